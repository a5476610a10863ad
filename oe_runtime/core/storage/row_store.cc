#include "oe_runtime/core/storage/row_store.h"

#include <limits>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

// Small, because every internal shard of every table holds a part of one; large enough that the array of
// blocks stays in the caches.
constexpr size_t kBlockBytes = size_t{32} << 10;

}  // namespace

RowStore::RowStore(Arena* arena, size_t row_floats) : arena_(arena), row_floats_(row_floats) {
  while ((size_t{2} << shift_) * row_floats * sizeof(float) <= kBlockBytes) ++shift_;
  mask_ = (1U << shift_) - 1;
}

void RowStore::Reserve() {
  if ((size_ >> shift_) < blocks_.size()) return;
  if (size_ >= std::numeric_limits<uint32_t>::max()) {
    throw StorageError(
        "a sixteenth of a table holds at most 4294967295 rows on one server; use more servers");
  }
  if (blocks_.size() == blocks_.capacity()) blocks_.reserve(blocks_.size() * 2 + 1);
  const size_t bytes = (size_t{1} << shift_) * row_floats_ * sizeof(float);
  blocks_.push_back(reinterpret_cast<float*>(arena_->Allocate(bytes)));
}

}  // namespace oe
