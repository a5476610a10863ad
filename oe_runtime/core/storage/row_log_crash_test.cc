// The proof that the log of rows keeps its promise: random pushes, erases, checkpoints, cleaning and
// recoveries on a simulated drive, power cuts with torn sectors, kills, writes and flushes that fail and
// blocks that cannot be read at random steps (also of recovery itself), and after each a comparison of every
// row with a model. The owner here has the newest version of a row in memory for a while and writes it back
// later, as a table does.
//
//   OE_CRASH_SEED=N      repeats a run (each prints its seed)
//   OE_CRASH_POINTS=N    crash points, 30000 if not set

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/storage/row_log.h"
#include "oe_runtime/core/storage/simulated_block_device.h"

namespace oe::row_log_crash_test {
namespace {

// Words of 4 bytes of a row: also one that fills a block, and one that takes two.
constexpr std::array<uint32_t, 8> kWords = {18, 64, 128, 130, 300, 1024, 1025, 1500};
constexpr size_t kSuper = size_t{16} << 10;

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// What a row holds: a function of its key and of the number of the push that made it, different in all words.
std::vector<uint32_t> Content(Key key, uint64_t stamp, uint32_t words) {
  std::vector<uint32_t> row(words);
  for (uint32_t d = 0; d < words; ++d)
    row[d] = static_cast<uint32_t>(Mix64(Mix64(key) + stamp * 10000 + d) >> 32);
  return row;
}

using Rows = std::map<Key, uint64_t>;  // key → number of its last push

struct Totals {
  uint64_t crashes = 0;
  uint64_t in_recovery = 0;
  uint64_t in_commit = 0;
  uint64_t in_cleaning = 0;
  uint64_t failed_writes = 0;
  uint64_t failed_flushes = 0;
  uint64_t unreadable = 0;
  uint64_t recovered = 0;
  uint64_t to_older = 0;
  uint64_t rows_compared = 0;
  uint64_t erased = 0;
  uint64_t full = 0;
  uint64_t write_backs_full = 0;
  uint64_t appended = 0;
  uint64_t moved = 0;
  uint64_t tombstones = 0;
};

// One table through many lives.
class Subject {
 public:
  Subject(uint64_t seed, uint32_t words, uint32_t window, size_t sector, Totals* totals)
      : random_(seed), device_(seed + 1, sector), words_(words), totals_(totals) {
    spec_.table = "t";
    spec_.where = "the simulated device";
    spec_.identity = "{}";
    spec_.row_bytes = words * sizeof(uint32_t);
    spec_.window = window;
    spec_.super_bytes = kSuper;
    spec_.chunk_bytes = size_t{16} << 10;
    spec_.segment_bytes = size_t{32} << (10 + random_() % 2);
    spec_.spare = 1.1 + static_cast<double>(random_() % 8) / 10;
    spec_.relocate = [this](Key key, uint32_t slot, const std::function<uint32_t()>& move) {
      const uint32_t moved = move();
      const auto cell = cells_.find(key);
      if (moved != kNoRow && cell != cells_.end() && cell->second.slot == slot) cell->second.slot = moved;
    };
    const uint64_t block_rows = std::max<uint64_t>(1, 4096 / spec_.row_bytes);
    keys_ = (2 + random_() % 8) * block_rows + random_() % 8;
    // A third of the devices are nearly full all the time.
    if (random_() % 3 == 0) {
      device_.capacity = 2 * kSuper + spec_.segment_bytes * (8 + random_() % 4);
      keys_ = spec_.segment_bytes / kBlockBytes * block_rows * (2 + random_() % 3);
    }
    // Pushes go on while a commit is made durable.
    device_.on_step = [this] {
      if (!hooked_ || hooks_left_ == 0 || random_() % 4 != 0) return;
      --hooks_left_;
      hooked_ = false;
      PushInto(1);
      hooked_ = true;
    };
  }

