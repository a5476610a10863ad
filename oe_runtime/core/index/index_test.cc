#include "oe_runtime/core/index/index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <random>
#include <vector>

#include "oe_runtime/core/index/hash_index.h"

namespace oe {
namespace {

void Add(Index* index, Key key, uint32_t row) {
  index->Reserve();
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
  const auto index = NewHashIndex();
  double most = 0;
  for (uint32_t i = 0; i < 100000; ++i) {
    Add(index.get(), i, i);
    if (i >= 1000) most = std::max(most, static_cast<double>(index->bytes()) / (i + 1));
  }
  EXPECT_LE(most, 24.1);
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
  index.Reserve(kKeys);
  const uint64_t bytes = index.bytes();
  for (uint32_t i = 0; i < kKeys; ++i) index.Add(key(i), i);
  for (uint32_t i = 0; i < 40 * kKeys; ++i) {
    index.Erase(key(i));
    index.Reserve(1);
    index.Add(key(i + kKeys), i + kKeys);
  }
  EXPECT_EQ(index.bytes(), bytes);
  HashIndex fresh;
  fresh.Reserve(kKeys);
  for (uint32_t i = 40 * kKeys; i < 41 * kKeys; ++i) fresh.Add(key(i), i);
  EXPECT_LT(index.AverageProbes(), 1.1 * fresh.AverageProbes());
  EXPECT_LT(index.AverageProbesOfAbsent(), 1.1 * fresh.AverageProbesOfAbsent());
  for (uint32_t i = 40 * kKeys; i < 41 * kKeys; ++i) {
    ASSERT_EQ(Find(index, key(i)), i);
    ASSERT_EQ(Find(index, key(i + kKeys)), kNoRow);
    index.Erase(key(i));
  }
  EXPECT_EQ(index.AverageProbesOfAbsent(), 1);
}

TEST(HashIndexTest, GrowsOnceForManyKeys) {
  const auto index = NewHashIndex();
  index->Reserve(100000);
  const uint64_t bytes = index->bytes();
  for (uint32_t i = 0; i < 100000; ++i) Add(index.get(), i, i);
  EXPECT_EQ(index->bytes(), bytes);
  EXPECT_LE(bytes, 100000 * 24);
}

TEST(HashIndexTest, KeysInTheOrderOfAnotherIndexDoNotClusterWithRoomForThem) {
  HashIndex from;
  // All of one internal shard.
  for (Key key = 0; key < 400000; ++key) {
    if (Mix64(key) >> 60 == 5) Add(&from, key, static_cast<uint32_t>(key));
  }
  HashIndex to;
  const auto all = ScanAll(from, 4096);
  to.Reserve(all.size());
  std::vector<Key> keys(all.size());
  std::vector<uint32_t> rows(all.size());
  uint64_t position = 0;
  ASSERT_EQ(from.Scan(&position, keys.size(), keys.data(), rows.data()), keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    Add(&to, keys[i], rows[i]);
    if (i % 1000 != 0) continue;
    ASSERT_LT(to.AverageProbes(), 1.5) << "after " << i;
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
