#include "oe_runtime/core/common/unique.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <unordered_map>
#include <vector>

namespace oe {
namespace {

TEST(UniqueTest, OrderOfFirstOccurrence) {
  const std::vector<Key> ids = {9, 3, 9, 0, std::numeric_limits<Key>::max(), 3, 0};
  const UniqueKeys unique = FindUnique(ids.data(), ids.size());
  EXPECT_EQ(unique.keys, (std::vector<Key>{9, 3, 0, std::numeric_limits<Key>::max()}));
  EXPECT_EQ(unique.inverse, (std::vector<int32_t>{0, 1, 0, 2, 3, 1, 2}));
}

TEST(UniqueTest, Nothing) {
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

INSTANTIATE_TEST_SUITE_P(Strides, UniqueAgainstStd,
                         testing::Values(1, 3, 4096, uint64_t{1} << 40, uint64_t{1} << 63,
                                         0x9E3779B97F4A7C15ULL));

class SumTest : public testing::TestWithParam<size_t> {};

// Bit for bit what adding in the order of the positions gives.
TEST_P(SumTest, InOrderOfPositions) {
  const size_t dim = GetParam();
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<int32_t> rows(500);
  std::vector<float> gradients(rows.size() * dim);
  for (int32_t& row : rows) row = static_cast<int32_t>(random() % 20);
  for (float& gradient : gradients) gradient = normal(random);
  std::vector<float> sums(20 * dim, std::numeric_limits<float>::quiet_NaN());
  std::vector<uint8_t> seen(20);
  SumByRow(gradients.data(), rows.data(), rows.size(), dim, sums.data(), seen.data());
  for (size_t row = 0; row < 20; ++row) {
    for (size_t d = 0; d < dim; ++d) {
      float wanted = 0;
      for (size_t i = 0; i < rows.size(); ++i) {
        if (rows[i] == static_cast<int32_t>(row)) wanted += gradients[i * dim + d];
      }
      EXPECT_EQ(sums[row * dim + d], wanted);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dims, SumTest, testing::Values(1, 2, 8, 9, 10, 16, 64, 67));

}  // namespace
}  // namespace oe
