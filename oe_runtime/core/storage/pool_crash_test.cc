// The proof that pools keep their promise: random pushes, erases, checkpoints and recoveries on a simulated
// medium, power cuts and kills at random steps (also of recovery itself), and after each a comparison of
// every row with a model. Half of the tables have a cache of a few rows, that takes rows in and puts them out
// all the time; half lead a pool of counts, which must be those of the same checkpoint.
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
#include "oe_runtime/core/storage/cache_memory.h"
#include "oe_runtime/core/storage/pool.h"
#include "oe_runtime/core/storage/row_map.h"
#include "oe_runtime/core/storage/simulated_medium.h"

namespace oe::pool_crash_test {
namespace {

constexpr uint32_t kShards = 2;
// Words of 4 bytes of a row: float32 of so many dims, then Adagrad's bfloat16 rows of dims 1, 9 and 65.
constexpr std::array<uint32_t, 11> kWords = {1, 8, 9, 16, 33, 64, 65, 128, 2, 14, 98};

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// What a row holds: a function of its key and of the number of the write that made it, different in all
// words.
uint32_t Value(Key key, uint64_t stamp, uint32_t d) {
  return static_cast<uint32_t>(Mix64(Mix64(key) + stamp * 1000 + d) >> 32);
}

uint32_t WordOf(const std::byte* row, uint32_t d) {
  uint32_t value = 0;
  std::memcpy(&value, row + d * sizeof(value), sizeof(value));
  return value;
}

using Rows = std::map<Key, uint64_t>;    // key → number of its last write
using Counts = std::map<Key, uint32_t>;  // in the pool that is led

struct Totals {
  uint64_t crashes = 0;
  uint64_t in_recovery = 0;
  uint64_t in_checkpoint = 0;
  uint64_t recovered = 0;
  uint64_t to_older = 0;
  uint64_t rows_compared = 0;
  uint64_t counts_compared = 0;
  uint64_t erases = 0;
  uint64_t reused = 0;
  uint64_t full = 0;
  CacheStats cache;
};

// One table through many lives.
class Subject {
 public:
  Subject(uint64_t seed, uint32_t words, uint32_t window, Totals* totals)
      : random_(seed), medium_(seed + 1), words_(words), totals_(totals) {
    spec_.table = "t";
    spec_.identity = R"({"table": {"name": "t"}})";
    spec_.row_bytes = words * sizeof(uint32_t);
    spec_.shards = kShards;
    spec_.shard_of = [](Key key) { return static_cast<uint32_t>(Mix64(key) & (kShards - 1)); };
    spec_.window = window;
    spec_.block_bytes = random_() % 2 == 0 ? 2048 : 256;
    spec_.background = false;
    if (random_() % 4 == 0) spec_.format = kOldestPoolFormat + static_cast<uint32_t>(random_() % 2);
    keys_ = 10 + random_() % 60;
    // A third of the media are nearly full all the time.
    if (random_() % 3 == 0) capacity_ = kSuperBytes + ((24 + random_() % 64) << 10);
    if (random_() % 2 == 0) {
      cache_ = std::make_unique<CacheMemory>(1 + random_() % 8192);
      spec_.cache = cache_.get();
    }
    if (random_() % 2 == 0) {
      counts_spec_.kind = "counts";
      counts_spec_.table = "t";
      counts_spec_.identity = R"({"counts": {"name": "t"}})";
      counts_spec_.row_bytes = sizeof(uint32_t);
      counts_spec_.shard_of = [](Key) { return 0U; };
      counts_spec_.window = window + 1;
      counts_spec_.block_bytes = 256;
      counts_spec_.background = false;
    }
    medium_.set_largest(16 << 10);
    // Pushes go on while a checkpoint is made durable.
    medium_.on_step = [this] {
      if (!closing_ || random_() % 8 != 0) return;
      closing_ = false;
      if (random_() % 2 == 0) Read();
      Push();
      closing_ = true;
    };
  }

