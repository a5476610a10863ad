// Pools without crashes: their formats, and what they do when the medium is full.
#include "oe_runtime/core/storage/pool.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/storage/row_map.h"
#include "oe_runtime/core/storage/simulated_medium.h"

namespace oe::pool_test {
namespace {

constexpr size_t kBlockBytes = size_t{32} << 10;

PoolSpec Spec(size_t row_bytes, uint32_t window = 2) {
  PoolSpec spec;
  spec.table = "t";
  spec.identity = R"({"table": {"name": "t"}})";
  spec.row_bytes = row_bytes;
  spec.shard_of = [](Key) { return 0U; };
  spec.window = window;
  spec.background = false;
  return spec;
}

// A pool with one shard, and what its rows must be.
class Rows {
 public:
  Rows(Medium* medium, const PoolSpec& spec) : spec_(spec), pool_(Pool::Create(medium, spec)) {
    map_ = std::make_unique<RowMap>(NewHashIndex(), pool_->shard(0));
  }
  // Opens what is there, at its newest checkpoint.
  Rows(Medium* medium, const PoolSpec& spec, uint64_t uuid)
      : spec_(spec), pool_(Pool::Open(medium, uuid, spec)) {
    auto index = NewHashIndex();
    (void)pool_->Recover(std::nullopt, {index.get()});
    map_ = std::make_unique<RowMap>(std::move(index), pool_->shard(0));
  }

  // Throws StorageError.
  void Push(Key key, uint8_t value) {
    uint32_t number = 0;
    map_->FindOrAdd(&key, 1, &number, [](Key, std::byte*) {});
    std::memset(map_->row(number), value, spec_.row_bytes);
  }
  // The value of a row; nothing if its bytes differ or there is none.
  std::optional<uint8_t> Value(Key key) const {
    const std::byte* row = nullptr;
    map_->Find(&key, 1, &row);
    if (row == nullptr) return std::nullopt;
    for (size_t i = 1; i < spec_.row_bytes; ++i) {
      if (row[i] != row[0]) return std::nullopt;
    }
    return static_cast<uint8_t>(row[0]);
  }
  bool Erase(Key key) { return map_->Erase(key); }
  void Checkpoint() {
    pool_->Checkpoint(++checkpoint_, 0);
    pool_->RunPending();
  }
  // New rows from `key` on until one is refused; how many, and why.
  uint64_t Fill(Key key, std::string* why = nullptr) {
    const Key first = key;
    const std::string message = MessageOf<StorageFull>([&] {
      while (true) Push(key++, 1);
    });
    if (why != nullptr) *why = message;
    return key - 1 - first;
  }
  PoolRoom room() { return pool_->shard(0)->room(); }
  uint64_t Headroom() { return pool_->RowsIn(room().headroom + pool_->slots_left()); }
  uint64_t size() const { return map_->size(); }
  void Resume(uint64_t checkpoint) { checkpoint_ = checkpoint; }
  Pool* operator->() { return pool_.get(); }

