#pragma once

#include <array>
#include <memory>
#include <vector>

#include "oe_runtime/core/policy/admission.h"
#include "oe_runtime/core/storage/pool.h"

namespace oe {

// An admission filter whose counts are rows of a pool, so that they are part of its checkpoints: a counter
// has a row of 4 bytes a key (with what a pool keeps of a row, 20 bytes, and 16 to 24 of DRAM), a Bloom
// filter one for each block that has counts. As for rows of tables, the first change after a checkpoint
// writes to another place, so pools hold up to as many copies of a count as there are kept checkpoints, and
// two.

// What the pool of a filter must be like; its identity and its table are the caller's to say. `part_of` is
// the part of a key, `parts` for one that cannot be here.
PoolSpec CountsPool(const AdmissionSpec& spec, uint32_t parts, const AdmissionFilter::PartOf& part_of);

// The filter of the counts in `pool`, which must outlive it: none, or, after Pool::Recover(), those that
// `indexes`, one a part, got. Throws StorageError.
std::unique_ptr<AdmissionFilter> NewPooledFilter(const AdmissionSpec& spec, ShardInfo shard, Pool* pool,
                                                 std::vector<std::unique_ptr<Index>> indexes);

}  // namespace oe
