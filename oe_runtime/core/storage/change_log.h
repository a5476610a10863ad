#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <unordered_set>
#include <vector>

#include "oe_runtime/core/common/shard.h"

namespace oe {

// What happened to the rows of one internal shard since Start(): a bit per row, which stays in the
// processor's cache, a list of the changed keys, so that a save of few rows need not look at all of them, and
// one of erased keys. Before Start(), and when the list outgrows a whole save,
// nothing is known. Not thread-safe.
class ChangeLog {
 public:
  bool known() const noexcept { return known_; }
  // Whether it is known that nothing happened.
  bool empty() const noexcept {
    if (!known_ || !erased_.empty() || !keys_.empty()) return false;
    return (lists_ && listed_.empty()) ||  // without a look at the bits of all rows
           std::all_of(written_.begin(), written_.end(), [](uint64_t word) { return word == 0; });
  }
  // Forgets everything and begins.
  void Start() noexcept {
    known_ = true;
    written_.assign(written_.size(), 0);
    std::vector<Key>().swap(erased_);
    keys_.clear();
    std::vector<Key>().swap(listed_);
    lists_ = true;
  }

  // The row of that number was written, or the number went to another key.
  void Changed(uint32_t number) noexcept {
    lists_ = false;
    (void)Note(number);
  }
  // The same of the row of `key`, which has the number until Freed(); `rows` there are. Keys are listed as
  // long as they are few of the rows.
  void Changed(Key key, uint32_t number, uint64_t rows) noexcept {
    if (!Note(number) || !lists_) return;
    try {
      if (listed_.size() <= rows / kFewOfRows + kFewKeys) return listed_.push_back(key);
    } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the bits are there
    }
    lists_ = false;
    std::vector<Key>().swap(listed_);
  }
  void Freed(uint32_t number) noexcept {
    if (Has(number)) written_[number / 64] &= ~(uint64_t{1} << number % 64);
  }
  // The keys whose rows were written, in their order, and perhaps some that have no row any more; nothing if
  // they are not listed.
  std::optional<std::vector<Key>> Listed() const {
    if (!lists_) return std::nullopt;
    std::vector<Key> keys(listed_);
    keys.insert(keys.end(), keys_.begin(), keys_.end());
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    return keys;
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
  static constexpr uint64_t kFewOfRows = 8;

  // Whether that number was not noted before.
  bool Note(uint32_t number) noexcept {
    if (!known_) return false;
    const size_t word = number / 64;
    if (word >= written_.size() && !Grow(word)) return false;
    const uint64_t bit = uint64_t{1} << number % 64;
    const bool is_new = (written_[word] & bit) == 0;
    written_[word] |= bit;
    return is_new;
  }
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
    std::vector<Key>().swap(listed_);
    lists_ = false;
  }

  bool known_ = false;
  bool lists_ = false;  // whether every changed key is in listed_ or keys_
  std::vector<uint64_t> written_;
  std::unordered_set<Key> keys_;
  std::vector<Key> erased_;
  std::vector<Key> listed_;
};

}  // namespace oe