  // Until the next crash and the recovery after it.
  void Live() {
    device_.CrashAfter(random_() % 3 == 0 ? random_() % 30 : random_() % 600);
    if (random_() % 10 == 0) device_.FailWritesAfter(random_() % 200);
    if (random_() % 10 == 0) device_.FailFlushesAfter(random_() % 60);
    // After a flush that failed nobody knows what a drive still has that is read and not durable: such a life
    // ends with the power, or the next one would trust what it reads.
    bool power_cut = random_() % 3 != 0;
    bool crashed = false;
    try {
      Open();
      while (!testing::Test::HasFatalFailure()) Act();
    } catch (const SimulatedBlockDevice::Crash&) {
      crashed = true;
    } catch (const StorageFull& error) {
      FAIL() << error.what();
    } catch (const StorageError& error) {
      const std::string what = error.what();
      const bool flush = what.find("flush") != std::string::npos;
      const bool write = what.find("cannot write") != std::string::npos;
      ASSERT_TRUE(flush || write) << what;
      (flush ? totals_->failed_flushes : totals_->failed_writes) += 1;
      power_cut = power_cut || flush;
      crashed = true;
      if (log_ && !recovering_) {
        EXPECT_FALSE(log_->failure().empty());
        EXPECT_THROW(log_->Commit(std::nullopt), StorageError);
      }
    }
    if (testing::Test::HasFatalFailure()) return;
    ASSERT_TRUE(crashed);
    ++totals_->crashes;
    totals_->in_recovery += recovering_ ? 1 : 0;
    totals_->in_commit += committing_ ? 1 : 0;
    totals_->in_cleaning += cleaning_ ? 1 : 0;
    Close();
    device_.Restart(power_cut);
    // Usually look at it in peace; sometimes the next life begins with a crash at once.
    if (random_() % 4 != 0) {
      Open();
      if (testing::Test::HasFatalFailure()) return;
      Compare();
      // A power cut now must not change what was seen.
      if (random_() % 2 == 0 && !testing::Test::HasFatalFailure()) Act();
      Close();
      device_.Restart(true);
    }
  }

 private:
  struct Cell {
    uint32_t slot = kNoRow;  // of its newest version; kNoRow: that is here only
    uint64_t dirty = 0;      // the epoch in which it was changed; 0: it is on the device
    uint64_t stamp = 0;
    bool entries = false;  // whether the log has entries of the key
  };

  void Close() {
    hooked_ = committing_ = cleaning_ = recovering_ = false;
    room_ = RowLog::Room();
    if (log_) {
      const RowLogStats stats = log_->stats();
      totals_->appended += stats.appended;
      totals_->moved += stats.moved;
    }
    log_.reset();
    cells_.clear();
    pending_.reset();
    device_.RepairReads();
  }

  void Open() {
    recovering_ = true;
    log_ = RowLog::Open(&device_, spec_);
    if (!log_) {
      ASSERT_TRUE(committed_.empty()) << "a log with a checkpoint is gone";
      log_ = RowLog::Create(&device_, spec_);
      rows_.clear();
      called_.clear();
      next_id_ = 1;
      recovering_ = false;
      return;
    }
    // A header that cannot be read is no loss if it is readable again.
    if (random_() % 16 == 0 && device_.size() > 2 * kSuper) {
      device_.FailReads(2 * kSuper + random_() % (device_.size() - 2 * kSuper));
      try {
        Recover();
      } catch (const StorageError& error) {
        if (std::string(error.what()).find("cannot be read") == std::string::npos) throw;
        ++totals_->unreadable;
        device_.RepairReads();
        log_ = RowLog::Open(&device_, spec_);
        ASSERT_NE(log_, nullptr);
        Recover();
      }
      device_.RepairReads();
    } else {
      Recover();
    }
    recovering_ = false;
  }

  void Recover() {
    const std::vector<KeptCheckpoint> kept = log_->kept();
    CheckKept(kept);
    if (testing::Test::HasFatalFailure()) return;
    std::optional<uint64_t> id;
    if (!kept.empty() && random_() % 4 == 0) {
      id = kept[random_() % kept.size()].id;
      totals_->to_older += *id != kept.back().id ? 1 : 0;
      // From here on later ones may be gone.
      while (!committed_.empty() && committed_.back() > *id) committed_.pop_back();
    }
    const auto index = NewHashIndex();
    const KeptCheckpoint info = log_->Recover(id, [&](Key) { return index.get(); });
    pending_.reset();
    rows_.clear();
    if (kept.empty()) {
      ASSERT_EQ(info.rows, 0U);
      called_.clear();
    } else {
      ASSERT_EQ(info.id, id ? *id : kept.back().id);
      ASSERT_EQ(info.version, info.id * 7);
      rows_ = called_.at(info.id);
      called_.erase(called_.upper_bound(info.id), called_.end());
    }
    committed_.clear();
    for (const KeptCheckpoint& one : log_->kept()) committed_.push_back(one.id);
    next_id_ = info.id + 1;
    ASSERT_EQ(info.rows, rows_.size());
    cells_.clear();
    std::vector<Key> keys(rows_.size() + 1);
    std::vector<uint32_t> slots(rows_.size() + 1);
    uint64_t position = 0;
    const size_t found = index->Scan(&position, keys.size(), keys.data(), slots.data());
    ASSERT_EQ(found, rows_.size());
    for (size_t i = 0; i < found; ++i) {
      const auto row = rows_.find(keys[i]);
      ASSERT_NE(row, rows_.end()) << "key " << keys[i] << " is back";
      cells_[keys[i]] = {slots[i], 0, row->second, true};
    }
    ++totals_->recovered;
  }

