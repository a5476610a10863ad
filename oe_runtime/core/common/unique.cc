#include "oe_runtime/core/common/unique.h"

#include <algorithm>

#include "oe_runtime/core/common/prefetch.h"

namespace oe {
namespace {

constexpr size_t kAhead = 16;  // ids hashed, and their slots fetched, before they are looked at
constexpr size_t kMostSlots = size_t{4} << 20;  // that a thread keeps for its next batch

// kDim is 0 where the compiler shall not know it.
template <size_t kDim, typename T>
void SumFixed(const T* gradients, const int32_t* rows, size_t n, size_t dim, size_t step, T* sums,
              uint8_t* seen) {
  const size_t size = kDim == 0 ? dim : kDim;
  for (size_t i = 0; i < n; ++i) {
    const auto row = static_cast<size_t>(rows[i]);
    T* __restrict to = sums + row * size;
    const T* __restrict from = gradients + i * step * size;
    if (seen[row] != 0) {
      for (size_t d = 0; d < size; ++d) to[d] += from[d];
    } else {
      seen[row] = 1;
      for (size_t d = 0; d < size; ++d) to[d] = from[d];
    }
  }
}

template <typename T>
void Sum(const T* gradients, const int32_t* rows, size_t n, size_t dim, size_t step, T* sums, uint8_t* seen) {
  switch (dim) {
    case 1:
      return SumFixed<1>(gradients, rows, n, dim, step, sums, seen);
    case 8:
      return SumFixed<8>(gradients, rows, n, dim, step, sums, seen);
    case 9:
      return SumFixed<9>(gradients, rows, n, dim, step, sums, seen);
    case 16:
      return SumFixed<16>(gradients, rows, n, dim, step, sums, seen);
    case 32:
      return SumFixed<32>(gradients, rows, n, dim, step, sums, seen);
    case 64:
      return SumFixed<64>(gradients, rows, n, dim, step, sums, seen);
    default:
      return SumFixed<0>(gradients, rows, n, dim, step, sums, seen);
  }
}

// Places in a list of distinct keys, found by key; -1 is an empty slot.
class Slots {
 public:
  explicit Slots(size_t most) : slots_(Kept()) {
    while ((size_t{1} << bits_) < 2 * most) ++bits_;
    mask_ = (size_t{1} << bits_) - 1;
    slots_.assign(mask_ + 1, -1);
  }
  ~Slots() {
    if (slots_.size() > kMostSlots) slots_ = {};
  }
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  void Prefetch(Key key) const { oe::Prefetch(&slots_[Home(key)]); }
  // The slot that has the place of `key` in `keys`, or the empty one where it belongs.
  int32_t& Find(Key key, const std::vector<Key>& keys) {
    size_t at = Home(key);
    while (slots_[at] >= 0 && keys[static_cast<size_t>(slots_[at])] != key) at = (at + 1) & mask_;
    return slots_[at];
  }

 private:
  // They stay with the thread: new memory would cost as much as the search.
  static std::vector<int32_t>& Kept() {
    static thread_local std::vector<int32_t> slots;
    return slots;
  }
  // Multiplying spreads strided keys; the high bits are the good ones.
  size_t Home(Key key) const { return static_cast<size_t>((key * 0x9E3779B97F4A7C15ULL) >> (64 - bits_)); }

  std::vector<int32_t>& slots_;
  unsigned bits_ = 4;
  size_t mask_ = 0;
};

}  // namespace

UniqueKeys FindUnique(const Key* ids, size_t n) {
  UniqueKeys result;
  result.inverse.resize(n);
  if (n == 0) return result;
  Slots slots(n);
  result.keys.reserve(n / 2);
  for (size_t i = 0; i < n; ++i) {
    if (i + kAhead < n) slots.Prefetch(ids[i + kAhead]);
    int32_t& place = slots.Find(ids[i], result.keys);
    if (place < 0) {
      place = static_cast<int32_t>(result.keys.size());
      result.keys.push_back(ids[i]);
    }
    result.inverse[i] = place;
  }
  return result;
}

void MarkCommon(const std::vector<Key>& keys, const std::vector<Key>& others, std::vector<uint8_t>* common) {
  // The smaller of the two fills the slots, which are then in the nearer cache.
  const bool of_keys = keys.size() <= others.size();
  const std::vector<Key>& few = of_keys ? keys : others;
  const std::vector<Key>& many = of_keys ? others : keys;
  Slots slots(few.size());
  for (size_t i = 0; i < few.size(); ++i) slots.Find(few[i], few) = static_cast<int32_t>(i);
  for (size_t i = 0; i < many.size(); ++i) {
    if (i + kAhead < many.size()) slots.Prefetch(many[i + kAhead]);
    const int32_t place = slots.Find(many[i], few);
    if (place >= 0) (*common)[of_keys ? static_cast<size_t>(place) : i] = 1;
  }
}

void SumByRow(const float* gradients, const int32_t* rows, size_t n, size_t dim, float* sums, uint8_t* seen,
              size_t step) {
  Sum(gradients, rows, n, dim, step, sums, seen);
}

void SumByRow(const double* gradients, const int32_t* rows, size_t n, size_t dim, double* sums, uint8_t* seen,
              size_t step) {
  Sum(gradients, rows, n, dim, step, sums, seen);
}

}  // namespace oe
