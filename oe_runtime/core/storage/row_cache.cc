#include "oe_runtime/core/storage/row_cache.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>
#include <thread>

#include "oe_runtime/core/common/prefetch.h"
#include "oe_runtime/core/storage/slot_store.h"

namespace oe {
namespace {

constexpr size_t kNotesAtOnce = 64;       // worked off under one lock
constexpr size_t kLeastNotes = 4096;      // that are kept; with many frames, as many
constexpr size_t kFramesAtOnce = 1024;    // looked at under one lock
constexpr size_t kWriteBacksAtOnce = 64;  // done under one lock
constexpr uint16_t kMissesToEnter = 3;    // of a row, where another one has to go for it; at most 4
constexpr uint16_t kCountBits = 3;        // of missed_times_
constexpr size_t kCountsAFrame = 4;       // as many places does missed_times_ have

}  // namespace

RowCache::RowCache(CacheMemory* memory, SlotStore* slots, std::vector<std::byte*>* blocks,
                   const RowLayout& layout)
    : slots_(slots),
      layout_(layout),
      frames_(memory, blocks, layout,
              layout.block_rows() * (sizeof(uint8_t) + kCountsAFrame * sizeof(uint16_t)) +
                  EpochMarks::BytesOf(layout.block_rows())) {}

void RowCache::NoteReads(const Key* keys, const uint32_t* numbers, size_t n) noexcept {
  // Whether a row is cached is hard to predict for the processor, so nothing branches on it; what looks like
  // a choice, the compiler may make a branch of.
  static_assert((kNoRow & kCopyBit) != 0 && (kNoRow + 1) % kCopyBit == 0);
  std::array<Key, kMostReads> missed;  // NOLINT(cppcoreguidelines-pro-type-member-init)
  size_t misses = 0;
  size_t absent = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t number = numbers[i];
    const uint32_t not_slot = number / kCopyBit;  // 0 or 1
    absent += number == kNoRow ? 1 : 0;
    missed[misses] = keys[i];
    misses += 1 - not_slot;
    uint8_t* read = read_.data() + ((number + 1) % kCopyBit & (0 - not_slot));
    // Other pulls read it too: a line that need not be written stays in all caches.
    if (__atomic_load_n(read, __ATOMIC_RELAXED) == 0) __atomic_store_n(read, uint8_t{1}, __ATOMIC_RELAXED);
  }
  frames_.CountReads(n - misses - absent, misses);
  if (misses == 0) return;
  const std::lock_guard<std::mutex> lock(missed_mutex_);
  if (missed_.size() + misses > std::max(kLeastNotes, frames_.size())) return;
  try {
    missed_.insert(missed_.end(), missed.begin(), missed.begin() + static_cast<ptrdiff_t>(misses));
  } catch (const std::bad_alloc&) {
    return;
  }
  noted_.store(missed_.size(), std::memory_order_relaxed);
}

void RowCache::Upkeep(Index* index) noexcept {
  full_ = false;
  if (frames_.wants_shrink()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Shrink(index);
  }
  std::array<Key, kNotesAtOnce> keys{};
  std::array<uint32_t, kNotesAtOnce> numbers{};
  size_t n = 0;
  {
    const std::lock_guard<std::mutex> lock(missed_mutex_);
    n = std::min(missed_.size(), keys.size());
    std::copy(missed_.end() - static_cast<ptrdiff_t>(n), missed_.end(), keys.begin());
    missed_.resize(missed_.size() - n);
    noted_.store(missed_.size(), std::memory_order_relaxed);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < n; ++i) Prefetch(MissesOf(Mix64(keys[i])));
  size_t wanted = 0;
  for (size_t i = 0; i < n; ++i) {
    if (frames_.has_free() || Grow() || MissedOften(keys[i])) keys[wanted++] = keys[i];
  }
  index->Find(keys.data(), wanted, numbers.data());
  for (size_t i = 0; i < wanted; ++i) {
    if (numbers[i] == kNoRow || (numbers[i] & kCopyBit) != 0) continue;
    slots_->PrefetchRow(numbers[i]);
    slots_->PrefetchMeta(numbers[i]);
  }
  for (size_t i = 0; i < wanted; ++i) {
    uint32_t slot = kNoRow;
    index->Find(&keys[i], 1, &slot);  // the key may have come earlier among these
    if (slot == kNoRow || (slot & kCopyBit) != 0) continue;
    if (!slots_->Intact(keys[i], slot)) {
      NoteDamaged(keys[i]);
      continue;
    }
    const uint32_t at = TakeFrame(index);
    if (at == kNoRow) return;
    frames_[at] = {keys[i], slot, 0};
    __atomic_store_n(&read_[at + 1], uint8_t{0}, __ATOMIC_RELAXED);
    std::memcpy(slots_->row(at | kCopyBit), slots_->row(slot), layout_.row_bytes);
    index->Set(keys[i], at | kCopyBit);
    ++moves_;
  }
}

