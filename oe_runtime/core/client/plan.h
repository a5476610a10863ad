// How one batch is asked for: unique keys, shared out among the servers, and the layout of the rows that come
// back.
//
// Tables of one dim, float64 or not, form a group; its rows lie in one array, ordered by server, then table,
// then first occurrence of the key. So what one server sends for one group is one contiguous piece of that
// array, and is read straight from the socket into it; the summed gradients go out the same way.
#pragma once

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "oe_runtime/core/common/thread_pool.h"
#include "oe_runtime/core/common/unique.h"
#include "oe_runtime/core/spec/spec.h"

namespace oe {

struct IdsView {
  const Key* data = nullptr;
  size_t size = 0;
};

// Unique keys, ordered by server: keys[bounds[s] .. bounds[s + 1]) belong to server s. Tables that are looked
// up with the same ids and share keys among servers alike share one of these.
struct ShardedKeys {
  std::vector<Key> keys;
  std::vector<size_t> bounds;
  size_t on(size_t server) const { return bounds[server + 1] - bounds[server]; }
};

// One table of a group.
struct PlannedTable {
  uint32_t table = 0;           // client's id
  size_t keys = 0;              // which ShardedKeys
  std::vector<size_t> offsets;  // per server: the first row of this table's in the group
};

struct PlannedLookup {
  size_t lookup = 0;  // its number in the request
  size_t table = 0;   // which PlannedTable of the group
  size_t size = 0;    // ids
  size_t offset = 0;  // of its first id in `inverse`
};

struct PlannedGroup {
  uint32_t dim = 0;
  bool is_float64 = false;  // dtype of its rows and gradients; otherwise float32
  size_t rows = 0;
  std::vector<PlannedTable> tables;
  std::vector<PlannedLookup> lookups;
  std::vector<int32_t> inverse;  // all ids of all lookups, one after the other -> row

  size_t row_bytes() const { return dim * (is_float64 ? sizeof(double) : sizeof(float)); }
};

struct BatchPlan {
  uint32_t servers = 0;
  std::vector<ShardedKeys> keys;
  // One per distinct dim, ascending: first those of float64 tables (wire/messages.h), then of all others.
  std::vector<PlannedGroup> groups;
};

// lookups: (index into `tables`, index into `ids`), both in range. Throws KeyRangeError naming the table and
// the key, SpecError for more ids than int32 can count.
BatchPlan MakePlan(const std::vector<TableSpec>& tables, const std::vector<IdsView>& ids,
                   const std::vector<std::pair<uint32_t, uint32_t>>& lookups, uint32_t servers,
                   ThreadPool* pool);

// The part of a plan whose keys another plan has too, in the same table.
struct Overlap {
  BatchPlan plan;                             // without inverses and lookups
  std::vector<std::vector<uint32_t>> places;  // per group: row in `plan` -> row in the whole plan's group
};

// `whole`: tables, by client's id, of which all rows count as common.
Overlap FindOverlap(const BatchPlan& plan, const BatchPlan& other, const std::set<uint32_t>& whole,
                    ThreadPool* pool);

}  // namespace oe
