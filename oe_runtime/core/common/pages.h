// Sizes of memory pages, and rounding up to them.
#pragma once

#include <cstddef>

namespace oe {

inline constexpr size_t kPage = 4096;
inline constexpr size_t kHugePage = size_t{2} << 20;  // on x86-64

constexpr size_t RoundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace oe
