#include "oe_runtime/core/common/unique.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <unordered_map>
#include <vector>

namespace oe::unique_test {
namespace {

TEST(UniqueTest, OrderOfFirstOccurrence) {
  const std::vector<Key> ids = {9, 3, 9, 0, std::numeric_limits<Key>::max(), 3, 0};
  const UniqueKeys unique = FindUnique(ids.data(), ids.size());
  EXPECT_EQ(unique.keys, (std::vector<Key>{9, 3, 0, std::numeric_limits<Key>::max()}));
  EXPECT_EQ(unique.inverse, (std::vector<int32_t>{0, 1, 0, 2, 3, 1, 2}));
}

TEST(UniqueTest, NoIds) {
  const UniqueKeys unique = FindUnique(nullptr, 0);
  EXPECT_TRUE(unique.keys.empty());
  EXPECT_TRUE(unique.inverse.empty());
}

class UniqueAgainstStd : public testing::TestWithParam<uint64_t> {};

// Random, strided and huge keys, against the obvious way.
TEST_P(UniqueAgainstStd, SameResult) {
  std::mt19937_64 random(GetParam());
  for (const size_t n : {size_t{1}, size_t{7}, size_t{8}, size_t{1000}, size_t{50000}}) {
    std::vector<Key> ids(n);
    for (Key& id : ids) id = (random() % (n / 2 + 1)) * GetParam();
    std::unordered_map<Key, int32_t> places;
    std::vector<Key> keys;
    std::vector<int32_t> inverse;
    for (const Key id : ids) {
      const auto [place, added] = places.emplace(id, static_cast<int32_t>(keys.size()));
      if (added) keys.push_back(id);
      inverse.push_back(place->second);
    }
    const UniqueKeys unique = FindUnique(ids.data(), ids.size());
    EXPECT_EQ(unique.keys, keys);
    EXPECT_EQ(unique.inverse, inverse);
  }
}

// As many distinct ids as few slots take, one more and one less, and all; then the last id is the new one.
TEST(UniqueTest, FewAndManyDistinctIds) {
  constexpr size_t kIds = 1024;
  for (const size_t distinct : {size_t{1}, size_t{255}, size_t{256}, size_t{257}, size_t{1023}, kIds}) {
    std::vector<Key> ids(kIds);
    for (size_t i = 0; i < kIds; ++i) ids[i] = 3 * (i % distinct);
    ids.back() = 3 * (distinct - 1);
    const UniqueKeys unique = FindUnique(ids.data(), ids.size());
    ASSERT_EQ(unique.keys.size(), distinct);
    for (size_t i = 0; i < kIds; ++i) {
      ASSERT_EQ(unique.keys[static_cast<size_t>(unique.inverse[i])], ids[i]);
      ASSERT_EQ(unique.keys[i % distinct], 3 * (i % distinct));
    }
  }
}

// Ids of few keys, skewed ones, each once, and keys that all meet in one slot.
TEST(UniqueTest, MostRepeatedKeysAreLeftOut) {
  std::mt19937_64 random(7);
  const uint64_t inverse = 0xF1DE83E19937733DULL;  // of the factor that gives a key its slot
  const auto check = [](const std::vector<Key>& keys, size_t most, bool much) {
    std::vector<Key> distinct(keys.size());
    std::vector<uint16_t> which(keys.size());
    const size_t count = LeaveOutRepeated(keys.data(), keys.size(), distinct.data(), which.data());
    std::set<Key> seen;
    std::set<size_t> used;
    for (size_t i = 0; i < keys.size(); ++i) {
      ASSERT_LT(which[i], count);
      ASSERT_EQ(distinct[which[i]], keys[i]);
      used.insert(which[i]);
      ASSERT_LE(which[i], used.size() - 1);  // in the order of the keys
      seen.insert(keys[i]);
    }
    EXPECT_EQ(used.size(), count);
    EXPECT_GE(count, seen.size());
    EXPECT_LE(count, most);
    EXPECT_EQ(RepeatMuch(keys.data(), keys.size()), much);
  };
  check({5}, 1, false);
  check({0, 0, std::numeric_limits<Key>::max(), 0}, 2, false);  // too few to tell
  std::vector<Key> keys(size_t{1} << 16);
  for (Key& key : keys) key = random() % 10 == 0 ? random() : random() % 500;
  check(keys, keys.size() * 2 / 10, true);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  check(keys, keys.size(), false);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = (i % 3 + 1) * inverse;
  check(keys, keys.size(), false);
}

TEST(UniqueTest, MarksKeysOfBothBatches) {
  std::vector<Key> keys(3000);
  std::vector<Key> others(500);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = 7 * i;
  for (size_t i = 0; i < others.size(); ++i) others[i] = 35 * i + i % 2;
  for (int turn = 0; turn < 2; ++turn) {
    std::vector<uint8_t> common(keys.size());
    MarkCommon(keys, others, &common);
    const std::set<Key> wanted(others.begin(), others.end());
    for (size_t i = 0; i < keys.size(); ++i) ASSERT_EQ(common[i] != 0, wanted.count(keys[i]) == 1);
    keys.swap(others);
  }
}

INSTANTIATE_TEST_SUITE_P(Strides, UniqueAgainstStd,
                         testing::Values(1, 3, 4096, uint64_t{1} << 40, uint64_t{1} << 63,
                                         0x9E3779B97F4A7C15ULL));

class SumTest : public testing::TestWithParam<size_t> {};

// Bit for bit what adding in the order of the positions gives; also of rows that have begun.
template <typename T>
void ExpectInOrder(size_t dim, size_t step) {
  constexpr size_t kRows = 20;
  std::mt19937 random(1);
  std::normal_distribution<T> normal;
  std::vector<int32_t> rows(500);
  std::vector<T> gradients(rows.size() * step * dim);
  for (int32_t& row : rows) row = static_cast<int32_t>(random() % (kRows - 1));
  rows[7] = kRows - 1;  // alone
  for (T& gradient : gradients) gradient = normal(random);
  std::fill_n(&gradients[7 * step * dim], dim, T{-0.0});
  std::vector<T> wanted(kRows * dim);
  std::vector<bool> begun(kRows);
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto row = static_cast<size_t>(rows[i]);
    for (size_t d = 0; d < dim; ++d) {
      const T more = gradients[i * step * dim + d];
      wanted[row * dim + d] = begun[row] ? wanted[row * dim + d] + more : more;
    }
    begun[row] = true;
  }
  std::vector<T> sums(kRows * dim, std::numeric_limits<T>::quiet_NaN());
  std::vector<uint8_t> seen(kRows);
  SumByRow(gradients.data(), rows.data(), rows.size(), dim, sums.data(), seen.data(), step);
  EXPECT_EQ(std::memcmp(sums.data(), wanted.data(), sums.size() * sizeof(T)), 0);
  EXPECT_EQ(seen, std::vector<uint8_t>(kRows, 1));
  std::vector<T> added(kRows * dim, T{kNoTerm});
  SumByRow(gradients.data(), rows.data(), rows.size(), dim, added.data(), nullptr, step);
  EXPECT_EQ(std::memcmp(added.data(), wanted.data(), added.size() * sizeof(T)), 0);
}

TEST_P(SumTest, InOrderOfPositions) {
  for (const size_t step : {size_t{1}, size_t{3}}) {
    ExpectInOrder<float>(GetParam(), step);
    ExpectInOrder<double>(GetParam(), step);
  }
}

INSTANTIATE_TEST_SUITE_P(Dims, SumTest, testing::Values(1, 2, 8, 9, 10, 16, 64, 67));

}  // namespace
}  // namespace oe::unique_test
