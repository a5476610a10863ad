#include "oe_runtime/core/index/index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "oe_runtime/core/index/hash_index.h"

namespace oe {
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

TEST(HashIndexTest, EveryKeyValueIsLegal) {
  const auto index = NewHashIndex();
  const std::vector<Key> keys = {0, 1, ~Key{0}, ~Key{0} - 1, Key{1} << 63, 0x9E3779B97F4A7C15ULL};
  for (const Key key : keys) EXPECT_EQ(Find(*index, key), kNoRow) << key;
  for (uint32_t i = 0; i < keys.size(); ++i) Add(index.get(), keys[i], i);
  for (uint32_t i = 0; i < keys.size(); ++i) EXPECT_EQ(Find(*index, keys[i]), i);
}

TEST(HashIndexTest, AgreesWithAMapWhileGrowing) {
  const auto index = NewHashIndex();
  std::map<Key, uint32_t> expected;
  std::mt19937_64 random(1);
  for (uint32_t row = 0; row < 50000; ++row) {
    const Key key = random() >> (random() % 60);
    if (expected.count(key) > 0) {
      EXPECT_EQ(Find(*index, key), expected[key]);
      continue;
    }
    EXPECT_EQ(Find(*index, key), kNoRow);
    Add(index.get(), key, row);
    expected[key] = row;
  }
  EXPECT_EQ(ScanAll(*index, 7), expected);
  EXPECT_EQ(ScanAll(*index, 4096), expected);
}

// Ranges side by side have every key once, however few there are to a segment or segments to a range.
TEST(HashIndexTest, RangesHaveTheKeysOfTheirPlaces) {
  for (const uint32_t size : {0U, 5U, 3000U, 60000U}) {
    const auto index = NewHashIndex();
    for (uint32_t row = 0; row < size; ++row) Add(index.get(), Mix64(row), row);
    const std::map<Key, uint32_t> expected = ScanAll(*index, 100);
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

TEST(HashIndexTest, FindsBatchesOfAnySize) {
  constexpr uint32_t kRow = 123456789;
  constexpr size_t kLongest = 300;
  HashIndex index;
  std::vector<Key> keys;
  for (uint32_t row = 0; row < 20000; ++row) {  // several segments, and keys beyond their first buckets
    keys.push_back(Mix64(row) >> 4);
    Add(&index, keys.back(), row);
  }
  std::mt19937_64 random(2);
  for (size_t size = 0; size <= kLongest; ++size) {
    std::vector<Key> batch(size);
    std::vector<uint32_t> expected(size);
    for (size_t i = 0; i < size; ++i) {
      expected[i] = random() % 5 == 0 ? kNoRow : static_cast<uint32_t>(random() % keys.size());
      batch[i] = expected[i] == kNoRow ? ~random() | Key{1} << 63 : keys[expected[i]];
    }
    std::vector<uint32_t> rows(size + 1, kRow);
    index.Find(batch.data(), size, rows.data());
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
  // The inverse of Mix64's multiplications and shifts is known, so anybody can make such keys.
  const auto unmix = [](uint64_t x) {
    const auto unshift = [](uint64_t y, unsigned by) {
      uint64_t original = y;
      for (unsigned done = by; done < 64; done += by) original = y ^ (original >> by);
      return original;
    };
    x = unshift(x, 31) * 0x319642B2D24D8EC3ULL;
    x = unshift(x, 27) * 0x96DE1B173F119089ULL;
    return unshift(x, 30);
  };
  ASSERT_EQ(unmix(Mix64(123456789)), 123456789U);
  HashIndex index;
  std::vector<Key> added;
  const auto fill = [&] {
    for (uint32_t i = 0; i < 10000; ++i) {
      const Key key = unmix((uint64_t{7} << 60) + i);
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
}  // namespace oe
