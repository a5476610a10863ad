#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/shard.h"
#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/policy/policy_spec.h"

namespace oe {

class Pool;
struct PoolSpec;

// Counts how often the keys without a row of one server's part of a table were pushed. It has as many parts
// as the table has internal shards. Parts are independent of each other, each like a container. Counts are in
// DRAM, or with the rows in a pool.
class AdmissionFilter {
 public:
  using Sink = std::function<void(const void* data, size_t size)>;
  using Source = std::function<void(void* data, size_t size)>;
  // The part that a key belongs to; `parts` for a key of another server.
  using PartOf = std::function<uint32_t(Key)>;

  // In DRAM, for a complete spec with a name. Throws StorageError when there is no memory for it.
  static std::unique_ptr<AdmissionFilter> Create(const AdmissionSpec& spec, uint32_t parts, ShardInfo shard);

  virtual ~AdmissionFilter() = default;
  AdmissionFilter(const AdmissionFilter&) = delete;
  AdmissionFilter& operator=(const AdmissionFilter&) = delete;

  // Counts `times` more for a key of that part and returns its count; a cbf returns an upper bound. Throws
  // StorageError when there is no memory.
  virtual uint32_t Count(uint32_t part, Key key, uint32_t times) = 0;
  // The key has a row now: a counter forgets it, a Bloom filter does not. Throws StorageError when a pool has
  // no room for the tombstone.
  virtual void Forget(uint32_t part, Key key) = 0;
  // Looks at about `most` keys of a part with places in the range, from *position on (0 at first), and
  // forgets those that were counted last before the part's period began. False after the last key. Nothing
  // may be counted between calls for one range. A Bloom filter forgets nothing. Throws StorageError.
  virtual bool Sweep(uint32_t part, const Index::Range& places, uint64_t* position, size_t most) = 0;
  // Begins the next period of a part, all of whose places were swept: a key that a sweep did not see counts
  // as of the new period.
  virtual void EndPeriod(uint32_t part) noexcept = 0;
  // How many periods of a part have ended, by sweeps or since there was no room.
  virtual uint64_t periods(uint32_t /*part*/) const noexcept { return 0; }
  uint32_t filter_freq() const { return filter_freq_; }
  // How many keys were forgotten before they got a row, since the filter was made.
  virtual uint64_t forgotten(uint32_t part) const noexcept = 0;

  virtual uint64_t bytes(uint32_t part) const noexcept = 0;  // of DRAM

  // The size of the written counts.
  virtual uint64_t WrittenBytes() const noexcept = 0;
  virtual void Write(const Sink& sink) const = 0;
  // Adds the counts that a filter of the same spec and parts wrote, on any server of any number, for the keys
  // of this server. False for bytes that are not such a filter's. Throws StorageError.
  virtual bool Add(const Source& source, uint64_t bytes, const PartOf& part_of) = 0;

 protected:
  explicit AdmissionFilter(const AdmissionSpec& spec)
      : filter_freq_(static_cast<uint32_t>(spec.params.at("filter_freq"))) {}

 private:
  const uint32_t filter_freq_;
};

// A filter in a pool is part of its checkpoints. A counter has a row of 4 bytes per key (20 with what the
// pool keeps of a row, and 16 to 24 of DRAM), a Bloom filter one row per block that has counts. As for rows
// of tables, the first change after a checkpoint writes to another place, so pools hold up to as many copies
// of a count as there are kept checkpoints, and two.

// The pool of a filter, without its identity and its table. `part_of` is the part of a key, `parts` for one
// that cannot be here.
PoolSpec CountsPool(const AdmissionSpec& spec, uint32_t parts, const AdmissionFilter::PartOf& part_of);

// The filter of the counts in `pool`, which must outlive it: none, or, after Pool::Recover(), those that
// `indexes`, one per part, got. Throws StorageError.
std::unique_ptr<AdmissionFilter> NewPooledFilter(const AdmissionSpec& spec, ShardInfo shard, Pool* pool,
                                                 std::vector<std::unique_ptr<Index>> indexes);

}  // namespace oe
