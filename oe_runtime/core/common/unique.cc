#include "oe_runtime/core/common/unique.h"

#include <algorithm>

#include "oe_runtime/core/common/prefetch.h"

namespace oe {
namespace {

constexpr size_t kAhead = 16;  // ids hashed, and their slots fetched, before they are looked at
constexpr size_t kMostSlots = size_t{4} << 20;  // that a thread keeps for its next batch

// kDim is 0 where the compiler shall not know it.
template <size_t kDim, typename T>
void SumFixed(const T* gradients, const int32_t* rows, size_t n, size_t dim, T* sums, uint8_t* seen) {
  const size_t size = kDim == 0 ? dim : kDim;
  for (size_t i = 0; i < n; ++i) {
    const auto row = static_cast<size_t>(rows[i]);
    T* __restrict to = sums + row * size;
    const T* __restrict from = gradients + i * size;
    if (seen[row] != 0) {
      for (size_t d = 0; d < size; ++d) to[d] += from[d];
    } else {
      seen[row] = 1;
      for (size_t d = 0; d < size; ++d) to[d] = from[d];
    }
  }
}

template <typename T>
void Sum(const T* gradients, const int32_t* rows, size_t n, size_t dim, T* sums, uint8_t* seen) {
  switch (dim) {
    case 1:
      return SumFixed<1>(gradients, rows, n, dim, sums, seen);
    case 8:
      return SumFixed<8>(gradients, rows, n, dim, sums, seen);
    case 9:
      return SumFixed<9>(gradients, rows, n, dim, sums, seen);
    case 16:
      return SumFixed<16>(gradients, rows, n, dim, sums, seen);
    case 32:
      return SumFixed<32>(gradients, rows, n, dim, sums, seen);
    case 64:
      return SumFixed<64>(gradients, rows, n, dim, sums, seen);
    default:
      return SumFixed<0>(gradients, rows, n, dim, sums, seen);
  }
}

}  // namespace

UniqueKeys FindUnique(const Key* ids, size_t n) {
  UniqueKeys result;
  result.inverse.resize(n);
  if (n == 0) return result;
  unsigned bits = 4;
  while ((size_t{1} << bits) < 2 * n) ++bits;
  const size_t mask = (size_t{1} << bits) - 1;
  // Places in result.keys; -1 is an empty slot. They stay: new memory would cost as much as the search.
  static thread_local std::vector<int32_t> slots;
  slots.assign(mask + 1, -1);
  // Multiplying spreads strided keys; the high bits are the good ones.
  const auto home = [bits](Key key) {
    return static_cast<size_t>((key * 0x9E3779B97F4A7C15ULL) >> (64 - bits));
  };

  result.keys.reserve(n / 2);
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) Prefetch(&slots[home(ids[i + kAhead])]);
    const Key key = ids[i];
    size_t at = home(key);
    while (slots[at] >= 0 && result.keys[static_cast<size_t>(slots[at])] != key) at = (at + 1) & mask;
    if (slots[at] < 0) {
      slots[at] = static_cast<int32_t>(result.keys.size());
      result.keys.push_back(key);
    }
    result.inverse[i] = slots[at];
  }
  if (slots.size() > kMostSlots) slots = {};
  return result;
}

void SumByRow(const float* gradients, const int32_t* rows, size_t n, size_t dim, float* sums, uint8_t* seen) {
  Sum(gradients, rows, n, dim, sums, seen);
}

void SumByRow(const double* gradients, const int32_t* rows, size_t n, size_t dim, double* sums,
              uint8_t* seen) {
  Sum(gradients, rows, n, dim, sums, seen);
}

}  // namespace oe
