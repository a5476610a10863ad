#include "oe_runtime/core/storage/slot_store.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <cstring>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/prefetch.h"
#include "oe_runtime/core/storage/pool.h"

namespace oe {
namespace {

// Slots that were used before lie anywhere, and are not in the processor's caches.
constexpr size_t kSlotsAhead = 8;

constexpr uint64_t kRowsUnseen = 64;  // that are added before MakeRoom() looks again

template <typename T>
void ReserveOne(std::vector<T>* list) {
  if (list->size() == list->capacity()) list->reserve(list->size() * 2 + 64);
}

}  // namespace

void SlotStore::ReserveLists() {
  ReserveOne(&epoch_changes_.written);
  ReserveOne(&epoch_changes_.retired);
  ReserveOne(&epoch_changes_.tombstones);
  ReserveOne(&epoch_changes_.repaired);
}

void SlotStore::Reserve() {
  if (size_ >= limit_) MakeRoom();
  ReserveCopy();
}

uint64_t SlotStore::reserved() const noexcept {
  const uint64_t epochs = pool_->spec().window + uint64_t{1};
  const uint64_t seen = std::min(seen_size_, size_);
  // Rows that did not change lately may, and of rows that are new nobody knows yet.
  const uint64_t expected = Epochs(pool_->spec().window);
  return epochs * ExpectedChanges() + expected * (Expected(seen) / 4 + Expected(size_ - seen));
}

// Free slots beyond those that the open epoch may still need for copies.
uint64_t SlotStore::SpareSlots() const {
  const uint64_t expected = std::min(copied_, size_);
  const uint64_t copies = expected > copied_now_ ? expected - copied_now_ : 0;
  const uint64_t free = FreeSlots();
  const uint64_t kept = copies + Expected(size_) / 4;
  return free > kept ? free - kept : 0;
}

// Room for one more row and what is reserved with it.
void SlotStore::MakeRoom() {
  const auto spare = [this] {
    const uint64_t used = size_ + reserved();
    return std::min(slot_count() > used ? slot_count() - used : 0, SpareSlots());
  };
  while (spare() == 0) {
    try {
      TakeBlock();
    } catch (const StorageFull& full) {
      pool_->WaitIdle();
      if (spare() > 0) break;
      ++refused_;
      throw NoNewRows(full, pool_->spec().table, pool_->spec().window);
    }
  }
  // What changes in this epoch is looked at again after a few rows.
  limit_ = size_ + 1 + std::min((spare() - 1) / 2, kRowsUnseen);
}

void SlotStore::ReserveCopy() {
  ReserveLists();
  if (!dropped_.empty() || !free_.empty() || TakeGiven()) return;
  try {
    if (fresh_blocks_ == 0) TakeBlock();
  } catch (const StorageError& error) {
    // A checkpoint that is being made durable will give slots back.
    pool_->WaitIdle();
    if (TakeGiven()) return;
    if (dynamic_cast<const StorageFull*>(&error) == nullptr) throw;
    throw StorageFull(
        error.what() + std::string(". Table '") + pool_->spec().table +
        "' has no slot left for what changes: more than expected did since the kept checkpoints; "
        "make a checkpoint, which gives slots back, evict rows, or keep fewer checkpoints");
  }
  const auto first = static_cast<uint32_t>((blocks() - fresh_blocks_) << layout().shift);
  free_.reserve(layout().block_rows());
  for (uint32_t i = layout().block_rows(); i > 0; --i) free_.push_back(first + i - 1);
  --fresh_blocks_;
}

// Many rows may go at once. What an epoch copies is left to it, or training would stop until a checkpoint.
void SlotStore::ReserveTombstone() {
  if (SpareSlots() == 0) {
    try {
      TakeBlock();
    } catch (const StorageFull& full) {
      pool_->WaitIdle();
      if (SpareSlots() == 0) {
        throw StorageFull(full.what() + std::string(". Table '") + pool_->spec().table +
                          "' has no slots left to note more rows as evicted: make a checkpoint, which gives "
                          "slots back, and evict again");
      }
    }
  }
  ReserveCopy();
}

// One more block, for the end of its shard's slots.
void SlotStore::TakeBlock() {
  RequireNumbers();
  const SlotBlock block = pool_->TakeBlock();
  ReserveOne(&epoch_changes_.blocks);
  // The thread that makes checkpoints durable finds the slots of copies in the same list.
  std::unique_lock<std::mutex> lock;
  if (cache_) lock = std::unique_lock<std::mutex>(cache_->mutex());
  (void)Adopt(block);
  epoch_changes_.blocks.push_back(block);
  ++fresh_blocks_;
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

uint64_t SlotStore::FreeSlots() const {
  const std::lock_guard<std::mutex> lock(given_mutex_);
  return FreeSlotsLocked();
}

uint64_t SlotStore::FreeSlotsLocked() const noexcept {
  return free_.size() + dropped_.size() + given_.size() + (fresh_blocks_ << layout().shift);
}

PoolRoom SlotStore::room() const {
  const std::lock_guard<std::mutex> lock(given_mutex_);
  PoolRoom room;
  room.slots = slot_count();
  room.free = FreeSlotsLocked();
  room.reserved = reserved();
  room.changed = ExpectedChanges();
  const uint64_t used = size_ + room.reserved;
  room.headroom = room.slots > used ? room.slots - used : 0;
  room.refused = refused_;
  return room;
}

void SlotStore::ReserveErase(uint32_t number) {
  ReserveLists();
  if (!Writable(number)) ReserveTombstone();
  ReserveTombstoneLists();
}

void SlotStore::ReserveQuarantine() {
  ReserveCopy();
  ReserveTombstoneLists();
}

void SlotStore::ReserveTombstoneLists() {
  ReserveOne(&dropped_);
  const size_t tombstones = epoch_changes_.tombstones.size() + dropped_.size() + 1;  // at Close()
  if (tombstones > epoch_changes_.tombstones.capacity()) epoch_changes_.tombstones.reserve(2 * tombstones);
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
    epoch_changes_.written.push_back(number);
    if (free_.size() >= kSlotsAhead) {
      const uint32_t next = free_[free_.size() - kSlotsAhead];
      oe::Prefetch(&metas_[next >> layout().shift][next & mask()]);
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
      // The copy is right whatever happened to the slot, but what checkpoints have of it is in its metadata.
      if (!Fits(key, frame.slot, row(number))) {
        if (!RepairMeta(key, frame.slot, row(number))) pool_->Suspect();
        Report(Damage::Kind::kRepaired, key, frame.slot);
      }
      epoch_changes_.retired.push_back(frame.slot);
      frame.slot = Take(key, false);
      ++copied_now_;
    }
    frame.written = epoch_;
    writable_copies().Set(number % kCopyBit, epoch_);
    return number;
  }
  const uint32_t copy = Take(key, false);
  std::memcpy(row(copy), row(number), layout().row_bytes);
  epoch_changes_.retired.push_back(number);
  ++copied_now_;
  return copy;
}

bool SlotStore::Intact(Key key, uint32_t number) const noexcept {
  return (number & kCopyBit) != 0 || Writable(number) || Fits(key, number, row(number));
}

// Whether the metadata of a slot of a closed epoch is that of a row of `key` with this content.
bool SlotStore::Fits(Key key, uint32_t number, const std::byte* content) const noexcept {
  const SlotMeta& of = meta(number);
  uint64_t state = __atomic_load_n(&of.state, __ATOMIC_ACQUIRE);
  if (state == 0) {
    if (pool_->sealed() + 1 < epoch_) return true;  // perhaps its own epoch is not durable yet
    state = __atomic_load_n(&of.state, __ATOMIC_ACQUIRE);
  }
  return of.key == key && state != 0 && state == SlotState(EpochOf(state), key, content, layout().row_bytes);
}

void SlotStore::MakeWritable(const Key* keys, size_t n, uint32_t* numbers) {
  std::array<uint32_t, kMostKeys> old;  // NOLINT(cppcoreguidelines-pro-type-member-init)
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) {
    if (numbers[i] != kNoRow) PrefetchWritable(numbers[i]);
  }
  for (size_t i = 0; i < n; ++i) {
    if (numbers[i] == kNoRow || Writable(numbers[i])) continue;
    Prefetch(numbers[i]);
    old[count++] = static_cast<uint32_t>(i);
  }
  std::bitset<256> replaced;  // of numbers, by their lowest bits
  for (size_t at = 0; at < count; ++at) {
    const uint32_t i = old[at];
    const uint32_t number = numbers[i];
    if (replaced[number % replaced.size()]) {  // the key may have come earlier in this batch
      index().Find(&keys[i], 1, &numbers[i]);
      if (numbers[i] == kNoRow || Writable(numbers[i])) continue;
    }
    replaced.set(number % replaced.size());
    OrStorageError([&] { ReserveCopy(); });
    if (!Intact(keys[i], number) && !RepairSlot(keys[i], number)) {
      Quarantine(keys[i], number);
      numbers[i] = kNoRow;
      continue;
    }
    numbers[i] = Replace(keys[i], number);
    if (numbers[i] != number) index().Set(keys[i], numbers[i]);
  }
}

