#pragma once

#include <cstdint>
#include <vector>

#include "oe_runtime/core/client/plan.h"
#include "oe_runtime/core/common/thread_pool.h"

namespace oe {

// The distinct (lookup, row) pairs of a group: what a function of an embedding that differs from lookup to
// lookup, such as its part of a dense layer, has to be computed for.

// Of a group whose lookups all have as many ids, one for each example. Pairs are ordered by lookup, then by
// first occurrence.
struct Pairs {
  std::vector<int32_t> rows;    // pair -> row of the group
  std::vector<int32_t> sizes;   // lookup -> its pairs
  std::vector<int32_t> of_ids;  // (examples, lookups): the pair
  // The same the other way round, an element for each id: ordered by pair, then by example.
  std::vector<int32_t> examples;
  std::vector<int32_t> pairs;
};

// Throws SpecError when the lookups have different numbers of ids.
Pairs FindPairs(const PlannedGroup& group, ThreadPool* pool);

}  // namespace oe
