#include "oe_runtime/core/index/index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "oe_runtime/core/index/compact_index.h"
#include "oe_runtime/core/index/hash_index.h"

namespace oe::index_test {
namespace {

void Add(Index* index, Key key, uint32_t row) {
  index->Reserve(key);
  index->Add(key, row);
}

uint32_t Find(const Index& index, Key key) {
  uint32_t row = 0;
  index.Find(&key, 1, &row);
  return row;
}

std::map<Key, uint32_t> ScanAll(const Index& index, size_t at_once) {
  std::map<Key, uint32_t> all;
  std::vector<Key> keys(at_once);
  std::vector<uint32_t> rows(at_once);
  uint64_t position = 0;
  while (const size_t found = index.Scan(&position, at_once, keys.data(), rows.data())) {
    for (size_t i = 0; i < found; ++i)
      EXPECT_TRUE(all.emplace(keys[i], rows[i]).second) << "seen twice: " << keys[i];
  }
  return all;
}

// The key of internal shard 5 whose hash has the upper 60 bits of x below those of the shard.
constexpr uint32_t kShard = 5;
Key KeyOf(uint64_t x) { return Unmix64(uint64_t{kShard} << 60 | x >> 4); }
// The i-th of different keys of the shard.
Key KeyAt(uint64_t i) { return KeyOf(Mix64(i + 1)); }

enum class Kind { kHash, kCompact };

// Of any keys of one internal shard, with so many that a compact index has left its first form behind.
class AnyIndexTest : public ::testing::TestWithParam<Kind> {
 protected:
  static std::unique_ptr<Index> NewIndex() {
    return GetParam() == Kind::kHash ? NewHashIndex() : NewCompactIndex(kShard);
  }
  const std::unique_ptr<Index> index_ = NewIndex();
};

INSTANTIATE_TEST_SUITE_P(, AnyIndexTest, ::testing::Values(Kind::kHash, Kind::kCompact),
                         [](const auto& kind) { return kind.param == Kind::kHash ? "Hash" : "Compact"; });

TEST(HashIndexTest, EveryKeyValueIsLegal) {
  const auto index = NewHashIndex();
  const std::vector<Key> keys = {0, 1, ~Key{0}, ~Key{0} - 1, Key{1} << 63, 0x9E3779B97F4A7C15ULL};
  for (const Key key : keys) EXPECT_EQ(Find(*index, key), kNoRow) << key;
  for (uint32_t i = 0; i < keys.size(); ++i) Add(index.get(), keys[i], i);
  for (uint32_t i = 0; i < keys.size(); ++i) EXPECT_EQ(Find(*index, keys[i]), i);
}

// Each bit of the hash counts, wherever the index has put it.
TEST_P(AnyIndexTest, EveryKeyOfTheShardIsLegal) {
  std::vector<Key> keys = {KeyOf(0), KeyOf(~uint64_t{0})};
  for (unsigned bit = 4; bit < 64; ++bit) {
    for (const uint64_t x : {uint64_t{0}, ~uint64_t{0}, uint64_t{0x123456789ABCDEF0}}) {
      const Key key = KeyOf(x ^ uint64_t{1} << bit);
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
    }
  }
  for (uint32_t i = 0; i < 100000; ++i) Add(index_.get(), KeyAt(i), i);
  for (uint32_t i = 0; i < keys.size(); ++i) {
    ASSERT_EQ(Find(*index_, keys[i]), kNoRow) << i;
    Add(index_.get(), keys[i], 1000000 + i);
  }
  for (uint32_t i = 0; i < keys.size(); ++i) EXPECT_EQ(Find(*index_, keys[i]), 1000000 + i);
  EXPECT_EQ(ScanAll(*index_, 1000).size(), 100000 + keys.size());
}

TEST_P(AnyIndexTest, AgreesWithAMapWhileGrowing) {
  std::map<Key, uint32_t> expected;
  std::mt19937_64 random(1);
  for (uint32_t row = 0; row < 100000; ++row) {
    const Key key = KeyOf(random() << random() % 50);
    if (expected.count(key) > 0) {
      EXPECT_EQ(Find(*index_, key), expected[key]);
      continue;
    }
    EXPECT_EQ(Find(*index_, key), kNoRow);
    Add(index_.get(), key, row);
    expected[key] = row;
  }
  EXPECT_EQ(ScanAll(*index_, 7), expected);
  EXPECT_EQ(ScanAll(*index_, 4096), expected);
}

// Through all that an index does while it grows, which is looked at now and then.
TEST_P(AnyIndexTest, AgreesWithAMapWhateverIsDone) {
  constexpr uint64_t kKeys = 260000;
  constexpr uint32_t kTurns = 900000;
  std::vector<uint32_t> expected(kKeys, kNoRow);  // by number of the key
  std::mt19937_64 random(3);
  uint64_t size = 0;
  uint64_t next_look = 60000;
  for (uint32_t row = 0; row < kTurns; ++row) {
    const uint64_t i = random() % kKeys;
    const Key key = KeyAt(i);
    ASSERT_EQ(Find(*index_, key), expected[i]);
    const bool grows = row < kTurns / 3 || row > kTurns / 2;
    if (expected[i] == kNoRow) {
      Add(index_.get(), key, row);
      expected[i] = row;
      ++size;
    } else if (grows || random() % 3 == 0) {
      index_->Set(key, row);
      expected[i] = row;
    } else {
      index_->Erase(key);
      expected[i] = kNoRow;
      --size;
    }
    if (row + 1 < kTurns && size != next_look) continue;
    next_look += 15000;
    ASSERT_EQ(ScanAll(*index_, 500).size(), size);
    std::vector<Key> keys(kKeys);
    for (uint64_t k = 0; k < kKeys; ++k) keys[k] = KeyAt(k);
    std::vector<uint32_t> rows(kKeys);
    index_->Find(keys.data(), kKeys, rows.data());
    ASSERT_EQ(rows, expected) << "after " << row;
  }
  for (uint64_t i = 0; i < kKeys; ++i) {
    if (expected[i] != kNoRow) index_->Erase(KeyAt(i));
  }
  EXPECT_TRUE(ScanAll(*index_, 500).empty());
}

// Ranges side by side have every key once, however few there are to a segment or segments to a range.
TEST_P(AnyIndexTest, RangesHaveTheKeysOfTheirPlaces) {
  for (const uint32_t size : {0U, 5U, 3000U, 60000U, 150000U}) {
    const auto index = NewIndex();
    for (uint32_t row = 0; row < size; ++row) Add(index.get(), KeyAt(row), row);
    const std::map<Key, uint32_t> expected = ScanAll(*index, 100);
    ASSERT_EQ(expected.size(), size);
    for (const uint64_t ranges : {1U, 7U, 256U}) {
      std::map<Key, uint32_t> all;
      for (uint64_t i = 0; i < ranges; ++i) {
        const uint64_t width = ~uint64_t{0} / ranges;
        const Index::Range range{i * width, i + 1 == ranges ? ~uint64_t{0} : (i + 1) * width - 1};
        std::array<Key, 64> keys{};
        std::array<uint32_t, 64> rows{};
        uint64_t position = 0;
        while (const size_t found = index->Scan(range, &position, keys.size(), keys.data(), rows.data())) {
          for (size_t k = 0; k < found; ++k) {
            EXPECT_GE(ScanPlace(keys[k]), range.first);
            EXPECT_LE(ScanPlace(keys[k]), range.last);
            EXPECT_TRUE(all.emplace(keys[k], rows[k]).second) << "seen twice: " << keys[k];
          }
        }
      }
      EXPECT_EQ(all, expected) << size << " keys in " << ranges << " ranges";
    }
  }
}

// Also while some segments have been split and others are as large as they get.
TEST_P(AnyIndexTest, ScansHaveEachKeyOnceAtAnySize) {
  std::array<Key, 512> keys{};
  std::array<uint32_t, 512> rows{};
  for (uint32_t size = 1; size <= 100000; ++size) {
    Add(index_.get(), KeyAt(size), size);
    if (size % 400 != 0) continue;
    uint64_t all = 0;
    uint64_t of_range = 0;
    uint64_t position = 0;
    while (const size_t n = index_->Scan(&position, keys.size(), keys.data(), rows.data())) all += n;
    position = 0;
    while (const size_t n = index_->Scan(Index::Range{}, &position, keys.size(), keys.data(), rows.data()))
      of_range += n;
    ASSERT_EQ(all, size);
    ASSERT_EQ(of_range, size);
  }
}

// An eviction goes on where it was, though keys have come since.
TEST_P(AnyIndexTest, PositionsOfAnotherSizeAreHarmless) {
  const Index::Range range{uint64_t{1} << 61, uint64_t{7} << 61};
  std::vector<uint64_t> positions = {0, ~uint64_t{0}, uint64_t{1} << 40};
  std::array<Key, 64> keys{};
  std::array<uint32_t, 64> rows{};
  for (uint32_t row = 0; row < 150000; ++row) {
    Add(index_.get(), KeyAt(row), row);
    if (row % 1000 != 0) continue;
    for (uint64_t& position : positions) {
      const size_t found = index_->Scan(range, &position, keys.size(), keys.data(), rows.data());
      ASSERT_LE(found, keys.size());
      for (size_t i = 0; i < found; ++i) ASSERT_EQ(Find(*index_, keys[i]), rows[i]);
    }
  }
}

TEST_P(AnyIndexTest, FindsBatchesOfAnySize) {
  constexpr uint32_t kRow = 123456789;
  constexpr size_t kLongest = 300;
  constexpr uint32_t kKeys = 80000;  // several segments, and keys beyond their first buckets
  for (uint32_t row = 0; row < kKeys; ++row) Add(index_.get(), KeyAt(row), row);
  std::mt19937_64 random(2);
  for (size_t size = 0; size <= kLongest; ++size) {
    std::vector<Key> batch(size);
    std::vector<uint32_t> expected(size);
    for (size_t i = 0; i < size; ++i) {
      const auto number = static_cast<uint32_t>(random() % kKeys);
      expected[i] = random() % 5 == 0 ? kNoRow : number;
      batch[i] = KeyAt(expected[i] == kNoRow ? kKeys + number : number);
    }
    std::vector<uint32_t> rows(size + 1, kRow);
    index_->Find(batch.data(), size, rows.data());
    EXPECT_EQ(rows.back(), kRow) << "written beyond a batch of " << size;
    rows.pop_back();
    ASSERT_EQ(rows, expected) << size;
  }
}

TEST(HashIndexTest, StridedKeysDoNotCluster) {
  for (const Key stride :
       {Key{1}, Key{2}, Key{16}, Key{4096}, Key{1} << 20, Key{1} << 32, Key{1} << 44, Key{26000003}}) {
    // All of one internal shard, as the table hands them over.
    std::vector<Key> keys;
    for (Key i = 0; keys.size() < 20000; ++i) {
      if (Mix64(i * stride) >> 60 == 3) keys.push_back(i * stride);
    }
    HashIndex index;
    for (uint32_t i = 0; i < keys.size(); ++i) Add(&index, keys[i], i);
    for (uint32_t i = 0; i < keys.size(); ++i) ASSERT_EQ(Find(index, keys[i]), i) << stride;
    EXPECT_LT(index.AverageProbes(), 1.5) << "stride " << stride;
  }
}

TEST(HashIndexTest, AtMost24BytesAKeyOnceGrown) {
  HashIndex index;
  double most = 0;
  for (uint32_t i = 0; i < 300000; ++i) {
    Add(&index, i, i);
    if (i >= 100) most = std::max(most, static_cast<double>(index.bytes()) / (i + 1));
  }
  EXPECT_LE(most, 24);
  EXPECT_GE(most, 16);  // 64 bytes for at most four keys
}

TEST(HashIndexTest, GrowingTakesNoLongerInALargeIndex) {
  HashIndex index;
  uint64_t small = 0;
  for (uint32_t i = 0; i < 400000; ++i) {
    Add(&index, i, i);
    if (i == 20000) small = index.longest_reserve();
  }
  EXPECT_GT(small, 0U);
  // A full segment, and the two that it is split into.
  EXPECT_LE(index.longest_reserve(), 2500U);
  EXPECT_LE(index.longest_reserve(), small * 3 / 2);
}

TEST(HashIndexTest, KeysThatShareTheirHashBitsAreRefusedBeforeTheyTakeTheMemory) {
  // The inverse of Mix64 is known, so anybody can make such keys.
  HashIndex index;
  std::vector<Key> added;
  const auto fill = [&] {
    for (uint32_t i = 0; i < 10000; ++i) {
      const Key key = Unmix64((uint64_t{7} << 60) + i);
      index.Reserve(key);
      index.Add(key, i);
      added.push_back(key);
    }
  };
  EXPECT_THROW(fill(), std::bad_alloc);
  EXPECT_GE(added.size(), 3000U);
  EXPECT_LE(index.bytes(), uint64_t{20} << 20);
  for (uint32_t i = 0; i < added.size(); ++i) ASSERT_EQ(Find(index, added[i]), i);
  Add(&index, 12345, 1);
  EXPECT_EQ(Find(index, 12345), 1U);
}

TEST(HashIndexTest, KeysThatComeAndGoLeaveNoTrace) {
  HashIndex index;
  constexpr Key kAtOnce = 20000;
  for (Key key = 0; key < 20 * kAtOnce; ++key) {
    Add(&index, key, static_cast<uint32_t>(key));
    if (key >= kAtOnce) index.Erase(key - kAtOnce);
  }
  EXPECT_LT(index.AverageProbes(), 1.5);
  EXPECT_LT(index.AverageAbsentProbes(), 4);  // hundreds, if buckets stayed marked as overflowed
  EXPECT_EQ(ScanAll(index, 1000).size(), kAtOnce);
  EXPECT_LE(index.bytes(), kAtOnce * 30);
}

TEST(IndexTest, SetsAndErases) {
  for (const bool array : {false, true}) {
    const auto index = array ? NewArrayIndex(4000, 0, 1) : NewHashIndex();
    std::map<Key, uint32_t> expected;
    std::mt19937_64 random(2);
    for (uint32_t row = 0; row < 60000; ++row) {
      const Key key = random() % 4000;
      if (expected.count(key) == 0) {
        Add(index.get(), key, row);
        expected[key] = row;
      } else if (random() % 2 == 0) {
        index->Set(key, row);
        expected[key] = row;
      } else {
        index->Erase(key);
        expected.erase(key);
        ASSERT_EQ(Find(*index, key), kNoRow);
      }
    }
    EXPECT_EQ(ScanAll(*index, 100), expected);
    for (Key key = 0; key < 4000; ++key) {
      const auto found = expected.find(key);
      ASSERT_EQ(Find(*index, key), found == expected.end() ? kNoRow : found->second);
    }
  }
}

// As a table with a cap does: as many keys come as go. Keys that are absent must stay quick to miss.
TEST(HashIndexTest, KeysThatComeAndGoLeaveNothingBehind) {
  HashIndex index;
  const auto key = [](uint32_t i) { return Mix64(i) & (~Key{0} >> 4); };
  constexpr uint32_t kKeys = 20000;
  for (uint32_t i = 0; i < kKeys; ++i) Add(&index, key(i), i);
  const uint64_t bytes = index.bytes();
  for (uint32_t i = 0; i < 40 * kKeys; ++i) {
    index.Erase(key(i));
    Add(&index, key(i + kKeys), i + kKeys);
  }
  EXPECT_LT(index.bytes(), bytes + bytes / 4);
  HashIndex fresh;
  for (uint32_t i = 40 * kKeys; i < 41 * kKeys; ++i) Add(&fresh, key(i), i);
  EXPECT_LT(index.AverageProbes(), 1.1 * fresh.AverageProbes());
  EXPECT_LT(index.AverageAbsentProbes(), 1.1 * fresh.AverageAbsentProbes());
  for (uint32_t i = 40 * kKeys; i < 41 * kKeys; ++i) {
    ASSERT_EQ(Find(index, key(i)), i);
    ASSERT_EQ(Find(index, key(i + kKeys)), kNoRow);
    index.Erase(key(i));
  }
  EXPECT_EQ(index.AverageAbsentProbes(), 1);
}

TEST(HashIndexTest, KeysMayComeInTheOrderOfAnotherIndexOrOfTheirHashes) {
  std::vector<Key> in_order;
  HashIndex from;
  // All of one internal shard.
  for (Key key = 0; key < 800000; ++key) {
    if (Mix64(key) >> 60 != 5) continue;
    Add(&from, key, static_cast<uint32_t>(key));
    in_order.push_back(key);
  }
  std::vector<Key> scanned(in_order.size());
  std::vector<uint32_t> rows(in_order.size());
  uint64_t position = 0;
  ASSERT_EQ(from.Scan(&position, scanned.size(), scanned.data(), rows.data()), scanned.size());
  std::vector<Key> by_hash = in_order;
  std::sort(by_hash.begin(), by_hash.end(), [](Key a, Key b) { return Mix64(a) < Mix64(b); });
  for (const auto& keys : {scanned, by_hash}) {
    HashIndex to;
    for (size_t i = 0; i < keys.size(); ++i) {
      Add(&to, keys[i], static_cast<uint32_t>(keys[i]));
      if (i % 5000 != 0) continue;
      ASSERT_LT(to.AverageProbes(), 2) << "after " << i;  // 13, if segments filled from one end
    }
    EXPECT_EQ(ScanAll(to, 4096), ScanAll(from, 4096));
    EXPECT_LE(static_cast<double>(to.bytes()), 24.0 * static_cast<double>(keys.size()));
    // A few splits in a row, until the keys so far part.
    EXPECT_LE(to.longest_reserve(), 20000U);
  }
}

TEST(HashIndexTest, KeysOfOneServerOfManyDoNotCluster) {
  HashIndex index;
  uint32_t rows = 0;
  for (Key key = 0; rows < 30000; ++key) {
    const uint64_t hash = Mix64(key);
    if (hash >> 60 == 3 && server_of_hash(hash, 64) == 5) Add(&index, key, rows++);
  }
  EXPECT_LT(index.AverageProbes(), 1.5);
}

TEST(HashIndexTest, IndexesOfSeveralThreadsShareTheirBlocks) {
  std::vector<std::thread> threads;
  for (Key thread = 0; thread < 4; ++thread) {
    threads.emplace_back([thread] {
      for (int turn = 0; turn < 3; ++turn) {
        HashIndex index;
        for (uint32_t i = 0; i < 30000; ++i) Add(&index, thread << 40 | i, i);
        for (uint32_t i = 0; i < 30000; ++i) ASSERT_EQ(Find(index, thread << 40 | i), i);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(CompactIndexTest, AtMost12BytesAKeyAtEverySizeFrom65536) {
  CompactIndex index(kShard);
  constexpr uint32_t kFrom = 65536;
  constexpr uint32_t kKeys = 2200000;
  double most = 0;
  uint64_t longest_of_few = 0;
  for (uint32_t i = 0; i < kKeys; ++i) {
    Add(&index, KeyAt(i), i);
    if (i + 1 < kFrom || (i > 500000 && i % 16 != 0)) continue;
    most = std::max(most, static_cast<double>(index.bytes()) / (i + 1));
    if (i == 500000) longest_of_few = index.longest_reserve();
  }
  EXPECT_LE(most, 12);
  EXPECT_GE(most, 10.7);  // 64 bytes for six keys
  // Growing takes no longer in a large index: a full segment, and the two that it is split into.
  EXPECT_LE(index.longest_reserve(), 90000U);
  EXPECT_LE(index.longest_reserve(), longest_of_few * 3 / 2);
  EXPECT_LT(index.AverageProbes(), 1.45);
  std::vector<Key> keys(kKeys);
  for (uint32_t i = 0; i < kKeys; ++i) keys[i] = KeyAt(i);
  std::vector<uint32_t> rows(kKeys);
  index.Find(keys.data(), kKeys, rows.data());
  for (uint32_t i = 0; i < kKeys; ++i) ASSERT_EQ(rows[i], i);
}

TEST(CompactIndexTest, StridedKeysTakeNoMore) {
  constexpr uint32_t kKeys = 70000;
  for (const Key stride :
       {Key{1}, Key{2}, Key{16}, Key{4096}, Key{1} << 20, Key{1} << 32, Key{1} << 40, Key{26000003}}) {
    CompactIndex index(3);
    std::vector<Key> keys;
    for (Key i = 0; keys.size() < kKeys; ++i) {
      if (Mix64(i * stride) >> 60 == 3) keys.push_back(i * stride);
    }
    for (uint32_t i = 0; i < kKeys; ++i) Add(&index, keys[i], i);
    for (uint32_t i = 0; i < kKeys; ++i) ASSERT_EQ(Find(index, keys[i]), i) << stride;
    EXPECT_LE(index.bytes(), 12 * kKeys) << "stride " << stride;
  }
}

TEST(CompactIndexTest, KeysOfOneServerOfManyTakeNoMore) {
  CompactIndex index(kShard);
  constexpr uint32_t kKeys = 100000;
  constexpr uint32_t kServers = 64;
  std::vector<Key> keys;
  for (uint32_t i = 0; i < kKeys; ++i) {
    const uint64_t mixed = Mix64(i);
    const uint64_t of_server = (uint64_t{17} << 32) / kServers + static_cast<uint32_t>(mixed) / kServers;
    const Key key = Unmix64(uint64_t{kShard} << 60 | mixed << 4 >> 36 << 32 | of_server);
    ASSERT_EQ(server_of(key, kServers, false), 17U);
    keys.push_back(key);
    Add(&index, key, i);
    if (i + 1 >= 65536) {
      ASSERT_LE(index.bytes(), 12 * uint64_t{i + 1});
    }
  }
  for (uint32_t i = 0; i < kKeys; ++i) ASSERT_EQ(Find(index, keys[i]), i);
}

// As a restore or a recovery adds them. While only some parts of the hashes have come, an index may be
// larger.
TEST(CompactIndexTest, KeysMayComeInTheOrderOfAnotherIndexOrOfTheirHashes) {
  constexpr uint32_t kKeys = 150000;
  HashIndex hash;
  CompactIndex compact(kShard);
  std::map<Key, uint32_t> expected;
  for (uint32_t i = 0; i < kKeys; ++i) {
    Add(&hash, KeyAt(i), i);
    Add(&compact, KeyAt(i), i);
    expected[KeyAt(i)] = i;
  }
  const auto order_of = [](const Index& index) {
    std::vector<Key> keys(kKeys);
    std::vector<uint32_t> rows(kKeys);
    uint64_t position = 0;
    EXPECT_EQ(index.Scan(&position, kKeys, keys.data(), rows.data()), keys.size());
    return keys;
  };
  std::vector<std::vector<Key>> orders = {order_of(hash), order_of(compact)};
  orders.push_back(orders[0]);
  std::sort(orders.back().begin(), orders.back().end(), [](Key a, Key b) { return Mix64(a) < Mix64(b); });
  orders.push_back(orders[0]);
  std::sort(orders.back().begin(), orders.back().end(),
            [](Key a, Key b) { return Mix64(a) << 52 < Mix64(b) << 52; });
  for (const auto& keys : orders) {
    CompactIndex to(kShard);
    for (const Key key : keys) Add(&to, key, expected[key]);
    EXPECT_EQ(ScanAll(to, 4096), expected);
    EXPECT_LE(to.bytes(), 12 * uint64_t{kKeys});
    // A few splits in a row, until the keys so far part.
    EXPECT_LE(to.longest_reserve(), 300000U);
  }
}

TEST(CompactIndexTest, KeysThatComeAndGoTakeNoMore) {
  CompactIndex index(kShard);
  constexpr uint32_t kKeys = 100000;
  for (uint32_t i = 0; i < kKeys; ++i) Add(&index, KeyAt(i), i);
  for (uint32_t i = 0; i < 10 * kKeys; ++i) {
    index.Erase(KeyAt(i));
    Add(&index, KeyAt(i + kKeys), i + kKeys);
  }
  EXPECT_LE(index.bytes(), 12.1 * kKeys);
  for (uint32_t i = 10 * kKeys; i < 11 * kKeys; ++i) {
    ASSERT_EQ(Find(index, KeyAt(i)), i);
    ASSERT_EQ(Find(index, KeyAt(i + kKeys)), kNoRow);
  }
  EXPECT_EQ(ScanAll(index, 1000).size(), kKeys);
}

TEST(CompactIndexTest, KeysThatShareTheirHashBitsAreRefusedBeforeTheyTakeTheMemory) {
  CompactIndex index(kShard);
  constexpr uint32_t kKeys = 100000;
  for (uint32_t i = 0; i < kKeys; ++i) Add(&index, KeyAt(i), i);
  std::vector<Key> added;
  const auto fill = [&] {
    for (uint32_t i = 0; i < kKeys; ++i) {
      const Key key = Unmix64((uint64_t{kShard} << 60) + i);
      Add(&index, key, kKeys + i);
      added.push_back(key);
    }
  };
  EXPECT_THROW(fill(), std::bad_alloc);
  EXPECT_GE(added.size(), 3000U);
  EXPECT_LE(index.bytes(), uint64_t{20} << 20);
  for (uint32_t i = 0; i < added.size(); ++i) ASSERT_EQ(Find(index, added[i]), kKeys + i);
  for (uint32_t i = 0; i < kKeys; ++i) ASSERT_EQ(Find(index, KeyAt(i)), i);
  Add(&index, KeyAt(kKeys), 1);
  EXPECT_EQ(Find(index, KeyAt(kKeys)), 1U);
  EXPECT_EQ(ScanAll(index, 1000).size(), kKeys + added.size() + 1);
}

// Keys that have both of their buckets in common: twelve fit.
std::vector<Key> KeysThatMeet(size_t count) {
  const auto step_of = [](uint64_t rest) {  // as in compact_index.cc
    const uint64_t mixed = rest * 0xD6E8FEB86659FD93ULL;
    return ((mixed >> 32) * 2047 >> 32) + 1 + (mixed >> 31 & 1) * 2048;
  };
  std::vector<Key> keys;
  for (uint64_t rest = 0; keys.size() < count; rest += 2) {
    if (step_of(rest) == 77) keys.push_back(Unmix64(uint64_t{kShard} << 60 | rest << 11 | 1234));
  }
  return keys;
}

void ExpectAll(const std::vector<Key>& keys) {
  CompactIndex index(kShard);
  for (uint32_t i = 0; i < keys.size(); ++i) Add(&index, keys[i], i);
  std::vector<uint32_t> rows(keys.size());
  index.Find(keys.data(), keys.size(), rows.data());
  for (uint32_t i = 0; i < keys.size(); ++i) ASSERT_EQ(rows[i], i);
  for (uint32_t i = 0; i < 50; ++i) ASSERT_EQ(Find(index, keys[i]), i);
  const std::map<Key, uint32_t> all = ScanAll(index, 1000);
  ASSERT_EQ(all.size(), keys.size());
  EXPECT_LE(index.bytes(), 12.1 * static_cast<double>(keys.size()));
}

// As they are pushed, as a recovery meets them, and as a save writes them.
TEST(CompactIndexTest, KeysThatMeetAreTakenInAnyOrder) {
  std::vector<Key> few = KeysThatMeet(40);
  std::vector<Key> first = few;
  for (uint32_t i = 0; i < 150000; ++i) first.push_back(KeyAt(i));
  std::vector<Key> last(first.begin() + 40, first.end());
  last.insert(last.end(), few.begin(), few.end());
  ExpectAll(first);
  ExpectAll(last);
  CompactIndex index(kShard);
  for (uint32_t i = 0; i < last.size(); ++i) Add(&index, last[i], i);
  std::vector<Key> scanned;
  std::array<Key, 100> keys{};
  std::array<uint32_t, 100> rows{};
  uint64_t position = 0;
  while (const size_t n = index.Scan(&position, keys.size(), keys.data(), rows.data())) {
    scanned.insert(scanned.end(), keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(n));
  }
  ExpectAll(scanned);
}

TEST(CompactIndexTest, KeysThatMeetAreKeysLikeOthers) {
  CompactIndex index(kShard);
  for (uint32_t i = 0; i < 100000; ++i) Add(&index, KeyAt(i), i);
  const std::vector<Key> keys = KeysThatMeet(40);
  for (uint32_t i = 0; i < keys.size(); ++i) Add(&index, keys[i], i);
  for (uint32_t i = 0; i < keys.size(); ++i) index.Set(keys[i], 1000 + i);
  const Index::Range narrow{ScanPlace(keys[39]), ScanPlace(keys[39])};
  std::array<Key, 4> found{};
  std::array<uint32_t, 4> rows{};
  uint64_t position = 0;
  ASSERT_EQ(index.Scan(narrow, &position, found.size(), found.data(), rows.data()), 1U);
  EXPECT_EQ(found[0], keys[39]);
  EXPECT_EQ(rows[0], 1039U);
  EXPECT_EQ(index.Scan(narrow, &position, found.size(), found.data(), rows.data()), 0U);
  for (uint32_t i = 0; i < keys.size(); i += 2) index.Erase(keys[i]);
  for (uint32_t i = 0; i < keys.size(); ++i) {
    EXPECT_EQ(Find(index, keys[i]), i % 2 == 0 ? kNoRow : 1000 + i);
  }
  EXPECT_EQ(ScanAll(index, 7).size(), 100020U);
}

// A key in a thousand, chosen to meet others, must not cost the memory of all.
TEST(CompactIndexTest, KeysThatMeetDoNotEmptySegments) {
  CompactIndex index(kShard);
  constexpr uint32_t kKeys = 500000;
  for (uint32_t i = 0; i < kKeys; ++i) Add(&index, KeyAt(i), i);
  uint32_t added = 0;
  for (uint64_t top = 0; top < 64; ++top) {
    uint32_t here = 0;
    for (const Key key : KeysThatMeet(200)) {
      const Key moved = Unmix64(Mix64(key) | top << 54);
      if (Find(index, moved) == kNoRow && here++ < 14) Add(&index, moved, added++);
    }
  }
  EXPECT_GT(added, 500U);
  EXPECT_LE(index.bytes(), 14.0 * (kKeys + added));
}

TEST(ArrayIndexTest, RangesHaveTheirKeys) {
  constexpr uint64_t kFirst = 5;
  constexpr uint64_t kStride = 48;
  constexpr uint64_t kDim = 1000;
  const auto index = NewArrayIndex(kDim, kFirst, kStride);
  for (Key key = kFirst; key < kDim; key += kStride) Add(index.get(), key, static_cast<uint32_t>(key));
  for (uint64_t first = 0; first < kDim; first += 3) {
    for (const uint64_t last : {first, first + 1, first + kStride - 1, first + kStride, kDim - 1}) {
      std::set<Key> expected;
      for (Key key = kFirst; key < kDim; key += kStride) {
        if (key >= first && key <= last) expected.insert(key);
      }
      std::set<Key> found;
      Key key = 0;
      uint32_t row = 0;
      uint64_t position = 0;
      while (index->Scan({first, last}, &position, 1, &key, &row) > 0) found.insert(key);
      ASSERT_EQ(found, expected) << first << " to " << last;
    }
  }
}

TEST(ArrayIndexTest, HoldsItsKeysOnly) {
  // Keys 5, 53, 101, … below 1000, as server 1 of 3 has them in its internal shard 1… (first 5, stride 48).
  const auto index = NewArrayIndex(1000, 5, 48);
  EXPECT_EQ(index->bytes(), 21 * sizeof(uint32_t));
  std::map<Key, uint32_t> expected;
  for (Key key = 5; key < 1000; key += 96) {
    EXPECT_EQ(Find(*index, key), kNoRow);
    const auto row = static_cast<uint32_t>(key * 7);
    Add(index.get(), key, row);
    expected[key] = row;
  }
  for (Key key = 5; key < 1000; key += 48) {
    EXPECT_EQ(Find(*index, key), expected.count(key) > 0 ? expected[key] : kNoRow);
  }
  EXPECT_EQ(ScanAll(*index, 3), expected);
  EXPECT_EQ(NewArrayIndex(5, 5, 48)->bytes(), 0U);
  EXPECT_EQ(NewArrayIndex(6, 5, 48)->bytes(), 4U);
}

}  // namespace
}  // namespace oe::index_test
