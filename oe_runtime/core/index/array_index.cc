#include "oe_runtime/core/index/array_index.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#include "oe_runtime/core/common/prefetch.h"

namespace oe {

void ArrayIndex::Free::operator()(uint32_t* memory) const noexcept { std::free(memory); }

ArrayIndex::ArrayIndex(uint64_t count, uint64_t first, uint64_t stride)
    : count_(count),
      first_(first),
      stride_(stride),
      powers_of_two_((stride & (stride - 1)) == 0),
      // calloc gives untouched pages of the system for anything large, so empty ranges cost nothing.
      rows_(static_cast<uint32_t*>(std::calloc(std::max<uint64_t>(count, 1), sizeof(uint32_t)))) {
  if (!rows_) throw std::bad_alloc();
  while (powers_of_two_ && (uint64_t{1} << shift_) < stride) ++shift_;
}

void ArrayIndex::Find(const Key* keys, size_t n, uint32_t* rows) const noexcept {
  for (size_t i = 0; i < n; ++i) Prefetch(&rows_[Position(keys[i])]);
  for (size_t i = 0; i < n; ++i) rows[i] = rows_[Position(keys[i])] - 1;  // 0 - 1 == kNoRow
}

void ArrayIndex::Set(Key key, uint32_t row) noexcept { rows_[Position(key)] = row + 1; }

void ArrayIndex::Erase(Key key) noexcept { rows_[Position(key)] = 0; }

size_t ArrayIndex::Scan(uint64_t* position, size_t max, Key* keys, uint32_t* rows) const noexcept {
  return Scan({}, position, max, keys, rows);
}

size_t ArrayIndex::Scan(const Range& range, uint64_t* position, size_t max, Key* keys,
                        uint32_t* rows) const noexcept {
  const uint64_t begin = range.first <= first_ ? 0 : (range.first - first_ - 1) / stride_ + 1;
  const bool none = count_ == 0 || range.last < first_;
  const uint64_t end = none ? 0 : std::min(count_ - 1, (range.last - first_) / stride_) + 1;
  size_t found = 0;
  uint64_t at = begin + *position;
  for (; found < max && at < end; ++at) {
    const uint32_t row = rows_[at];
    if (row == 0) continue;
    keys[found] = first_ + at * stride_;
    rows[found] = row - 1;
    ++found;
  }
  *position = at - begin;
  return found;
}

std::unique_ptr<Index> NewArrayIndex(uint64_t input_dim, uint64_t first, uint64_t stride) {
  const uint64_t count = first < input_dim ? (input_dim - first - 1) / stride + 1 : 0;
  return std::make_unique<ArrayIndex>(count, first, stride);
}

}  // namespace oe
