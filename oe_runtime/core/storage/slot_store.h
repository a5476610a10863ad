#ifndef OE_CORE_STORAGE_SLOT_STORE_H_
#define OE_CORE_STORAGE_SLOT_STORE_H_

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

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

// The rows of one internal shard of a table in a pool (pool.h). Rows belong to epochs: a row that was written
// in an earlier epoch is never changed; Replace() gives a copy in the open epoch, and its slot is free again
// when no checkpoint needs it. Not thread-safe but for Give().
class SlotStore final : public RowStore {
 public:
  // `pool` must outlive the store.
  SlotStore(Pool* pool, const RowLayout& layout, uint32_t epoch)
      : RowStore(layout), pool_(pool), epoch_(epoch) {}

  void Reserve() override;
  uint32_t Add(Key key) noexcept override;
  uint64_t size() const noexcept override { return size_; }
  SlotStore* slots() noexcept override { return this; }

  // Whether the row belongs to the open epoch and so may be written.
  bool Writable(uint32_t number) const noexcept { return epochs_[number] == epoch_; }
  void PrefetchEpoch(uint32_t number) const noexcept { __builtin_prefetch(&epochs_[number]); }
  // The number of a writable copy of the row of `key`, which was not writable. Reserve() must have come
  // before; the caller puts the new number into the index.
  uint32_t Replace(Key key, uint32_t number) noexcept;
  // Forgets the row of `key`, leaving a tombstone: a slot without a row that hides the key's older slots from
  // recovery; the caller takes the key out of the index. A row that came in the open epoch hides none, and
  // the next row takes its slot.
  void ReserveErase(uint32_t number) override;
  void Erase(Key key, uint32_t number) noexcept override;

  // What happened in an epoch. Numbers of slots.
  struct Changes {
    std::vector<SlotBlock> blocks;     // that are new; they follow those of earlier epochs
    std::vector<uint32_t> written;     // rows and tombstones
    std::vector<uint32_t> tombstones;  // which of them are tombstones
    std::vector<uint32_t> retired;     // of earlier epochs, no longer part of the table
  };
  // Whether anything happened in the open epoch.
  bool changed() const noexcept { return !changes_.written.empty() || !changes_.retired.empty(); }
  // Ends the open epoch and begins the next one.
  Changes Close() noexcept;

  // Takes slots back that no checkpoint needs. Thread-safe.
  void Give(const std::vector<uint32_t>& numbers);

  // For recovery: adds a block, all of whose slots count as rows of closed epochs; the number of its first.
  uint32_t Adopt(const SlotBlock& block);
  const SlotMeta& meta(uint32_t number) const noexcept {
    return metas_[number >> layout().shift][number & mask()];
  }
  void SetSize(uint64_t size) noexcept { size_ = size; }

 private:
  uint32_t Take(Key key, bool added) noexcept;
  bool TakeGiven();
  void ReserveLists();

  Pool* const pool_;
  uint32_t epoch_;
  uint64_t size_ = 0;
  std::vector<SlotMeta*> metas_;
  std::vector<uint32_t> epochs_;  // the open epoch in which a slot was taken; 0 after recovery
  std::vector<bool> added_;       // whether the row was added then, and is no copy of an older one
  std::vector<uint32_t> free_;
  std::vector<uint32_t> dropped_;  // of rows that were added and erased in the open epoch; written, too
  Changes changes_;

  std::mutex given_mutex_;
  std::vector<uint32_t> given_;
};

}  // namespace oe

#endif  // OE_CORE_STORAGE_SLOT_STORE_H_
