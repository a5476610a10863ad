#pragma once

#include <algorithm>
#include <array>
#include <bitset>
#include <memory>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <string>
#include <utility>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/fair_shared_mutex.h"
#include "oe_runtime/core/common/prefetch.h"
#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/storage/change_log.h"
#include "oe_runtime/core/storage/slot_store.h"

namespace oe {

// One internal shard of a table: keys to rows. The caller holds mutex(): shared to read, exclusive to change.
// Several at once: in the order of the shards.
class RowMap {
 public:
  // `store` must outlive the map.
  RowMap(std::unique_ptr<Index> index, RowStore* store)
      : index_(std::move(index)),
        store_(store),
        slots_(store->slots()),
        cache_(slots_ == nullptr ? nullptr : slots_->cache()) {}

  FairSharedMutex& mutex() const { return mutex_; }

  // Whether the store counts the keys of Find(), so that each is to be looked up as often as it is asked for.
  bool counts_reads() const noexcept { return cache_ != nullptr; }
  // rows[i] = the row of keys[i], or nullptr.
  void Find(const Key* keys, size_t n, const std::byte** rows) const noexcept {
    std::array<uint32_t, RowCache::kMostReads> numbers;  // NOLINT(cppcoreguidelines-pro-type-member-init)
    for (size_t begin = 0; begin < n; begin += numbers.size()) {
      const size_t size = std::min(numbers.size(), n - begin);
      index_->Find(keys + begin, size, numbers.data());
      if (cache_ != nullptr) cache_->NoteReads(keys + begin, numbers.data(), size);
      for (size_t i = 0; i < size; ++i) {
        rows[begin + i] = numbers[i] == kNoRow ? nullptr : row(numbers[i]);
      }
    }
  }

  // numbers[i] = the number of the row of keys[i], which may be written until the next checkpoint of the
  // store, or an Upkeep() between, which moves() shows; a missing row is made by `fill(key, row)`, which does
  // not throw. Throws StorageError; then each key either has a filled row or none.
  template <typename Fill>
  void FindOrAdd(const Key* keys, size_t n, uint32_t* numbers, const Fill& fill) {
    for (size_t begin = 0; begin < n; begin += kAtOnce) {
      const size_t end = std::min(begin + kAtOnce, n);
      FindWritable(keys + begin, end - begin, numbers + begin);
      for (size_t i = begin; i < end; ++i) {
        if (numbers[i] != kNoRow) continue;
        index_->Find(&keys[i], 1, &numbers[i]);  // the key may have come earlier in this batch
        if (numbers[i] != kNoRow) continue;
        Reserve(keys[i]);
        numbers[i] = store_->Add(keys[i]);
        fill(keys[i], row(numbers[i]));
        index_->Add(keys[i], numbers[i]);
        Changed(&numbers[i], 1);
      }
    }
  }

  // numbers[i] = the number of the row of keys[i], which may be written as above, or kNoRow. Throws
  // StorageError.
  void FindWritable(const Key* keys, size_t n, uint32_t* numbers) {
    for (size_t begin = 0; begin < n; begin += kAtOnce) {
      const size_t size = std::min(kAtOnce, n - begin);
      index_->Find(keys + begin, size, numbers + begin);
      if (slots_ != nullptr) {
        try {
          MakeWritable(keys + begin, size, numbers + begin);
        } catch (...) {
          Changed(numbers + begin, size);  // some have other numbers now
          throw;
        }
      }
      Changed(numbers + begin, size);
    }
  }

  // Removes a key, leaving what its store needs to remember that (RowStore::Erase). False for a key without
  // a row. Throws StorageError.
  bool Erase(Key key) {
    uint32_t number = kNoRow;
    index_->Find(&key, 1, &number);
    if (number == kNoRow) return false;
    Erase(key, number);
    return true;
  }
  void Erase(Key key, uint32_t number) {
    OrStorageError([&] { store_->ReserveErase(number); });
    Forget(key, number);
  }

  // Erases the rows for which wants(key, row) among about `most` keys of the range from *position on (0 at
  // first), which moves on; false when there are no more keys. Rows that come or go between calls may be
  // missed. Throws StorageError.
  template <typename Wants>
  bool EraseIf(const Index::Range& range, uint64_t* position, size_t most, const Wants& wants) {
    std::array<Key, kAtOnce> keys{};
    std::array<uint32_t, kAtOnce> numbers{};
    for (size_t seen = 0; seen < most;) {
      const uint64_t start = *position;
      const size_t found = index_->Scan(range, position, kAtOnce, keys.data(), numbers.data());
      if (found == 0) return false;
      for (size_t i = 0; i < found; ++i) oe::Prefetch(row(numbers[i]));
      bool erased = false;
      for (size_t i = 0; i < found; ++i) {
        if (!wants(keys[i], static_cast<const std::byte*>(row(numbers[i])))) continue;
        Erase(keys[i], numbers[i]);
        erased = true;
      }
      if (erased) *position = start;  // the place of an erased key may have another one now
      seen += found;
    }
    return true;
  }

