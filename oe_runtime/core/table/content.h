#pragma once

// Shared by the files that implement Table; for them only.

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <memory>
#include <optional>

#include "oe_runtime/core/common/prefetch.h"
#include "oe_runtime/core/policy/admission.h"
#include "oe_runtime/core/storage/kept_rows.h"
#include "oe_runtime/core/storage/log_store.h"
#include "oe_runtime/core/storage/pool.h"
#include "oe_runtime/core/storage/row_map.h"
#include "oe_runtime/core/table/table.h"

namespace oe {

constexpr uint32_t kShardBits = 4;
constexpr uint32_t kShards = 1U << kShardBits;
static_assert(kShards == Table::kParts, "Keys() has one part per internal shard");

inline bool IsArray(const TableSpec& spec) { return spec.index == "array"; }

// The rows, exchanged as a whole by Restore.
struct Table::Content {
  // What holds the rows, before the shards, which point to it: an arena, or storage that keeps checkpoints.
  std::unique_ptr<Arena> arena;
  std::unique_ptr<Pool> counts;  // of the filter; led by the rows
  std::unique_ptr<KeptRows> kept;
  std::array<std::unique_ptr<RowStore>, kShards> stores;  // of the arena
  std::array<std::unique_ptr<RowMap>, kShards> shards;
  std::unique_ptr<AdmissionFilter> filter;  // if there is admission; its parts are under the shards' locks
  std::array<uint64_t, kShards> hands{};    // where the search for rows to evict goes on; of pushes
  // When the present period of the filter's parts began, as far as is known.
  struct Swept {
    uint64_t step = 0;
    uint32_t seconds = 0;
    bool known = false;
    // Sweeps that began at the part's first place and go on, as bits: of policies their reasons'.
    uint32_t under_way = 0;
    static constexpr uint32_t kOfCall = uint32_t{1} << 31;  // of a save or of Evict()
    uint64_t period = 0;                                    // AdmissionFilter::periods
  };
  std::array<Swept, kShards> swept{};  // of sweeps, which keep pushes away
  bool loaded = false;                 // from files or a checkpoint: the age of its counts is not known
  std::atomic<uint64_t> version{0};
  bool opened = false;  // the rows were there already
  // That of one shard, to ask what is the same for all.
  RowStore& store() const { return shards[0]->store(); }

  // The checksum of the file that had this content when the shards' changes were empty.
  std::optional<uint64_t> saved;
  // The version that was last written to or read from a file.
  std::atomic<uint64_t> saved_version{0};
};

// The keys of a call in the order of their internal shards.
struct Table::Plan {
  std::array<size_t, kShards + 1> begin{};
  std::unique_ptr<Key[]> keys;
  std::unique_ptr<uint32_t[]> order;  // keys[i] was at order[i]

  // Runs task(begin, end, shard) for every internal shard with keys; rethrows the first error when all are
  // done.
  template <typename Task>
  void ForEachShard(Executor* executor, const Task& task) const {
    std::array<std::exception_ptr, kShards> errors;
    const auto run = [&](size_t shard) {
      if (begin[shard] == begin[shard + 1]) return;
      try {
        task(begin[shard], begin[shard + 1], shard);
      } catch (...) {
        errors[shard] = std::current_exception();
      }
    };
    if (executor != nullptr) {
      executor->ParallelFor(kShards, run);
    } else {
      for (size_t shard = 0; shard < kShards; ++shard) run(shard);
    }
    for (const std::exception_ptr& error : errors) {
      if (error) std::rethrow_exception(error);
    }
  }
};

// Unpins the rows of a call when it ends, by numbers that are kNoRow until then (RowStore::Unpin).
struct Table::Pins {
  const Plan& plan;
  const Content& content;
  uint32_t* numbers;

  Pins(const Plan& of, const Content& rows, uint32_t* found) : plan(of), content(rows), numbers(found) {
    std::fill_n(numbers, plan.begin[kShards], kNoRow);
  }
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;
  ~Pins() {
    for (size_t shard = 0; content.store().pins() && shard < kShards; ++shard) {
      uint32_t* const begin = numbers + plan.begin[shard];
      uint32_t* const end = numbers + plan.begin[shard + 1];
      if (std::all_of(begin, end, [](uint32_t number) { return number == kNoRow; })) continue;
      const std::unique_lock<FairSharedMutex> lock(content.shards[shard]->mutex());
      content.shards[shard]->store().Unpin(begin, static_cast<size_t>(end - begin));
    }
  }
};

}  // namespace oe
