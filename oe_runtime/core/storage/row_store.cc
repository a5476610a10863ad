#include "oe_runtime/core/storage/row_store.h"

#include <cstring>
#include <mutex>
#include <utility>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

constexpr size_t kLine = 256;

// Small, because every internal shard of every table holds a part of a block; large enough that the array of
// blocks stays in the caches.
constexpr size_t kArenaBlockBytes = size_t{32} << 10;

}  // namespace

RowLayout RowLayout::Dense(size_t row_bytes, size_t block_bytes) {
  RowLayout layout;
  layout.row_bytes = row_bytes;
  layout.stride = row_bytes;
  while ((size_t{2} << layout.shift) * row_bytes <= block_bytes) ++layout.shift;
  layout.block_bytes = layout.block_rows() * row_bytes;
  return layout;
}

RowLayout RowLayout::InLines(size_t row_bytes, size_t block_bytes) {
  RowLayout layout;
  layout.row_bytes = row_bytes;
  size_t in_line = 1;
  size_t lines = 1;  // of a row
  if (row_bytes < kLine) {
    in_line = kLine / row_bytes;
    layout.stride = row_bytes;
    layout.gap = kLine - in_line * row_bytes;
    layout.reciprocal = static_cast<uint32_t>((uint64_t{1} << 32) / in_line + (in_line > 1 ? 1 : 0));
    if (in_line == 1) {  // 2^32 is no reciprocal of 32 bits
      layout.stride = kLine;
      layout.gap = 0;
      layout.reciprocal = 0;
    }
  } else {
    lines = (row_bytes + kLine - 1) / kLine;
    layout.stride = lines * kLine;
  }
  const auto bytes = [&](size_t rows) { return (rows + in_line - 1) / in_line * lines * kLine; };
  while (bytes(size_t{2} << layout.shift) <= block_bytes) ++layout.shift;
  layout.block_bytes = bytes(layout.block_rows());
  return layout;
}

RowLayout RowLayout::InPool(uint64_t format, size_t row_bytes, size_t block_bytes) {
  const RowLayout in_lines = InLines(row_bytes, block_bytes);
  const size_t of_row = row_bytes < kLine ? kLine / (kLine / row_bytes) : in_lines.stride;
  const size_t most = of_row - of_row / 4;  // of a row that is packed
  if (format < 2 || row_bytes > most || (format == 2 && row_bytes == most)) return in_lines;
  RowLayout packed = Dense(row_bytes, block_bytes);
  packed.block_bytes = RoundUp(packed.block_bytes, kLine);
  return packed;
}

std::unique_ptr<Index> RowStore::UseIndex(std::unique_ptr<Index> index) noexcept {
  const std::unique_lock<FairSharedMutex> lock(mutex_);
  index_.swap(index);
  return index;
}

void RowStore::RequireNumbers() const {
  if (blocks() < kCopyBit >> layout_.shift) return;
  throw StorageError("a sixteenth of a table holds at most " + std::to_string(kMostRowsOfAStore) +
                     " rows on one server; use more servers");
}

void RowStore::Rows(const Key* /*keys*/, const uint32_t* numbers, size_t n, const std::byte** rows,
                    LogReads* /*reads*/) const {
  for (size_t i = 0; i < n; ++i) rows[i] = numbers[i] == kNoRow ? nullptr : row(numbers[i]);
}

void RowStore::CopyFacts(const uint32_t* numbers, size_t n, size_t at, size_t words, uint32_t* facts,
                         size_t stride) const {
  for (size_t i = 0; i < n; ++i) oe::Prefetch(row(numbers[i]) + at);
  for (size_t i = 0; i < n; ++i) {
    std::memcpy(facts + i * stride, row(numbers[i]) + at, words * sizeof(uint32_t));
  }
}

void RowStore::Changed(const Key* keys, const uint32_t* numbers, size_t n) noexcept {
  const uint64_t rows = size();
  for (size_t i = 0; i < n; ++i) {
    if (numbers[i] != kNoRow) changes_.Changed(keys[i], numbers[i], rows);
  }
}

void RowStore::Forget(Key key, uint32_t number) noexcept {
  Erase(key, number);
  index_->Erase(key);
  changes_.Erased(key, size());
}

void RowStore::Quarantine(Key key, uint32_t number) {
  RequireFewDamaged(1);
  OrStorageError([&] { ReserveQuarantine(); });
  Forget(key, number);
  Report(Damage::Kind::kQuarantined, key, number);
}

ArenaRows::ArenaRows(Arena* arena, size_t row_bytes)
    : RowStore(RowLayout::Dense(row_bytes, kArenaBlockBytes)), arena_(arena) {}

void ArenaRows::Reserve() {
  if (free_ > 0 || (next_ >> layout().shift) < blocks()) return;
  RequireNumbers();
  ReserveBlock();
  AddBlock(arena_->Allocate(layout().block_bytes));
}

uint32_t ArenaRows::Add(Key /*key*/) noexcept {
  if (free_ == 0) return static_cast<uint32_t>(next_++);
  const uint32_t number = first_free_;
  std::memcpy(&first_free_, row(number), sizeof(first_free_));
  --free_;
  return number;
}

void ArenaRows::Erase(Key /*key*/, uint32_t number) noexcept {
  changes_.Freed(number);
  std::memcpy(row(number), &first_free_, sizeof(first_free_));
  first_free_ = number;
  ++free_;
}

}  // namespace oe
