// Arrays of halves (common/half.h), eight at a time.
#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "oe_runtime/core/common/half.h"

namespace oe {

// Eight numbers at once. GCC takes 16 for a loop over halves, which is more than most rows have.
constexpr uint32_t kLanes = 8;
using Lanes = uint32_t __attribute__((vector_size(kLanes * sizeof(uint32_t))));
using HalfLanes = uint16_t __attribute__((vector_size(kLanes * sizeof(uint16_t))));

template <typename To, typename From>
To LoadLanes(const From* from) noexcept {
  To lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

// The first n of some halves, n <= kLanes.
inline void StoreHalves(Lanes halves, size_t n, uint16_t* to) noexcept {
  const HalfLanes lanes = __builtin_convertvector(halves, HalfLanes);
  if (n == kLanes) {
    std::memcpy(to, &lanes, sizeof(lanes));
  } else {
    for (size_t i = 0; i < n; ++i) to[i] = lanes[i];
  }
}

template <typename Half>
void UnpackLanes(HalfLanes halves, float* to) noexcept {
  if constexpr (std::is_same_v<Half, Bfloat16>) {
#ifdef __AVX2__  // GCC 12 makes four instructions of the conversion
    const __m256i wide = _mm256_cvtepu16_epi32(LoadLanes<__m128i>(&halves));
    const auto bits = LoadLanes<Lanes>(&wide) << 16;
#else
    const Lanes bits = __builtin_convertvector(halves, Lanes) << 16;
#endif
    std::memcpy(to, &bits, sizeof(bits));
  } else {
#ifdef __F16C__
    _mm256_storeu_ps(to, _mm256_cvtph_ps(LoadLanes<__m128i>(&halves)));
#else
    for (size_t i = 0; i < kLanes; ++i) to[i] = Half::ToFloat(halves[i]);
#endif
  }
}

// n halves as floats. The floats may begin 2n bytes before the halves, so that both end together.
template <typename Half>
void UnpackHalves(const uint16_t* from, size_t n, float* to) noexcept {
  HalfLanes last{};
  if (n < kLanes) {
    std::memcpy(&last, from, n * sizeof(*from));
    for (size_t i = 0; i < n; ++i) to[i] = Half::ToFloat(last[i]);
    return;
  }
  last = LoadLanes<HalfLanes>(from + n - kLanes);  // some of them again
  for (size_t i = 0; i + kLanes < n; i += kLanes) UnpackLanes<Half>(LoadLanes<HalfLanes>(from + i), to + i);
  UnpackLanes<Half>(last, to + n - kLanes);
}

// Floats as bfloat16, rounded to the nearest, where they are.
inline void RoundToBfloat16(float* values, size_t n) noexcept {
  for (size_t i = 0; i < n; ++i) values[i] = Bfloat16::ToFloat(Bfloat16::Nearest(values[i]));
}

// The upper halves of floats: what RoundToBfloat16() left of them.
inline void PackBfloat16(const float* from, size_t n, uint16_t* to) noexcept {
  for (size_t i = 0; i < n; ++i) to[i] = static_cast<uint16_t>(BitsOf(from[i]) >> 16);
}

}  // namespace oe
