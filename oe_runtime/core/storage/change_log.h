#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <unordered_set>
#include <vector>

#include "oe_runtime/core/common/shard.h"

namespace oe {

// What happened to the rows of one internal shard since Start(): a bit per row, which stays in the
// processor's cache, and a list of erased keys. Before Start(), and when the list outgrows a whole save,
// nothing is known. Not thread-safe.
class ChangeLog {
 public:
  bool known() const noexcept { return known_; }
  // Whether it is known that nothing happened.
  bool empty() const noexcept {
    return known_ && erased_.empty() && keys_.empty() &&
           std::all_of(written_.begin(), written_.end(), [](uint64_t word) { return word == 0; });
  }
  // Forgets everything and begins.
  void Start() noexcept {
    known_ = true;
    written_.assign(written_.size(), 0);
    std::vector<Key>().swap(erased_);
    keys_.clear();
  }

  // The row of that number was written, or the number went to another key.
  void Changed(uint32_t number) noexcept {
    if (!known_) return;
    const size_t word = number / 64;
    if (word >= written_.size() && !Grow(word)) return;
    written_[word] |= uint64_t{1} << number % 64;
  }
  bool Has(uint32_t number) const noexcept {
    const size_t word = number / 64;
    return word < written_.size() && (written_[word] >> number % 64 & 1) != 0;
  }

  // The same by key, where rows have no numbers that they keep.
  void ChangedKey(Key key, uint64_t rows) noexcept {
    if (!known_ || keys_.count(key) > 0) return;
    if (keys_.size() > rows + kFewKeys) return Stop();
    try {
      keys_.insert(key);
    } catch (const std::bad_alloc&) {
      Stop();
    }
  }
  bool HasKey(Key key) const noexcept { return keys_.count(key) > 0; }

  // A key lost its row; `rows` are left.
  void Erased(Key key, uint64_t rows) noexcept {
    if (!known_) return;
    if (erased_.size() > rows + kFewKeys) return Stop();
    try {
      erased_.push_back(key);
    } catch (const std::bad_alloc&) {
      Stop();
    }
  }
  // May name a key twice, and keys that have a row again.
  const std::vector<Key>& erased() const noexcept { return erased_; }

 private:
  static constexpr uint64_t kFewKeys = 4096;

  bool Grow(size_t word) noexcept {
    try {
      written_.resize(word + word / 2 + 64);
      return true;
    } catch (const std::bad_alloc&) {
      Stop();
      return false;
    }
  }
  void Stop() noexcept {
    known_ = false;
    std::vector<uint64_t>().swap(written_);
    std::vector<Key>().swap(erased_);
    std::unordered_set<Key>().swap(keys_);
  }

  bool known_ = false;
  std::vector<uint64_t> written_;
  std::unordered_set<Key> keys_;
  std::vector<Key> erased_;
};

}  // namespace oe
