#ifndef OE_CORE_STORAGE_ROW_STORE_H_
#define OE_CORE_STORAGE_ROW_STORE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "oe_runtime/core/storage/storage.h"

namespace oe {

// Rows of `row_floats` floats, numbered from 0 in order of allocation, without headers. They never move, so
// pointers to them stay good for the life of the store. Not thread-safe.
class RowStore {
 public:
  // `arena` must outlive the store.
  RowStore(Arena* arena, size_t row_floats);

  // Makes room for one more row; throws StorageError when the storage is full. Add() then does not throw.
  void Reserve();
  // The number of a new row, contents undefined. Reserve() must have come before.
  uint32_t Add() noexcept { return static_cast<uint32_t>(size_++); }

  float* row(uint32_t number) const noexcept {
    return blocks_[number >> shift_] + static_cast<size_t>(number & mask_) * row_floats_;
  }
  uint64_t size() const noexcept { return size_; }

 private:
  Arena* const arena_;
  const size_t row_floats_;
  uint32_t shift_ = 0;  // log2 of the rows in a block
  uint32_t mask_ = 0;
  uint64_t size_ = 0;
  std::vector<float*> blocks_;
};

}  // namespace oe

#endif  // OE_CORE_STORAGE_ROW_STORE_H_
