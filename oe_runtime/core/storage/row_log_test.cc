#include "oe_runtime/core/storage/row_log.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/storage/simulated_block_device.h"

namespace oe::row_log_test {
namespace {

using Need = RowLog::Need;

RowLogSpec SmallSpec(size_t row_bytes) {
  RowLogSpec spec;
  spec.table = "t";
  spec.where = "the device";
  spec.identity = R"({"table": {"name": "t"}})";
  spec.row_bytes = row_bytes;
  spec.segment_bytes = size_t{64} << 10;
  spec.chunk_bytes = size_t{16} << 10;
  spec.super_bytes = size_t{64} << 10;
  return spec;
}

// As long as it lives nothing can be allocated.
class NoMemory {
 public:
  NoMemory() {
    uint64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    ::getrlimit(RLIMIT_AS, &before_);
    struct rlimit now = before_;
    now.rlim_cur = pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    ::setrlimit(RLIMIT_AS, &now);
    for (size_t bytes = size_t{1} << 30; bytes >= sizeof(Taken); bytes = bytes * 3 / 4) {
      while (auto* taken = static_cast<Taken*>(std::malloc(bytes))) {
        taken->next = taken_;
        taken_ = taken;
      }
    }
  }
  NoMemory(const NoMemory&) = delete;
  NoMemory& operator=(const NoMemory&) = delete;
  ~NoMemory() {
    while (taken_ != nullptr) std::free(std::exchange(taken_, taken_->next));
    ::setrlimit(RLIMIT_AS, &before_);
  }

 private:
  struct Taken {
    Taken* next;
  };
  struct rlimit before_{};
  Taken* taken_ = nullptr;
};

// Who owns a log: rows of words that say key and version.
class Owner {
 public:
  explicit Owner(BlockDevice* device, RowLogSpec spec) : device_(device), spec_(std::move(spec)) {
    spec_.relocate = [this](Key key, uint32_t slot, const std::function<uint32_t()>& move) {
      const std::lock_guard<std::mutex> lock(locks_[key % locks_.size()]);
      const uint32_t moved = move();
      if (moved != kNoRow && slots_[key] == slot) slots_[key] = moved;
    };
    spec_.damaged = [this](Key key, uint32_t) { damaged_.push_back(key); };
    slots_.assign(kKeys, kNoRow);
    versions_.assign(kKeys, 0);
  }

  void Create() { log_ = RowLog::Create(device_, spec_); }
  KeptCheckpoint Recover(std::optional<uint64_t> id = std::nullopt) {
    if (!log_) log_ = RowLog::Open(device_, spec_);
    const auto index = NewHashIndex();
    const KeptCheckpoint kept = log_->Recover(id, [&](Key) { return index.get(); });
    for (Key key = 0; key < kKeys; ++key) index->Find(&key, 1, &slots_[key]);
    return kept;
  }

  bool Has(Key key) {
    const std::lock_guard<std::mutex> lock(locks_[key % locks_.size()]);
    return slots_[key] != kNoRow;
  }
  void Write(Key key) {
    const RowLog::Room room = log_->Reserve(1, !Has(key) ? Need::kNewRows : Need::kUpdates);
    const std::lock_guard<std::mutex> lock(locks_[key % locks_.size()]);
    if (slots_[key] != kNoRow) log_->Supersede(slots_[key]);
    const std::vector<std::byte> row = RowOf(key, ++versions_[key]);
    slots_[key] = log_->Append(key, log_->epoch(), row.data());
    ASSERT_NE(slots_[key], kNoRow);
  }
  void Erase(Key key) {
    const RowLog::Room room = log_->Reserve(1, Need::kUpdates);
    log_->Supersede(slots_[key]);
    slots_[key] = kNoRow;
    ASSERT_TRUE(log_->AppendTombstone(key, log_->epoch()));
  }
  void Checkpoint(uint64_t id) {
    KeptCheckpoint checkpoint;
    checkpoint.id = checkpoint.version = id;
    for (Key key = 0; key < kKeys; ++key) {
      if (slots_[key] == kNoRow) continue;
      ++checkpoint.rows;
      checkpoint.digest += RowLog::KeyDigest(key);
    }
    checkpoint.epoch = log_->CloseEpoch();
    log_->Commit(checkpoint);
  }
  // The version that is read; 0: none. -1: it cannot be read.
  int Read(Key key) {
    const std::lock_guard<std::mutex> lock(locks_[key % locks_.size()]);
    if (slots_[key] == kNoRow) return 0;
    std::vector<std::byte> row(spec_.row_bytes);
    std::byte* into = row.data();
    std::vector<BlockRead> reads(log_->reads_per_row());
    uint8_t copied = 0;
    log_->Locate(&slots_[key], 1, &into, reads.data(), &copied);
    if (copied == 0) {
      const auto queue = device_->NewQueue();
      queue->Submit(reads.data(), reads.size());
      queue->Wait();
      for (const BlockRead& read : reads) {
        if (read.error != 0) return -1;
      }
    }
    uint32_t version = 0;
    std::memcpy(&version, row.data(), sizeof(version));
    return row == RowOf(key, version) ? static_cast<int>(version) : -2;
  }
  void ForgetLog() { log_.reset(); }

