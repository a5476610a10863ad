#include "oe_runtime/core/initializer/initializer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"

namespace oe::initializer_test {
namespace {

std::vector<float> Row(const InitializerSpec& spec, Key key, uint32_t dim = 8,
                       const std::string& table = "t") {
  std::vector<float> row(dim + 1, -9.0F);
  Initializer::Create(spec, table)->Fill(key, row.data(), dim);
  EXPECT_EQ(row.back(), -9.0F) << "wrote past the row";
  row.pop_back();
  return row;
}

uint32_t Bits(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

TEST(InitializerTest, Constants) {
  EXPECT_EQ(Row({"zeros", {}, 3}, 5), std::vector<float>(8, 0.0F));
  EXPECT_EQ(Row({"constant", {{"value", 0.7}}, 3}, 5), std::vector<float>(8, 0.7F));
}

TEST(InitializerTest, APureFunctionOfSeedTableKeyAndElement) {
  for (const char* name : {"uniform", "normal", "truncated_normal"}) {
    const std::vector<float> row = Row({name, {}, 1}, 42);
    EXPECT_EQ(Row({name, {}, 1}, 42), row);
    const std::vector<float> shorter = Row({name, {}, 1}, 42, 5);
    EXPECT_TRUE(std::equal(shorter.begin(), shorter.end(), row.begin())) << "depends on dim";
    EXPECT_NE(Row({name, {}, 2}, 42), row);
    EXPECT_NE(Row({name, {}, 1}, 43), row);
    EXPECT_NE(Row({name, {}, 1}, 42, 8, "u"), row);
    EXPECT_NE(row[0], row[1]);
  }
}

// Checkpoints and running clusters rely on these bits: a change of them is a change of the format.
// The uniform ones were computed from the header's description by other code (Python).
TEST(InitializerTest, TheBitsAreFixed) {
  const std::vector<float> uniform = Row({"uniform", {}, 20}, ~Key{0}, 3, "C1");
  const std::vector<float> normal = Row({"normal", {}, 20}, ~Key{0}, 3, "C1");
  EXPECT_EQ(Bits(uniform[0]), 0x3D1C2D49U);
  EXPECT_EQ(Bits(uniform[1]), 0x3CCE7C42U);
  EXPECT_EQ(Bits(uniform[2]), 0x3D1E7B75U);
  EXPECT_EQ(Bits(normal[0]), 0x3D71F6DCU);
  EXPECT_EQ(Bits(normal[1]), 0x3D0B76E1U);
  EXPECT_EQ(Bits(normal[2]), 0x3D77DEFEU);
}

TEST(InitializerTest, UniformIsUniform) {
  std::vector<float> values;
  for (Key key = 0; key < 20000; ++key) {
    for (const float value : Row({"uniform", {{"minval", -1}, {"maxval", 3}}, 0}, key << 40, 5))
      values.push_back(value);
  }
  std::sort(values.begin(), values.end());
  EXPECT_GE(values.front(), -1.0F);
  EXPECT_LE(values.back(), 3.0F);
  double worst = 0;  // Kolmogorov-Smirnov distance; 1.63 / sqrt(n) = 0.0052 is exceeded once in a hundred
  for (size_t i = 0; i < values.size(); ++i) {
    const double expected = (static_cast<double>(values[i]) + 1) / 4;
    worst = std::max(
        worst, std::abs(expected - (static_cast<double>(i) + 0.5) / static_cast<double>(values.size())));
  }
  EXPECT_LT(worst, 0.0052);
}

TEST(InitializerTest, NormalIsNormal) {
  std::vector<float> values;
  for (Key key = 0; key < 20000; ++key) {
    for (const float value : Row({"normal", {{"mean", 1}, {"stddev", 2}}, 0}, key, 5))
      values.push_back(value);
  }
  std::sort(values.begin(), values.end());
  double worst = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double expected = 0.5 * std::erfc(-(static_cast<double>(values[i]) - 1) / 2 / std::sqrt(2.0));
    worst = std::max(
        worst, std::abs(expected - (static_cast<double>(i) + 0.5) / static_cast<double>(values.size())));
  }
  EXPECT_LT(worst, 0.0052);
  EXPECT_GT(values.back(), 1 + 2 * 3.7F);  // the tails are there
  EXPECT_LT(values.front(), 1 - 2 * 3.7F);
  EXPECT_LT(values.back(), 1 + 2 * 6.5F);
}

TEST(InitializerTest, TruncatedNormalIsANormalWithoutTails) {
  std::vector<float> values;
  for (Key key = 0; key < 20000; ++key) {
    for (const float value : Row({"truncated_normal", {{"mean", 1}, {"stddev", 2}}, 0}, key, 5))
      values.push_back(value);
  }
  std::sort(values.begin(), values.end());
  const auto count = static_cast<double>(values.size());
  const auto below = [](double z) { return 0.5 * std::erfc(-z / std::sqrt(2.0)); };
  double worst = 0;
  double sum = 0;
  double squares = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double z = (static_cast<double>(values[i]) - 1) / 2;
    const double expected = (below(z) - below(-2)) / (below(2) - below(-2));
    worst = std::max(worst, std::abs(expected - (static_cast<double>(i) + 0.5) / count));
    sum += z;
    squares += z * z;
  }
  EXPECT_LT(worst, 0.0052);
  EXPECT_NEAR(sum / count, 0, 4 * 0.88 / std::sqrt(count));
  EXPECT_NEAR(std::sqrt(squares / count), 0.87962566103423978, 0.004);  // Keras's constant
  EXPECT_GE(values.front(), 1 - 2 * 2.0F);
  EXPECT_LE(values.back(), 1 + 2 * 2.0F);
  EXPECT_LT(values.front(), 1 - 2 * 1.99F);  // up to the bounds
  EXPECT_GT(values.back(), 1 + 2 * 1.99F);
}

TEST(InitializerTest, RefusesUnsupportedSpecifications) {
  const auto message = [](const InitializerSpec& spec) {
    return MessageOf<SpecError>([&] { (void)Initializer::Create(spec, "t"); });
  };
  EXPECT_EQ(message({"glorot", {}, 0}),
            "initializer 'glorot' is not one of constant, normal, truncated_normal, uniform, zeros");
  EXPECT_EQ(message({"uniform", {{"minval", 1}, {"maxval", 0}}, 0}),
            "initializer 'uniform': 'minval' (1) is above 'maxval' (0)");
  EXPECT_EQ(message({"normal", {{"stddev", -1}}, 0}),
            "initializer 'normal': 'stddev' must be at least 0, not -1");
  EXPECT_EQ(message({"zeros", {{"value", 0}}, 0}),
            "initializer 'zeros' does not support 'value'; it supports no parameters");
}

}  // namespace
}  // namespace oe::initializer_test
