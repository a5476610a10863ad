#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/storage/row_cache.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {

// The rows of a table in storage that keeps checkpoints: a pool (pool.h) or a log (log_pool.h). Thread-safe
// but for what the comments exclude.
class KeptRows {
 public:
  virtual ~KeptRows() = default;

  // Closes the open epoch: takes microseconds, however many rows there are. The caller excludes writers of
  // all shards; `version` is theirs. Throws SpecError for an id that is not above that of the last checkpoint
  // and StorageError when an earlier checkpoint could not be made durable; then nothing has changed.
  virtual void Checkpoint(uint64_t id, uint64_t version) = 0;
  // Returns when every checkpoint so far is durable; throws StorageError why one cannot be.
  virtual void WaitDurable() = 0;
  // The same without the error.
  virtual void WaitIdle() noexcept = 0;

  // Durable checkpoints that are kept, oldest first.
  virtual std::vector<CheckpointInfo> Checkpoints() const = 0;
  // When the newest of them became durable, Unix seconds; 0: before this object was there.
  virtual int64_t durable_at() const = 0;

  // Goes back to the kept checkpoint `id`, or without one to the newest, or to an empty table if there is
  // none; later checkpoints are dropped. `indexes`, one per shard and empty, get the rows. Returns what was
  // recovered. The caller excludes all use of shards. Throws StorageError for an id that is not kept and for
  // rows that are damaged. Interrupted anywhere, it can be repeated. `before` is called when all was read and
  // is intact; if it throws, nothing has changed.
  virtual CheckpointInfo Recover(std::optional<uint64_t> id, const std::vector<Index*>& indexes,
                                 const std::function<void()>& before) = 0;

  // All files go with this object, whatever checkpoints there are; at once, what makes them count.
  virtual void Remove() = 0;

  // Of storage.
  virtual uint64_t bytes() const = 0;
  // Of the caches of all shards.
  virtual CacheStats cache_stats() const = 0;
};

}  // namespace oe
