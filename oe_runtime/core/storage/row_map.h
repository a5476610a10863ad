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
#include "oe_runtime/core/storage/log_store.h"
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
        cache_(slots_ == nullptr ? nullptr : slots_->cache()),
        log_(store->log_store()),
        mutex_(log_ == nullptr ? own_mutex_ : log_->mutex()) {
    if (log_ != nullptr) (void)log_->UseIndex(index_.get());
  }
  ~RowMap() {
    if (log_ != nullptr) log_->ForgetIndex(index_.get());
  }
  RowMap(const RowMap&) = delete;
  RowMap& operator=(const RowMap&) = delete;

  FairSharedMutex& mutex() const { return mutex_; }
  // The store, if its rows are in DRAM only while they are used: then a call that changes rows needs
  // RowLog::Room for two appends of each key, and rows that it found stay pinned until Unpin().
  LogStore* log() const noexcept { return log_; }
  void Unpin(uint32_t* numbers, size_t n) noexcept {
    for (size_t i = 0; log_ != nullptr && i < n; ++i) {
      if (numbers[i] != kNoRow) log_->Unpin(numbers[i]);
      numbers[i] = kNoRow;
    }
  }

  // Whether the store counts the keys of Find(), so that each is to be looked up as often as it is asked for.
  bool counts_reads() const noexcept { return cache_ != nullptr; }
  // rows[i] = the row of keys[i], or nullptr. Rows that are not in DRAM come with `reads`, which must not be
  // nullptr if log() is not.
  void Find(const Key* keys, size_t n, const std::byte** rows, LogReads* reads = nullptr) const {
    std::array<uint32_t, RowCache::kMostReads> numbers;  // NOLINT(cppcoreguidelines-pro-type-member-init)
    for (size_t begin = 0; begin < n; begin += numbers.size()) {
      const size_t size = std::min(numbers.size(), n - begin);
      index_->Find(keys + begin, size, numbers.data());
      if (cache_ != nullptr) cache_->NoteReads(keys + begin, numbers.data(), size);
      if (log_ != nullptr) NoteReads(numbers.data(), size);
      Rows(keys + begin, numbers.data(), size, rows + begin, reads);
    }
  }
  // For a read that is still to come: adds the rows to `reads` that are not in DRAM; the others stay there
  // for now. Looks at some of the keys, and returns at how many. With a log.
  size_t ReadAhead(const Key* keys, size_t n, LogReads* reads) const {
    std::array<uint32_t, kAtOnce> numbers;  // NOLINT(cppcoreguidelines-pro-type-member-init)
    n = std::min(n, numbers.size());
    index_->Find(keys, n, numbers.data());
    for (size_t i = 0; i < n; ++i) {
      if (numbers[i] == kNoRow) continue;
      if ((numbers[i] & kCopyBit) != 0) {
        log_->Keep(numbers[i]);
      } else {
        reads->Add(log_, keys[i], numbers[i]);
      }
    }
    return n;
  }
  // numbers[i] = that of the row of keys[i], or kNoRow. Nothing is counted as a read.
  void Numbers(const Key* keys, size_t n, uint32_t* numbers) const noexcept {
    index_->Find(keys, n, numbers);
  }
  // Whether all keys have rows.
  bool HasAll(const Key* keys, size_t n) const noexcept {
    uint32_t number = kNoRow;
    for (size_t i = 0; i < n; ++i) {
      index_->Find(&keys[i], 1, &number);
      if (number == kNoRow) return false;
    }
    return true;
  }
  // What Find() gives for the numbers that the keys have.
  void Rows(const Key* keys, const uint32_t* numbers, size_t n, const std::byte** rows,
            LogReads* reads) const {
    for (size_t i = 0; i < n; ++i) {
      if (numbers[i] != kNoRow && log_ != nullptr && reads != nullptr && (numbers[i] & kCopyBit) == 0) {
        reads->Add(log_, keys[i], numbers[i], &rows[i]);
      } else {
        rows[i] = numbers[i] == kNoRow ? nullptr : row(numbers[i]);
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
        if (numbers[i] != kNoRow) {
          if (log_ != nullptr) log_->Pin(numbers[i]);
          continue;
        }
        Reserve(keys[i]);
        numbers[i] = store_->Add(keys[i]);
        fill(keys[i], row(numbers[i]));
        index_->Add(keys[i], numbers[i]);
        Changed(&keys[i], &numbers[i], 1);
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
          Changed(keys + begin, numbers + begin, size);  // some have other numbers now
          throw;
        }
      } else if (log_ != nullptr) {
        OrStorageError([&] {
          log_->MakeWritable(keys + begin, size, numbers + begin, [&](size_t i) {
            uint32_t slot = kNoRow;
            index_->Find(&keys[begin + i], 1, &slot);
            Quarantine(keys[begin + i], slot);
          });
        });
      }
      Changed(keys + begin, numbers + begin, size);
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

  // Erases rows among about `most` keys of the range from *position on (0 at first), which moves on; false
  // when there are no more keys. judge(keys, numbers, n, goes) sets goes[i] for the rows, at most
  // kJudgedAtOnce, that are to go; erased(i) is called for each that is gone. Rows that come or go between
  // calls may be missed. Throws StorageError.
  static constexpr size_t kJudgedAtOnce = 64;
  template <typename Judge, typename Erased>
  bool EraseIf(const Index::Range& range, uint64_t* position, size_t most, const Judge& judge,
               const Erased& erased) {
    std::array<Key, kJudgedAtOnce> keys{};
    std::array<uint32_t, kJudgedAtOnce> numbers{};
    for (size_t seen = 0; seen < most;) {
      const uint64_t start = *position;
      const size_t found = index_->Scan(range, position, kJudgedAtOnce, keys.data(), numbers.data());
      if (found == 0) return false;
      std::array<bool, kJudgedAtOnce> goes{};
      judge(keys.data(), numbers.data(), found, goes.data());
      for (size_t i = 0; i < found; ++i) {
        if (!goes[i]) continue;
        *position = start;  // the place of an erased key may have another one now
        Erase(keys[i], numbers[i]);
        erased(i);
      }
      seen += found;
    }
    return true;
  }

  // Lets the cache of the store, if it has one, take in what was read (row_cache.h). The caller does not hold
  // mutex().
  void Upkeep() noexcept {
    if (log_ != nullptr) return ShrinkQuietly();
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
    if (number == kNoRow) return;
    if (log_ != nullptr) {
      const bool in_frame = (number & kCopyBit) != 0;
      const uint32_t slot = in_frame ? log_->SlotOf(number) : number;
      if (slot == kNoRow) return;
      LogReads reads;
      reads.Add(log_, key, slot);
      reads.Start();
      reads.Wait();
      const int error = reads.entries().front().error;
      if (error == 0) return;
      if (!in_frame) {
        reads.Require();
        return Quarantine(key, number);
      }
      log_->log()->RequireBadBlocks(error);
      log_->Renew(number);
      return log_->Report(Damage::Kind::kRepaired, key, slot);
    }
    if (slots_->Intact(key, PlaceOf(number))) return;
    OrStorageError([&] { slots_->ReserveCopy(); });
    if (RepairMeta(key, PlaceOf(number))) return;
    if ((number & kCopyBit) == 0) return Quarantine(key, number);
    const uint32_t damaged = PlaceOf(number);
    (void)slots_->Replace(key, number);  // its copy is right
    if (changes_.Has(damaged)) Changed(&key, &number, 1);
    slots_->Report(Damage::Kind::kRepaired, key, damaged);
  }
  // Throws StorageError if the table may not lose so many more damaged rows (Damage::RequireFew).
  void RequireFewDamaged(uint64_t more) const {
    if (slots_ != nullptr) slots_->RequireFewDamaged(more);
    if (log_ != nullptr) log_->RequireFewDamaged(more);
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
      Changed(keys + begin, numbers + begin, size);
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
  bool changed() const noexcept {
    if (log_ != nullptr) return log_->changed();
    return slots_ == nullptr || slots_->changed();
  }
  // Whether the row was changed since the last save of the table.
  bool HasChanged(Key key, uint32_t number) const noexcept {
    return log_ != nullptr ? changes_.HasKey(key) : changes_.Has(PlaceOf(number));
  }
  // Since the last save of the table; by PlaceOf(), or by key if there is a log().
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
  size_t Scan(const Index::Range& range, uint64_t* position, size_t max, Key* keys,
              uint32_t* numbers) const noexcept {
    return index_->Scan(range, position, max, keys, numbers);
  }

 private:
  static constexpr size_t kAtOnce = 64;

  void Changed(const Key* keys, const uint32_t* numbers, size_t n) noexcept {
    if (!changes_.known()) return;
    for (size_t i = 0; i < n; ++i) {
      if (numbers[i] == kNoRow) continue;
      if (log_ != nullptr) {
        changes_.ChangedKey(keys[i], store_->size());
      } else {
        changes_.Changed(PlaceOf(numbers[i]));
      }
    }
  }

  void NoteReads(const uint32_t* numbers, size_t n) const noexcept {
    uint64_t hits = 0;
    uint64_t misses = 0;
    for (size_t i = 0; i < n; ++i) {
      if (numbers[i] == kNoRow) continue;
      const bool hit = (numbers[i] & kCopyBit) != 0 && !log_->NoteRead(numbers[i]);
      hits += hit ? 1 : 0;
      misses += hit ? 0 : 1;
    }
    log_->NoteReads(hits, misses);
  }

  // Frames beyond what the cache may have, which many rows that were used at once had taken.
  void ShrinkQuietly() noexcept {
    try {
      while (log_->wants_shrink()) {
        const RowLog::Room room = log_->log()->Reserve(log_->MostShrunk(), RowLog::Need::kWriteBack);
        const std::unique_lock<FairSharedMutex> lock(mutex_);
        if (!log_->Shrink()) return;
      }
    } catch (const StorageError&) {  // NOLINT(bugprone-empty-catch): then they stay
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
    RequireFewDamaged(1);
    if (log_ != nullptr) {
      Forget(key, number);
      return log_->Report(Damage::Kind::kQuarantined, key, number);
    }
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

  mutable FairSharedMutex own_mutex_;
  const std::unique_ptr<Index> index_;
  RowStore* const store_;
  ChangeLog changes_;
  SlotStore* const slots_;  // store_, if its rows must be asked for before they are written
  RowCache* const cache_;   // of slots_, if it has one
  LogStore* const log_;     // store_, if its rows are in DRAM only while they are used
  FairSharedMutex& mutex_;
};

}  // namespace oe
