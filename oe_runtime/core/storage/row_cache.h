#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/storage/frames.h"
#include "oe_runtime/core/storage/row_store.h"

namespace oe {

class SlotStore;

// Copies in DRAM of rows of one internal shard that are read often. Every row keeps its slot in the pool. The
// index of the shard leads to the copy of a row that has one (numbers with kCopyBit), so a pull
// reads a cached row as fast as a row in DRAM. Pulls only note their misses. Upkeep(), after the reply, takes
// rows in and evicts others by CLOCK; a row enters once it was missed several times lately (MissedOften()).
// Pushes change copies, which are written to their slots when they are evicted or when a checkpoint needs
// them (slot_store.h).
//
// Callers hold the lock of the shard: exclusively, unless a method says otherwise. To change copies, or where
// slots are, they also hold mutex(). That is the only lock of the thread that makes checkpoints durable,
// since pushes, with the shard's lock, may wait for that thread.
class RowCache {
 public:
  // All must outlive the cache; `blocks` are those of the store's copies.
  RowCache(CacheMemory* memory, SlotStore* slots, std::vector<std::byte*>* blocks, const RowLayout& layout);
  RowCache(const RowCache&) = delete;
  RowCache& operator=(const RowCache&) = delete;

  static constexpr size_t kMostReads = RowStore::kMostReads;
  // Notes the reads of a pull: `numbers` of the rows of n <= kMostReads `keys`, kNoRow for none. With the
  // lock shared.
  void NoteReads(const Key* keys, const uint32_t* numbers, size_t n) noexcept;
  // Whether Upkeep() has something to do. Without the lock.
  bool wants_upkeep() const noexcept {
    return noted_.load(std::memory_order_relaxed) > 0 || frames_.wants_shrink();
  }
  // Works off some of the notes, few enough not to let pulls wait for long; `index` is that of the shard.
  // Takes mutex().
  void Upkeep(Index* index) noexcept;
  // Keys of rows that Upkeep() did not take in, because they are damaged; the caller looks after these.
  std::vector<Key> TakeDamaged() noexcept { return std::exchange(damaged_, {}); }
  // How many times rows were moved into copies and out of them. With the lock shared.
  uint64_t moves() const noexcept { return moves_; }

  std::mutex& mutex() const noexcept { return mutex_; }

  struct Frame {
    Key key = 0;
    uint32_t slot = kNoRow;  // of the row; kNoRow: the frame is free
    uint32_t written = 0;    // the epoch in which the copy was changed and is not in its slot yet; 0: it is
  };

  // What follows needs mutex(); numbers have kCopyBit.
  Frame& frame(uint32_t number) noexcept { return frames_[number % kCopyBit]; }
  // Writes a copy that was changed to its slot.
  void WriteBack(uint32_t number) noexcept;
  // Makes a frame free, whatever is in it.
  void Free(uint32_t number) noexcept;

  // Writes back what was changed up to `epoch`, taking mutex() again and again; without the lock.
  void WriteBackUpTo(uint32_t epoch) noexcept;

  // Without the lock.
  CacheStats stats() const noexcept { return frames_.stats(); }

 private:
  void NoteDamaged(Key key) noexcept;
  uint32_t TakeFrame(Index* index) noexcept;
  bool Grow() noexcept;
  void Shrink(Index* index) noexcept;
  void Resize() noexcept;
  void Evict(uint32_t at, Index* index) noexcept;
  uint16_t* MissesOf(uint64_t hash) noexcept {
    return missed_times_.data() + ((hash & 0xFFFFFFFFU) * missed_times_.size() >> 32);
  }
  bool MissedOften(Key key) noexcept;

  SlotStore* const slots_;
  const RowLayout layout_;
  bool full_ = false;  // no block can be had; until the next Upkeep()

  Frames<Frame> frames_;
  // Of each frame, at its number plus 1: whether it was read since the hand was there. The first stands for
  // rows without one, and is always 1.
  std::vector<uint8_t> read_ = std::vector<uint8_t>(1, 1);
  // How often keys were missed lately: 14 bits of a key's hash and a count, at a place that the hash gives
  // too; 8 bytes for each frame.
  std::vector<uint16_t> missed_times_;
  std::vector<Key> damaged_;
  uint64_t moves_ = 0;
  mutable std::mutex mutex_;

  std::mutex missed_mutex_;
  std::vector<Key> missed_;
  std::atomic<size_t> noted_{0};  // its size
};

}  // namespace oe
