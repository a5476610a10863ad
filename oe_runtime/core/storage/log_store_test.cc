// Rows of a log that a drive does not give back, or gives back wrong: at once, for a while, or for good.

#include "oe_runtime/core/storage/log_store.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/storage/log_pool.h"
#include "oe_runtime/core/storage/row_map.h"
#include "oe_runtime/core/storage/simulated_block_device.h"

namespace oe::log_store_test {
namespace {

constexpr size_t kRowBytes = 256;
constexpr Key kKeys = 8000;

// A table of one shard with a cache for a few of its rows, all of which are in the log.
class LogStoreTest : public testing::Test {
 protected:
  LogStoreTest() : damage_(std::make_shared<Damage>("table 't'")), cache_(uint64_t{64} << 10) {
    pool_ = NewPool([] {});
    rows_ = std::make_unique<RowMap>(NewHashIndex(), pool_->shard(0));
    keys_.resize(kKeys);
    for (Key key = 0; key < kKeys; ++key) keys_[key] = key;
    for (size_t begin = 0; begin < kKeys; begin += kAtOnce) Write(begin);
    pool_->Checkpoint(1, 1);
    pool_->WaitDurable();
  }

  std::unique_ptr<LogPool> NewPool(const std::function<void()>& remove) {
    auto device = std::make_unique<SimulatedBlockDevice>(7);
    device_ = device.get();
    PoolSpec table;
    table.table = "t";
    table.row_bytes = kRowBytes;
    table.shard_of = [](Key) { return 0U; };
    table.damage = damage_;
    table.cache = &cache_;
    RowLogSpec log;
    log.table = "t";
    log.where = "the device";
    log.identity = "{}";
    log.row_bytes = kRowBytes;
    return std::make_unique<LogPool>(
        std::move(device), table, log, true, [] { return uint64_t{1} << 30; }, remove);
  }

  // As a push does: the rows of some keys are made writable, and those without one anew.
  void Write(size_t begin) {
    const RowLog::Room room = pool_->shard(0)->RoomFor(2 * kAtOnce, RowLog::Need::kNewRows);
    const std::unique_lock<FairSharedMutex> lock(rows_->mutex());
    std::vector<uint32_t> numbers(kAtOnce, kNoRow);
    try {
      rows_->FindOrAdd(&keys_[begin], kAtOnce, numbers.data(),
                       [](Key key, std::byte* row) { Fill(key, row); });
    } catch (...) {
      rows_->store().Unpin(numbers.data(), numbers.size());
      throw;
    }
    rows_->store().Unpin(numbers.data(), numbers.size());
  }

  // As a pull does: how many of all rows are as they were written. The others are damaged.
  size_t CountRight() const {
    size_t right = 0;
    std::vector<std::byte> wanted(kRowBytes);
    std::vector<const std::byte*> found(kAtOnce);
    for (size_t begin = 0; begin < kKeys; begin += kAtOnce) {
      const std::shared_lock<FairSharedMutex> lock(rows_->mutex());
      LogReads reads;
      rows_->Find(&keys_[begin], kAtOnce, found.data(), &reads);
      reads.Run();
      for (size_t i = 0; i < kAtOnce; ++i) {
        Fill(keys_[begin + i], wanted.data());
        right += found[i] != nullptr && std::memcmp(found[i], wanted.data(), kRowBytes) == 0 ? 1 : 0;
      }
    }
    return right;
  }

  // Where the block of a row is that is in the log only.
  uint64_t OffsetOf(Key key) const {
    uint32_t slot = kNoRow;
    rows_->Numbers(&key, 1, &slot);
    if (slot == kNoRow || (slot & kCopyBit) != 0) return 0;
    std::vector<std::byte> row(kRowBytes);
    std::byte* into = row.data();
    BlockRead read;
    uint8_t copied = 0;
    pool_->shard(0)->log()->Locate(&slot, 1, &into, &read, &copied);
    return copied != 0 ? 0 : read.offset / kBlockBytes * kBlockBytes;
  }
  std::vector<uint64_t> Blocks() const {
    std::vector<uint64_t> blocks;
    blocks.reserve(keys_.size());
    for (const Key key : keys_) blocks.push_back(OffsetOf(key));
    std::sort(blocks.begin(), blocks.end());
    blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
    if (blocks.front() == 0) blocks.erase(blocks.begin());
    return blocks;
  }

  static void Fill(Key key, std::byte* row) {
    std::memset(row, static_cast<int>(key % 251 + 1), kRowBytes);
    std::memcpy(row, &key, sizeof(key));
  }

