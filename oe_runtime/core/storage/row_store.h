#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "oe_runtime/core/common/prefetch.h"
#include "oe_runtime/core/common/shard.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {

class LogStore;
class SlotStore;

// The bit of a row's number that says that it is of a copy in DRAM (row_cache.h).
constexpr uint32_t kCopyBit = 1U << 31;
constexpr uint64_t kMostRowsOfAStore = kCopyBit - 1;

// How rows of one size lie in blocks of 2^shift rows.
struct RowLayout {
  size_t row_bytes = 0;     // what a row holds
  size_t stride = 0;        // from a row to the next one of its line
  size_t gap = 0;           // unused bytes at the end of a line
  uint32_t reciprocal = 0;  // ceil(2^32 / rows in a line), to divide by; 0 without lines
  uint32_t shift = 0;
  size_t block_bytes = 0;

  // One after the other, in blocks of about `block_bytes`.
  static RowLayout Dense(size_t row_bytes, size_t block_bytes);
  // So that persistent memory, which reads and writes lines of 256 bytes, touches as few of them as possible:
  // larger rows begin with a line, smaller ones do not straddle two.
  static RowLayout InLines(size_t row_bytes, size_t block_bytes);
  // That of a pool of `format` (pool_format.h): in lines; since format 2, one after the other where lines
  // would waste more than a quarter, as with rows of 132 bytes, of which a line holds one.
  static RowLayout InPool(uint64_t format, size_t row_bytes, size_t block_bytes);

  uint32_t block_rows() const { return 1U << shift; }
  size_t Offset(uint32_t row_of_block) const noexcept {
    const size_t line = (uint64_t{row_of_block} * reciprocal) >> 32;
    return row_of_block * stride + line * gap;
  }
};

// Rows of one internal shard of a table, without headers, known by numbers. They never move, so pointers to
// them stay good until they are erased. Not thread-safe.
class RowStore {
 public:
  explicit RowStore(const RowLayout& layout) : layout_(layout), mask_(layout.block_rows() - 1) {}
  virtual ~RowStore() = default;
  RowStore(const RowStore&) = delete;
  RowStore& operator=(const RowStore&) = delete;

  // Makes room for one more row; throws StorageError when the storage is full. Add() then does not throw.
  virtual void Reserve() = 0;
  // The number of a new row for `key`, contents undefined. Reserve() must have come before.
  virtual uint32_t Add(Key key) noexcept = 0;
  // Makes Erase() of that row not throw; throws StorageError when the storage has no room for what must be
  // written down of it.
  virtual void ReserveErase(uint32_t number) = 0;
  // Forgets the row of `key`. ReserveErase() must have come just before.
  virtual void Erase(Key key, uint32_t number) noexcept = 0;
  // Rows there are.
  virtual uint64_t size() const noexcept = 0;
  // This store, if a row must be asked for before it is written (slot_store.h).
  virtual SlotStore* slots() noexcept { return nullptr; }
  // This store, if its rows are in DRAM only while they are used (log_store.h).
  virtual LogStore* log_store() noexcept { return nullptr; }

  void PrefetchRow(uint32_t number) const noexcept { oe::PrefetchRow(row(number), layout_.row_bytes); }
  std::byte* row(uint32_t number) const noexcept {
    return blocks_[number / kCopyBit][number % kCopyBit >> layout_.shift] + layout_.Offset(number & mask_);
  }

 protected:
  const RowLayout& layout() const noexcept { return layout_; }
  uint32_t mask() const noexcept { return mask_; }
  size_t blocks() const noexcept { return blocks_[0].size(); }
  // Makes room for one more block; may throw std::bad_alloc.
  void ReserveBlock() {
    if (blocks_[0].size() == blocks_[0].capacity()) blocks_[0].reserve(blocks_[0].size() * 2 + 1);
  }
  void AddBlock(std::byte* block) { blocks_[0].push_back(block); }
  std::vector<std::byte*>& copies() noexcept { return blocks_[1]; }

 private:
  const RowLayout layout_;
  const uint32_t mask_;
  std::array<std::vector<std::byte*>, 2> blocks_;  // of rows and of copies
};

// In memory of an arena, numbered from 0 in order of allocation; numbers of erased rows come again.
class ArenaRows final : public RowStore {
 public:
  // `arena` must outlive the store.
  ArenaRows(Arena* arena, size_t row_bytes);

  void Reserve() override;
  uint32_t Add(Key key) noexcept override;
  void ReserveErase(uint32_t /*number*/) override {}
  void Erase(Key key, uint32_t number) noexcept override;
  uint64_t size() const noexcept override { return next_ - free_; }

 private:
  Arena* const arena_;
  uint64_t next_ = 0;  // numbers that were given out
  uint64_t free_ = 0;  // how many of them are free: a list in the rows themselves
  uint32_t first_free_ = 0;
};

}  // namespace oe
