#ifndef OE_CORE_TABLE_AHEAD_H_
#define OE_CORE_TABLE_AHEAD_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <new>
#include <vector>

#include "oe_runtime/core/common/shard.h"

namespace oe {

// Keys of rows of one internal shard that were pulled to be pushed and cannot be written where they are
// (SlotStore::Writable): what Upkeep() can move while the worker computes, so that the push need not. Forgets
// what does not fit, as the push moves what nobody has. Thread-safe.
class KeysAhead {
 public:
  bool any() const noexcept { return size_.load(std::memory_order_relaxed) > 0; }

  void Add(const Key* keys, size_t n) noexcept {
    if (n == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (keys_.size() + n > kMost) return;
    try {
      keys_.insert(keys_.end(), keys, keys + n);
    } catch (const std::bad_alloc&) {
      return;
    }
    size_.store(keys_.size(), std::memory_order_relaxed);
  }

  // Takes out at most so many; how many.
  size_t Take(Key* keys, size_t most) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    const size_t n = std::min(keys_.size(), most);
    std::copy(keys_.end() - static_cast<ptrdiff_t>(n), keys_.end(), keys);
    keys_.resize(keys_.size() - n);
    size_.store(keys_.size(), std::memory_order_relaxed);
    return n;
  }

 private:
  static constexpr size_t kMost = 8192;

  std::mutex mutex_;
  std::vector<Key> keys_;
  std::atomic<size_t> size_{0};
};

}  // namespace oe

#endif  // OE_CORE_TABLE_AHEAD_H_