void SlotStore::FindAgain(const Key* keys, size_t n, uint32_t* numbers) noexcept {
  std::array<uint32_t, kAtOnce> now{};
  for (size_t begin = 0; begin < n; begin += kAtOnce) {
    const size_t size = std::min(kAtOnce, n - begin);
    index().Find(keys + begin, size, now.data());
    for (size_t i = 0; i < size; ++i) {
      uint32_t& number = numbers[begin + i];
      if (number != kNoRow) number = Writable(now[i]) ? now[i] : Replace(keys[begin + i], now[i]);
    }
    NoteChanged(keys + begin, numbers + begin, size);
  }
}

void SlotStore::Changed(const Key* /*keys*/, const uint32_t* numbers, size_t n) noexcept {
  for (size_t i = 0; i < n; ++i) {
    if (numbers[i] != kNoRow) changes_.Changed(PlaceOf(numbers[i]));
  }
}

void SlotStore::Upkeep() noexcept {
  while (cache_ && cache_->wants_upkeep()) {
    const std::unique_lock<FairSharedMutex> lock(mutex());
    cache_->Upkeep(&index());
    for (const Key key : cache_->TakeDamaged()) CheckQuietly(key);
  }
}

bool SlotStore::Scrub(uint64_t* position, uint64_t* rows) noexcept {
  std::array<Key, kAtOnce> keys{};
  std::array<uint32_t, kAtOnce> numbers{};
  size_t damaged = 0;
  if (*position == 0) in_pass_ = true;
  {
    const std::shared_lock<FairSharedMutex> lock(mutex());
    *rows = index().Scan(position, kAtOnce, keys.data(), numbers.data());
    for (size_t i = 0; i < *rows; ++i) {
      numbers[i] = PlaceOf(numbers[i]);
      Prefetch(numbers[i]);
    }
    for (size_t i = 0; i < *rows; ++i) {
      if (!Intact(keys[i], numbers[i])) keys[damaged++] = keys[i];
    }
  }
  if (damaged > 0) {
    const std::unique_lock<FairSharedMutex> lock(mutex());
    for (size_t i = 0; i < damaged; ++i) in_pass_ = CheckQuietly(keys[i]) && in_pass_;
  }
  if (*rows == 0 && in_pass_) unchecked_ = false;
  return *rows > 0;
}

