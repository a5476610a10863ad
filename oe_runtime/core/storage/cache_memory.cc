#include "oe_runtime/core/storage/cache_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <new>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {
namespace {

constexpr size_t kCacheAlignment = 256;
constexpr uint64_t kMostWanted = uint64_t{256} << 10;  // bytes that are asked for at once,
constexpr uint64_t kPartWanted = 16;                   // and the part of a small cache

std::byte* AlignUp(std::byte* address, size_t unit) {
  const auto number = reinterpret_cast<uintptr_t>(address);
  return address + (RoundUp(number, unit) - number);
}

}  // namespace

// Blocks of one size are used again for the same size only; addresses, unlike memory, are plenty.
CacheMemory::CacheMemory(uint64_t limit)
    : limit_(limit), reserved_(RoundUp(static_cast<size_t>(limit), kHugePage) * 4 + kHugePage) {
  void* memory = limit > (uint64_t{1} << 44) ? MAP_FAILED
                                             : ::mmap(nullptr, reserved_, PROT_READ | PROT_WRITE,
                                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw StorageError("no memory for a cache of " + BytesText(limit) + "; give a smaller 'cache_bytes'",
                       ENOMEM);
  }
  begin_ = static_cast<std::byte*>(memory);
  // Rows are read at random: with 4 KiB pages most reads would also miss the TLB.
  if (limit >= kHugePage) (void)::madvise(AlignUp(begin_, kHugePage), reserved_ - kHugePage, MADV_HUGEPAGE);
}

CacheMemory::~CacheMemory() { (void)::munmap(begin_, reserved_); }

std::byte* CacheMemory::Take(size_t bytes, size_t more, uint64_t held) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t counted = bytes + more;
  const bool poor = held + counted <= FairShare();
  const uint64_t wanted = wanted_;
  if (this->bytes() + counted > limit_) {
    const uint64_t most = std::max(std::min(kMostWanted, limit_ / kPartWanted), counted);
    if (poor) wanted_ = std::max(wanted, std::min(wanted + counted, most));
    return nullptr;
  }
  if (!poor && wanted > 0) return nullptr;
  std::byte* block = nullptr;
  const auto given = given_.find(bytes);
  if (given != given_.end() && !given->second.empty()) {
    block = given->second.back();
    given->second.pop_back();
  } else {
    const size_t room = RoundUp(bytes, kCacheAlignment);
    const auto offset = static_cast<size_t>(AlignUp(begin_, kHugePage) - begin_);
    if (offset + used_ + room > reserved_) return nullptr;
    block = begin_ + offset + used_;
    used_ += room;
  }
  bytes_ += counted;
  if (poor) wanted_ = wanted - std::min(wanted, counted);
  return block;
}

void CacheMemory::Give(std::byte* block, size_t bytes, size_t more) noexcept {
  // Whole pages go back to the system.
  std::byte* const first = AlignUp(block, kPage);
  const size_t whole = block + bytes > first ? static_cast<size_t>(block + bytes - first) / kPage * kPage : 0;
  if (whole > 0) (void)::madvise(first, whole, MADV_DONTNEED);
  const std::lock_guard<std::mutex> lock(mutex_);
  bytes_ -= bytes + more;
  try {
    given_[bytes].push_back(block);
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): only its addresses are lost
  }
}

}  // namespace oe