  // Lets the cache of the store, if it has one, take in what was read (row_cache.h). The caller does not hold
  // mutex().
  void Upkeep() noexcept {
    while (cache_ != nullptr && cache_->wants_upkeep()) {
      const std::unique_lock<FairSharedMutex> lock(mutex_);
      cache_->Upkeep(index_.get());
      for (const Key key : cache_->TakeDamaged()) CheckQuietly(key);
    }
  }

  // Checks the rows of some keys from *position on (0 at first), which moves on, against their checksums, and
  // does what CheckRow() does about those that are damaged; false when there are no more keys. Rows that come
  // or go between calls may be missed. *rows are how many it was. The caller does not hold mutex().
  bool Scrub(uint64_t* position, uint64_t* rows) noexcept {
    std::array<Key, kAtOnce> keys{};
    std::array<uint32_t, kAtOnce> numbers{};
    size_t damaged = 0;
    {
      const std::shared_lock<FairSharedMutex> lock(mutex_);
      *rows = index_->Scan(position, kAtOnce, keys.data(), numbers.data());
      for (size_t i = 0; i < *rows; ++i) {
        numbers[i] = PlaceOf(numbers[i]);
        slots_->PrefetchRow(numbers[i]);
        slots_->PrefetchMeta(numbers[i]);
      }
      for (size_t i = 0; i < *rows; ++i) {
        if (!slots_->Intact(keys[i], numbers[i])) keys[damaged++] = keys[i];
      }
    }
    if (damaged > 0) {
      const std::unique_lock<FairSharedMutex> lock(mutex_);
      for (size_t i = 0; i < damaged; ++i) CheckQuietly(keys[i]);
    }
    return *rows > 0;
  }
  // Whether the row that a key has is what was written; the number is that of the key.
  bool Intact(Key key, uint32_t number) const noexcept {
    return slots_ == nullptr || (number & kCopyBit) != 0 || slots_->Intact(key, number);
  }
  // A damaged row is repaired where that is possible, and otherwise quarantined: the key has no row any more.
  // Where the storage has no room to write that down, the row stays, to be found again.
  void CheckQuietly(Key key) noexcept {
    try {
      CheckRow(key);
    } catch (const StorageError&) {  // NOLINT(bugprone-empty-catch): see above
    }
  }
  // The same, throwing StorageError.
  void CheckRow(Key key) {
    uint32_t number = kNoRow;
    index_->Find(&key, 1, &number);
    if (number == kNoRow || slots_->Intact(key, PlaceOf(number))) return;
    OrStorageError([&] { slots_->ReserveCopy(); });
    if (RepairMeta(key, PlaceOf(number))) return;
    if ((number & kCopyBit) == 0) return Quarantine(key, number);
    const uint32_t damaged = PlaceOf(number);
    (void)slots_->Replace(key, number);  // its copy is right
    if (changes_.Has(damaged)) Changed(&number, 1);
    slots_->Report(Damage::Kind::kRepaired, key, damaged);
  }
  // Changes when rows have other numbers than before, because they were taken into the cache or put out.
  uint64_t moves() const noexcept { return cache_ == nullptr ? 0 : cache_->moves(); }
  // The numbers that the rows of keys[n] have now, which were made writable since the last checkpoint; kNoRow
  // stays.
  void FindAgain(const Key* keys, size_t n, uint32_t* numbers) noexcept {
    std::array<uint32_t, kAtOnce> now{};
    for (size_t begin = 0; begin < n; begin += kAtOnce) {
      const size_t size = std::min(kAtOnce, n - begin);
      index_->Find(keys + begin, size, now.data());
      for (size_t i = 0; i < size; ++i) {
        uint32_t& number = numbers[begin + i];
        if (number == kNoRow) continue;
        number = slots_->Writable(now[i]) ? now[i] : slots_->Replace(keys[begin + i], now[i]);
      }
      Changed(numbers + begin, size);
    }
  }
  // To be held, beside mutex(), to write to rows.
  std::unique_lock<std::mutex> LockCopies() {
    return cache_ == nullptr ? std::unique_lock<std::mutex>() : std::unique_lock(cache_->mutex());
  }

