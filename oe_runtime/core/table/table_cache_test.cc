// What the cache of dram_pmem (storage/row_cache.h) takes in and puts out.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/storage/epoch_marks.h"
#include "oe_runtime/core/storage/storage.h"
#include "oe_runtime/core/table/table.h"

namespace oe::table_cache_test {
namespace {

constexpr uint32_t kDim = 32;  // 256 bytes a row with Adagrad's state
constexpr uint64_t kRows = 100000;
constexpr uint64_t kHot = 1000;
constexpr uint64_t kCold = 400;  // of a batch
// A block of 32 KiB, 128 rows, with what belongs to it for each of the 16 internal shards, and none more.
constexpr uint64_t kCacheBytes = 16 * (uint64_t{32} << 10) + 16 * 128 * 40;
constexpr uint64_t kFrames = uint64_t{16} * 128;

class TableCacheTest : public testing::Test {
 protected:
  TableCacheTest() {
    TableSpec spec;
    spec.name = "t";
    spec.dim = kDim;
    StorageSpec storage{"dram_pmem", directory_.path()};
    storage.cache_bytes = kCacheBytes;
    table_ = Table::Create(spec, storage);
    std::vector<Key> keys(kRows);
    for (Key key = 0; key < kRows; ++key) keys[key] = key;
    Push(keys);
  }

  uint64_t Random() { return Mix64(drawn_++); }
  void Push(const std::vector<Key>& keys) {
    const std::vector<float> grads(keys.size() * kDim, 1.0F);
    table_->Push(keys.data(), keys.size(), grads.data(), 0.1);
  }
  // Of unique keys; how many of them were in the cache.
  uint64_t Step(std::vector<Key> keys) {
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    const uint64_t before = table_->cache().hits;
    std::vector<float> out(keys.size() * kDim);
    table_->Pull(keys.data(), keys.size(), out.data());
    table_->Upkeep();
    const uint64_t hits = table_->cache().hits - before;
    Push(keys);
    return hits;
  }
  // About half of the keys from `hot` on, and some of all others.
  std::vector<Key> Batch(Key hot) {
    std::vector<Key> keys;
    for (Key key = hot; key < hot + kHot; ++key) {
      if (Random() % 2 == 0) keys.push_back(key);
    }
    for (uint64_t i = 0; i < kCold; ++i) keys.push_back(hot + kHot + Random() % (kRows - hot - kHot));
    return keys;
  }

  TestDirectory directory_;
  std::unique_ptr<Table> table_;

 private:
  uint64_t drawn_ = 0;
};

TEST_F(TableCacheTest, EveryRowEntersWhileThereIsRoom) {
  std::vector<Key> keys;
  for (Key key = 0; key < kHot; ++key) keys.push_back(key);
  EXPECT_EQ(Step(keys), 0U);
  EXPECT_EQ(table_->cache().rows, kHot);
  EXPECT_EQ(Step(keys), kHot);
  EXPECT_EQ(table_->cache().evictions, 0U);
}

TEST_F(TableCacheTest, RarelyReadRowsReplaceNoOthers) {
  for (int i = 0; i < 50; ++i) (void)Step(Batch(0));
  const CacheStats before = table_->cache();
  EXPECT_GT(before.rows, kFrames * 9 / 10);
  EXPECT_LE(before.bytes, kCacheBytes);
  for (int i = 0; i < 200; ++i) (void)Step(Batch(0));
  const CacheStats after = table_->cache();
  EXPECT_GT(after.misses - before.misses, 200 * kCold * 9 / 10);
  EXPECT_LT(after.evictions - before.evictions, (after.misses - before.misses) / 80);
  EXPECT_GT(after.hits - before.hits, 200 * kHot / 2 * 95 / 100);
}

TEST_F(TableCacheTest, NewlyFrequentRowsEnter) {
  for (int i = 0; i < 100; ++i) (void)Step(Batch(0));
  for (int i = 0; i < 25; ++i) (void)Step(Batch(kRows / 2));
  uint64_t hits = 0;
  for (int i = 0; i < 10; ++i) hits += Step(Batch(kRows / 2));
  EXPECT_GT(hits, 10 * kHot / 2 * 95 / 100);
}

TEST(EpochMarksTest, AreThoseOfOneEpoch) {
  EpochMarks marks;
  marks.Grow(100);
  EXPECT_FALSE(marks.Has(99, 1));
  marks.Set(5, 1);
  marks.Set(6, 1);
  marks.Set(99, 1);
  EXPECT_TRUE(marks.Has(5, 1));
  EXPECT_FALSE(marks.Has(5, 2));
  EXPECT_FALSE(marks.Has(37, 1));
  marks.Clear(6);
  EXPECT_FALSE(marks.Has(6, 1));
  marks.Set(7, 2);
  EXPECT_TRUE(marks.Has(7, 2));
  EXPECT_FALSE(marks.Has(5, 1)) << "a later epoch began in its group";
  EXPECT_TRUE(marks.Has(99, 1));
  marks.Grow(10);
  marks.Grow(1000);
  EXPECT_TRUE(marks.Has(7, 2));
  EXPECT_FALSE(marks.Has(999, 2));
}

}  // namespace
}  // namespace oe::table_cache_test