  // All that were committed for sure, and none that was never asked for; the window is kept.
  void CheckKept(const std::vector<KeptCheckpoint>& kept) {
    ASSERT_LE(kept.size(), spec_.window);
    if (!committed_.empty()) {
      ASSERT_FALSE(kept.empty()) << "the committed checkpoint " << committed_.back() << " is gone";
      ASSERT_GE(kept.back().id, committed_.back());
    }
    for (size_t i = 0; i < kept.size(); ++i) {
      ASSERT_EQ(called_.count(kept[i].id), 1U) << kept[i].id;
      ASSERT_EQ(kept[i].rows, called_[kept[i].id].size());
      if (i == 0) continue;
      ASSERT_EQ(std::next(called_.find(kept[i - 1].id))->first, kept[i].id) << "one in between is gone";
    }
  }

  void Act() {
    const uint64_t what = random_() % 20;
    if (what < 9) return Push();
    if (what < 11) return EraseSome();
    if (what < 13) return ReadSome();
    if (what < 15) return Clean();
    if (what < 19) return Checkpoint();
    if (pending_ || random_() % 4 != 0) return;
    // Back to a checkpoint without a crash.
    recovering_ = true;
    Recover();
    recovering_ = false;
    if (!testing::Test::HasFatalFailure()) Compare();
  }

  // Room for `rows`, or false if there is none.
  bool Reserve(uint64_t rows, RowLog::Need need) {
    try {
      room_ = log_->Reserve(rows, need);
      return true;
    } catch (const StorageFull&) {
      ++totals_->full;
      return false;
    }
  }

  void Append(Key key, Cell* cell) {
    const std::vector<uint32_t> row = Content(key, cell->stamp, words_);
    cell->slot = log_->Append(key, cell->dirty, reinterpret_cast<const std::byte*>(row.data()));
    ASSERT_NE(cell->slot, kNoRow) << "no place in spite of the room";
    cell->dirty = 0;
    cell->entries = true;
    log_->Claim(-1);
  }

  // What a checkpoint that is under way still needs of the row goes to the log; then there is no newest
  // version in it.
  void BeginChange(Key key, Cell* cell) {
    if (cell->dirty != 0 && cell->dirty < log_->epoch()) Append(key, cell);
    if (testing::Test::HasFatalFailure()) return;
    if (cell->slot != kNoRow) log_->Supersede(cell->slot);
    cell->slot = kNoRow;
  }

  void Push() {
    const size_t n = 1 + random_() % 12;
    const bool updates = random_() % 3 == 0;
    if (!Reserve(3 * n, updates ? RowLog::Need::kUpdates : RowLog::Need::kNewRows)) return;
    PushInto(n, updates);
    room_ = RowLog::Room();
    if (random_() % 4 == 0) log_->WriteChunks();
  }

  // With room for three appends of each.
  void PushInto(size_t n, bool updates = false) {
    for (size_t i = 0; i < n && !testing::Test::HasFatalFailure(); ++i) {
      const Key key = random_() % keys_;
      if (updates && cells_.count(key) == 0) continue;
      Cell& cell = cells_[key];
      BeginChange(key, &cell);
      if (cell.dirty == 0) log_->Claim(1);
      cell.dirty = log_->epoch();
      cell.stamp = ++stamp_;
      rows_[key] = cell.stamp;
      if (random_() % 3 == 0) Append(key, &cell);  // it is evicted
    }
  }

  void EraseSome() {
    const size_t n = random_() % 6;
    if (!Reserve(2 * n, RowLog::Need::kUpdates)) return;
    for (size_t i = 0; i < n && !testing::Test::HasFatalFailure(); ++i) {
      const Key key = random_() % keys_;
      const auto found = cells_.find(key);
      if (found == cells_.end()) continue;
      BeginChange(key, &found->second);
      if (found->second.dirty != 0) log_->Claim(-1);
      if (found->second.entries) {
        ASSERT_TRUE(log_->AppendTombstone(key, log_->epoch()));
      }
      cells_.erase(found);
      rows_.erase(key);
      ++totals_->erased;
    }
    room_ = RowLog::Room();
  }

