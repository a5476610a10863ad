#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/fair_shared_mutex.h"
#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/storage/change_log.h"
#include "oe_runtime/core/storage/row_store.h"

namespace oe {

// One internal shard of a table: keys to rows. The caller holds mutex(): shared to read, exclusive to change.
// Several at once: in the order of the shards.
class RowMap {
 public:
  // `store` must outlive the map.
  RowMap(std::unique_ptr<Index> index, RowStore* store) : index_(index.get()), store_(store) {
    (void)store->UseIndex(std::move(index));
    store->changes() = ChangeLog();
  }
  RowMap(const RowMap&) = delete;
  RowMap& operator=(const RowMap&) = delete;

  FairSharedMutex& mutex() const { return store_->mutex(); }
  // What has no word for keys: pins, upkeep, caches, damage.
  RowStore& store() const noexcept { return *store_; }

  // rows[i] = the row of keys[i], or nullptr. As RowStore::Rows, `reads` included.
  void Find(const Key* keys, size_t n, const std::byte** rows, LogReads* reads = nullptr) const {
    std::array<uint32_t, RowStore::kMostReads> numbers;  // NOLINT(cppcoreguidelines-pro-type-member-init)
    for (size_t begin = 0; begin < n; begin += numbers.size()) {
      const size_t size = std::min(numbers.size(), n - begin);
      index_->Find(keys + begin, size, numbers.data());
      store_->NoteReads(keys + begin, numbers.data(), size);
      store_->Rows(keys + begin, numbers.data(), size, rows + begin, reads);
    }
  }
  // As RowStore::ReadAhead. Looks at some of the keys, and returns at how many.
  size_t ReadAhead(const Key* keys, size_t n, LogReads* reads) const {
    std::array<uint32_t, kAtOnce> numbers;  // NOLINT(cppcoreguidelines-pro-type-member-init)
    n = std::min(n, numbers.size());
    index_->Find(keys, n, numbers.data());
    store_->ReadAhead(keys, numbers.data(), n, reads);
    return n;
  }
  // numbers[i] = that of the row of keys[i], or kNoRow. Nothing is counted as a read.
  void Numbers(const Key* keys, size_t n, uint32_t* numbers) const noexcept {
    index_->Find(keys, n, numbers);
  }
  // Appends the keys whose rows are not what was written (RowStore::Intact).
  void FindDamaged(const Key* keys, size_t n, std::vector<Key>* damaged) const {
    std::array<uint32_t, kAtOnce> numbers;  // NOLINT(cppcoreguidelines-pro-type-member-init)
    for (size_t begin = 0; begin < n; begin += kAtOnce) {
      const size_t size = std::min(kAtOnce, n - begin);
      index_->Find(keys + begin, size, numbers.data());
      for (size_t i = 0; i < size; ++i) {
        if (numbers[i] != kNoRow) store_->Prefetch(numbers[i]);
      }
      for (size_t i = 0; i < size; ++i) {
        const Key key = keys[begin + i];
        if (numbers[i] != kNoRow && !store_->Intact(key, numbers[i])) damaged->push_back(key);
      }
    }
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
          store_->Pin(numbers[i]);
          continue;
        }
        store_->OrStorageError([&] {
          index_->Reserve(keys[i]);
          store_->Reserve();
        });
        numbers[i] = store_->Add(keys[i]);
        fill(keys[i], row(numbers[i]));
        index_->Add(keys[i], numbers[i]);
        store_->NoteChanged(&keys[i], &numbers[i], 1);
      }
    }
  }

  // numbers[i] = the number of the row of keys[i], which may be written as above, or kNoRow. Throws
  // StorageError.
  void FindWritable(const Key* keys, size_t n, uint32_t* numbers) {
    for (size_t begin = 0; begin < n; begin += kAtOnce) {
      const size_t size = std::min(kAtOnce, n - begin);
      index_->Find(keys + begin, size, numbers + begin);
      try {
        store_->MakeWritable(keys + begin, size, numbers + begin);
      } catch (...) {
        store_->NoteChanged(keys + begin, numbers + begin, size);  // some have other numbers now
        throw;
      }
      store_->NoteChanged(keys + begin, numbers + begin, size);
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
    store_->OrStorageError([&] { store_->ReserveErase(number); });
    store_->Forget(key, number);
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

  // A row that a key may have is checked, and repaired or quarantined (RowStore::CheckRow). Throws
  // StorageError.
  void CheckRow(Key key) {
    uint32_t number = kNoRow;
    index_->Find(&key, 1, &number);
    if (number != kNoRow) store_->CheckRow(key, number);
  }

  std::byte* row(uint32_t number) const noexcept { return store_->row(number); }
  uint64_t size() const noexcept { return store_->size(); }
  uint64_t index_bytes() const noexcept { return index_->bytes(); }
  // As Index::Scan.
  size_t Scan(uint64_t* position, size_t max, Key* keys, uint32_t* numbers) const noexcept {
    return index_->Scan(position, max, keys, numbers);
  }
  size_t Scan(const Index::Range& range, uint64_t* position, size_t max, Key* keys,
              uint32_t* numbers) const noexcept {
    return index_->Scan(range, position, max, keys, numbers);
  }

 private:
  static constexpr size_t kAtOnce = RowStore::kMostKeys;

  Index* const index_;  // the store's
  RowStore* const store_;
};

}  // namespace oe
