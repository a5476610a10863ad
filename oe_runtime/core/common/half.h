#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace oe {

inline uint32_t BitsOf(float value) noexcept {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline float FloatOf(uint32_t bits) noexcept {
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The two half precision formats. ToFloat is exact. FromFloat rounds to one of the two neighbours: up in
// magnitude if what is cut off, as a fraction of their distance, and `random`'s highest bits (kRandomBits of
// them, also as a fraction) add up to 1 or more. With uniform random bits the expectation is the value itself
// (Gupta et al., "Deep Learning with Limited Numerical Precision", 2015). Nearest rounds to nearest, ties to
// even. Either leaves a value that the format has as it is, keeps NaN and infinities, and makes no infinity
// of a finite value: beyond the largest it is the largest. No branches, so that loops over them vectorize.
// FromBits is FromFloat of a number's bits, or of a vector's (GCC's vector_size), and leaves halves in the
// lower half of each.

// bfloat16: the upper half of a float32.
struct Bfloat16 {
  static constexpr int kRandomBits = 16;

  static float ToFloat(uint16_t half) noexcept { return FloatOf(uint32_t{half} << 16); }

  static uint16_t FromFloat(float value, uint32_t random) noexcept {
    return static_cast<uint16_t>(FromBits(BitsOf(value), random));
  }
  template <typename Bits>
  static Bits FromBits(Bits bits, Bits random) noexcept {
    return Round(bits, random >> 16);
  }
  static uint16_t Nearest(float value) noexcept {
    const uint32_t bits = BitsOf(value);
    return static_cast<uint16_t>(Round(bits, 0x7FFF + (bits >> 16 & 1)));
  }

 private:
  template <typename Bits>
  static Bits Round(Bits bits, Bits add) noexcept {
    const Bits infinity = Bits{} + 0x7F800000;
    const Bits largest = Bits{} + 0x7F7F0000;
    const Bits magnitude = bits & 0x7FFFFFFF;
    Bits rounded = magnitude + add;
    rounded = rounded < largest ? rounded : largest;
    rounded = magnitude >= infinity ? magnitude : rounded;
    rounded = magnitude > infinity ? magnitude | 0x00400000 : rounded;  // NaN stays, quiet
    return (rounded | (bits & 0x80000000)) >> 16;
  }
};

// IEEE 754 binary16.
struct Float16 {
  static constexpr int kRandomBits = 13;

  static float ToFloat(uint16_t half) noexcept {
    const uint32_t magnitude = (half & 0x7FFFU) << 13;
    // The exponent's bias is 127 instead of 15.
    uint32_t bits = magnitude + (112U << 23);
    bits = magnitude >= kInfinity ? bits + (112U << 23) : bits;
    const uint32_t subnormal = BitsOf(FloatOf(magnitude + (113U << 23)) - 0x1p-14F);
    bits = magnitude < kSmallestNormal ? subnormal : bits;
    return FloatOf(bits | (half & 0x8000U) << 16);
  }

  static uint16_t FromFloat(float value, uint32_t random) noexcept {
    const uint32_t bits = BitsOf(value);
    const uint32_t add = random >> (32 - kRandomBits);
    // In units of the distance of subnormal numbers; what lies beyond them is not used.
    const float units = std::min(0x1p-13F, std::fabs(value)) * 0x1p24F + static_cast<float>(add) * 0x1p-13F;
    return Choose(bits, add, static_cast<uint32_t>(static_cast<int32_t>(units)));
  }
  template <typename Bits>
  static Bits FromBits(Bits bits, Bits random) noexcept {
    Bits halves;
    for (size_t i = 0; i < sizeof(bits) / sizeof(bits[0]); ++i) {
      halves[i] = FromFloat(FloatOf(bits[i]), random[i]);
    }
    return halves;
  }
  static uint16_t Nearest(float value) noexcept {
    const uint32_t bits = BitsOf(value);
    const float units = std::nearbyint(std::min(0x1p-13F, std::fabs(value)) * 0x1p24F);
    return Choose(bits, 0xFFF + (bits >> 13 & 1), static_cast<uint32_t>(static_cast<int32_t>(units)));
  }

 private:
  // Of a float16's exponent and mantissa, where a float32 has them.
  static constexpr uint32_t kInfinity = 0x7C00U << 13;
  static constexpr uint32_t kSmallestNormal = 0x0400U << 13;

  static uint16_t Choose(uint32_t bits, uint32_t add, uint32_t subnormal) noexcept {
    constexpr uint32_t kLargest = 0x7BFF;
    const uint32_t magnitude = bits & 0x7FFFFFFF;
    uint32_t rounded = std::min((magnitude + add - (112U << 23)) >> 13, kLargest);
    rounded = magnitude < (113U << 23) ? subnormal : rounded;
    rounded = magnitude >= 0x7F800000 ? 0x7C00 : rounded;
    rounded = magnitude > 0x7F800000 ? 0x7E00 | (magnitude >> 13 & 0x1FF) : rounded;  // NaN
    return static_cast<uint16_t>(rounded | (bits >> 16 & 0x8000));
  }
};

}  // namespace oe
