#include "oe_runtime/core/common/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace oe::half_test {
namespace {

// What the bits of a half mean, by the definition of its format.
double Meaning(uint16_t half, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = half >> mantissa_bits & ((1 << exponent_bits) - 1);
  const int mantissa = half & ((1 << mantissa_bits) - 1);
  const double sign = (half & 0x8000) != 0 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

struct OfBfloat16 {
  using Half = Bfloat16;
  static double Value(uint16_t half) { return Meaning(half, 8, 7); }
  static constexpr uint16_t kInfinity = 0x7F80;
};

struct OfFloat16 {
  using Half = Float16;
  static double Value(uint16_t half) { return Meaning(half, 5, 10); }
  static constexpr uint16_t kInfinity = 0x7C00;
};

template <typename Format>
class HalfTest : public testing::Test {};
using Formats = testing::Types<OfBfloat16, OfFloat16>;
TYPED_TEST_SUITE(HalfTest, Formats);

constexpr uint32_t kRandoms[] = {0, 1, 0x80000000, 0x12345678, 0xFFFFFFFF};

TYPED_TEST(HalfTest, EveryPatternMeansWhatTheFormatSays) {
  using Half = typename TypeParam::Half;
  for (uint32_t pattern = 0; pattern <= 0xFFFF; ++pattern) {
    const auto half = static_cast<uint16_t>(pattern);
    const float value = Half::ToFloat(half);
    const double wanted = TypeParam::Value(half);
    if (std::isnan(wanted)) {
      ASSERT_TRUE(std::isnan(value)) << pattern;
      ASSERT_TRUE(std::isnan(Half::ToFloat(Half::Nearest(value)))) << pattern;
      for (const uint32_t random : kRandoms) {
        ASSERT_TRUE(std::isnan(Half::ToFloat(Half::FromFloat(value, random)))) << pattern;
      }
      continue;
    }
    ASSERT_EQ(static_cast<double>(value), wanted) << pattern;
    ASSERT_EQ(std::signbit(value), (half & 0x8000) != 0) << pattern;
    // And back, whatever the random bits are: what the format has is not rounded.
    ASSERT_EQ(Half::Nearest(value), half) << pattern;
    for (const uint32_t random : kRandoms) ASSERT_EQ(Half::FromFloat(value, random), half) << pattern;
  }
}

// Between each two neighbours: the first float above the lower one, those around the middle, and the last.
TYPED_TEST(HalfTest, NearestIsTheNearestAndEvenOfTwo) {
  using Half = typename TypeParam::Half;
  for (uint32_t pattern = 0; pattern + 1 < TypeParam::kInfinity; ++pattern) {
    const auto low = static_cast<uint16_t>(pattern);
    const auto high = static_cast<uint16_t>(pattern + 1);
    const float below = Half::ToFloat(low);
    const float above = Half::ToFloat(high);
    const auto middle = static_cast<float>((TypeParam::Value(low) + TypeParam::Value(high)) / 2);  // exact
    for (const float sign : {1.0F, -1.0F}) {
      const auto mark = static_cast<uint16_t>(sign < 0 ? 0x8000 : 0);
      const auto expect = [&](float value, uint16_t wanted) {
        ASSERT_EQ(Half::Nearest(sign * value), static_cast<uint16_t>(wanted | mark)) << pattern;
      };
      expect(std::nextafter(below, above), low);
      expect(std::nextafter(middle, below), low);
      expect(middle, low % 2 == 0 ? low : high);
      expect(std::nextafter(middle, above), high);
      expect(std::nextafter(above, below), high);
    }
  }
}

// Over all random bits the mean is the value itself, and only its two neighbours come out.
TYPED_TEST(HalfTest, StochasticRoundingIsUnbiased) {
  using Half = typename TypeParam::Half;
  const uint32_t draws = uint32_t{1} << Half::kRandomBits;
  std::vector<float> values = {0.1F, -0.1F, 1.00001F, 3.14159F, -1234.567F, 65000.0F, 1e-3F, 7e-5F};
  values.insert(values.end(), {6.1e-5F, 5e-5F, -3.3e-6F, 4e-8F, 1e-9F});  // subnormal as float16
  for (const float value : values) {
    double sum = 0;
    double least = std::numeric_limits<double>::infinity();
    double most = -least;
    for (uint32_t i = 0; i < draws; ++i) {
      const double rounded = TypeParam::Value(Half::FromFloat(value, i << (32 - Half::kRandomBits)));
      sum += rounded;
      least = std::min(least, rounded);
      most = std::max(most, rounded);
    }
    const double exact = static_cast<double>(value);
    const double distance = most - least;
    EXPECT_LE(least, exact);
    EXPECT_GE(most, exact);
    EXPECT_LE(distance, std::max(std::abs(exact) * std::ldexp(1, Half::kRandomBits - 23), 0x1p-24)) << value;
    EXPECT_NEAR(sum / draws, exact, distance / draws) << value;
  }
}

TYPED_TEST(HalfTest, InfinitiesStayAndNothingElseBecomesOne) {
  using Half = typename TypeParam::Half;
  const float infinity = std::numeric_limits<float>::infinity();
  const auto largest = static_cast<uint16_t>(TypeParam::kInfinity - 1);
  const float beyond[] = {std::nextafter(Half::ToFloat(largest), infinity),
                          std::numeric_limits<float>::max()};
  for (const uint32_t random : kRandoms) {
    EXPECT_EQ(Half::FromFloat(infinity, random), TypeParam::kInfinity);
    EXPECT_EQ(Half::FromFloat(-infinity, random), TypeParam::kInfinity | 0x8000);
    for (const float value : beyond) {
      EXPECT_EQ(Half::FromFloat(value, random), largest);
      EXPECT_EQ(Half::FromFloat(-value, random), largest | 0x8000);
    }
  }
  for (const float value : beyond) EXPECT_EQ(Half::Nearest(value), largest);
  EXPECT_EQ(Half::Nearest(infinity), TypeParam::kInfinity);
}

}  // namespace
}  // namespace oe::half_test
