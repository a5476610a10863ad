#pragma once

#include <cstdint>
#include <string>

#include "oe_runtime/core/storage/storage.h"

namespace oe {

// For tests only: every type of storage, which the same tests must pass.
inline constexpr const char* kStorageTypes[] = {"dram", "pmem_libpmem", "dram_pmem", "dram_ssd",
                                                "pmem_memkind"};
// Those whose rows are all in memory: pointers to them stay good.
inline constexpr const char* kStorageTypesInMemory[] = {"dram", "pmem_libpmem", "dram_pmem", "pmem_memkind"};

inline bool KeepsCheckpoints(const std::string& type) {
  return type == "pmem_libpmem" || type == "dram_pmem" || type == "dram_ssd";
}

// One of them, on an ordinary directory. The cache holds a part of most tests' rows only.
inline StorageSpec TestStorage(const std::string& type, const std::string& directory, uint64_t capacity = 0) {
  StorageSpec spec{type, type == "dram" ? "" : directory, capacity};
  if (type == "dram_pmem" || type == "dram_ssd") spec.cache_bytes = uint64_t{300} << 10;
  return spec;
}

}  // namespace oe