  void Clean() {
    cleaning_ = true;
    totals_->tombstones += log_->stats().tombstones > 0 ? 1 : 0;
    // A row that cannot be read stays where it is.
    std::optional<Key> bad;
    if (random_() % 8 == 0) bad = MakeBad();
    log_->Clean();
    if (bad) {
      device_.RepairReads();
      ++totals_->unreadable;
    }
    cleaning_ = false;
    if (bad) Compare();
  }

  // The block of some row cannot be read.
  std::optional<Key> MakeBad() {
    for (const auto& [key, cell] : cells_) {
      if (cell.slot == kNoRow || random_() % 4 != 0) continue;
      std::vector<BlockRead> reads(log_->reads_per_row());
      std::vector<std::byte> row(spec_.row_bytes);
      std::byte* into = row.data();
      uint8_t copied = 0;
      log_->Locate(&cell.slot, 1, &into, reads.data(), &copied);
      if (copied != 0) continue;
      device_.FailReads(reads[random_() % reads.size()].offset);
      return key;
    }
    return std::nullopt;
  }

  void Checkpoint() {
    if (!pending_) {
      const uint64_t id = next_id_++;
      called_[id] = rows_;
      KeptCheckpoint checkpoint;
      checkpoint.epoch = log_->CloseEpoch();
      checkpoint.id = id;
      checkpoint.version = id * 7;
      checkpoint.rows = rows_.size();
      for (const auto& [key, stamp] : rows_) checkpoint.digest += RowLog::KeyDigest(key);
      pending_ = checkpoint;
      if (random_() % 3 == 0) return;  // pushes go on, and write back some of it
    }
    // The rest of its rows.
    for (auto at = cells_.begin(); at != cells_.end(); ++at) {
      if (at->second.dirty == 0 || at->second.dirty > pending_->epoch) continue;
      if (!Reserve(1, RowLog::Need::kWriteBack)) {
        ++totals_->write_backs_full;
        room_ = RowLog::Room();
        // Without this checkpoint there is nothing to be done; a server would end.
        device_.CrashAfter(0);
        device_.Step();
      }
      if (at->second.dirty == 0 || at->second.dirty > pending_->epoch) continue;
      Append(at->first, &at->second);
      if (testing::Test::HasFatalFailure()) return;
    }
    room_ = RowLog::Room();
    committing_ = true;
    if (Reserve(60, RowLog::Need::kUpdates)) {  // for pushes meanwhile
      hooked_ = true;
      hooks_left_ = 20;
    }
    log_->Commit(pending_);
    hooked_ = false;
    committing_ = false;
    room_ = RowLog::Room();
    const size_t expected = std::min<size_t>(spec_.window, committed_.size() + 1);
    committed_.clear();
    for (const KeptCheckpoint& kept : log_->kept()) committed_.push_back(kept.id);
    ASSERT_EQ(committed_.size(), expected);
    ASSERT_EQ(committed_.back(), pending_->id);
    pending_.reset();
    called_.erase(called_.begin(), called_.find(committed_.front()));
  }

  void ReadSome() {
    std::vector<Key> keys;
    for (const auto& [key, cell] : cells_) {
      if (cell.slot != kNoRow && random_() % 4 == 0) keys.push_back(key);
    }
    Read(keys);
  }

  // Every row, and nothing else.
  void Compare() {
    ASSERT_EQ(cells_.size(), rows_.size());
    std::vector<Key> keys;
    for (const auto& [key, cell] : cells_) {
      ASSERT_EQ(rows_.count(key), 1U) << "key " << key << " is back";
      ASSERT_EQ(rows_[key], cell.stamp);
      if (cell.slot != kNoRow) keys.push_back(key);
    }
    Read(keys);
    totals_->rows_compared += keys.size();
  }

  void Read(const std::vector<Key>& keys) {
    const size_t n = keys.size();
    if (n == 0) return;
    std::vector<uint32_t> slots;
    slots.reserve(n);
    for (const Key key : keys) slots.push_back(cells_.at(key).slot);
    std::vector<std::byte> rows(n * spec_.row_bytes);
    std::vector<std::byte*> into(n);
    for (size_t i = 0; i < n; ++i) into[i] = rows.data() + i * spec_.row_bytes;
    const size_t parts = log_->reads_per_row();
    std::vector<BlockRead> reads(n * parts);
    std::vector<uint8_t> copied(n);
    log_->Locate(slots.data(), n, into.data(), reads.data(), copied.data());
    const auto queue = device_.NewQueue();
    for (size_t i = 0; i < n; ++i) {
      if (copied[i] == 0) queue->Submit(&reads[i * parts], parts);
    }
    queue->Wait();
    for (size_t i = 0; i < n; ++i) {
      for (size_t part = 0; copied[i] == 0 && part < parts; ++part) {
        ASSERT_EQ(reads[i * parts + part].error, 0) << "key " << keys[i];
      }
      const std::vector<uint32_t> expected = Content(keys[i], rows_.at(keys[i]), words_);
      ASSERT_EQ(std::memcmp(into[i], expected.data(), spec_.row_bytes), 0) << "key " << keys[i];
    }
  }