  static constexpr size_t kAtOnce = 400;
  const std::shared_ptr<Damage> damage_;
  CacheMemory cache_;
  SimulatedBlockDevice* device_ = nullptr;
  std::unique_ptr<LogPool> pool_;
  std::unique_ptr<RowMap> rows_;
  std::vector<Key> keys_;
};

TEST_F(LogStoreTest, AReadErrorThatGoesAwayChangesNothing) {
  for (const int error : {EIO, ENODATA, EILSEQ, EREMOTEIO, ENOMEM, EBADMSG}) {
    for (const uint64_t times : {uint64_t{1}, uint64_t{2}}) {
      const std::string what = std::to_string(error) + " " + std::to_string(times);
      for (const uint64_t block : Blocks()) device_->FailReads(block, error, times);
      ASSERT_EQ(CountRight(), kKeys) << what;
      device_->RepairReads();
      for (const uint64_t block : Blocks()) device_->FailReads(block, error, times);
      for (size_t begin = 0; begin < kKeys; begin += kAtOnce) Write(begin);
      device_->RepairReads();
      ASSERT_EQ(CountRight(), kKeys) << what;
      ASSERT_EQ(damage_->quarantined(), 0U) << what;
    }
  }
}

TEST_F(LogStoreTest, AReadErrorThatStaysIsAnErrorAndGivesUpNoRow) {
  const Key key = 1234;
  const uint64_t block = OffsetOf(key);
  ASSERT_GT(block, 0U);
  device_->FailReads(block);
  const std::string pull = MessageOf<StorageError>([&] { (void)CountRight(); });
  EXPECT_EQ(pull.find("table 't': "), 0U) << pull;
  EXPECT_NE(pull.find(" cannot be read from the device: Input/output error; no row was given up"),
            std::string::npos)
      << pull;
  EXPECT_EQ(MessageOf<StorageError>([&] { Write(key / kAtOnce * kAtOnce); }), pull);
  EXPECT_EQ(rows_->size(), kKeys);
  EXPECT_EQ(damage_->quarantined(), 0U);
  device_->RepairReads();
  EXPECT_EQ(CountRight(), kKeys);

  // Who says that rows may begin anew needs no read of them.
  device_->FailReads(block);
  size_t erased = 0;
  {
    const RowLog::Room room = pool_->shard(0)->RoomFor(2 * kAtOnce, RowLog::Need::kUpdates);
    const std::unique_lock<FairSharedMutex> lock(rows_->mutex());
    for (const Key each : keys_) {
      if (OffsetOf(each) == block) erased += rows_->Erase(each) ? 1 : 0;
    }
  }
  EXPECT_EQ(erased, kBlockBytes / kRowBytes);
  EXPECT_EQ(CountRight(), kKeys - erased);
  for (size_t begin = 0; begin < kKeys; begin += kAtOnce) Write(begin);
  EXPECT_EQ(CountRight(), kKeys);
}

// A bit that flipped takes its row; a table that loses many rows is no longer the one that was trained.
TEST_F(LogStoreTest, DamagedRowsAreGivenUpUpToALimit) {
  const std::vector<uint64_t> blocks = Blocks();
  const size_t in_block = kBlockBytes / kRowBytes;
  device_->Flip(blocks[10] + 17, 3);
  EXPECT_EQ(CountRight(), kKeys - in_block);
  for (size_t begin = 0; begin < kKeys; begin += kAtOnce) Write(begin);
  EXPECT_EQ(damage_->quarantined(), in_block);
  EXPECT_EQ(CountRight(), kKeys) << "they began anew";
  pool_->Checkpoint(2, 2);
  pool_->WaitDurable();

  for (const uint64_t block : Blocks()) device_->Flip(block + 17, 3);
  const auto write_all = [&] {
    for (size_t begin = 0; begin < kKeys; begin += kAtOnce) Write(begin);
  };
  const std::string push = MessageOf<StorageError>(write_all);
  EXPECT_EQ(push.find("table 't': too many rows are damaged: "), 0U) << push;
  EXPECT_LE(damage_->quarantined(), Damage::kLeastLost);
  EXPECT_EQ(MessageOf<StorageError>([&] { (void)CountRight(); }).find("table 't': too many"), 0U);
  EXPECT_EQ(MessageOf<StorageError>(write_all).find("table 't': too many"), 0U);
  EXPECT_LE(damage_->quarantined(), Damage::kLeastLost);
  EXPECT_GE(rows_->size() + Damage::kLeastLost, kKeys);
}

// As where the file system is read-only by then: other tables go on.
TEST_F(LogStoreTest, ATableEndsThoughItsFileCannotBeRemoved) {
  bool asked = false;
  auto pool = NewPool([&] {
    asked = true;
    throw StorageError("cannot remove the storage file", EROFS);
  });
  testing::internal::CaptureStderr();
  pool.reset();
  EXPECT_TRUE(asked) << "it has no checkpoint";
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "warning: table 't': cannot remove the storage file: Read-only file system\n");
}

}  // namespace
}  // namespace oe::log_store_test