  // Until the next crash and the recovery after it. False when something was wrong.
  void Live() {
    medium_.CrashAfter(random_() % 3 == 0 ? random_() % 40 : random_() % 1500);
    bool crashed = false;
    try {
      pending_ = 0;
      Open();
      while (!testing::Test::HasFatalFailure()) Act();
    } catch (const SimulatedMedium::Crash&) {
      crashed = true;
    }
    if (testing::Test::HasFatalFailure()) return;
    ASSERT_TRUE(crashed);
    ++totals_->crashes;
    totals_->in_recovery += recovering_ ? 1 : 0;
    totals_->in_checkpoint += closing_ ? 1 : 0;
    closing_ = false;
    recovering_ = false;
    Close();
    medium_.Restart(random_() % 3 != 0);
    // Usually look at it in peace; sometimes the next life begins with a crash at once.
    if (random_() % 4 != 0) {
      Open();
      if (testing::Test::HasFatalFailure()) return;
      Compare();
      // A power cut now must not change what was seen.
      if (random_() % 2 == 0) Act();
      Close();
      medium_.Restart(true);
    }
  }

 private:
  void Close() {
    maps_.clear();
    counts_map_.reset();
    if (pool_) totals_->cache += pool_->cache_stats();
    pool_.reset();
    counts_pool_.reset();
    if (cache_) {
      EXPECT_EQ(cache_->bytes(), 0U);
    }
  }

  void Open() {
    std::optional<uint64_t> uuid;
    std::optional<uint64_t> counts_uuid;
    for (const std::string& name : medium_.List()) {
      uint64_t found = 0;
      bool super = false;
      ASSERT_TRUE(ParsePoolName(name, &found, &super));
      // A region without its magic, or without bytes, was never finished; storages remove these.
      if (medium_.SizeOf(name) == 0) continue;
      const Region region = medium_.Open(name);
      uint64_t inside = 0;
      std::string text;
      if (!super || !ReadSuperHeader(region, &inside, &text)) continue;
      (text.find("\"counts\"") == std::string::npos ? uuid : counts_uuid) = found;
    }
    if (!uuid) {
      ASSERT_TRUE(committed_.empty()) << "a pool with a checkpoint is gone";
      for (const std::string& name : medium_.List()) medium_.Remove(name);
      medium_.capacity = UINT64_MAX;
      pool_ = Pool::Create(&medium_, spec_);
      rows_.clear();
      called_.clear();
      NewCounts();
      medium_.capacity = capacity_;
      for (uint32_t i = 0; i < kShards; ++i) {
        maps_.push_back(std::make_unique<RowMap>(NewHashIndex(), pool_->shard(i)));
      }
      return;
    }
    recovering_ = true;
    pool_ = Pool::Open(&medium_, *uuid, spec_);
    if (counts_uuid) {
      counts_pool_ = Pool::Open(&medium_, *counts_uuid, counts_spec_);
      pool_->Lead(counts_pool_.get());
    } else if (counts_spec_.led()) {
      ASSERT_TRUE(committed_.empty()) << "the counts of a checkpoint are gone";
      NewCounts();
    }
    Recover();
    recovering_ = false;
  }

  void NewCounts() {
    counts_.clear();
    called_counts_.clear();
    if (!counts_spec_.led()) return;
    counts_map_.reset();
    pool_->Lead(nullptr);
    if (counts_pool_) counts_pool_->Remove();
    counts_pool_.reset();
    medium_.capacity = UINT64_MAX;
    counts_pool_ = Pool::Create(&medium_, counts_spec_);
    pool_->Lead(counts_pool_.get());
    counts_map_ = std::make_unique<RowMap>(NewHashIndex(), counts_pool_->shard(0));
  }

  // As a table does.
  CheckpointInfo RecoverBoth(std::optional<uint64_t> id, const std::vector<Index*>& indexes) {
    if (!counts_pool_) return pool_->Recover(id, indexes);
    CheckpointInfo info;
    const std::vector<CheckpointInfo> kept = counts_pool_->Checkpoints();
    if (!id && !kept.empty()) {  // the table had none: the power went when its first was durable here only
      info = pool_->Recover(id, indexes);
      NewCounts();
      return info;
    }
    const bool has =
        id && std::any_of(kept.begin(), kept.end(), [&](const auto& one) { return one.id == *id; });
    EXPECT_TRUE(has || !id) << "the counts of checkpoint " << *id << " are gone";
    auto index = NewHashIndex();
    const CheckpointInfo counts =
        counts_pool_->Recover(id, {index.get()}, [&] { info = pool_->Recover(id, indexes); });
    EXPECT_EQ(counts.version, info.version);
    counts_map_ = std::make_unique<RowMap>(std::move(index), counts_pool_->shard(0));
    return info;
  }

