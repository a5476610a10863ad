// Bits of rows and of their metadata flip on a simulated medium, between pushes, checkpoints, power cuts and
// recoveries: a key either has the row that was written or, once the damage is found, none. What a damaged
// row had never gets a right checksum.
//
//   OE_CRASH_SEED=N      repeats a run (it prints its seed)

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/storage/cache_memory.h"
#include "oe_runtime/core/storage/pool.h"
#include "oe_runtime/core/storage/row_map.h"
#include "oe_runtime/core/storage/simulated_medium.h"

namespace oe::pool_damage_test {
namespace {

constexpr uint32_t kWords = 9;
constexpr Key kKeys = 60;

using Rows = std::map<Key, uint64_t>;  // key → number of its last write

uint32_t Value(Key key, uint64_t stamp, uint32_t d) {
  return static_cast<uint32_t>(Mix64(Mix64(key) + stamp * 1000 + d) >> 32);
}

void Fill(std::byte* row, Key key, uint64_t stamp) {
  for (uint32_t d = 0; d < kWords; ++d) {
    const uint32_t value = Value(key, stamp, d);
    std::memcpy(row + d * sizeof(value), &value, sizeof(value));
  }
}

bool Is(const std::byte* row, Key key, uint64_t stamp) {
  for (uint32_t d = 0; d < kWords; ++d) {
    const uint32_t value = Value(key, stamp, d);
    if (std::memcmp(row + d * sizeof(value), &value, sizeof(value)) != 0) return false;
  }
  return true;
}

struct Totals {
  uint64_t lives = 0;
  uint64_t flips = 0;
  uint64_t quarantined = 0;
  uint64_t repaired = 0;
  uint64_t refused = 0;  // pools whose metadata is lost
};

class Subject {
 public:
  Subject(uint64_t seed, Totals* totals) : random_(seed), medium_(seed + 1), totals_(totals) {
    spec_.table = "t";
    spec_.identity = R"({"table": {"name": "t"}})";
    spec_.row_bytes = kWords * sizeof(uint32_t);
    spec_.shard_of = [](Key) { return 0U; };
    spec_.block_bytes = 512;
    spec_.background = false;
    flips_metadata_ = random_() % 4 == 0;
    if (random_() % 2 == 0) {
      cache_ = std::make_unique<CacheMemory>(1 + random_() % 8192);
      spec_.cache = cache_.get();
    }
  }
  ~Subject() { Close(); }
  Subject(const Subject&) = delete;
  Subject& operator=(const Subject&) = delete;

  // Until the pool cannot be used any more, which only lost metadata may do.
  void Run() {
    try {
      for (int life = 0; life < 20; ++life) {
        Open();
        for (int act = 0; act < 30 && !testing::Test::HasFatalFailure(); ++act) Act();
        if (testing::Test::HasFatalFailure()) return;
        Close();
        medium_.Restart(random_() % 2 == 0);
        ++totals_->lives;
      }
    } catch (const StorageError& error) {
      ASSERT_TRUE(flips_metadata_) << error.what();
      ++totals_->refused;
    }
  }

 private:
  void Close() {
    map_.reset();
    pool_.reset();
    if (!damage_) return;
    totals_->quarantined += damage_->quarantined();
    totals_->repaired += damage_->repaired();
    damage_.reset();
  }

  void Open() {
    damage_ = std::make_shared<Damage>("t");
    spec_.damage = damage_;
    std::optional<uint64_t> uuid;
    for (const std::string& name : medium_.List()) {
      uint64_t found = 0;
      bool super = false;
      if (ParsePoolName(name, &found, &super) && super) uuid = found;
    }
    if (!uuid) {
      pool_ = Pool::Create(&medium_, spec_);
      map_ = std::make_unique<RowMap>(NewHashIndex(), pool_->shard(0));
      rows_.clear();
      return;
    }
    pool_ = Pool::Open(&medium_, *uuid, spec_);
    Recover();
  }

  void Recover() {
    auto index = NewHashIndex();
    const CheckpointInfo info = pool_->Recover(std::nullopt, {index.get()});
    map_ = std::make_unique<RowMap>(std::move(index), pool_->shard(0));
    rows_ = at_checkpoint_[info.id];
    next_id_ = info.id + 1;
    ASSERT_EQ(info.rows, rows_.size());
  }

  void Act() {
    switch (random_() % 8) {
      case 0:
      case 1:
      case 2:
        return Push();
      case 3:
        return Read();
      case 4:
        return Flip();
      case 5:
        return Scrub();
      case 6:
        if (random_() % 4 == 0) return Recover();
        return;
      default:
        return Checkpoint();
    }
  }