void RowCache::NoteDamaged(Key key) noexcept {
  try {
    damaged_.push_back(key);
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): it is found again
  }
}

// A frame that is free; kNoRow when there is none at all.
uint32_t RowCache::TakeFrame(Index* index) noexcept {
  if (!frames_.has_free() && !Grow()) {
    if (frames_.size() == 0) return kNoRow;
    uint32_t at = frames_.Pass();
    while (__atomic_exchange_n(&read_[at + 1], uint8_t{0}, __ATOMIC_RELAXED) != 0) at = frames_.Pass();
    Evict(at, index);
  }
  return frames_.Take();
}

void RowCache::Evict(uint32_t at, Index* index) noexcept {
  WriteBack(at | kCopyBit);
  index->Set(frames_[at].key, frames_[at].slot);
  Free(at | kCopyBit);
  ++moves_;
  frames_.CountEviction();
}

void RowCache::WriteBack(uint32_t number) noexcept {
  Frame& of = frame(number);
  if (of.written == 0) return;
  std::memcpy(slots_->row(of.slot), slots_->row(number), layout_.row_bytes);
  of.written = 0;
  frames_.CountWriteBack();
}

void RowCache::Free(uint32_t number) noexcept {
  slots_->writable_copies().Clear(number % kCopyBit);
  frames_.Free(number % kCopyBit);
}

// Adds a block of frames, unless the memory is used up.
bool RowCache::Grow() noexcept {
  if (full_) return false;
  const size_t size = frames_.size() + layout_.block_rows();
  try {
    ReserveFor(&read_, size + 1);
    ReserveFor(&missed_times_, kCountsAFrame * size);
    slots_->writable_copies().Grow(size);
    full_ = !frames_.Grow();
  } catch (const std::bad_alloc&) {
    return false;
  }
  if (!full_) Resize();
  return !full_;
}

// Gives the last block of frames back.
void RowCache::Shrink(Index* index) noexcept {
  (void)frames_.Shrink([&](uint32_t at) {
    if (frames_[at].slot != kNoRow) Evict(at, index);
    return true;
  });
  Resize();
}

// What there is of each frame beside it.
void RowCache::Resize() noexcept {
  read_.resize(frames_.size() + 1);
  missed_times_.resize(kCountsAFrame * frames_.size());
}

// Notes a miss of the key, and says whether it is that of a row that was missed kMissesToEnter times lately.
// Rows that are read now and then cost no copy then, and put no other row out. Lately is until another key
// that is missed has the same place, on average after as many misses as there are places: so old counts go by
// themselves, and when other rows are read from some time on, these come in after a few misses each.
// (Counting before admission is TinyLFU's: Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache
// Admission Policy", ACM Transactions on Storage 13(4), 2017; what it compares with, the use of the row that
// would go, is in CLOCK's hand.)
bool RowCache::MissedOften(Key key) noexcept {
  if (missed_times_.empty()) return false;
  const uint64_t hash = Mix64(key);
  uint16_t& place = *MissesOf(hash);
  const auto fingerprint = static_cast<uint16_t>(hash >> 44 & ~uint64_t{kCountBits});
  const int before = (place & ~kCountBits) == fingerprint ? place & kCountBits : 0;
  const bool often = before + 1 >= kMissesToEnter;
  place = static_cast<uint16_t>(fingerprint | (often ? 0 : before + 1));
  return often;
}

// The thread that calls this comes after all others on a processor (pool_checkpoint.cc): when it is put off
// one with the lock, pushes wait until it has one again. So what takes it long, fetching rows from the pool,
// it does without the lock, and what it does with the lock is short.
void RowCache::WriteBackUpTo(uint32_t epoch) noexcept {
  std::array<size_t, kWriteBacksAtOnce> due{};
  std::array<const std::byte*, kWriteBacksAtOnce> slots{};
  bool last = false;
  for (size_t at = 0; !last; std::this_thread::yield()) {
    const auto is_due = [&](size_t frame) {
      return frames_[frame].written != 0 && frames_[frame].written <= epoch;
    };
    size_t found = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const size_t end = std::min(frames_.size(), at + kFramesAtOnce);
      for (; at < end && found < due.size(); ++at) {
        if (!is_due(at)) continue;
        slots[found] = slots_->row(frames_[at].slot);
        due[found++] = at;
      }
      last = at >= frames_.size();
    }
    if (found == 0) continue;
    for (size_t i = 0; i < found; ++i) PrefetchRow(slots[i], layout_.row_bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < found; ++i) {
      // A push may have done it, and the frame have gone, since.
      if (due[i] < frames_.size() && is_due(due[i])) WriteBack(static_cast<uint32_t>(due[i]) | kCopyBit);
    }
  }
}

}  // namespace oe
