#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace oe {

// Copies a row of whole 4-byte words; the two must not overlap. Short rows are the rule, and a call of memcpy
// costs as much as copying one.
inline void CopyRow(const std::byte* from, std::byte* to, size_t bytes) {
  // 32 bytes anywhere. As memcpy, GCC 12 moves 32 bytes as two halves, and twice as many stores wait for
  // their lines.
  using Vector [[gnu::vector_size(32), gnu::aligned(4), gnu::may_alias]] = int32_t;
  constexpr size_t kWord = 4;
  constexpr size_t kVector = sizeof(Vector);
  if (bytes > 8 * kVector) {
    std::memcpy(to, from, bytes);
    return;
  }
  const auto copy = [&](size_t at) {
    *reinterpret_cast<Vector*>(to + at) = *reinterpret_cast<const Vector*>(from + at);
  };
  if (bytes < kVector) {
    for (size_t at = 0; at < bytes; at += kWord) std::memcpy(to + at, from + at, kWord);
    return;
  }
  for (size_t at = 0; at + kVector < bytes; at += kVector) copy(at);
  copy(bytes - kVector);  // what is left, and some of what is there already
}

}  // namespace oe
