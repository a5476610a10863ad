// What the file of an admission policy needs. A policy is one .cc file in this folder that registers how its
// parameters are checked and its filter, in DRAM and in a pool. CONTRIBUTING.md shows the steps.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "oe_runtime/core/common/registry.h"
#include "oe_runtime/core/policy/admission.h"
#include "oe_runtime/core/policy/checked_params.h"
#include "oe_runtime/core/storage/pool.h"
#include "oe_runtime/core/storage/row_map.h"

namespace oe {

struct AdmissionEntry {
  using Maps = std::vector<std::unique_ptr<RowMap>>;  // by part

  std::string name;
  // Fills in the defaults, of a hash table or of an array table. Throws SpecError.
  AdmissionSpec (*complete)(const AdmissionSpec& spec, bool hash);
  // Of a complete specification. Throws StorageError or std::bad_alloc.
  std::unique_ptr<AdmissionFilter> (*in_dram)(const AdmissionSpec& spec, uint32_t parts, ShardInfo shard);
  // Says how large the rows of its pool are, and which shard has them.
  void (*describe_pool)(uint32_t parts, const AdmissionFilter::PartOf& part_of, PoolSpec* pool);
  std::unique_ptr<AdmissionFilter> (*in_pool)(const AdmissionSpec& spec, ShardInfo shard, Maps maps);
};

using RegisterAdmission = Registry<AdmissionEntry>::Add;

// What a filter throws where DRAM has no more.
StorageError NoMemory(const std::string& what);

// The row of a key, to be written; of zeros where there was none.
std::byte* WritableRow(RowMap* map, Key key, size_t bytes);

}  // namespace oe
