#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "oe_runtime/core/index/index.h"

namespace oe {

// A row number for each possible key, 4 bytes each. Pages without rows take no memory. The keys of an
// internal shard are those with key / stride == position, key % stride == first, for stride = servers ·
// internal shards.
class ArrayIndex final : public Index {
 public:
  // `count` positions; position p stands for key first + p · stride. Throws std::bad_alloc.
  ArrayIndex(uint64_t count, uint64_t first, uint64_t stride);

  void Find(const Key* keys, size_t n, uint32_t* rows) const noexcept override;
  void Reserve(Key /*key*/) override {}
  void Add(Key key, uint32_t row) noexcept override { Set(key, row); }
  void Set(Key key, uint32_t row) noexcept override;
  void Erase(Key key) noexcept override;
  size_t Scan(uint64_t* position, size_t max, Key* keys, uint32_t* rows) const noexcept override;
  size_t Scan(const Range& range, uint64_t* position, size_t max, Key* keys,
              uint32_t* rows) const noexcept override;
  uint64_t bytes() const noexcept override { return count_ * sizeof(uint32_t); }

 private:
  struct Free {
    void operator()(uint32_t* memory) const noexcept;
  };

  uint64_t Position(Key key) const noexcept { return powers_of_two_ ? key >> shift_ : key / stride_; }

  const uint64_t count_;
  const uint64_t first_;
  const uint64_t stride_;
  bool powers_of_two_ = false;
  uint32_t shift_ = 0;
  std::unique_ptr<uint32_t[], Free> rows_;  // row number + 1; 0 where there is none
};

}  // namespace oe
