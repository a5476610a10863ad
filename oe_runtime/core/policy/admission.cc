#include "oe_runtime/core/policy/admission.h"

#include <cstring>
#include <new>
#include <utility>

#include "oe_runtime/core/policy/admission_registry.h"

namespace oe {
namespace {

const AdmissionEntry& EntryOf(const AdmissionSpec& spec) {
  return *Registry<AdmissionEntry>::Find(spec.name);
}

}  // namespace

StorageError NoMemory(const std::string& what) {
  return StorageError("no memory for " + what +
                      "; use more servers, or a cbf with a smaller 'max_element_size'");
}

std::byte* WritableRow(RowMap* map, Key key, size_t bytes) {
  uint32_t number = kNoRow;
  map->FindOrAdd(&key, 1, &number, [bytes](Key, std::byte* row) { std::memset(row, 0, bytes); });
  return map->row(number);
}

std::unique_ptr<AdmissionFilter> AdmissionFilter::Create(const AdmissionSpec& spec, uint32_t parts,
                                                         ShardInfo shard) {
  try {
    return EntryOf(spec).in_dram(spec, parts, shard);
  } catch (const std::bad_alloc&) {
    throw NoMemory("the admission filter");
  }
}

PoolSpec CountsPool(const AdmissionSpec& spec, uint32_t parts, const AdmissionFilter::PartOf& part_of) {
  PoolSpec pool;
  pool.kind = "counts";
  pool.shards = parts;
  EntryOf(spec).describe_pool(parts, part_of, &pool);
  return pool;
}

std::unique_ptr<AdmissionFilter> NewPooledFilter(const AdmissionSpec& spec, ShardInfo shard, Pool* pool,
                                                 std::vector<std::unique_ptr<Index>> indexes) {
  AdmissionEntry::Maps maps;
  for (uint32_t part = 0; part < indexes.size(); ++part) {
    maps.push_back(std::make_unique<RowMap>(std::move(indexes[part]), pool->shard(part)));
  }
  try {
    return EntryOf(spec).in_pool(spec, shard, std::move(maps));
  } catch (const std::bad_alloc&) {
    throw NoMemory("the admission filter");
  }
}

}  // namespace oe
