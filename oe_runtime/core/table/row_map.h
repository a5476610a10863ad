#ifndef OE_CORE_TABLE_ROW_MAP_H_
#define OE_CORE_TABLE_ROW_MAP_H_

#include <algorithm>
#include <array>
#include <memory>
#include <new>
#include <shared_mutex>
#include <string>
#include <utility>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/storage/slot_store.h"

namespace oe {

// One internal shard of a table: keys to rows. The caller holds mutex(): shared to read, exclusive to change.
class RowMap {
 public:
  // `store` must outlive the map.
  RowMap(std::unique_ptr<Index> index, RowStore* store)
      : index_(std::move(index)), store_(store), slots_(store->slots()) {}

  std::shared_mutex& mutex() const { return mutex_; }

  // rows[i] = the row of keys[i], or nullptr.
  void Find(const Key* keys, size_t n, const float** rows) const noexcept {
    std::array<uint32_t, kAtOnce> numbers{};
    for (size_t begin = 0; begin < n; begin += kAtOnce) {
      const size_t size = std::min(kAtOnce, n - begin);
      index_->Find(keys + begin, size, numbers.data());
      for (size_t i = 0; i < size; ++i) {
        rows[begin + i] = numbers[i] == kNoRow ? nullptr : row(numbers[i]);
      }
    }
  }

  // numbers[i] = the number of the row of keys[i], which may be written until the next checkpoint of the
  // store; a missing row is made by `fill(key, row)`, which does not throw. Throws StorageError; then each
  // key either has a filled row or none.
  template <typename Fill>
  void FindOrAdd(const Key* keys, size_t n, uint32_t* numbers, const Fill& fill) {
    for (size_t begin = 0; begin < n; begin += kAtOnce) {
      const size_t end = std::min(begin + kAtOnce, n);
      index_->Find(keys + begin, end - begin, numbers + begin);
      if (slots_ != nullptr) MakeWritable(keys + begin, end - begin, numbers + begin);
      for (size_t i = begin; i < end; ++i) {
        if (numbers[i] != kNoRow) continue;
        index_->Find(&keys[i], 1, &numbers[i]);  // the key may have come earlier in this batch
        if (numbers[i] != kNoRow) continue;
        Reserve(keys[i]);
        numbers[i] = store_->Add(keys[i]);
        fill(keys[i], row(numbers[i]));
        index_->Add(keys[i], numbers[i]);
      }
    }
  }

  // Removes a key, leaving what its store needs to remember that (SlotStore::Erase). False for a key without
  // a row. Throws StorageError.
  bool Erase(Key key) {
    uint32_t number = kNoRow;
    index_->Find(&key, 1, &number);
    if (number == kNoRow) return false;
    Reserve(key);
    slots_->Erase(key, number);
    index_->Erase(key);
    return true;
  }

  float* row(uint32_t number) const noexcept { return reinterpret_cast<float*>(store_->row(number)); }
  uint64_t size() const noexcept { return store_->size(); }
  // Whether anything changed since the last checkpoint of the store, or since there is none.
  bool changed() const noexcept { return slots_ == nullptr || slots_->changed(); }
  uint64_t index_bytes() const noexcept { return index_->bytes(); }
  // As Index::Scan.
  size_t Scan(uint64_t* position, size_t max, Key* keys, uint32_t* numbers) const noexcept {
    return index_->Scan(position, max, keys, numbers);
  }

 private:
  static constexpr size_t kAtOnce = 64;

  void Reserve(Key key) {
    try {
      index_->Reserve(key);
      store_->Reserve();
    } catch (const std::bad_alloc&) {
      throw StorageError("no memory for an index of more than " + std::to_string(store_->size()) +
                         " keys in a sixteenth of a table; use more servers");
    }
  }

  // Replaces rows of earlier epochs by copies.
  void MakeWritable(const Key* keys, size_t n, uint32_t* numbers) {
    std::array<uint32_t, kAtOnce> old{};
    size_t count = 0;
    for (size_t i = 0; i < n; ++i) {
      if (numbers[i] != kNoRow) slots_->PrefetchEpoch(numbers[i]);
    }
    for (size_t i = 0; i < n; ++i) {
      if (numbers[i] == kNoRow || slots_->Writable(numbers[i])) continue;
      __builtin_prefetch(row(numbers[i]));
      old[count++] = static_cast<uint32_t>(i);
    }
    for (size_t at = 0; at < count; ++at) {
      const uint32_t i = old[at];
      if (at > 0) index_->Find(&keys[i], 1, &numbers[i]);  // the key may have come earlier in this batch
      if (slots_->Writable(numbers[i])) continue;
      Reserve(keys[i]);
      numbers[i] = slots_->Replace(keys[i], numbers[i]);
      index_->Set(keys[i], numbers[i]);
    }
  }

  mutable std::shared_mutex mutex_;
  const std::unique_ptr<Index> index_;
  RowStore* const store_;
  SlotStore* const slots_;  // store_, if its rows must be asked for before they are written
};

}  // namespace oe

#endif  // OE_CORE_TABLE_ROW_MAP_H_
