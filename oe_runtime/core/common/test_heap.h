#pragma once

#include <malloc.h>

#include <cstdint>

namespace oe {

// For tests only: bytes that malloc has given to this process and that it has not freed, in heaps and in
// mappings of their own. 0 under sanitizers, which have a malloc of theirs.
inline uint64_t HeapBytes() {
#if __GLIBC_PREREQ(2, 33)
  const struct mallinfo2 info = ::mallinfo2();
  return info.uordblks + info.hblkhd;
#else
  const struct mallinfo info = ::mallinfo();
  return uint64_t{static_cast<unsigned>(info.uordblks)} + static_cast<unsigned>(info.hblkhd);
#endif
}

}  // namespace oe
