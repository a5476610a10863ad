#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "oe_runtime/core/common/prefetch.h"
#include "oe_runtime/core/storage/damage.h"
#include "oe_runtime/core/storage/epoch_marks.h"
#include "oe_runtime/core/storage/row_cache.h"
#include "oe_runtime/core/storage/row_store.h"

namespace oe {

// What a pool's metadata region holds for each slot (a place for a row). `state` is 0 while the slot is free
// or its epoch is open; at a closed epoch it is SlotState().
struct SlotMeta {
  uint64_t key;
  uint64_t state;
};
static_assert(sizeof(SlotMeta) == 16, "it lies on the medium");

// 2^shift slots.
struct SlotBlock {
  std::byte* rows = nullptr;
  SlotMeta* metas = nullptr;
};

// How full a pool is, in slots.
struct PoolRoom {
  uint64_t slots = 0;     // that the pool has
  uint64_t free = 0;      // of these, those that can be written now
  uint64_t reserved = 0;  // of these, those that new rows leave to the rows that are there
  uint64_t changed = 0;   // expected from one checkpoint to the next: copies, and two for each row that goes
  uint64_t headroom = 0;  // new rows that the pool and its medium have room for, about
  uint64_t refused = 0;   // times a new row was refused

  PoolRoom& operator+=(const PoolRoom& other) {
    slots += other.slots;
    free += other.free;
    reserved += other.reserved;
    changed += other.changed;
    headroom += other.headroom;
    refused += other.refused;
    return *this;
  }
};

// The rows of one internal shard of a table in a pool (pool.h). Rows belong to epochs: a row that was written
// in an earlier epoch is never changed; Replace() gives a copy in the open epoch, and its slot is free again
// when no checkpoint needs it. With a cache, the row of a copy has its slot in the open epoch as soon as it
// may be written there, and its content when the copy is evicted, replaced or erased in a later epoch, or
// when the checkpoint of its epoch is made durable, whichever comes first. Not thread-safe but for Give() and
// WriteBackUpTo().
//
// Copies and tombstones need slots beside those of the rows: as many as an epoch takes, times the kept
// checkpoints and the one that is being made durable (reserved()). A new row that would leave fewer is
// refused, and an eviction that would take the slots for an epoch's copies. An update is refused only when
// there is no free slot at all.
class SlotStore final : public RowStore {
 public:
  // `pool` must outlive the store, and so must `memory`, that of a cache; nullptr: without one.
  SlotStore(Pool* pool, const RowLayout& layout, uint32_t epoch, CacheMemory* memory)
      : RowStore(layout),
        pool_(pool),
        epoch_(epoch),
        cache_(memory == nullptr ? nullptr : std::make_unique<RowCache>(memory, this, &copies(), layout)) {}

  // For a new row: only from slots that are not reserved.
  void Reserve() override;
  uint32_t Add(Key key) noexcept override;
  uint64_t size() const noexcept override { return size_; }

  // Replaces rows of earlier epochs by copies. A damaged row has none, which would have a right checksum: its
  // key gets kNoRow.
  void MakeWritable(const Key* keys, size_t n, uint32_t* numbers) override;
  uint64_t moves() const noexcept override { return cache_ ? cache_->moves() : 0; }
  void FindAgain(const Key* keys, size_t n, uint32_t* numbers) noexcept override;
  std::unique_lock<std::mutex> LockCopies() override {
    return cache_ ? std::unique_lock(cache_->mutex()) : std::unique_lock<std::mutex>();
  }
  bool counts_reads() const noexcept override { return cache_ != nullptr; }
  void NoteReads(const Key* keys, const uint32_t* numbers, size_t n) const noexcept override {
    if (cache_) cache_->NoteReads(keys, numbers, n);
  }
  void Upkeep() noexcept override;
  CacheStats cache_stats() const noexcept override { return cache_ ? cache_->stats() : CacheStats{}; }
  uint32_t PlaceOf(uint32_t number) const noexcept override {
    return (number & kCopyBit) != 0 ? cache_->frame(number).slot : number;
  }

