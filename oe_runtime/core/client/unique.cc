#include "oe_runtime/core/client/unique.h"

#include <algorithm>

namespace oe {
namespace {

constexpr size_t kAhead = 16;  // ids hashed, and their slots fetched, before they are looked at

template <size_t kDim, typename T>
void SumFixed(const T* gradients, const int32_t* rows, size_t n, T* sums) {
  for (size_t i = 0; i < n; ++i) {
    T* to = sums + static_cast<size_t>(rows[i]) * kDim;
    const T* from = gradients + i * kDim;
    for (size_t d = 0; d < kDim; ++d) to[d] += from[d];
  }
}

template <typename T>
void Sum(const T* gradients, const int32_t* rows, size_t n, size_t dim, T* sums) {
  switch (dim) {
    case 1:
      return SumFixed<1>(gradients, rows, n, sums);
    case 8:
      return SumFixed<8>(gradients, rows, n, sums);
    case 9:
      return SumFixed<9>(gradients, rows, n, sums);
    case 16:
      return SumFixed<16>(gradients, rows, n, sums);
    default:
      break;
  }
  for (size_t i = 0; i < n; ++i) {
    T* to = sums + static_cast<size_t>(rows[i]) * dim;
    const T* from = gradients + i * dim;
    for (size_t d = 0; d < dim; ++d) to[d] += from[d];
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
  struct Slot {
    Key key;
    int32_t place;  // -1: empty
  };
  std::vector<Slot> slots(mask + 1, Slot{0, -1});
  // Multiplying spreads strided keys; the high bits are the good ones.
  const auto home = [bits](Key key) {
    return static_cast<size_t>((key * 0x9E3779B97F4A7C15ULL) >> (64 - bits));
  };

  result.keys.reserve(n / 2);
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(&slots[home(ids[i + kAhead])], 1);
    const Key key = ids[i];
    size_t at = home(key);
    while (slots[at].place >= 0 && slots[at].key != key) at = (at + 1) & mask;
    if (slots[at].place < 0) {
      slots[at] = Slot{key, static_cast<int32_t>(result.keys.size())};
      result.keys.push_back(key);
    }
    result.inverse[i] = slots[at].place;
  }
  return result;
}

void SumByRow(const float* gradients, const int32_t* rows, size_t n, size_t dim, float* sums) {
  Sum(gradients, rows, n, dim, sums);
}

void SumByRow(const double* gradients, const int32_t* rows, size_t n, size_t dim, double* sums) {
  Sum(gradients, rows, n, dim, sums);
}

}  // namespace oe
