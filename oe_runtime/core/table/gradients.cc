#include "oe_runtime/core/table/gradients.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

namespace oe {
namespace {

// Not finite are those whose exponents have all bits set. Integer operations, several numbers at a time.
template <typename Bits>
bool PieceIsFinite(const std::byte* values, size_t n, Bits infinity) noexcept {
  Bits largest = 0;
  for (size_t i = 0; i < n; ++i) {
    Bits bits = 0;
    std::memcpy(&bits, values + i * sizeof(bits), sizeof(bits));
    largest = std::max(largest, static_cast<Bits>(bits & ~Bits{0} >> 1));
  }
  return largest < infinity;
}

bool PieceIsFinite(Dtype dtype, const std::byte* values, size_t n) noexcept {
  if (dtype == Dtype::kFloat64) return PieceIsFinite<uint64_t>(values, n, 0x7FF0000000000000);
  return PieceIsFinite<uint32_t>(values, n, 0x7F800000);
}

}  // namespace

bool AllFinite(const TableSpec& spec, const void* grads, size_t n, Executor* executor) {
  constexpr size_t kPiece = size_t{1} << 16;
  const Dtype dtype = DtypeOf(spec);
  const auto* values = static_cast<const std::byte*>(grads);
  const size_t count = n * spec.dim;
  if (executor == nullptr || count <= kPiece) return PieceIsFinite(dtype, values, count);
  std::atomic<bool> finite{true};
  executor->ParallelFor((count + kPiece - 1) / kPiece, [&](size_t piece) {
    const size_t begin = piece * kPiece;
    const std::byte* from = values + begin * ValueBytes(dtype);
    if (!PieceIsFinite(dtype, from, std::min(kPiece, count - begin))) finite = false;
  });
  return finite;
}

size_t CountNonfinite(const TableSpec& spec, const void* grads, size_t n, Executor* executor) {
  if (AllFinite(spec, grads, n, executor)) return 0;
  const auto* values = static_cast<const std::byte*>(grads);
  const size_t bytes = spec.dim * ValueBytes(DtypeOf(spec));
  size_t count = 0;
  for (size_t i = 0; i < n; ++i) count += AllFinite(spec, values + i * bytes, 1) ? 0 : 1;
  return count;
}

void RefuseNonfinite(const TableSpec& spec, const Key* keys, size_t n, const void* values, size_t of_key,
                     const std::string& what, size_t stride, Executor* executor) {
  if (spec.nonfinite_gradients == "pass" || n * of_key == 0) return;
  const Dtype dtype = DtypeOf(spec);
  const auto* from = static_cast<const std::byte*>(values);
  const size_t bytes = of_key * ValueBytes(dtype);
  if (stride == 0) stride = bytes;
  const size_t at_once = std::max<size_t>(1, (size_t{1} << 18) / bytes);
  std::atomic<size_t> bad{n};  // the first key of the first piece that has some
  const auto check = [&](size_t piece) {
    const size_t begin = piece * at_once;
    const size_t end = std::min(n, begin + at_once);
    bool finite = true;
    if (stride == bytes) finite = PieceIsFinite(dtype, from + begin * bytes, (end - begin) * of_key);
    for (size_t i = begin; stride != bytes && finite && i < end; ++i) {
      finite = PieceIsFinite(dtype, from + i * stride, of_key);
    }
    size_t first = bad.load();
    while (!finite && begin < first && !bad.compare_exchange_weak(first, begin)) {
    }
  };
  const size_t pieces = (n + at_once - 1) / at_once;
  if (executor != nullptr && pieces > 1) {
    executor->ParallelFor(pieces, check);
  } else {
    for (size_t piece = 0; piece < pieces; ++piece) check(piece);
  }
  size_t first = bad;
  if (first == n) return;
  while (PieceIsFinite(dtype, from + first * stride, of_key)) ++first;
  throw SpecError("table '" + spec.name + "': the " + what + " of key " +
                  std::to_string(static_cast<int64_t>(keys[first])) +
                  " is not finite; give finite numbers, or set the table's nonfinite_gradients to pass");
}

GradientError Nonfinite(const TableSpec& spec, const Key* keys, size_t n, const void* grads) {
  const auto* values = static_cast<const std::byte*>(grads);
  const size_t bytes = spec.dim * ValueBytes(DtypeOf(spec));
  size_t first = 0;
  while (first + 1 < n && AllFinite(spec, values + first * bytes, 1)) ++first;
  return GradientError("table '" + spec.name + "': the gradient of key " +
                       std::to_string(static_cast<int64_t>(keys[first])) + " is not finite (" +
                       std::to_string(CountNonfinite(spec, grads, n)) + " of " + std::to_string(n) +
                       " keys); try a smaller learning rate, or set the table's nonfinite_gradients to "
                       "skip or pass");
}

}  // namespace oe