  // Whether the row belongs to the open epoch and so may be written. Numbers of copies count as rows here, in
  // Replace() and in Erase().
  bool Writable(uint32_t number) const noexcept {
    return writable_[number / kCopyBit].Has(number % kCopyBit, epoch_);
  }
  void PrefetchWritable(uint32_t number) const noexcept {
    writable_[number / kCopyBit].Fetch(number % kCopyBit);
  }
  // The number of a slot.
  void PrefetchMeta(uint32_t number) const noexcept { oe::Prefetch(&meta(number)); }
  // Whether the slot of `key` is as it was written, by its checksum. A slot has none while its epoch is
  // open or not durable yet: that counts as intact, and so do copies. With the shard's lock, shared is
  // enough.
  bool Intact(Key key, uint32_t number) const noexcept override;
  // From a recovery on, which reads no rows, until a pass of Scrub() has found none damaged that stays.
  bool unchecked() const noexcept override { return unchecked_.load(std::memory_order_relaxed); }
  void CheckRow(Key key, uint32_t number) override;
  bool Scrub(uint64_t* position, uint64_t* rows) noexcept override;
  void Prefetch(uint32_t number) const noexcept override {
    PrefetchRow(number);
    if ((number & kCopyBit) == 0) PrefetchMeta(number);
  }
  void Report(Damage::Kind kind, Key key, uint32_t number) const noexcept override;
  void RequireFewDamaged(uint64_t more) const override;
  // Makes room for a copy; throws StorageError when there is no slot at all. Replace() then does not throw.
  void ReserveCopy();
  // The number of a writable copy of the row of `key`, which was not writable. ReserveCopy() must have come
  // before; the caller puts the new number into the index (a copy keeps its number).
  uint32_t Replace(Key key, uint32_t number) noexcept;
  // Forgets the row of `key`, leaving a tombstone: a slot without a row that hides the key's older slots from
  // recovery; the caller takes the key out of the index. A row that came in the open epoch hides none, and
  // the next row takes its slot.
  void ReserveErase(uint32_t number) override;
  // The same for a row of an earlier epoch that is damaged.
  void ReserveQuarantine() override;
  void Erase(Key key, uint32_t number) noexcept override;

  // What happened in an epoch. Numbers of slots.
  struct Changes {
    std::vector<SlotBlock> blocks;     // that are new; they follow those of earlier epochs
    std::vector<uint32_t> written;     // rows and tombstones
    std::vector<uint32_t> tombstones;  // which of them are tombstones
    std::vector<uint32_t> retired;     // of earlier epochs, no longer part of the table
    std::vector<uint32_t> repaired;    // of earlier epochs, whose metadata was wrong
  };
  // Whether anything happened in the open epoch.
  bool changed() const noexcept override {
    return !epoch_changes_.written.empty() || !epoch_changes_.retired.empty();
  }
  // Ends the open epoch and begins the next one.
  Changes Close() noexcept;

  // Writes what a closed epoch still has in copies only to its slots. Thread-safe.
  void WriteBackUpTo(uint32_t epoch) noexcept {
    if (cache_) cache_->WriteBackUpTo(epoch);
  }
  // For the cache: which copies were changed in the open epoch.
  EpochMarks& writable_copies() noexcept { return writable_[1]; }

  // Takes slots back that no checkpoint needs; the last are taken first. Thread-safe.
  void Give(const std::vector<uint32_t>& numbers);