  RowLog& log() { return *log_; }
  std::vector<Key>& damaged() { return damaged_; }
  uint32_t version(Key key) const { return versions_[key]; }
  uint32_t slot(Key key) const { return slots_[key]; }

  static constexpr Key kKeys = 20000;

 private:
  std::vector<std::byte> RowOf(Key key, uint32_t version) const {
    std::vector<std::byte> row(spec_.row_bytes);
    for (size_t at = 0; at + 4 <= row.size(); at += 4) {
      const auto word = at == 0 ? version : static_cast<uint32_t>(Mix64(key * 1000003 + version + at));
      std::memcpy(row.data() + at, &word, sizeof(word));
    }
    return row;
  }

  BlockDevice* const device_;
  RowLogSpec spec_;
  std::array<std::mutex, 16> locks_;
  std::vector<uint32_t> slots_;
  std::vector<uint32_t> versions_;
  std::vector<Key> damaged_;
  std::unique_ptr<RowLog> log_;
};

std::string WhatOf(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void ExpectError(const std::function<void()>& work, const std::string& part) {
  const std::string what = WhatOf(work);
  EXPECT_NE(what.find(part), std::string::npos) << what;
}

TEST(RowLogFormatTest, SuperblocksAndChunksAreReadAsWritten) {
  RowLogSuper super;
  super.sequence = 7;
  super.uuid = 0xABCDEF;
  super.segment_bytes = 4 << 20;
  super.row_bytes = 72;
  super.epoch = 9;
  super.use = 12;
  super.kept = {{3, 30, 300, 10, 11}, {5, 50, 500, 12, 13}};
  super.discarded = {{1, 2}, {6, 8}};
  super.extents = {0, 1024, 7};
  super.identity = "{}";
  const BlockBuffer encoded = EncodeRowLogSuper(super, 1 << 20);
  const uint64_t bytes = RowLogSuperBytes(encoded.data(), 1 << 20);
  RowLogSuper read;
  ASSERT_TRUE(DecodeRowLogSuper(encoded.data(), bytes, &read));
  EXPECT_EQ(read.sequence, 7U);
  EXPECT_EQ(read.kept.at(1).version, 500U);
  EXPECT_EQ(read.discarded.at(1).last, 8U);
  EXPECT_EQ(read.extents, super.extents);
  EXPECT_EQ(read.identity, "{}");
  for (uint64_t at = 0; at < bytes; ++at) {
    encoded.data()[at] ^= std::byte{4};
    const uint64_t there = RowLogSuperBytes(encoded.data(), encoded.size());
    EXPECT_TRUE(there == 0 || !DecodeRowLogSuper(encoded.data(), there, &read)) << at;
    encoded.data()[at] ^= std::byte{4};
  }
  ExpectError([&] { (void)EncodeRowLogSuper(super, 100); }, "3 segments");

  Chunk chunk;
  chunk.uuid = 1;
  chunk.use = 2;
  chunk.place = 3;
  chunk.header_blocks = 1;
  chunk.blocks = 3;
  chunk.rows = {{1, 2}, {3, 4}};
  chunk.tombstones = {{5, 6}};
  chunk.sums = {8, 9};
  chunk.fact_words = 2;
  chunk.facts = {10, 11, 12, 13};
  const BlockBuffer header(kBlockBytes);
  EncodeChunk(chunk, header.data());
  Chunk same;
  ASSERT_EQ(ChunkHeaderBlocks(header.data()), 1U);
  ASSERT_TRUE(DecodeChunk(header.data(), &same));
  EXPECT_EQ(same.rows.at(1).lsn, 4U);
  EXPECT_EQ(same.tombstones.at(0).key, 5U);
  EXPECT_EQ(same.sums, chunk.sums);
  EXPECT_EQ(same.fact_words, 2U);
  EXPECT_EQ(same.facts, chunk.facts);
  for (size_t at = 0; at < kBlockBytes; ++at) {
    header.data()[at] ^= std::byte{1};
    EXPECT_FALSE(ChunkHeaderBlocks(header.data()) == 1 && DecodeChunk(header.data(), &same)) << at;
    header.data()[at] ^= std::byte{1};
  }
}

TEST(RowLogTest, RowsComeBackAtEachKeptCheckpoint) {
  SimulatedBlockDevice device(1);
  Owner owner(&device, SmallSpec(512));
  owner.Create();
  for (Key key = 0; key < 1000; ++key) owner.Write(key);
  owner.Checkpoint(1);
  for (Key key = 0; key < 500; ++key) owner.Write(key);
  for (Key key = 900; key < 1000; ++key) owner.Erase(key);
  owner.Write(5000);
  owner.Checkpoint(2);
  for (Key key = 0; key < 1000; ++key) {
    if (owner.slot(key) != kNoRow) owner.Write(key);
  }
  owner.ForgetLog();  // without the last pushes
  EXPECT_EQ(owner.Recover().id, 2U);
  EXPECT_EQ(owner.Read(3), 2);
  EXPECT_EQ(owner.Read(700), 1);
  EXPECT_EQ(owner.Read(950), 0);
  EXPECT_EQ(owner.Read(5000), 1);
  EXPECT_EQ(owner.Recover(1).rows, 1000U);
  EXPECT_EQ(owner.Read(3), 1);
  EXPECT_EQ(owner.Read(950), 1);
  EXPECT_EQ(owner.Read(5000), 0);
  ExpectError([&] { owner.Recover(2); }, "has no checkpoint 2");
  EXPECT_EQ(owner.Recover().id, 1U);
}

// Rows that are pushed again in one epoch need no room for their old versions.
TEST(RowLogTest, CleaningMovesLittleAtTheTargetSize) {
  for (const auto& [spare, most] : std::map<double, double>{{1.45, 1.0}, {1.3, 1.6}}) {
    SimulatedBlockDevice device(2);
    RowLogSpec spec = SmallSpec(512);
    spec.segment_bytes = size_t{128} << 10;
    spec.chunk_bytes = size_t{64} << 10;
    spec.spare = spare;
    Owner owner(&device, spec);
    owner.Create();
    std::mt19937_64 random(3);
    for (Key key = 0; key < Owner::kKeys; ++key) owner.Write(key);
    const RowLogStats before = owner.log().stats();
    for (size_t i = 0; i < 5 * Owner::kKeys; ++i) owner.Write(random() % Owner::kKeys);
    const RowLogStats after = owner.log().stats();
    const double moved = static_cast<double>(after.moved - before.moved) /
                         static_cast<double>(after.appended - before.appended);
    EXPECT_LT(moved, most) << "at " << spare;
    EXPECT_LT(static_cast<double>(after.segments) * static_cast<double>(after.segment_rows),
              spare * Owner::kKeys * 1.1 + 10 * static_cast<double>(after.segment_rows));
    std::printf("%.2f x the rows' space: %.2f rows moved per row written\n", spare, moved);
    for (Key key = 0; key < Owner::kKeys; key += 97) {
      EXPECT_EQ(owner.Read(key), static_cast<int>(owner.version(key)));
    }
  }
}

// A large call must not let the log be cleaned early for good.
TEST(RowLogTest, OneLargeReservationCostsLittleLater) {
  for (const bool checkpoints : {true, false}) {
    SimulatedBlockDevice device(6);
    Owner owner(&device, SmallSpec(512));
    owner.Create();
    std::mt19937_64 random(7);
    uint64_t id = 0;
    for (Key key = 0; key < Owner::kKeys; ++key) owner.Write(key);
    const auto bytes_per_row = [&](size_t turns) {
      const RowLogStats before = owner.log().stats();
      for (size_t i = 0; i < turns * Owner::kKeys; ++i) {
        owner.Write(random() % Owner::kKeys);
        if (i % 100 == 0 && owner.log().WantsTending()) owner.log().Tend();
        if (checkpoints && i % (Owner::kKeys / 10) == 0) owner.Checkpoint(++id);
      }
      const RowLogStats after = owner.log().stats();
      return static_cast<double>(after.written_bytes - before.written_bytes) /
             static_cast<double>(after.appended - before.appended);
    };
    (void)bytes_per_row(2);
    const double before = bytes_per_row(5);
    (void)owner.log().Reserve(2 * Owner::kKeys, Need::kWriteBack);
    (void)bytes_per_row(2);
    const double after = bytes_per_row(5);
    std::printf("%s checkpoints: %.0f bytes written per row of 512 bytes, later %.0f\n",
                checkpoints ? "with" : "without", before, after);
    EXPECT_LT(after, 1.1 * before);
  }
}

TEST(RowLogTest, AFullDeviceRefusesNewRowsFirst) {
  SimulatedBlockDevice device(4);
  RowLogSpec spec = SmallSpec(512);
  device.capacity = 2 * spec.super_bytes + 40 * spec.segment_bytes;
  Owner owner(&device, spec);
  owner.Create();
  Key key = 0;
  std::string what;
  for (; what.empty() && key < Owner::kKeys; ++key) what = WhatOf([&] { owner.Write(key); });
  EXPECT_NE(what.find("storage the device is full: table 't' needs"), std::string::npos) << what;
  EXPECT_NE(what.find("free space on the drive"), std::string::npos) << what;
  EXPECT_GT(key, 2000U);
  for (int turn = 0; turn < 5; ++turn) {
    for (Key old = 0; old + 1 < key; ++old) owner.Write(old);
  }
  owner.Checkpoint(1);
  for (Key old = 0; old < 200; ++old) owner.Write(old);
  // Room comes back.
  for (Key old = 200; old < 1200; ++old) owner.Erase(old);
  owner.Checkpoint(2);
  owner.Checkpoint(3);
  owner.Write(Owner::kKeys - 1);
  EXPECT_EQ(owner.Read(0), static_cast<int>(owner.version(0)));
}

// Rows that nobody writes stay in the segments that were in use when the others were erased.
TEST(RowLogTest, TombstonesEndBesideRowsThatStay) {
  SimulatedBlockDevice device(12);
  Owner owner(&device, SmallSpec(72));
  owner.Create();
  constexpr Key kStay = 4000;
  constexpr Key kChurn = 500;
  for (Key key = 0; key < kStay + kChurn; ++key) owner.Write(key);
  uint64_t most = 0;
  for (uint64_t id = 1; id <= 60; ++id) {
    owner.Checkpoint(id);
    owner.log().Tend();
    for (Key key = kStay; key < kStay + kChurn; ++key) {
      owner.Erase(key);
      owner.Write(key);
    }
    most = std::max(most, owner.log().stats().tombstones);
  }
  const RowLogStats stats = owner.log().stats();
  std::printf("at most %llu tombstones; %llu segments, %llu of them free\n",
              static_cast<unsigned long long>(most), static_cast<unsigned long long>(stats.segments),
              static_cast<unsigned long long>(stats.free_segments));
  EXPECT_LT(most, 2 * (stats.live + stats.segment_rows));
  for (Key key = 0; key < kStay + kChurn; ++key) {
    EXPECT_EQ(owner.Read(key), static_cast<int>(owner.version(key))) << key;
  }
}

TEST(RowLogTest, DamageIsNamed) {
  SimulatedBlockDevice device(5);
  const RowLogSpec spec = SmallSpec(512);
  Owner owner(&device, spec);
  owner.Create();
  for (Key key = 0; key < 3000; ++key) owner.Write(key);
  owner.Checkpoint(1);
  // A row with a bit that flipped: only that one is lost, and it stays where it is.
  std::vector<std::byte> row(512);
  std::byte* into = row.data();
  BlockRead read;
  uint8_t copied = 0;
  const uint32_t slot = owner.slot(100);
  owner.log().Locate(&slot, 1, &into, &read, &copied);
  ASSERT_EQ(copied, 0);
  device.Flip(read.offset, 3);
  EXPECT_EQ(owner.Read(100), -1);
  for (int turn = 0; turn < 4; ++turn) {
    for (Key key = 0; key < 3000; ++key) {
      if (key / 8 != 100 / 8) owner.Write(key);
    }
    owner.Checkpoint(2 + static_cast<uint64_t>(turn));
  }
  while (owner.damaged().empty() && owner.log().Clean()) {
  }
  EXPECT_EQ(owner.Read(100), -1);
  EXPECT_EQ(owner.Read(2000), 5);
  // The header of the first chunk of a segment in use.
  owner.ForgetLog();
  const uint64_t header = 2 * spec.super_bytes + slot / 8 / 16 * spec.segment_bytes;
  device.Flip(header + 100, 1);
  device.Flip(header + 103, 7);
  ExpectError([&] { owner.Recover(); }, "the device is damaged: the header at byte " +
                                            std::to_string(header) +
                                            " has a wrong checksum, and more than one bit is wrong");
  device.Flip(header + 103, 7);
  device.Flip(header + 100, 1);
  owner.Recover();
  EXPECT_EQ(owner.Read(2000), 5);
  RowLogSpec other = spec;
  other.row_bytes = 256;
  ExpectError([&] { (void)RowLog::Open(&device, other); }, "rows of 512 B");
}

// Without the header nobody knows which keys the rows have that follow it.
TEST(RowLogTest, AFlippedBitOfAHeaderIsCorrected) {
  SimulatedBlockDevice device(5);
  RowLogSpec spec = SmallSpec(256);
  spec.damage = std::make_shared<Damage>("table 't'");
  Owner owner(&device, spec);
  owner.Create();
  for (Key key = 0; key < 1000; ++key) owner.Write(key);
  owner.Checkpoint(1);
  for (Key key = 0; key < 1000; key += 3) owner.Write(key);
  owner.Checkpoint(2);
  const auto rows = [&] {
    return device.Content(2 * spec.super_bytes, device.size() - 2 * spec.super_bytes);
  };
  const std::vector<std::byte> content = rows();
  std::vector<uint64_t> headers;
  for (uint64_t at = 0; at < content.size(); at += kBlockBytes) {
    if (ChunkHeaderBlocks(&content[at]) > 0) headers.push_back(2 * spec.super_bytes + at);
  }
  ASSERT_GT(headers.size(), 5U);
  std::mt19937_64 random(3);
  uint64_t repaired = 0;
  for (uint64_t at = 0; at < 64; ++at) {  // each byte of its front, and some behind that
    const uint64_t header = headers[random() % headers.size()];
    device.Flip(header + (at < 56 ? at : random() % kBlockBytes), static_cast<int>(random() % 8));
    owner.ForgetLog();
    owner.Recover();
    for (Key key = 0; key < 1000; ++key) {
      ASSERT_EQ(owner.Read(key), static_cast<int>(owner.version(key))) << key << " byte " << at;
    }
    ASSERT_EQ(spec.damage->repaired(), ++repaired);
    ASSERT_EQ(rows(), content) << "it is not written anew";
  }
  // The cleaner goes on past one, too.
  device.Flip(headers[0] + 77, 2);
  for (uint64_t id = 3; id < 8; ++id) {
    for (Key key = 0; key < 1000; key += 2) owner.Write(key);
    owner.Checkpoint(id);
  }
  for (int turn = 0; turn < 20; ++turn) (void)owner.log().Clean();
  owner.ForgetLog();
  owner.Recover();
  for (Key key = 0; key < 1000; ++key) ASSERT_EQ(owner.Read(key), static_cast<int>(owner.version(key)));
}

TEST(RowLogTest, AFlippedBitOfTheNewestSuperblockCostsNoCheckpoint) {
  SimulatedBlockDevice device(5);
  RowLogSpec spec = SmallSpec(256);
  spec.damage = std::make_shared<Damage>("table 't'");
  Owner owner(&device, spec);
  owner.Create();
  for (uint64_t id = 1; id <= 3; ++id) {
    for (Key key = 0; key < 100; ++key) owner.Write(key);
    owner.Checkpoint(id);
  }
  const uint64_t newest = 3 % 2 * spec.super_bytes;
  const std::vector<std::byte> before = device.Content(0, 2 * spec.super_bytes);
  const auto put_back = [&] {
    const BlockBuffer supers(before.size());
    std::memcpy(supers.data(), before.data(), before.size());
    device.Write(0, supers.data(), supers.size());
    owner.ForgetLog();
  };
  const uint64_t bytes = RowLogSuperBytes(&before[newest], spec.super_bytes);
  ASSERT_GT(bytes, 112U);
  uint64_t repaired = 0;
  for (uint64_t at = 0; at < bytes; at += at < 112 ? 1 : 7) {
    put_back();
    device.Flip(newest + at, static_cast<int>(at % 8));
    ASSERT_EQ(owner.Recover().id, 3U) << at;
    ASSERT_EQ(spec.damage->repaired(), ++repaired) << at;
    ASSERT_EQ(spec.damage->replaced(), 0U);
  }
  // More than that: the copy before it, and a word.
  put_back();
  device.Flip(newest + 50, 3);
  device.Flip(newest + 90, 3);
  const auto replaced = std::make_shared<Damage>("table 't'");  // with lines left in this minute
  RowLogSpec again = spec;
  again.damage = replaced;
  Owner other(&device, again);
  testing::internal::CaptureStderr();
  EXPECT_EQ(other.Recover().id, 2U);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(replaced->replaced(), 1U);
  EXPECT_NE(said.find("table 't': a copy of the superblock is damaged"), std::string::npos) << said;
  EXPECT_NE(said.find("at byte " + std::to_string(newest) + " of the device; the copy before it was taken"),
            std::string::npos)
      << said;
  // Of zeros it is damaged too: it was written before.
  put_back();
  const BlockBuffer zeros(kBlockBytes);
  std::memset(zeros.data(), 0, kBlockBytes);
  device.Write(newest, zeros.data(), kBlockBytes);
  other.ForgetLog();
  EXPECT_EQ(other.Recover().id, 2U);
  EXPECT_EQ(replaced->replaced(), 2U);
}

TEST(RowLogTest, ANewLogHasOneSuperblockAndNoDamage) {
  SimulatedBlockDevice device(5);
  RowLogSpec spec = SmallSpec(256);
  spec.damage = std::make_shared<Damage>("table 't'");
  Owner owner(&device, spec);
  owner.Create();
  owner.ForgetLog();
  EXPECT_EQ(owner.Recover().id, 0U);
  EXPECT_EQ(spec.damage->replaced(), 0U);
}

// As after a write that the drive lost, or where a part of a file comes from a backup.
TEST(RowLogTest, ASegmentOfAnotherTimeIsRefused) {
  SimulatedBlockDevice device(5);
  const RowLogSpec spec = SmallSpec(256);
  Owner owner(&device, spec);
  owner.Create();
  std::vector<std::vector<std::byte>> then;
  for (uint64_t id = 1; id <= 30; ++id) {
    for (Key key = id % 2; key < 400; key += 2) owner.Write(key);
    owner.Checkpoint(id);
    then.push_back(device.Content(0, device.size()));
  }
  const std::vector<std::byte> now = then.back();
  owner.ForgetLog();
  const auto put = [&](uint64_t at, const std::byte* from) {
    const BlockBuffer segment(spec.segment_bytes);
    std::memcpy(segment.data(), from, spec.segment_bytes);
    device.Write(at, segment.data(), segment.size());
  };
  const RowLogSuper super = RowLog::Peek(&device, spec).value();
  int refused = 0;
  for (uint64_t i = 0; i < super.extents.size(); ++i) {
    if (super.extents[i] == 0) continue;
    const uint64_t at = 2 * spec.super_bytes + i * spec.segment_bytes;
    for (const std::vector<std::byte>& old : then) {
      if (old.size() < at + spec.segment_bytes || std::memcmp(&old[at], &now[at], kBlockBytes) == 0) continue;
      put(at, &old[at]);
      ExpectError([&] { owner.Recover(); }, "the device is damaged: the header at byte ");
      owner.ForgetLog();
      ++refused;
    }
    put(at, &now[at]);
  }
  EXPECT_GT(refused, 20);
  owner.Recover();
  for (Key key = 0; key < 400; ++key) EXPECT_EQ(owner.Read(key), 15);
}

// After a crash the same rows are written once more, to the same places: what was there must not pass for it.
TEST(RowLogTest, WhatACrashLeftDoesNotPassForALostWrite) {
  SimulatedBlockDevice device(5);
  const RowLogSpec spec = SmallSpec(256);
  Owner owner(&device, spec);
  owner.Create();
  const auto train = [&](uint64_t id) {
    for (Key key = 0; key < 400; ++key) owner.Write(key);
    owner.Checkpoint(id);
    return device.Content(0, device.size());
  };
  const auto put = [&](const std::vector<std::byte>& from, uint64_t at, uint64_t bytes) {
    const BlockBuffer buffer(bytes);
    std::memcpy(buffer.data(), &from[at], bytes);
    device.Write(at, buffer.data(), bytes);
    owner.ForgetLog();
  };
  const uint64_t supers = 2 * spec.super_bytes;
  (void)train(1);
  owner.ForgetLog();
  ASSERT_EQ(owner.Recover().id, 1U);
  const std::vector<std::byte> first = device.Content(0, supers);
  const std::vector<std::byte> second = train(2);
  put(first, 0, supers);  // the power goes before the superblock of the second checkpoint is there
  ASSERT_EQ(owner.Recover().id, 1U);
  const std::vector<std::byte> again = train(2);
  ASSERT_EQ(again.size(), second.size());
  put(second, supers, second.size() - supers);  // all writes but those of superblocks are lost
  ExpectError([&] { owner.Recover(); }, "is of another time than the superblock: the drive lost writes");
  put(again, supers, again.size() - supers);
  EXPECT_EQ(owner.Recover().id, 2U);
  for (Key key = 0; key < 400; ++key) EXPECT_EQ(owner.Read(key), 3);
}

// Whoever reads must outlive what it reads into: a drive may fill that until the queue of reads has ended.
TEST(RowLogTest, ReadsThatBreakOffEndBeforeTheirMemory) {
  SimulatedBlockDevice device(5);
  Owner owner(&device, SmallSpec(256));
  owner.Create();
  for (Key key = 0; key < 3000; ++key) owner.Write(key);
  owner.Checkpoint(1);
  owner.ForgetLog();
  owner.Recover();
  uint64_t broken = 0;
  for (; broken < 100; ++broken) {
    device.FailWaitsAfter(broken);
    try {
      owner.Recover();
      break;
    } catch (const StorageError& error) {
      ASSERT_EQ(error.what(), std::string("reads of the simulated device break off"));
    }
  }
  device.FailWaitsAfter(UINT64_MAX);
  EXPECT_GT(broken, 5U);
  owner.ForgetLog();
  EXPECT_EQ(owner.Recover().id, 1U);
}

// Nobody may go on without the note that a version is dead: once its tombstone is gone too, it would come
// back.
TEST(RowLogTest, ARowThatCannotBeSupersededStopsTheLog) {
#if defined(OE_SANITIZE_ADDRESS) || defined(OE_SANITIZE_THREAD)
  GTEST_SKIP() << "they end at an allocation that fails";
#endif
  SimulatedBlockDevice device(5);
  Owner owner(&device, SmallSpec(256));
  owner.Create();
  for (Key key = 0; key < 1000; ++key) owner.Write(key);
  owner.Checkpoint(1);
  {
    const RowLog::Room room = owner.log().Reserve(1, Need::kUpdates);
    const NoMemory no_memory;
    owner.log().Supersede(owner.slot(17));
  }
  ExpectError([&] { owner.Checkpoint(2); }, "out of memory");
  ExpectError([&] { (void)owner.log().Reserve(1, Need::kUpdates); }, "out of memory");
  owner.ForgetLog();
  EXPECT_EQ(owner.Recover().id, 1U);
  for (Key key = 0; key < 1000; ++key) ASSERT_EQ(owner.Read(key), 1);
}

TEST(RowLogTest, ALogOfAnEarlierFormatIsReadAndKeepsIt) {
  SimulatedBlockDevice device(5);
  RowLogSpec spec = SmallSpec(256);
  spec.format = 1;
  Owner owner(&device, spec);
  owner.Create();
  for (Key key = 0; key < 3000; ++key) owner.Write(key);
  owner.Checkpoint(1);
  owner.ForgetLog();
  Owner later(&device, SmallSpec(256));
  for (uint64_t id = 2; id < 6; ++id) {
    EXPECT_EQ(later.Recover().id, id - 1);
    EXPECT_EQ(later.log().spec().MostSegments(), spec.MostSegments());
    for (Key key = 0; key < 3000; ++key) ASSERT_EQ(later.Read(key), 1);
    later.Checkpoint(id);
    later.ForgetLog();
    EXPECT_EQ(RowLog::Peek(&device, spec).value().format, 1U);
  }
}

// To move it away, or to start without it, would lose what is still there when the drive is back.
TEST(RowLogTest, ADriveThatIsGoneIsNotDamaged) {
  SimulatedBlockDevice device(5);
  const RowLogSpec spec = SmallSpec(512);
  Owner owner(&device, spec);
  owner.Create();
  for (Key key = 0; key < 100; ++key) owner.Write(key);
  owner.Checkpoint(1);
  owner.ForgetLog();
  device.FailReads(0);  // the older copy of the superblock: the other one says all
  owner.Recover();
  for (Key key = 0; key < 100; ++key) EXPECT_EQ(owner.Read(key), 1);
  owner.ForgetLog();
  device.FailReads(0);
  device.FailReads(spec.super_bytes);
  ExpectError([&] { owner.Recover(); },
              "the device cannot be read, not even its superblock: Input/output error; no row was given up");
  device.RepairReads();
  owner.Recover();
  for (Key key = 0; key < 100; ++key) EXPECT_EQ(owner.Read(key), 1);
}

TEST(RowLogTest, FactsOfRowsAreInDramWhereverTheRowsGo) {
  SimulatedBlockDevice device(3);
  RowLogSpec spec = SmallSpec(512);
  spec.facts_at = 0;  // the version, and a word that the key is in
  spec.fact_words = 2;
  Owner owner(&device, spec);
  owner.Create();
  std::mt19937_64 random(4);
  const auto check = [&] {
    for (Key key = 0; key < 1000; ++key) {
      const uint32_t slot = owner.slot(key);
      std::array<uint32_t, 2> facts{};
      owner.log().CopyFacts(&slot, 1, facts.data());
      ASSERT_EQ(facts[0], owner.version(key)) << key;
      ASSERT_EQ(facts[1], static_cast<uint32_t>(Mix64(key * 1000003 + facts[0] + 4))) << key;
    }
  };
  for (Key key = 0; key < 1000; ++key) owner.Write(key);
  for (int i = 0; i < 6000; ++i) owner.Write(random() % 1000);
  EXPECT_GT(owner.log().stats().moved, 0U);
  check();
  owner.Checkpoint(1);
  owner.ForgetLog();
  owner.Recover();
  check();
}

// What a walk shows: the keys whose slot it was at, with rows that can be read, in the order of their slots.
std::vector<Key> WalkedKeys(Owner* owner, RowLogWalk* walk) {
  std::vector<Key> keys;
  uint32_t last = 0;
  while (walk->Next()) {
    SegmentChunks& chunks = walk->chunks();
    for (const uint32_t row : walk->live()) {
      const Key key = chunks.chunk().rows[row].key;
      if (owner->slot(key) != chunks.slot(row)) continue;  // a version that a checkpoint needs
      EXPECT_TRUE(keys.empty() || chunks.slot(row) > last);
      last = chunks.slot(row);
      const std::byte* const content = chunks.row(row);
      if (content == nullptr) {
        walk->LeaveOut(chunks.slot(row));
        continue;
      }
      uint32_t version = 0;
      std::memcpy(&version, content, sizeof(version));
      EXPECT_EQ(version, owner->version(key)) << key;
      keys.push_back(key);
    }
  }
  return keys;
}

class RowLogWalkTest : public testing::TestWithParam<size_t> {};

TEST_P(RowLogWalkTest, ShowsEachRowOnceInOrderWithFewReads) {
  SimulatedBlockDevice device(8);
  Owner owner(&device, SmallSpec(GetParam()));
  owner.Create();
  std::mt19937_64 random(9);
  for (Key key = 0; key < 1000; ++key) owner.Write(key);
  owner.Checkpoint(1);
  for (int i = 0; i < 4000; ++i) owner.Write(random() % 1000);
  for (Key key = 0; key < 1000; key += 10) owner.Erase(key);
  while (owner.log().stats().moved == 0 && owner.log().Clean()) {
  }
  for (Key key = 1; key < 10; ++key) owner.Write(key);
  const uint64_t before = device.stats().reads;
  RowLogWalk walk(&owner.log());
  std::vector<Key> keys = WalkedKeys(&owner, &walk);
  EXPECT_LE(device.stats().reads - before, owner.log().stats().segments);
  // The rest is in chunks that are not written yet.
  std::sort(keys.begin(), keys.end());
  EXPECT_TRUE(std::adjacent_find(keys.begin(), keys.end()) == keys.end());
  size_t rest = 0;
  for (Key key = 0; key < 1000; ++key) {
    const bool walked = std::binary_search(keys.begin(), keys.end(), key);
    if (owner.slot(key) == kNoRow) {
      EXPECT_FALSE(walked);
    } else {
      EXPECT_EQ(walk.HasPassed(owner.slot(key)), walked) << key;
      rest += walked ? 0 : 1;
    }
  }
  EXPECT_GT(rest, 0U);
  EXPECT_LT(rest, 200U);
  owner.Checkpoint(2);
  RowLogWalk again(&owner.log());
  EXPECT_EQ(WalkedKeys(&owner, &again).size(), 900U);
}

INSTANTIATE_TEST_SUITE_P(RowBytes, RowLogWalkTest, testing::Values(72, 512, 5000));

TEST(RowLogTest, AWalkLeavesOutWhatCannotBeRead) {
  SimulatedBlockDevice device(5);
  const RowLogSpec spec = SmallSpec(512);
  Owner owner(&device, spec);
  owner.Create();
  for (Key key = 0; key < 1000; ++key) owner.Write(key);
  owner.Checkpoint(1);
  const auto offset_of = [&](Key key) { return 2 * spec.super_bytes + owner.slot(key) / 8 * kBlockBytes; };
  device.Flip(offset_of(100) + 7, 3);  // a block with another checksum
  device.FailReads(offset_of(300));    // one that cannot be read
  const uint64_t segment = owner.slot(800) / 8 / 16;
  const uint64_t header = 2 * spec.super_bytes + segment * spec.segment_bytes;  // that cannot be corrected
  device.Flip(header + 100, 1);
  device.Flip(header + 101, 1);
  RowLogWalk walk(&owner.log());
  const std::vector<Key> keys = WalkedKeys(&owner, &walk);
  const std::set<Key> walked(keys.begin(), keys.end());
  for (Key key = 0; key < 1000; ++key) {
    const uint64_t block = owner.slot(key) / 8;
    const bool gone = offset_of(key) == offset_of(100) || offset_of(key) == offset_of(300);
    EXPECT_EQ(walked.count(key) == 0, gone || block / 16 == segment) << key;
    EXPECT_EQ(walk.HasPassed(owner.slot(key)), walked.count(key) > 0) << key;
  }
}

// Where a drive loses a chunk of a segment that is in use again, it has one that was right once.
TEST(RowLogTest, AWalkPassesNoChunkOfAnotherUse) {
  for (const bool of_another_log : {false, true}) {
    SimulatedBlockDevice device(13);
    const RowLogSpec spec = SmallSpec(512);
    uint64_t id = 0;
    const auto fill = [&](Owner* owner, Key first) {
      for (int turn = 0; turn < 5; ++turn) {
        for (Key key = first; key < first + 1000; ++key) owner->Write(key);
        owner->Checkpoint(++id);
      }
    };
    Owner owner(&device, spec);
    owner.Create();
    fill(&owner, of_another_log ? 1000 : 0);
    const uint64_t begin = 2 * spec.super_bytes;
    const uint64_t segments = owner.log().stats().segments;
    const BlockBuffer before(segments * spec.segment_bytes);
    BlockRead read;
    read.offset = begin;
    read.into = before.data();
    read.bytes = static_cast<uint32_t>(before.size());
    const auto queue = device.NewQueue();
    queue->Submit(&read, 1);
    queue->Wait();
    ASSERT_EQ(read.error, 0);
    Owner other(&device, spec);
    Owner& now = of_another_log ? other : owner;
    if (of_another_log) now.Create();  // its segments have the same uses
    fill(&now, 0);
    for (uint64_t segment = 0; segment < segments; ++segment) {
      const uint64_t at = segment * spec.segment_bytes;
      device.Write(begin + at, before.data() + at, spec.chunk_bytes);
    }
    RowLogWalk walk(&now.log());
    const std::vector<Key> keys = WalkedKeys(&now, &walk);
    const std::set<Key> walked(keys.begin(), keys.end());
    EXPECT_LT(walked.size(), 1000U);
    for (Key key = 0; key < 1000; ++key) {
      EXPECT_EQ(walk.HasPassed(now.slot(key)), walked.count(key) > 0) << key;
    }
  }
}

TEST(RowLogTest, AFailedWriteEndsCheckpointsNotReads) {
  SimulatedBlockDevice device(6);
  Owner owner(&device, SmallSpec(512));
  owner.Create();
  for (Key key = 0; key < 100; ++key) owner.Write(key);
  device.FailWritesAfter(0);
  ExpectError([&] { owner.Checkpoint(1); }, "table 't': cannot write");
  for (Key key = 0; key < 100; ++key) EXPECT_EQ(owner.Read(key), 1);
  ExpectError([&] { owner.Write(3); }, "cannot write");
  EXPECT_TRUE(owner.log().kept().empty());
}

// A recovery would bring the row back.
TEST(RowLogTest, ATombstoneThatFindsNoPlaceEndsCheckpoints) {
  SimulatedBlockDevice device(8);
  Owner owner(&device, SmallSpec(512));
  owner.Create();
  owner.Write(1);
  owner.Checkpoint(1);
  RowLog& log = owner.log();
  const std::vector<std::byte> row(512);
  for (Key key = 100; log.Append(key, log.epoch(), row.data()) != kNoRow;) ++key;  // without room
  EXPECT_EQ(log.failure(), "");
  for (Key key = 100; log.AppendTombstone(key, log.epoch());) ++key;
  EXPECT_EQ(
      log.failure(),
      "table 't': the log has no room to note that a row is gone; save the table to a file and restore it");
  ExpectError([&] { log.Commit(std::nullopt); }, "no room to note that a row is gone");
  ExpectError([&] { owner.Write(2); }, "no room to note that a row is gone");
  EXPECT_EQ(owner.Read(1), 1);
  EXPECT_EQ(log.kept().size(), 1U);
}

// On files, with everything at once: for the sanitizers.
TEST(RowLogTest, ThreadsWriteReadCleanAndCommitAtOnce) {
  const TestDirectory directory;
  const auto device = OpenBlockDevice(directory.file("log"));
  RowLogSpec spec = SmallSpec(512);
  spec.spare = 1.3;
  Owner owner(device.get(), spec);
  owner.Create();
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  constexpr Key kOfThread = 800;
  for (Key thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(thread);
      while (!stop) {
        const Key key = thread * kOfThread + random() % kOfThread;
        owner.Write(key);
        ASSERT_EQ(owner.Read(key), static_cast<int>(owner.version(key)));
      }
    });
  }
  threads.emplace_back([&] {
    while (!stop) {
      owner.log().Clean();
      owner.log().Commit(std::nullopt);
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  stop = true;
  for (std::thread& thread : threads) thread.join();
  owner.Checkpoint(1);
  std::map<Key, uint32_t> versions;
  for (Key key = 0; key < 3 * kOfThread; ++key) versions[key] = owner.version(key);
  owner.ForgetLog();
  EXPECT_EQ(owner.Recover().id, 1U);
  for (const auto& [key, version] : versions) ASSERT_EQ(owner.Read(key), static_cast<int>(version)) << key;
}

}  // namespace
}  // namespace oe::row_log_test