  void Recover() {
    const std::vector<CheckpointInfo> kept = pool_->Checkpoints();
    CheckKept(kept);
    std::optional<uint64_t> id;
    // An older one from time to time, of several.
    if (!kept.empty() && random_() % 4 == 0) {
      id = kept[random_() % kept.size()].id;
      totals_->to_older += *id != kept.back().id ? 1 : 0;
    }
    if (id) {
      // From here on later ones may be gone.
      while (!committed_.empty() && committed_.back() > *id) committed_.pop_back();
    }
    std::vector<std::unique_ptr<Index>> indexes;
    std::vector<Index*> pointers;
    for (uint32_t i = 0; i < kShards; ++i) {
      indexes.push_back(NewHashIndex());
      pointers.push_back(indexes.back().get());
    }
    std::optional<uint64_t> target = id;
    if (!target && !kept.empty()) target = kept.back().id;
    const CheckpointInfo info = RecoverBoth(target, pointers);
    if (testing::Test::HasFailure()) FAIL();
    pending_ = 0;
    if (kept.empty()) {
      ASSERT_EQ(info.rows, 0U);
      rows_.clear();
      called_.clear();
      counts_.clear();
      called_counts_.clear();
    } else {
      ASSERT_EQ(info.id, id ? *id : kept.back().id);
      rows_ = called_.at(info.id);
      ASSERT_EQ(info.version, info.id * 7);
      called_.erase(called_.upper_bound(info.id), called_.end());
      counts_ = called_counts_[info.id];
      called_counts_.erase(called_counts_.upper_bound(info.id), called_counts_.end());
      committed_.clear();
      for (const CheckpointInfo& one : pool_->Checkpoints()) committed_.push_back(one.id);
    }
    next_id_ = info.id + 1;
    ASSERT_EQ(info.rows, rows_.size());
    maps_.clear();
    for (uint32_t i = 0; i < kShards; ++i) {
      maps_.push_back(std::make_unique<RowMap>(std::move(indexes[i]), pool_->shard(i)));
    }
    ++totals_->recovered;
  }

  // All that were committed for sure, and none that was never asked for; the window is kept.
  void CheckKept(const std::vector<CheckpointInfo>& kept) {
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
    const uint64_t what = random_() % 16;
    if (cache_ && random_() % 2 == 0) Read();
    if (what < 9) return Push();
    if (what < 11) return EraseSome();
    if (what < 15) return Checkpoint();
    if (pending_ > 0 || random_() % 4 != 0) return;
    // Back to a checkpoint without a crash.
    recovering_ = true;
    Recover();
    recovering_ = false;
    Compare();
  }

  // A pull and the upkeep after it.
  void Read() {
    std::vector<Key> keys(1 + random_() % 30);
    for (Key& key : keys) key = random_() % (1 + random_() % keys_);
    for (uint32_t i = 0; i < kShards; ++i) {
      std::vector<Key> mine;
      std::copy_if(keys.begin(), keys.end(), std::back_inserter(mine),
                   [&](Key key) { return spec_.shard_of(key) == i; });
      std::vector<const std::byte*> found(mine.size());
      maps_[i]->Find(mine.data(), mine.size(), found.data());
      for (size_t at = 0; at < mine.size(); ++at) {
        const auto expected = rows_.find(mine[at]);
        ASSERT_EQ(found[at] != nullptr, expected != rows_.end()) << "key " << mine[at];
        if (found[at] == nullptr) continue;
        for (uint32_t d = 0; d < words_; ++d) {
          ASSERT_EQ(WordOf(found[at], d), Value(mine[at], expected->second, d)) << "key " << mine[at];
        }
      }
      if (random_() % 4 != 0) maps_[i]->store().Upkeep();
    }
    if (cache_) {
      ASSERT_LE(cache_->bytes(), cache_->limit());
    }
    medium_.Step();
  }