  // A row that is read in a moment, and what Intact() needs of it.
  void Prefetch(uint32_t number) const noexcept {
    store_->PrefetchRow(number);
    if (slots_ != nullptr && (number & kCopyBit) == 0) slots_->PrefetchMeta(number);
  }
  std::byte* row(uint32_t number) const noexcept { return store_->row(number); }
  uint64_t size() const noexcept { return store_->size(); }
  // For rows in a pool.
  PoolRoom room() const { return slots_->room(); }
  // Whether anything changed since the last checkpoint of the store, or since there is none.
  bool changed() const noexcept { return slots_ == nullptr || slots_->changed(); }
  // Since the last save of the table; by PlaceOf().
  ChangeLog& changes() noexcept { return changes_; }
  const ChangeLog& changes() const noexcept { return changes_; }
  uint64_t index_bytes() const noexcept { return index_->bytes(); }
  // The number that a row keeps when it is taken into the cache or put out.
  uint32_t PlaceOf(uint32_t number) const noexcept {
    return cache_ != nullptr && (number & kCopyBit) != 0 ? cache_->frame(number).slot : number;
  }
  // As Index::Scan.
  size_t Scan(uint64_t* position, size_t max, Key* keys, uint32_t* numbers) const noexcept {
    return index_->Scan(position, max, keys, numbers);
  }

 private:
  static constexpr size_t kAtOnce = 64;

  void Changed(const uint32_t* numbers, size_t n) noexcept {
    if (!changes_.known()) return;
    for (size_t i = 0; i < n; ++i) {
      if (numbers[i] != kNoRow) changes_.Changed(PlaceOf(numbers[i]));
    }
  }

  void Reserve(Key key) {
    OrStorageError([&] {
      index_->Reserve(key);
      store_->Reserve();
    });
  }

  template <typename Work>
  void OrStorageError(const Work& work) const {
    try {
      work();
    } catch (const std::bad_alloc&) {
      throw StorageError("no memory for an index of more than " + std::to_string(store_->size()) +
                         " keys in a sixteenth of a table; use more servers");
    }
  }

  bool RepairMeta(Key key, uint32_t slot) noexcept {
    if (!slots_->RepairMeta(key, slot)) return false;
    slots_->Report(Damage::Kind::kRepaired, key, slot);
    return true;
  }

  void Forget(Key key, uint32_t number) noexcept {
    store_->Erase(key, number);
    index_->Erase(key);
    changes_.Erased(key, store_->size());
  }

  // Takes a slot as an update does, of which this may be a part, not as an eviction.
  void Quarantine(Key key, uint32_t number) {
    OrStorageError([&] { slots_->ReserveQuarantine(); });
    Forget(key, number);
    slots_->Report(Damage::Kind::kQuarantined, key, number);
  }

  // Replaces rows of earlier epochs by copies. A damaged row has none, which would have a right checksum: its
  // key gets kNoRow.
  void MakeWritable(const Key* keys, size_t n, uint32_t* numbers) {
    std::array<uint32_t, kAtOnce> old;  // NOLINT(cppcoreguidelines-pro-type-member-init)
    size_t count = 0;
    for (size_t i = 0; i < n; ++i) {
      if (numbers[i] != kNoRow) slots_->PrefetchWritable(numbers[i]);
    }
    for (size_t i = 0; i < n; ++i) {
      if (numbers[i] == kNoRow || slots_->Writable(numbers[i])) continue;
      Prefetch(numbers[i]);
      old[count++] = static_cast<uint32_t>(i);
    }
    std::bitset<256> replaced;  // of numbers, by their lowest bits
    for (size_t at = 0; at < count; ++at) {
      const uint32_t i = old[at];
      const uint32_t number = numbers[i];
      if (replaced[number % replaced.size()]) {  // the key may have come earlier in this batch
        index_->Find(&keys[i], 1, &numbers[i]);
        if (numbers[i] == kNoRow || slots_->Writable(numbers[i])) continue;
      }
      replaced.set(number % replaced.size());
      OrStorageError([&] { slots_->ReserveCopy(); });
      if (!Intact(keys[i], number) && !RepairMeta(keys[i], number)) {
        Quarantine(keys[i], number);
        numbers[i] = kNoRow;
        continue;
      }
      numbers[i] = slots_->Replace(keys[i], number);
      if (numbers[i] != number) index_->Set(keys[i], numbers[i]);
    }
  }

  mutable FairSharedMutex mutex_;
  const std::unique_ptr<Index> index_;
  RowStore* const store_;
  ChangeLog changes_;
  SlotStore* const slots_;  // store_, if its rows must be asked for before they are written
  RowCache* const cache_;   // of slots_, if it has one
};

}  // namespace oe
