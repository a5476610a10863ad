#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "oe_runtime/core/client/plan.h"
#include "oe_runtime/core/common/thread_pool.h"

namespace oe {

// Pooling over bags of ids, as PyTorch's EmbeddingBag does it: the forward and the backward pass of all
// lookups of a group at once. Values are floats, or doubles of a group of float64 tables.

// Of one lookup. Bag b has its ids offsets[b] .. offsets[b + 1] - 1.
struct Bags {
  const int64_t* offsets = nullptr;  // count + 1
  size_t count = 0;
  const void* weights = nullptr;  // of each id; nullptr: all are 1
  bool mean = false;              // the sum is divided by the bag's number of ids
  void* pooled = nullptr;         // an embedding for each bag, or its gradient
  size_t stride = 0;              // values from one bag's embedding to the next one's
};

// bags[l] are those of group.lookups[l]. Throws SpecError unless there are as many, and the offsets of each
// go from 0 to its number of ids and never down.
void CheckBags(const PlannedGroup& group, const std::vector<Bags>& bags);

// Fills `pooled`. An empty bag is zeros.
void PoolBags(const PlannedGroup& group, const void* rows, const std::vector<Bags>& bags, ThreadPool* pool);

// Fills `sums`, rows x dim, with the gradient of each row: `pooled` are the bags' gradients. Adds in an
// order that follows from lookups and ids, so the result does not depend on the number of threads.
void SumBags(const PlannedGroup& group, const std::vector<Bags>& bags, void* sums, ThreadPool* pool);

}  // namespace oe