// False where the storage has no room to write down what is wrong: the row stays, to be found again.
bool SlotStore::CheckQuietly(Key key) noexcept {
  try {
    uint32_t number = kNoRow;
    index().Find(&key, 1, &number);
    if (number != kNoRow) CheckRow(key, number);
    return true;
  } catch (const StorageError&) {
    return false;
  }
}

void SlotStore::CheckRow(Key key, uint32_t number) {
  const uint32_t slot = PlaceOf(number);
  if (Intact(key, slot)) return;
  OrStorageError([&] { ReserveCopy(); });
  if (RepairSlot(key, slot)) return;
  if ((number & kCopyBit) == 0) return Quarantine(key, number);
  (void)Replace(key, number);  // its copy is right
  if (changes_.Has(slot)) NoteChanged(&key, &number, 1);
  Report(Damage::Kind::kRepaired, key, slot);
}

// Repairs a slot that is not intact in its key or in one bit of its state. ReserveCopy() must have come
// before.
bool SlotStore::RepairSlot(Key key, uint32_t number) noexcept {
  if (!RepairMeta(key, number, row(number))) return false;
  Report(Damage::Kind::kRepaired, key, number);
  return true;
}

bool SlotStore::RepairMeta(Key key, uint32_t number, const std::byte* content) noexcept {
  SlotMeta& of = metas_[number >> layout().shift][number & mask()];
  const uint64_t wrong = of.state;
  // Of these 65 states, one is right by chance in 2^26 cases.
  for (int bit = -1; bit < 64; ++bit) {
    const uint64_t state = bit < 0 ? wrong : wrong ^ uint64_t{1} << bit;
    if (state == 0 || state != SlotState(EpochOf(state), key, content, layout().row_bytes)) continue;
    epoch_changes_.repaired.push_back(number);
    of.key = key;
    __atomic_store_n(&of.state, state, __ATOMIC_RELEASE);
    return true;
  }
  return false;
}

void SlotStore::RequireFewDamaged(uint64_t more) const { pool_->RequireFewDamaged(more, size()); }

void SlotStore::Report(Damage::Kind kind, Key key, uint32_t number) const noexcept {
  pool_->Report(kind, key, row(number));
}

void SlotStore::Erase(Key key, uint32_t number) noexcept {
  --size_;
  const std::byte* content = row(number);
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
    epoch_changes_.tombstones.push_back(number);  // itself; the key may have older slots
    return;
  }
  // A damaged row may go, but what checkpoints have of it is in its metadata.
  if (!Fits(key, number, content) && !RepairMeta(key, number, content)) pool_->Suspect();
  epoch_changes_.tombstones.push_back(Take(key, false));
  epoch_changes_.retired.push_back(number);
}

SlotStore::Changes SlotStore::Close() noexcept {
  const std::lock_guard<std::mutex> lock(given_mutex_);  // against room()
  ++epoch_;
  // Their slots were written, so they must be something: tombstones of keys that they may hide nothing of.
  epoch_changes_.tombstones.insert(epoch_changes_.tombstones.end(), dropped_.begin(), dropped_.end());
  dropped_.clear();
  evicted_ = std::max(EvictedNow(), evicted_ / 2);
  if (changed()) {
    copied_ = std::max(copied_now_, copied_ - Expected(copied_));
    seen_size_ = std::min(size_, std::max(seen_size_, opened_size_));
  }
  opened_size_ = size_;
  copied_now_ = 0;
  limit_ = 0;
  return std::exchange(epoch_changes_, Changes{});
}

}  // namespace oe
