// Rows of halves from and to floats. PackNearest() and the random bits of Pack() are part of what a table
// means: the same on every processor and in every version.
#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "oe_runtime/core/common/half.h"
#include "oe_runtime/core/common/half_lanes.h"

// With GCC only, from 12 on: it is what releases are built with, and others lack parts of it.
#if defined(__x86_64__) && defined(__AVX2__) && !defined(__clang__) && __GNUC__ >= 12
#define OE_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif

namespace oe {

// Whether this processor has what functions with OE_AVX512 need.
inline bool HasAvx512() noexcept {
#ifdef OE_AVX512
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vl") != 0;
#else
  return false;
#endif
}

template <typename Number>
constexpr bool kIsHalf = !std::is_same_v<Number, float>;

// n numbers of a row as floats; Number is float, Bfloat16 or Float16.
template <typename Number>
void Unpack(const std::byte* row, size_t n, float* values) noexcept {
  if constexpr (!kIsHalf<Number>) {
    if (n > 0) std::memcpy(values, row, n * sizeof(float));
  } else {
    UnpackHalves<Number>(reinterpret_cast<const uint16_t*>(row), n, values);
  }
}

// Floats as n numbers of a row, halves rounded to the nearest.
template <typename Number>
void PackNearest(const float* values, size_t n, std::byte* row) noexcept {
  if constexpr (kIsHalf<Number>) {
    auto* halves = reinterpret_cast<uint16_t*>(row);
    for (size_t d = 0; d < n; ++d) halves[d] = Number::Nearest(values[d]);
  } else if (n > 0) {
    std::memcpy(row, values, n * sizeof(float));
  }
}

// "lowbias32" of C. Wellons (hash prospector, 2018), whose 32-bit multiplications vectorize, without its last
// step: only the upper halves are good. Number d of a seed begins with its lower half + d * kStep.
struct RandomSteps {
  static constexpr uint32_t kStep = 0x9E3779B9;
  static constexpr uint32_t kFirst = 0x7FEB352D;
  static constexpr uint32_t kSecond = 0x846CA68B;
};

// Random numbers, by their numbers from d on.
class RandomLanes : RandomSteps {
 public:
  explicit RandomLanes(uint64_t seed) noexcept
      : first_(static_cast<uint32_t>(seed) + Lanes{0, 1, 2, 3, 4, 5, 6, 7} * kStep),
        high_(static_cast<uint32_t>(seed >> 32)) {}

  Lanes operator()(uint32_t d) const noexcept {
    Lanes random = first_ + d * kStep;
    random = (random ^ random >> 16) * kFirst;
    return (random ^ random >> 15 ^ high_) * kSecond;
  }

 private:
  const Lanes first_;
  const uint32_t high_;
};

// Half::FromBits of numbers without NaN and infinity, and for bfloat16 below the largest, in fewer steps.
template <typename Half>
Lanes RoundCommon(Lanes bits, Lanes random) noexcept {
  if constexpr (std::is_same_v<Half, Bfloat16>) {
    return (bits + (random >> 16)) >> 16;
  } else {
    using Ints = int32_t __attribute__((vector_size(kLanes * sizeof(int32_t))));
    using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));
    const auto magnitude = reinterpret_cast<Ints>(bits & 0x7FFFFFFF);
    const auto add = reinterpret_cast<Ints>(random >> (32 - Half::kRandomBits));
    const auto value = reinterpret_cast<Floats>(magnitude);
    const Floats most = Floats{} + 0x1p-13F;
    const Floats units =
        (value < most ? value : most) * 0x1p24F + __builtin_convertvector(add, Floats) * 0x1p-13F;
    const Ints largest = Ints{} + 0x7BFF;
    Ints rounded = (magnitude + add - (112 << 23)) >> 13;
    rounded = rounded < largest ? rounded : largest;
    rounded = magnitude < (Ints{} + (113 << 23)) ? __builtin_convertvector(units, Ints) : rounded;
    return reinterpret_cast<Lanes>(rounded) | (bits >> 16 & 0x8000);
  }
}

// The largest magnitude of which RoundCommon() is no more the same.
template <typename Half>
constexpr uint32_t kUncommon = std::is_same_v<Half, Bfloat16> ? 0x7F7F0000 : 0x7F800000;

inline bool AnyAbove(Lanes magnitudes, uint32_t least) noexcept {
  using Ints = int32_t __attribute__((vector_size(kLanes * sizeof(int32_t))));
  const Ints above = reinterpret_cast<Ints>(magnitudes) >= Ints{} + static_cast<int32_t>(least);
#ifdef __AVX2__
  return _mm256_movemask_epi8(LoadLanes<__m256i>(&above)) != 0;
#else
  int32_t any = 0;
  for (uint32_t i = 0; i < kLanes; ++i) any |= above[i];
  return any != 0;
#endif
}

// The first n of 2 * kLanes halves.
inline void StoreHalves(Lanes first, Lanes second, size_t n, uint16_t* to) noexcept {
#ifdef __AVX2__
  if (n >= size_t{2} * kLanes) {
    const __m256i halves = _mm256_packus_epi32(LoadLanes<__m256i>(&first), LoadLanes<__m256i>(&second));
    const __m256i in_order = _mm256_permute4x64_epi64(halves, 0xD8);
    std::memcpy(to, &in_order, sizeof(in_order));
    return;
  }
#endif
  StoreHalves(first, std::min<size_t>(kLanes, n), to);
  if (n > kLanes) StoreHalves(second, std::min<size_t>(kLanes, n - kLanes), to + kLanes);
}

