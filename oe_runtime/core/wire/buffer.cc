#include "oe_runtime/core/wire/buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <vector>

#include "oe_runtime/core/common/pages.h"
#include "oe_runtime/core/wire/shared_memory.h"

namespace oe {
namespace {

constexpr size_t kLarge = size_t{128} << 10;  // below it, malloc is as good
constexpr size_t kLargest = std::numeric_limits<size_t>::max() / 2;

// In steps of an eighth, so that batches of about one size have blocks of the same.
size_t CapacityFor(size_t size) {
  if (size < kLarge) return RoundUp(std::max<size_t>(size, 1), Buffer::kAlignment);
  size_t step = kLarge / 8;
  while (step * 16 <= size) step *= 2;
  return RoundUp(size, size < kHugePage ? step : std::max(step, kHugePage));
}

uint8_t* Allocated(size_t capacity) {
  const bool huge = capacity >= kHugePage;
  void* const data = std::aligned_alloc(huge ? kHugePage : Buffer::kAlignment, capacity);
  if (data == nullptr) throw std::bad_alloc();
  if (huge) (void)::madvise(data, capacity, MADV_HUGEPAGE);  // a hint: without it, it is only slower
  return static_cast<uint8_t*>(data);
}

struct Block {
  uint8_t* data;
  size_t capacity;
};

class SpareBlocks {
 public:
  // A block of at least `capacity` and not much more, or nothing.
  Block Take(size_t capacity) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto best = blocks_.end();
    for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
      if (block->capacity < capacity || block->capacity / 2 > capacity) continue;
      if (best == blocks_.end() || block->capacity <= best->capacity) best = block;
    }
    if (best == blocks_.end()) return {nullptr, 0};
    const Block block = *best;
    blocks_.erase(best);
    bytes_ -= block.capacity;
    return block;
  }

  void Give(Block block) noexcept {
    std::unique_lock<std::mutex> lock(mutex_);
    if (block.capacity > Buffer::kMostSpare) {
      lock.unlock();
      return std::free(block.data);
    }
    while (count() == kMostBlocks || bytes_ + block.capacity > Buffer::kMostSpare) DropOldest();
    blocks_.push_back(block);  // there is room: see the constructor
    bytes_ += block.capacity;
  }

  void Clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (count() > 0) DropOldest();
  }

  size_t bytes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return bytes_;
  }

  SpareBlocks() { blocks_.reserve(kMostBlocks); }

 private:
  static constexpr size_t kMostBlocks = 64;
  size_t count() const { return blocks_.size(); }
  void DropOldest() {
    std::free(blocks_.front().data);
    bytes_ -= blocks_.front().capacity;
    blocks_.erase(blocks_.begin());
  }

  std::mutex mutex_;
  std::vector<Block> blocks_;  // the oldest first
  size_t bytes_ = 0;
};

// Never destroyed: arrays of Python's may outlive every other object of the process.
SpareBlocks& Spares() {
  static SpareBlocks* const spares = new SpareBlocks;
  return *spares;
}

}  // namespace

Buffer::Buffer(size_t size, const std::shared_ptr<SharedArena>& arena) {
  if (arena != nullptr && size >= SharedArena::kLeastBlock && size <= kLargest) {
    const size_t capacity = CapacityFor(size);
    data_ = arena->Take(capacity);
    if (data_ != nullptr) {
      size_ = size;
      capacity_ = capacity;
      arena_ = arena;
      return;
    }
  }
  Resize(size);
}

void Buffer::Allocate(size_t size) {
  Free();
  if (size > kLargest) throw std::bad_alloc();
  const size_t wanted = CapacityFor(size);
  Block block{nullptr, 0};
  if (wanted >= kLarge) block = Spares().Take(wanted);
  if (block.data == nullptr) block = {Allocated(wanted), wanted};
  data_ = block.data;
  capacity_ = block.capacity;
}

void Buffer::Grow(size_t size, size_t kept) {
  if (size > capacity_) {
    Buffer larger(size);
    if (kept > 0) std::memcpy(larger.data_, data_, kept);
    *this = std::move(larger);
  }
  size_ = size;
}

void Buffer::Free() noexcept {
  if (arena_ != nullptr) {
    arena_->Give(data_, capacity_);
    arena_.reset();
  } else if (capacity_ >= kLarge) {
    Spares().Give({data_, capacity_});
  } else {
    std::free(data_);
  }
  data_ = nullptr;
  size_ = capacity_ = 0;
}

size_t Buffer::Spare() { return Spares().bytes(); }

void Buffer::FreeSpare() { Spares().Clear(); }

}  // namespace oe