  std::mt19937_64 random_;
  SimulatedBlockDevice device_;
  const uint32_t words_;
  Totals* const totals_;
  RowLogSpec spec_;
  uint64_t keys_ = 0;

  std::unique_ptr<RowLog> log_;
  RowLog::Room room_;
  std::map<Key, Cell> cells_;
  std::optional<KeptCheckpoint> pending_;  // asked for, and not durable yet
  bool recovering_ = false;
  bool committing_ = false;
  bool cleaning_ = false;
  bool hooked_ = false;
  int hooks_left_ = 0;

  // The model.
  Rows rows_;                        // the present
  std::map<uint64_t, Rows> called_;  // at each checkpoint that was asked for
  std::vector<uint64_t> committed_;  // that are durable for sure
  uint64_t next_id_ = 1;
  uint64_t stamp_ = 0;
};

TEST(RowLogCrashTest, EveryCommittedRowSurvivesAnyCrash) {
  const uint64_t seed = FromEnvironment("OE_CRASH_SEED", std::random_device{}());
  const uint64_t points = FromEnvironment("OE_CRASH_POINTS", 30000);
  std::printf("OE_CRASH_SEED=%llu OE_CRASH_POINTS=%llu\n", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(points));
  Totals totals;
  std::mt19937_64 random(seed);
  while (totals.crashes < points) {
    const uint32_t words = kWords[random() % kWords.size()];
    const auto window = static_cast<uint32_t>(1 + random() % 3);
    const size_t sector = random() % 2 == 0 ? 512 : kBlockBytes;
    SCOPED_TRACE("words " + std::to_string(words) + ", window " + std::to_string(window) + ", sectors of " +
                 std::to_string(sector) + ", after " + std::to_string(totals.crashes) +
                 " crashes; repeat with OE_CRASH_SEED=" + std::to_string(seed));
    Subject subject(random(), words, window, sector, &totals);
    for (int life = 0; life < 40; ++life) {
      ASSERT_NO_THROW(subject.Live());
      if (testing::Test::HasFatalFailure()) return;
    }
  }
  std::printf(
      "%llu crashes (%llu in recovery, %llu in a commit, %llu in cleaning; %llu failed writes, %llu failed "
      "flushes), %llu blocks unreadable, %llu recoveries (%llu to an older one), %llu rows compared, %llu "
      "erased, %llu times full (%llu of a write-back), %llu rows appended, %llu moved\n",
      static_cast<unsigned long long>(totals.crashes), static_cast<unsigned long long>(totals.in_recovery),
      static_cast<unsigned long long>(totals.in_commit), static_cast<unsigned long long>(totals.in_cleaning),
      static_cast<unsigned long long>(totals.failed_writes),
      static_cast<unsigned long long>(totals.failed_flushes),
      static_cast<unsigned long long>(totals.unreadable), static_cast<unsigned long long>(totals.recovered),
      static_cast<unsigned long long>(totals.to_older), static_cast<unsigned long long>(totals.rows_compared),
      static_cast<unsigned long long>(totals.erased), static_cast<unsigned long long>(totals.full),
      static_cast<unsigned long long>(totals.write_backs_full),
      static_cast<unsigned long long>(totals.appended), static_cast<unsigned long long>(totals.moved));
  EXPECT_GT(totals.in_recovery, points / 100);
  EXPECT_GT(totals.in_commit, points / 20);
  EXPECT_GT(totals.in_cleaning, points / 100);
  EXPECT_GT(totals.failed_writes, points / 100);
  EXPECT_GT(totals.failed_flushes, points / 100);
  EXPECT_GT(totals.unreadable, points / 100);
  EXPECT_GT(totals.to_older, points / 100);
  EXPECT_GT(totals.rows_compared, points);
  EXPECT_GT(totals.erased, points);
  EXPECT_GT(totals.moved, points);
  EXPECT_GT(totals.full, points / 100);
  EXPECT_LT(totals.write_backs_full, points / 20);
}

}  // namespace
}  // namespace oe::row_log_crash_test