// The numbers of a row, by RandomLanes of `seed`: a random number for each, or, of the state of rows
// (`shared`), its two halves for two. Of `values`, kSlack more are read. Returns whether all are common.
constexpr size_t kSlack = size_t{2} * kLanes;
template <typename Half, bool shared, typename Round>
bool PackBy(const float* values, uint32_t n, uint64_t seed, uint16_t* to, const Round& round) noexcept {
  const RandomLanes random(seed);
  Lanes largest{};
  const auto rounded = [&](uint32_t d, Lanes bits) {
    const auto numbers = LoadLanes<Lanes>(values + d);
    const Lanes magnitudes = numbers & 0x7FFFFFFF;
    largest = magnitudes > largest ? magnitudes : largest;
    return round(numbers, bits);
  };
  for (uint32_t d = 0; d < n; d += 2 * kLanes) {
    const Lanes bits = random(shared ? d / 2 : d);
    const Lanes first = rounded(d, bits);
    if (n - d <= kLanes) {
      StoreHalves(first, n - d, to + d);
      break;
    }
    const Lanes second = rounded(d + kLanes, shared ? (bits ^ bits >> 16) << 16 : random(d + kLanes));
    StoreHalves(first, second, n - d, to + d);
  }
  return !AnyAbove(largest, kUncommon<Half>);
}

#ifdef OE_AVX512
// Sixteen numbers at once.
constexpr uint32_t kWideLanes = 16;
using WideLanes = uint32_t __attribute__((vector_size(kWideLanes * sizeof(uint32_t))));
using WideHalves = uint16_t __attribute__((vector_size(kWideLanes * sizeof(uint16_t))));
using WideParts = uint16_t __attribute__((vector_size(2 * kWideLanes * sizeof(uint16_t))));

// Intrinsics with a mask, here and below: GCC 12 warns of an uninitialized value in the others.
constexpr __mmask16 kAll = 0xFFFF;

OE_AVX512 inline void UnpackWide(const uint16_t* from, float* to) noexcept {
  __m256i halves;
  std::memcpy(&halves, from, sizeof(halves));
  const WideLanes bits = (WideLanes)_mm512_maskz_cvtepu16_epi32(kAll, halves) << 16;
  std::memcpy(to, &bits, sizeof(bits));
}

// PackBy() of the numbers from d on, bit by bit, of bfloat16 only; d is a multiple of kWideLanes.
template <bool shared>
OE_AVX512 inline void PackWide(const float* values, uint32_t d, uint64_t seed, uint16_t* to) noexcept {
  constexpr WideLanes kSteps = shared ? WideLanes{0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7}
                                      : WideLanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  constexpr WideLanes kIsSecond = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
  const uint32_t first = static_cast<uint32_t>(seed) + (shared ? d / 2 : d) * RandomSteps::kStep;
  WideLanes random = first + kSteps * RandomSteps::kStep;
  random = (random ^ random >> 16) * RandomSteps::kFirst;
  random = (random ^ random >> 15 ^ static_cast<uint32_t>(seed >> 32)) * RandomSteps::kSecond;
  WideLanes add = random >> 16;
  if constexpr (shared) add = kIsSecond != 0 ? (random ^ add) & 0xFFFF : add;
  // As Bfloat16::FromBits() of numbers whose NaNs are quiet, as those of arithmetic and of rows are.
  WideLanes bits;
  std::memcpy(&bits, values, sizeof(bits));
  const WideLanes magnitude = bits & 0x7FFFFFFF;
  const __m512i most = _mm512_maskz_max_epu32(kAll, (__m512i)magnitude, _mm512_set1_epi32(0x7F7F0000));
  const auto rounded = (WideLanes)_mm512_maskz_min_epu32(kAll, (__m512i)(magnitude + add), most);
  const WideLanes result = rounded | (bits & 0x80000000);
  const auto parts = (WideParts)result;
  const WideHalves halves =
      __builtin_shufflevector(parts, parts, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  std::memcpy(to, &halves, sizeof(halves));
}
#endif

// Of numbers that PackBy() found uncommon.
template <typename Half, bool shared>
__attribute__((noinline, cold)) void PackUncommon(const float* values, uint32_t n, uint64_t seed,
                                                  uint16_t* to) noexcept {
  PackBy<Half, shared>(values, n, seed, to, Half::template FromBits<Lanes>);
}

// The numbers of a row, rounded stochastically. Up to kSlack more of `values` are read.
template <typename Half, bool shared>
void Pack(const float* values, uint32_t n, uint64_t seed, std::byte* row) noexcept {
  static_assert(!shared || Half::kRandomBits <= 16);
  auto* to = reinterpret_cast<uint16_t*>(row);
  if (!PackBy<Half, shared>(values, n, seed, to, RoundCommon<Half>)) {
    PackUncommon<Half, shared>(values, n, seed, to);
  }
}

}  // namespace oe
