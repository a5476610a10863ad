#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "oe_runtime/core/common/shard.h"

namespace oe {

constexpr uint32_t kNoRow = 0xFFFFFFFFU;

// From keys to row numbers, for one internal shard of a table. Not thread-safe: many may read, or one may
// write.
class Index {
 public:
  virtual ~Index() = default;

  // rows[i] = the row of keys[i], or kNoRow. Fetches ahead within the batch.
  virtual void Find(const Key* keys, size_t n, uint32_t* rows) const noexcept = 0;

  // Makes room for `key`, in a time that does not depend on how many keys there are; may throw
  // std::bad_alloc, and then nothing that can be seen has changed.
  virtual void Reserve(Key key) = 0;
  // Adds a key that is absent. Reserve(key) must have come before.
  virtual void Add(Key key, uint32_t row) noexcept = 0;
  // Gives another row to a key that is present.
  virtual void Set(Key key, uint32_t row) noexcept = 0;
  // Removes a key that is present.
  virtual void Erase(Key key) noexcept = 0;

  // Copies up to `max` entries, beginning at `*position` (0 at first) and moving it on; returns how many. 0
  // means that all were seen. Nothing may be added between calls.
  virtual size_t Scan(uint64_t* position, size_t max, Key* keys, uint32_t* rows) const noexcept = 0;

  // The same of the entries whose place is in [first, last], in no order: an array's places are its keys,
  // those of other keys ScanPlace().
  struct Range {
    uint64_t first = 0;
    uint64_t last = ~uint64_t{0};
  };
  virtual size_t Scan(const Range& range, uint64_t* position, size_t max, Key* keys,
                      uint32_t* rows) const noexcept = 0;

  // Bytes of memory held.
  virtual uint64_t bytes() const noexcept = 0;
};

// The bits of the hash below the four that chose the internal shard.
inline uint64_t ScanPlace(Key key) noexcept { return Mix64(key) << 4; }

// For any keys.
std::unique_ptr<Index> NewHashIndex();

// For keys whose Mix64 has the top four bits `internal_shard`: at most 12 bytes per key where there are many,
// for lookups that cost somewhat more.
std::unique_ptr<Index> NewCompactIndex(uint32_t internal_shard);

// For the keys first, first + stride, first + 2·stride, … below `input_dim`. Throws std::bad_alloc.
std::unique_ptr<Index> NewArrayIndex(uint64_t input_dim, uint64_t first, uint64_t stride);

}  // namespace oe
