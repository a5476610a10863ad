#include "oe_runtime/core/table/gradients.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

namespace oe {
namespace {

// Not finite are those whose exponents have all bits set. Integer operations, eight floats at a time.
bool PieceIsFinite(const float* values, size_t n) noexcept {
  constexpr uint32_t kInfinity = 0x7F800000;
  uint32_t largest = 0;
  for (size_t i = 0; i < n; ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, values + i, sizeof(bits));
    largest = std::max(largest, bits & 0x7FFFFFFFU);
  }
  return largest < kInfinity;
}

}  // namespace

bool AllFinite(const float* values, size_t n, Executor* executor) {
  constexpr size_t kPiece = size_t{1} << 16;
  if (executor == nullptr || n <= kPiece) return PieceIsFinite(values, n);
  std::atomic<bool> finite{true};
  executor->ParallelFor((n + kPiece - 1) / kPiece, [&](size_t piece) {
    const size_t begin = piece * kPiece;
    if (!PieceIsFinite(values + begin, std::min(kPiece, n - begin))) finite = false;
  });
  return finite;
}

size_t CountNonfinite(const float* grads, size_t n, size_t dim, Executor* executor) {
  if (AllFinite(grads, n * dim, executor)) return 0;
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) count += PieceIsFinite(grads + i * dim, dim) ? 0 : 1;
  return count;
}

GradientError Nonfinite(const TableSpec& spec, const Key* keys, size_t n, const float* grads) {
  const size_t dim = spec.dim;
  size_t first = 0;
  while (first + 1 < n && PieceIsFinite(grads + first * dim, dim)) ++first;
  return GradientError("table '" + spec.name + "': the gradient of key " +
                       std::to_string(static_cast<int64_t>(keys[first])) + " is not finite (" +
                       std::to_string(CountNonfinite(grads, n, dim)) + " of " + std::to_string(n) +
                       " keys); try a smaller learning rate, or set the table's nonfinite_gradients to "
                       "skip or pass");
}

}  // namespace oe
