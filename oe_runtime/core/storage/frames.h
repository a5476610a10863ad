#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/storage/cache_memory.h"
#include "oe_runtime/core/storage/row_store.h"

namespace oe {

// Room in a vector that grows by a little again and again: a quarter more than it had, since the cache's
// memory does not count what is not used.
template <typename T>
void ReserveFor(std::vector<T>* vector, size_t size) {
  if (vector->capacity() < size) vector->reserve(std::max(size, vector->capacity() + vector->capacity() / 4));
}

// The frames for copies in DRAM of the rows of one internal shard: blocks of a CacheMemory, the list of those
// that are free, the hand of CLOCK, and the counts of what was done with them. The owner chooses which rows
// enter and which leave. `Frame` is what it knows of a frame; Frame{} is a free one. Its lock is held
// exclusively, unless a method says otherwise.
template <typename Frame>
class Frames {
 public:
  // `memory` and `blocks`, which gets the blocks of rows of `layout`, must outlive the frames. `more` bytes
  // are counted with each block, beside its frames.
  Frames(CacheMemory* memory, std::vector<std::byte*>* blocks, const RowLayout& layout, size_t more)
      : memory_(memory),
        blocks_(blocks),
        layout_(layout),
        more_(layout.block_rows() * sizeof(Frame) + more) {}
  ~Frames() {
    while (!blocks_->empty()) GiveBlock();
    if (joined_) memory_->Leave();
  }
  Frames(const Frames&) = delete;
  Frames& operator=(const Frames&) = delete;

  // The cache asks for its share of the memory from now on; otherwise from its first block on.
  void Join() noexcept {
    if (!std::exchange(joined_, true)) memory_->Join();
  }

  size_t size() const noexcept { return frames_.size(); }
  Frame& operator[](size_t at) noexcept { return frames_[at]; }
  const Frame& operator[](size_t at) const noexcept { return frames_[at]; }
  bool has_free() const noexcept { return !free_.empty(); }
  // A free frame, of which there must be one.
  uint32_t Take() noexcept {
    const uint32_t at = free_.back();
    free_.pop_back();
    rows_.fetch_add(1, std::memory_order_relaxed);
    return at;
  }
  void Free(uint32_t at) noexcept {
    frames_[at] = Frame{};
    free_.push_back(at);  // it has room for all
    rows_.fetch_sub(1, std::memory_order_relaxed);
  }
  void FreeAll() noexcept {
    free_.clear();
    std::fill(frames_.begin(), frames_.end(), Frame{});
    AddFree(0);
    rows_ = 0;
  }
  // The frame where the hand is, which moves on.
  uint32_t Pass() noexcept {
    if (hand_ >= frames_.size()) hand_ = 0;
    return hand_++;
  }

  // Adds a block of frames; with `beyond`, not of the cache's memory. False: that is used up. Throws
  // std::bad_alloc.
  bool Grow(bool beyond = false) {
    Join();
    const auto first = static_cast<uint32_t>(size());
    const size_t frames = first + layout_.block_rows();
    if (frames >= kCopyBit) return false;
    ReserveFor(blocks_, blocks_->size() + 1);
    ReserveFor(&beyond_, blocks_->size() + 1);
    ReserveFor(&frames_, frames);
    ReserveFor(&free_, frames);
    std::byte* const block =
        beyond ? static_cast<std::byte*>(::operator new[](layout_.block_bytes, kAlignment))
               : memory_->Take(layout_.block_bytes, more_, bytes_.load(std::memory_order_relaxed));
    if (block == nullptr) return false;
    blocks_->push_back(block);
    beyond_.push_back(beyond);
    beyond_blocks_ += beyond ? 1 : 0;
    frames_.resize(frames);
    AddFree(first);
    bytes_ += block_bytes();
    return true;
  }
  // Whether a block is to be given back: one beyond the memory, or of a cache that has more than its share.
  // Without the lock.
  bool wants_shrink() const noexcept {
    return beyond_blocks_ > 0 || memory_->Owes(bytes_.load(std::memory_order_relaxed));
  }
  // Gives the last block back, if there is one, once all its frames are free by evict(frame). False: that
  // could not free one.
  template <typename Evict>
  bool Shrink(const Evict& evict) noexcept {
    if (blocks_->empty()) return false;
    const auto first = static_cast<uint32_t>(size() - layout_.block_rows());
    for (uint32_t at = first; at < size(); ++at) {
      if (!evict(at)) return false;
    }
    free_.erase(std::remove_if(free_.begin(), free_.end(), [&](uint32_t at) { return at >= first; }),
                free_.end());
    frames_.resize(first);
    GiveBlock();
    return true;
  }
  // Of a block with its frames.
  size_t block_bytes() const noexcept { return layout_.block_bytes + more_; }

  // The counts. Without the lock.
  void CountReads(uint64_t hits, uint64_t misses) const noexcept {
    if (hits > 0) hits_.fetch_add(hits, std::memory_order_relaxed);
    if (misses > 0) misses_.fetch_add(misses, std::memory_order_relaxed);
  }
  void CountEviction() noexcept { evictions_.fetch_add(1, std::memory_order_relaxed); }
  void CountWriteBack() noexcept { write_backs_.fetch_add(1, std::memory_order_relaxed); }
  CacheStats stats() const noexcept { return {hits_, misses_, rows_, bytes_, evictions_, write_backs_}; }

 private:
  static constexpr std::align_val_t kAlignment{256};

  // The frames from `first` on are free, and the first of them the next to be taken.
  void AddFree(uint32_t first) noexcept {
    for (auto at = static_cast<uint32_t>(size()); at > first; --at) free_.push_back(at - 1);
  }
  void GiveBlock() noexcept {
    if (beyond_.back()) {
      ::operator delete[](blocks_->back(), kAlignment);
      --beyond_blocks_;
    } else {
      memory_->Give(blocks_->back(), layout_.block_bytes, more_);
    }
    blocks_->pop_back();
    beyond_.pop_back();
    bytes_ -= block_bytes();
  }

  CacheMemory* const memory_;
  std::vector<std::byte*>* const blocks_;
  const RowLayout layout_;
  const size_t more_;
  bool joined_ = false;
  std::vector<Frame> frames_;
  std::vector<uint32_t> free_;
  uint32_t hand_ = 0;
  std::vector<bool> beyond_;  // blocks that are not of the cache's memory
  std::atomic<uint64_t> beyond_blocks_{0};

  mutable std::atomic<uint64_t> hits_{0};
  mutable std::atomic<uint64_t> misses_{0};
  std::atomic<uint64_t> rows_{0};
  std::atomic<uint64_t> bytes_{0};
  std::atomic<uint64_t> evictions_{0};
  std::atomic<uint64_t> write_backs_{0};
};

}  // namespace oe
