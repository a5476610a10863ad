#pragma once

#include <algorithm>
#include <cstddef>

namespace oe {

constexpr size_t kCacheLine = 64;

// Fetches a line into the processor's caches. GCC 12 takes a function that does nothing but
// __builtin_prefetch for one without effects and drops its calls; it does not where there is an asm.
inline void Prefetch(const void* address) noexcept {
  __builtin_prefetch(address);
  asm volatile("");
}

// Fetches the lines of a row.
inline void PrefetchRow(const std::byte* row, size_t bytes) noexcept {
  // Beyond a few lines the hardware's own prefetcher has caught on.
  const size_t ahead = std::min(bytes, 8 * kCacheLine);
  for (size_t i = 0; i < ahead; i += kCacheLine) Prefetch(row + i);
  Prefetch(row + bytes - 1);
}

}  // namespace oe
