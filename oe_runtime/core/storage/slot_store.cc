#include "oe_runtime/core/storage/slot_store.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/prefetch.h"
#include "oe_runtime/core/storage/pool.h"

namespace oe {
namespace {

// Slots that were used before lie anywhere, and are not in the processor's caches.
constexpr size_t kAhead = 8;

template <typename T>
void ReserveOne(std::vector<T>* list) {
  if (list->size() == list->capacity()) list->reserve(list->size() * 2 + 64);
}

}  // namespace

void SlotStore::ReserveLists() {
  ReserveOne(&changes_.written);
  ReserveOne(&changes_.retired);
  ReserveOne(&changes_.tombstones);
}

void SlotStore::Reserve() {
  ReserveLists();
  if (!dropped_.empty() || !free_.empty() || TakeGiven()) return;
  if (blocks() >= uint64_t{kCopyBit} >> layout().shift) {
    throw StorageError(
        "a sixteenth of a table holds at most 2147483647 rows on one server; use more servers");
  }
  SlotBlock block;
  try {
    block = pool_->TakeBlock();
  } catch (const StorageError&) {
    // A checkpoint that is being made durable will give slots back.
    pool_->WaitIdle();
    {
      const std::lock_guard<std::mutex> lock(given_mutex_);
      free_.swap(given_);
    }
    if (!free_.empty()) return;
    throw;
  }
  ReserveOne(&changes_.blocks);
  // The thread that makes checkpoints durable finds the slots of copies in the same list.
  std::unique_lock<std::mutex> lock;
  if (cache_) lock = std::unique_lock<std::mutex>(cache_->mutex());
  const uint32_t first = Adopt(block);
  changes_.blocks.push_back(block);
  free_.reserve(layout().block_rows());
  for (uint32_t i = layout().block_rows(); i > 0; --i) free_.push_back(first + i - 1);
}

uint32_t SlotStore::Adopt(const SlotBlock& block) {
  const auto first = static_cast<uint32_t>(blocks() << layout().shift);
  ReserveBlock();
  ReserveOne(&metas_);
  const size_t slots = first + layout().block_rows();
  writable_[0].Grow(slots);
  added_.resize(slots, false);
  metas_.push_back(block.metas);
  AddBlock(block.rows);
  return first;
}

// Does not wait: the thread that gives slots back comes after all others on a processor, and may have been
// put off it with the lock. Another block of slots does as well.
bool SlotStore::TakeGiven() {
  const std::unique_lock<std::mutex> lock(given_mutex_, std::try_to_lock);
  if (lock && free_.empty()) free_.swap(given_);
  return !free_.empty();
}

void SlotStore::Give(const std::vector<uint32_t>& numbers) {
  const std::lock_guard<std::mutex> lock(given_mutex_);
  given_.insert(given_.end(), numbers.begin(), numbers.end());
}

void SlotStore::ReserveErase(uint32_t number) {
  ReserveLists();
  if (!Writable(number)) Reserve();  // its tombstone has a slot
  ReserveOne(&dropped_);
  const size_t tombstones = changes_.tombstones.size() + dropped_.size() + 1;  // at Close()
  if (tombstones > changes_.tombstones.capacity()) changes_.tombstones.reserve(2 * tombstones);
}

uint32_t SlotStore::Take(Key key, bool added) noexcept {
  uint32_t number = 0;
  if (!dropped_.empty()) {
    number = dropped_.back();
    dropped_.pop_back();
  } else {
    number = free_.back();
    free_.pop_back();
    writable_[0].Set(number, epoch_);
    changes_.written.push_back(number);
    if (free_.size() >= kAhead) {
      const uint32_t next = free_[free_.size() - kAhead];
      Prefetch(&metas_[next >> layout().shift][next & mask()]);
      PrefetchRow(next);
    }
  }
  metas_[number >> layout().shift][number & mask()].key = key;
  added_[number] = added;
  return number;
}

uint32_t SlotStore::Add(Key key) noexcept {
  ++size_;
  return Take(key, true);
}

uint32_t SlotStore::Replace(Key key, uint32_t number) noexcept {
  if ((number & kCopyBit) != 0) {
    const std::lock_guard<std::mutex> lock(cache_->mutex());
    RowCache::Frame& frame = cache_->frame(number);
    cache_->WriteBack(number);  // what belongs to an epoch that is closed
    if (!Writable(frame.slot)) {
      changes_.retired.push_back(frame.slot);
      frame.slot = Take(key, false);
    }
    frame.written = epoch_;
    writable_copies().Set(number % kCopyBit, epoch_);
    return number;
  }
  const uint32_t copy = Take(key, false);
  std::memcpy(row(copy), row(number), layout().row_bytes);
  changes_.retired.push_back(number);
  return copy;
}

void SlotStore::Erase(Key key, uint32_t number) noexcept {
  --size_;
  if ((number & kCopyBit) != 0) {
    const std::lock_guard<std::mutex> lock(cache_->mutex());
    const RowCache::Frame frame = cache_->frame(number);
    if (frame.written != epoch_) cache_->WriteBack(number);
    cache_->Free(number);
    number = frame.slot;
  }
  if (Writable(number) && added_[number]) {
    dropped_.push_back(number);
    return;
  }
  if (Writable(number)) {
    changes_.tombstones.push_back(number);  // itself; the key may have older slots
    return;
  }
  changes_.tombstones.push_back(Take(key, false));
  changes_.retired.push_back(number);
}

SlotStore::Changes SlotStore::Close() noexcept {
  ++epoch_;
  // Their slots were written, so they must be something: tombstones of keys that they may hide nothing of.
  changes_.tombstones.insert(changes_.tombstones.end(), dropped_.begin(), dropped_.end());
  dropped_.clear();
  return std::exchange(changes_, Changes{});
}

}  // namespace oe