  void Push() {
    std::vector<Key> keys;
    const size_t n = 1 + random_() % 20;
    for (size_t i = 0; i < n; ++i) keys.push_back(random_() % keys_);
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    for (const Key key : keys) {
      RowMap& map = *maps_[spec_.shard_of(key)];
      uint32_t number = 0;
      try {
        map.FindOrAdd(&key, 1, &number, [&](Key, std::byte* row) { Fill(row, key, 0); });
      } catch (const StorageError&) {
        ++totals_->full;
        return;
      }
      const uint64_t stamp = ++stamp_;
      rows_.try_emplace(key, 0);
      medium_.Step();
      Fill(map.row(number), key, stamp);
      rows_[key] = stamp;
    }
    Count(keys);
  }

  // Counts some of the keys and forgets others.
  void Count(const std::vector<Key>& keys) {
    if (!counts_map_) return;
    for (const Key key : keys) {
      if (random_() % 4 == 0) continue;
      try {
        if (random_() % 8 == 0) {
          ASSERT_EQ(counts_map_->Erase(key), counts_.count(key) > 0);
          counts_.erase(key);
        } else {
          uint32_t number = 0;
          counts_map_->FindOrAdd(&key, 1, &number,
                                 [](Key, std::byte* row) { std::memset(row, 0, sizeof(uint32_t)); });
          ++counts_[key];
          std::memcpy(counts_map_->row(number), &counts_[key], sizeof(uint32_t));
        }
      } catch (const StorageError&) {
        ++totals_->full;
        return;
      }
      medium_.Step();
    }
  }

  // In two halves, between which the power may go.
  void Fill(std::byte* row, Key key, uint64_t stamp) {
    for (uint32_t d = 0; d < words_; ++d) {
      if (d == words_ / 2 && stamp > 0) medium_.Step();
      const uint32_t value = Value(key, stamp, d);
      std::memcpy(row + d * sizeof(value), &value, sizeof(value));
    }
  }

  void EraseSome() {
    const size_t n = random_() % 6;
    for (size_t i = 0; i < n; ++i) {
      const Key key = random_() % keys_;
      try {
        const bool erased = maps_[spec_.shard_of(key)]->Erase(key);
        ASSERT_EQ(erased, rows_.count(key) > 0);
        totals_->erases += erased ? 1 : 0;
      } catch (const StorageError&) {
        ++totals_->full;
        return;
      }
      rows_.erase(key);
      medium_.Step();
    }
  }

  void Checkpoint() {
    if (random_() % 40 == 0) medium_.capacity = 0;  // no new segments: slots must be used again
    const uint64_t id = next_id_++;
    called_[id] = rows_;
    called_counts_[id] = counts_;
    pool_->Checkpoint(id, id * 7);
    ++pending_;
    if (random_() % 4 == 0) return;  // durable together with the next one
    closing_ = true;
    pool_->RunPending();
    closing_ = false;
    const size_t expected = std::min<size_t>(spec_.window, committed_.size() + pending_);
    pending_ = 0;
    committed_.clear();
    for (const CheckpointInfo& kept : pool_->Checkpoints()) committed_.push_back(kept.id);
    ASSERT_EQ(committed_.size(), expected);
    ASSERT_EQ(committed_.back(), id);
    while (!called_.empty() && called_.begin()->first < committed_.front()) {
      called_.erase(called_.begin());
    }
  }

  // Every row, and nothing else, right after a recovery.
  void Compare() {
    uint64_t rows = 0;
    for (uint32_t i = 0; i < kShards; ++i) {
      std::vector<Key> keys(maps_[i]->size() + 1);
      std::vector<uint32_t> numbers(maps_[i]->size() + 1);
      uint64_t position = 0;
      const size_t found = maps_[i]->Scan(&position, keys.size(), keys.data(), numbers.data());
      ASSERT_EQ(found, maps_[i]->size());
      numbers.resize(found);
      for (size_t at = 0; at < found; ++at) {
        const auto expected = rows_.find(keys[at]);
        ASSERT_NE(expected, rows_.end()) << "key " << keys[at] << " is back";
        const std::byte* row = maps_[i]->row(numbers[at]);
        for (uint32_t d = 0; d < words_; ++d) {
          ASSERT_EQ(WordOf(row, d), Value(keys[at], expected->second, d))
              << "key " << keys[at] << " at " << d;
        }
      }
      pool_->Verify(i, numbers);
      rows += found;
    }
    ASSERT_EQ(rows, rows_.size());
    totals_->rows_compared += rows;
    if (!counts_map_) return;
    ASSERT_EQ(counts_map_->size(), counts_.size());
    for (const auto& [key, count] : counts_) {
      const std::byte* row = nullptr;
      counts_map_->Find(&key, 1, &row);
      ASSERT_NE(row, nullptr) << "the count of key " << key << " is gone";
      ASSERT_EQ(WordOf(row, 0), count) << "key " << key;
    }
    totals_->counts_compared += counts_.size();
  }

