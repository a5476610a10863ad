#ifndef OE_CORE_TABLE_CONTENT_H_
#define OE_CORE_TABLE_CONTENT_H_

// What the parts of Table share; for them only.

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <optional>

#include "oe_runtime/core/storage/pool.h"
#include "oe_runtime/core/table/row_map.h"
#include "oe_runtime/core/table/table.h"

namespace oe {

constexpr uint32_t kShardBits = 4;
constexpr uint32_t kShards = 1U << kShardBits;
static_assert(kShards == Table::kParts, "Keys() has one part per internal shard");

inline bool IsArray(const TableSpec& spec) { return spec.index == "array"; }

inline void PrefetchRow(const float* row, size_t floats) {
  constexpr size_t kFloatsPerLine = 16;
  // Beyond a few lines the hardware's own prefetcher has caught on.
  const size_t ahead = std::min(floats, size_t{8} * kFloatsPerLine);
  for (size_t i = 0; i < ahead; i += kFloatsPerLine) __builtin_prefetch(row + i);
  __builtin_prefetch(row + floats - 1);
}

// The rows, exchanged as a whole by Restore.
struct Table::Content {
  // One of them holds the rows; before the shards, which point to it.
  std::unique_ptr<Arena> arena;
  std::unique_ptr<Pool> pool;
  std::array<std::unique_ptr<RowStore>, kShards> stores;  // of the arena
  std::array<std::unique_ptr<RowMap>, kShards> shards;
  std::atomic<uint64_t> version{0};
  bool opened = false;  // the pool was there already
  // The checksum of the file that had this content when the shards' changes were empty.
  std::optional<uint64_t> saved;
};

}  // namespace oe

#endif  // OE_CORE_TABLE_CONTENT_H_