 private:
  const PoolSpec spec_;
  uint64_t checkpoint_ = 0;
  std::unique_ptr<Pool> pool_;
  std::unique_ptr<RowMap> map_;
};

uint64_t UuidIn(const Medium& medium) {
  for (const std::string& name : medium.List()) {
    uint64_t uuid = 0;
    bool super = false;
    if (ParsePoolName(name, &uuid, &super) && super) return uuid;
  }
  return 0;
}

// Bytes of a row with its share of what its block wastes.
double BytesOf(uint64_t format, size_t row_bytes) {
  const RowLayout layout = RowLayout::InPool(format, row_bytes, kBlockBytes);
  return static_cast<double>(layout.block_bytes) / layout.block_rows();
}

// Adagrad's rows of two-byte weights: 6 bytes per weight, where float32 has 8.
TEST(PoolTest, RowsThatALineWouldWasteAQuarterForArePacked) {
  for (const size_t dim : {size_t{16}, size_t{32}, size_t{64}}) {
    EXPECT_EQ(BytesOf(2, 6 * dim), 8.0 * static_cast<double>(dim));
    EXPECT_LE(BytesOf(kPoolFormat, 6 * dim), 6.05 * static_cast<double>(dim));
  }
}

TEST(PoolTest, FourMoreBytesPerRowCostAtMostEight) {
  // Adagrad's rows of dim 16, 32 and 64, and with the fact of one eviction policy.
  for (const size_t bytes : {size_t{128}, size_t{256}, size_t{512}}) {
    EXPECT_EQ(BytesOf(kPoolFormat, bytes), static_cast<double>(bytes));
    EXPECT_LE(BytesOf(kPoolFormat, bytes + 4), static_cast<double>(bytes + 8));
  }
  for (size_t bytes = 4; bytes <= 4096; bytes += 4) {
    EXPECT_GE(BytesOf(kPoolFormat, bytes), static_cast<double>(bytes));
    EXPECT_GE(BytesOf(1, bytes), BytesOf(2, bytes));
    EXPECT_GE(BytesOf(2, bytes), BytesOf(kPoolFormat, bytes));
    if (bytes * 16 <= kBlockBytes) {
      EXPECT_LE(BytesOf(kPoolFormat, bytes), static_cast<double>(bytes) * 1.36) << bytes;
    }
    const RowLayout layout = RowLayout::InPool(kPoolFormat, bytes, kBlockBytes);
    for (uint32_t i = 1; i < layout.block_rows(); ++i) {
      ASSERT_GE(layout.Offset(i), layout.Offset(i - 1) + bytes) << bytes;
    }
    ASSERT_LE(layout.Offset(layout.block_rows() - 1) + bytes, layout.block_bytes);
    // As a pool's verification finds it, from the header of a segment.
    const RowLayout again = RowLayout::InPool(kPoolFormat, bytes, layout.block_bytes);
    ASSERT_EQ(again.block_rows(), layout.block_rows()) << bytes;
    ASSERT_EQ(again.block_bytes, layout.block_bytes) << bytes;
  }
}

// With rows whose places differ between the format and the current one.
void GoesOnAsItIs(uint32_t format, size_t row_bytes) {
  ASSERT_NE(BytesOf(format, row_bytes), BytesOf(kPoolFormat, row_bytes));
  SimulatedMedium medium(1);
  PoolSpec old = Spec(row_bytes);
  old.format = format;
  {
    Rows rows(&medium, old);
    for (Key key = 0; key < 300; ++key) rows.Push(key, static_cast<uint8_t>(key));
    rows.Checkpoint();
  }
  for (uint64_t life = 1; life <= 2; ++life) {
    Rows rows(&medium, Spec(row_bytes), UuidIn(medium));
    rows.Resume(life);
    for (Key key = 0; key < 300; ++key) ASSERT_EQ(rows.Value(key), static_cast<uint8_t>(key)) << key;
    // Also in segments that it gets now.
    for (Key key = 300 * life; key < 300 * life + 1000; ++key) rows.Push(key, 7);
    for (Key key = 0; key < 300; ++key) rows.Push(key, static_cast<uint8_t>(key));
    rows.Checkpoint();
    EXPECT_EQ(rows->spec().format, format);
  }
  EXPECT_THROW((void)Pool::Open(&medium, UuidIn(medium), Spec(row_bytes + 4)), StorageError);
}

TEST(PoolTest, PoolsOfEarlierFormatsGoOnAsTheyAre) {
  GoesOnAsItIs(1, 132);
  GoesOnAsItIs(2, 192);
}

TEST(PoolTest, AFormatOfALaterVersionIsRefusedByName) {
  SimulatedMedium medium(1);
  PoolSpec later = Spec(128);
  later.format = kPoolFormat + 1;
  {
    Rows rows(&medium, later);
    rows.Push(1, 1);
    rows.Checkpoint();
  }
  const uint64_t uuid = UuidIn(medium);
  EXPECT_EQ(MessageOf<StorageError>([&] { (void)Pool::Open(&medium, uuid, Spec(128)); }),
            SuperName(uuid) +
                ": 'format' is 4, but this version reads 1 to 3; use the version that wrote "
                "it, or start fresh (--storage-fresh)");
  EXPECT_FALSE(medium.List().empty()) << "it was removed";
}

class FullPoolTest : public testing::TestWithParam<uint32_t> {
 protected:
  FullPoolTest() {
    medium_.capacity = uint64_t{2} << 20;
    medium_.set_largest(size_t{256} << 10);
  }
  SimulatedMedium medium_{1};
};

// Filled before the first checkpoint, or over many.
TEST_P(FullPoolTest, UpdatesAndEvictionsGoOnWhereNewRowsAreRefused) {
  for (const bool over_many : {false, true}) {
    SCOPED_TRACE(over_many);
    for (const std::string& name : medium_.List()) medium_.Remove(name);
    Rows rows(&medium_, Spec(128, GetParam()));
    std::string why;
    uint64_t filled = 0;
    if (over_many) {
      why = MessageOf<StorageFull>([&] {
        for (;; ++filled) {
          if (filled % 250 == 0 && filled > 0) rows.Checkpoint();
          rows.Push(filled, 1);
        }
      });
    } else {
      filled = rows.Fill(0, &why);
    }
    ASSERT_EQ(rows.size(), filled);
    EXPECT_NE(why.find("is full for 't'. Table 't' takes no new rows"), std::string::npos) << why;
    EXPECT_GT(filled, rows.room().slots * (over_many ? 9 : 7) / 10) << "gave up with room left";
    EXPECT_EQ(rows.Headroom(), 0U);
    EXPECT_EQ(rows.room().refused, 1U);
    // A checkpoint before each push, and in each push 1 % of the rows.
    for (uint64_t push = 0; push < 40; ++push) {
      rows.Checkpoint();
      for (uint64_t i = 0; i < filled / 100; ++i) {
        const Key key = (push * 977 + i * 89) % filled;
        ASSERT_NO_THROW(rows.Push(key, static_cast<uint8_t>(push))) << push << " " << i;
      }
    }
    // It is known now that so few change.
    filled += rows.Fill(filled);
    EXPECT_GT(filled, rows.room().slots * 8 / 10);
    for (uint64_t push = 0; push < 10; ++push) {
      rows.Checkpoint();
      for (uint64_t i = 0; i < filled / 100; ++i) ASSERT_NO_THROW(rows.Push(i * 97 % filled, 2));
    }
    for (Key key = 0; key < filled / 10; ++key) {
      if (key % (filled / 200) == 0) rows.Checkpoint();
      ASSERT_NO_THROW(ASSERT_TRUE(rows.Erase(key))) << key;
    }
    // What was evicted is room again when the checkpoints that have it are gone.
    for (uint32_t i = 0; i < GetParam() + 10; ++i) {
      rows.Push(filled - 1, 1);
      rows.Checkpoint();
    }
    EXPECT_GT(rows.Fill(filled), 0U);
  }
}

// More are evicted at once than slots are left: a few checkpoints later, all can be.
TEST_P(FullPoolTest, EverythingCanBeEvictedInAFewTurns) {
  Rows rows(&medium_, Spec(128, GetParam()));
  const uint64_t filled = rows.Fill(0);
  rows.Checkpoint();
  Key next = 0;
  for (int turn = 0; turn < 40 && next < filled; ++turn) {
    try {
      for (; next < filled; ++next) ASSERT_TRUE(rows.Erase(next));
    } catch (const StorageFull& full) {
      EXPECT_NE(std::string(full.what()).find("make a checkpoint"), std::string::npos) << full.what();
      // What an epoch copies has its slots all the same.
      for (Key key = filled - filled / 100; key < filled; ++key) {
        if (key < next) continue;
        ASSERT_NO_THROW(rows.Push(key, 2)) << turn;
      }
      for (uint32_t i = 0; i <= GetParam(); ++i) {
        rows.Push(filled - 1, 1);
        rows.Checkpoint();
      }
    }
  }
  EXPECT_EQ(rows.size(), 0U);
  // And then the pool is as good as new.
  for (uint32_t i = 0; i < GetParam() + 6; ++i) rows.Checkpoint();
  EXPECT_GT(rows.Fill(0), filled / 2);
}

// A pool that trained at its limit does so after a restart.
TEST_P(FullPoolTest, TheReserveIsTheSameAfterARestart) {
  const PoolSpec spec = Spec(128, GetParam());
  uint64_t headroom = 0;
  uint64_t filled = 0;
  {
    Rows rows(&medium_, spec);
    for (Key key = 0; key < 10'000; ++key) rows.Push(key, 1);
    for (int i = 0; i < 30; ++i) {
      rows.Checkpoint();
      for (Key key = 0; key < 100; ++key) rows.Push(key, 1);
    }
    filled = 10'000 + rows.Fill(10'000);
    for (int i = 0; i < 3; ++i) {
      rows.Checkpoint();
      for (Key key = 0; key < 100; ++key) rows.Push(key, 1);
    }
    rows.Checkpoint();
    ASSERT_TRUE(rows.Erase(filled - 1));
    rows.Checkpoint();
    for (int i = 0; i < 5; ++i) {
      for (Key key = 0; key < 100; ++key) rows.Push(key, 1);
      rows.Checkpoint();
    }
    headroom = rows.Headroom();
    EXPECT_GT(headroom, 0U);
  }
  Rows rows(&medium_, spec, UuidIn(medium_));
  EXPECT_GE(rows.Headroom(), headroom);
  EXPECT_NO_THROW(rows.Push(filled, 1));
}

INSTANTIATE_TEST_SUITE_P(Kept, FullPoolTest, testing::Values(1, 2, 4));

}  // namespace
}  // namespace oe::pool_test