  std::mt19937_64 random_;
  SimulatedMedium medium_;
  const uint32_t words_;
  Totals* const totals_;
  PoolSpec spec_;
  uint64_t keys_ = 0;
  uint64_t capacity_ = UINT64_MAX;

  std::unique_ptr<CacheMemory> cache_;
  std::unique_ptr<Pool> pool_;
  std::vector<std::unique_ptr<RowMap>> maps_;
  PoolSpec counts_spec_;  // led() if there is one
  std::unique_ptr<Pool> counts_pool_;
  std::unique_ptr<RowMap> counts_map_;
  bool recovering_ = false;
  bool closing_ = false;

  Rows rows_;                        // the present
  std::map<uint64_t, Rows> called_;  // at each checkpoint that was asked for
  Counts counts_;
  std::map<uint64_t, Counts> called_counts_;
  std::vector<uint64_t> committed_;  // that are durable for sure
  size_t pending_ = 0;               // asked for, and not made durable yet
  uint64_t next_id_ = 1;
  uint64_t stamp_ = 0;
};

TEST(PoolCrashTest, EveryCommittedRowSurvivesAnyCrash) {
  const uint64_t seed = FromEnvironment("OE_CRASH_SEED", std::random_device{}());
  const uint64_t points = FromEnvironment("OE_CRASH_POINTS", 30000);
  std::printf("OE_CRASH_SEED=%llu OE_CRASH_POINTS=%llu\n", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(points));
  Totals totals;
  std::mt19937_64 random(seed);
  while (totals.crashes < points) {
    const uint32_t words = kWords[random() % kWords.size()];
    const auto window = static_cast<uint32_t>(1 + random() % 3);
    SCOPED_TRACE("words " + std::to_string(words) + ", window " + std::to_string(window) + ", after " +
                 std::to_string(totals.crashes) +
                 " crashes; repeat with OE_CRASH_SEED=" + std::to_string(seed));
    Subject subject(random(), words, window, &totals);
    for (int life = 0; life < 40; ++life) {
      ASSERT_NO_THROW(subject.Live());
      if (testing::Test::HasFatalFailure()) return;
    }
  }
  std::printf(
      "%llu crashes (%llu in recovery, %llu in a checkpoint), %llu recoveries (%llu to an older one), "
      "%llu rows and %llu counts compared, %llu erased, %llu times full; caches: %llu hits, %llu misses, "
      "%llu evictions, "
      "%llu write-backs\n",
      static_cast<unsigned long long>(totals.crashes), static_cast<unsigned long long>(totals.in_recovery),
      static_cast<unsigned long long>(totals.in_checkpoint),
      static_cast<unsigned long long>(totals.recovered), static_cast<unsigned long long>(totals.to_older),
      static_cast<unsigned long long>(totals.rows_compared),
      static_cast<unsigned long long>(totals.counts_compared), static_cast<unsigned long long>(totals.erases),
      static_cast<unsigned long long>(totals.full), static_cast<unsigned long long>(totals.cache.hits),
      static_cast<unsigned long long>(totals.cache.misses),
      static_cast<unsigned long long>(totals.cache.evictions),
      static_cast<unsigned long long>(totals.cache.write_backs));
  EXPECT_GT(totals.in_recovery, points / 100);
  EXPECT_GT(totals.in_checkpoint, points / 20);
  EXPECT_GT(totals.to_older, points / 100);
  EXPECT_GT(totals.rows_compared, points);
  EXPECT_GT(totals.counts_compared, points);
  EXPECT_GT(totals.cache.hits, points);
  EXPECT_GT(totals.cache.evictions, points);
  EXPECT_GT(totals.cache.write_backs, points);
}

}  // namespace
}  // namespace oe::pool_crash_test