  void Push() {
    for (size_t i = 0; i < 10; ++i) {
      const Key key = random_() % kKeys;
      bool filled = false;
      uint32_t number = 0;
      map_->FindOrAdd(&key, 1, &number, [&](Key, std::byte*) { filled = true; });
      const auto expected = rows_.find(key);
      if (filled) {
        ASSERT_TRUE(expected == rows_.end() || flipped_.count(key) > 0) << "key " << key << " is lost";
      } else {
        ASSERT_NE(expected, rows_.end()) << "key " << key << " is back";
        ASSERT_TRUE(Is(map_->row(number), key, expected->second)) << "key " << key << " was copied damaged";
      }
      rows_[key] = ++stamp_;
      const auto copies = map_->store().LockCopies();
      Fill(map_->row(number), key, stamp_);
    }
  }

  void Read() {
    for (size_t i = 0; i < 10; ++i) {
      const Key key = random_() % kKeys;
      const std::byte* row = nullptr;
      map_->Find(&key, 1, &row);
    }
    map_->store().Upkeep();
    Forget();
  }

  void Scrub() {
    uint64_t position = 0;
    uint64_t rows = 0;
    while (map_->store().Scrub(&position, &rows)) {
    }
    Forget();
    // All are right now, but for those that were not durable when they were flipped.
    for (const auto& [key, stamp] : rows_) {
      const std::byte* row = nullptr;
      map_->Find(&key, 1, &row);
      ASSERT_TRUE(Is(row, key, stamp)) << "key " << key;
    }
  }

  // What was quarantined.
  void Forget() {
    for (auto row = rows_.begin(); row != rows_.end();) {
      const std::byte* found = nullptr;
      map_->Find(&row->first, 1, &found);
      if (found == nullptr) {
        ASSERT_GT(flipped_.count(row->first), 0U) << "key " << row->first << " is lost";
        row = rows_.erase(row);
      } else {
        ++row;
      }
    }
  }

  // Of a row that has a checksum.
  void Flip() {
    const Key key = random_() % kKeys;
    if (rows_.count(key) == 0) return;
    std::array<Key, kKeys + 1> keys{};
    std::array<uint32_t, kKeys + 1> numbers{};
    uint64_t position = 0;
    const size_t found = map_->Scan(&position, keys.size(), keys.data(), numbers.data());
    for (size_t i = 0; i < found; ++i) {
      if (keys[i] != key) continue;
      SlotStore* slots = pool_->shard(0);
      const uint32_t number = map_->store().PlaceOf(numbers[i]);
      if (slots->Writable(number)) return;
      if (flips_metadata_ && random_() % 3 == 0) {
        const auto* meta = reinterpret_cast<const std::byte*>(&slots->meta(number));
        medium_.Flip(meta + random_() % sizeof(SlotMeta), static_cast<int>(random_() % 8));
      } else {
        medium_.Flip(slots->row(number) + random_() % spec_.row_bytes, static_cast<int>(random_() % 8));
      }
      flipped_.insert(key);
      ++totals_->flips;
      return;
    }
    FAIL() << "key " << key << " is lost";
  }

  void Checkpoint() {
    Forget();
    const uint64_t id = next_id_++;
    at_checkpoint_[id] = rows_;
    pool_->Checkpoint(id, id);
    pool_->RunPending();
  }

  std::mt19937_64 random_;
  SimulatedMedium medium_;
  Totals* const totals_;
  PoolSpec spec_;
  bool flips_metadata_ = false;
  std::unique_ptr<CacheMemory> cache_;
  std::shared_ptr<Damage> damage_;
  std::unique_ptr<Pool> pool_;
  std::unique_ptr<RowMap> map_;

  Rows rows_;
  std::map<uint64_t, Rows> at_checkpoint_;
  std::set<Key> flipped_;  // ever
  uint64_t next_id_ = 1;
  uint64_t stamp_ = 0;
};

TEST(PoolDamageTest, NothingDamagedGetsARightChecksum) {
  const char* text = std::getenv("OE_CRASH_SEED");  // NOLINT(concurrency-mt-unsafe)
  const uint64_t seed = text == nullptr ? std::random_device{}() : std::strtoull(text, nullptr, 10);
  std::printf("OE_CRASH_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  Totals totals;
  testing::internal::CaptureStderr();  // each is named there
  for (int i = 0; i < 150; ++i) {
    SCOPED_TRACE("repeat with OE_CRASH_SEED=" + std::to_string(seed));
    Subject(random(), &totals).Run();
    if (testing::Test::HasFatalFailure()) break;
  }
  (void)testing::internal::GetCapturedStderr();
  std::printf("%llu lives, %llu flips, %llu rows quarantined and %llu repaired, %llu pools refused\n",
              static_cast<unsigned long long>(totals.lives), static_cast<unsigned long long>(totals.flips),
              static_cast<unsigned long long>(totals.quarantined),
              static_cast<unsigned long long>(totals.repaired),
              static_cast<unsigned long long>(totals.refused));
  EXPECT_GT(totals.flips, 1000U);
  EXPECT_GT(totals.quarantined, 500U);
  EXPECT_GT(totals.repaired, 50U);
}

}  // namespace
}  // namespace oe::pool_damage_test