  // For recovery: adds a block, all of whose slots count as rows of closed epochs; the number of its first.
  uint32_t Adopt(const SlotBlock& block);
  const SlotMeta& meta(uint32_t number) const noexcept {
    return metas_[number >> layout().shift][number & mask()];
  }
  // As many rows, of which about `changed` are expected to change in an epoch (PoolRoom::changed).
  void SetSize(uint64_t size, uint64_t changed) noexcept {
    size_ = opened_size_ = seen_size_ = size;
    copied_ = changed;
    limit_ = 0;
    unchecked_ = size > 0;
  }
  // Whether there are fewer slots than the rows and what is reserved with them need.
  bool LacksSlots() const noexcept { return slot_count() < size_ + reserved(); }
  // One more block. Throws StorageError.
  void TakeBlock();
  // For how many epochs slots are reserved that none has shown to be needed.
  static uint64_t Epochs(uint32_t window) noexcept { return std::min<uint64_t>(window + uint64_t{1}, 4); }
  // A sixteenth: what is expected of rows of which no epoch has shown more.
  static uint64_t Expected(uint64_t rows) noexcept { return (rows + 15) / 16; }

  // Without the medium's part of `headroom`. Also while Close() runs.
  PoolRoom room() const;

 private:
  static constexpr size_t kAtOnce = 64;
  void Changed(const Key* keys, const uint32_t* numbers, size_t n) noexcept override;
  bool Fits(Key key, uint32_t number, const std::byte* content) const noexcept;
  bool RepairSlot(Key key, uint32_t number) noexcept;
  bool CheckQuietly(Key key) noexcept;
  bool RepairMeta(Key key, uint32_t number, const std::byte* content) noexcept;
  uint64_t slot_count() const noexcept { return uint64_t{blocks()} << layout().shift; }
  // Slots that were taken in the open epoch and come back later.
  uint64_t ChangedNow() const noexcept {
    const uint64_t taken = epoch_changes_.written.size() + opened_size_;
    return taken > size_ ? taken - size_ : 0;
  }
  uint64_t EvictedNow() const noexcept {
    const uint64_t changed = ChangedNow();
    return changed > copied_now_ ? changed - copied_now_ : 0;
  }
  uint64_t ExpectedChanges() const noexcept {
    return std::max(std::min(copied_, size_), copied_now_) + std::max(evicted_, EvictedNow());
  }
  uint64_t reserved() const noexcept;
  uint64_t FreeSlots() const;
  uint64_t FreeSlotsLocked() const noexcept;
  uint64_t SpareSlots() const;
  void MakeRoom();
  void ReserveTombstone();
  void ReserveTombstoneLists();
  uint32_t Take(Key key, bool added) noexcept;
  bool TakeGiven();
  void ReserveLists();

  Pool* const pool_;
  std::atomic<uint32_t> epoch_;  // pulls of unchecked rows read it while a checkpoint closes it
  uint64_t size_ = 0;
  uint64_t limit_ = 0;        // rows up to which MakeRoom() need not look again
  uint64_t opened_size_ = 0;  // rows when the open epoch began
  uint64_t seen_size_ = 0;    // rows that there were when an epoch began in which rows changed
  // Copies, and slots that evictions took, two for each: the most of an epoch, older ones less and less.
  // Evictions are mostly of many rows at once, so those of earlier epochs soon do not count.
  uint64_t copied_ = 0;
  uint64_t evicted_ = 0;
  uint64_t copied_now_ = 0;  // in the open epoch
  uint64_t refused_ = 0;
  std::atomic<bool> unchecked_{false};
  bool in_pass_ = false;  // of Scrub(), in which all rows were checked so far
  std::vector<SlotMeta*> metas_;
  // Slots that were taken, and copies that were changed. Which of the two a row is in is hard to predict for
  // the processor, so nothing branches on it.
  std::array<EpochMarks, 2> writable_;
  std::vector<bool>
      added_;  // whether a slot was taken for a row that was added, and is no copy of an older one
  std::vector<uint32_t> free_;
  uint64_t fresh_blocks_ = 0;      // the last ones, whose slots are free and not in that list yet
  std::vector<uint32_t> dropped_;  // of rows that were added and erased in the open epoch; written, too
  Changes epoch_changes_;

  const std::unique_ptr<RowCache> cache_;

  mutable std::mutex given_mutex_;
  std::vector<uint32_t> given_;
};

}  // namespace oe
