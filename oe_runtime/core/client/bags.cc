#include "oe_runtime/core/client/bags.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/prefetch.h"

namespace oe {
namespace {

// Bags of a lookup before those of the next: enough to find its rows in the caches again, and few enough to
// find their examples' other values there.
constexpr size_t kBlock = 1024;
constexpr size_t kLeastBlock = 64;
constexpr size_t kAhead = 32;  // ids between a row's fetch into the caches and its use
// Bags between the fetch of an example's values and their use: the next example's are often in another page,
// where the processor does not look ahead by itself.
constexpr size_t kAheadBags = 16;

// Some bags of one lookup.
template <typename T>
struct BagRange {
  const int32_t* inverse;  // of the lookup
  size_t ids;              // of the lookup
  const Bags* bags;
  size_t begin, end;  // bags
  size_t dim;
};

template <typename T>
T ScaleOf(const Bags& bags, size_t ids) {
  return bags.mean && ids > 1 ? T{1} / static_cast<T>(ids) : T{1};
}

template <typename T>
void FetchValues(const T* values, size_t dim) {
  PrefetchRow(reinterpret_cast<const std::byte*>(values), dim * sizeof(T));
}

// Fetches what a later bag than `b` has in `pooled`.
template <typename T>
void FetchAhead(const BagRange<T>& piece, size_t b) {
  const size_t later = std::min(b + kAheadBags, piece.bags->count - 1);
  FetchValues(static_cast<const T*>(piece.bags->pooled) + later * piece.bags->stride, piece.dim);
}

template <typename T, size_t kDim>
void PoolPiece(const BagRange<T>& piece, const T* rows) {
  const size_t dim = kDim == 0 ? piece.dim : kDim;
  const Bags& bags = *piece.bags;
  const auto* weights = static_cast<const T*>(bags.weights);
  for (size_t b = piece.begin; b < piece.end; ++b) {
    T* __restrict to = static_cast<T*>(bags.pooled) + b * bags.stride;
    FetchAhead(piece, b);
    const auto begin = static_cast<size_t>(bags.offsets[b]);
    const auto end = static_cast<size_t>(bags.offsets[b + 1]);
    if (begin == end) {
      std::memset(to, 0, dim * sizeof(T));
      continue;
    }
    const T scale = ScaleOf<T>(bags, end - begin);
    for (size_t i = begin; i < end; ++i) {
      FetchValues(rows + static_cast<size_t>(piece.inverse[std::min(i + kAhead, piece.ids - 1)]) * dim, dim);
      const T* __restrict row = rows + static_cast<size_t>(piece.inverse[i]) * dim;
      const T weight = weights == nullptr ? scale : weights[i] * scale;
      if (i == begin) {
        for (size_t d = 0; d < dim; ++d) to[d] = weight * row[d];
      } else {
        for (size_t d = 0; d < dim; ++d) to[d] += weight * row[d];
      }
    }
  }
}

template <typename T, size_t kDim>
void SumPiece(const BagRange<T>& piece, T* sums) {
  const size_t dim = kDim == 0 ? piece.dim : kDim;
  const Bags& bags = *piece.bags;
  const auto* weights = static_cast<const T*>(bags.weights);
  for (size_t b = piece.begin; b < piece.end; ++b) {
    const T* __restrict from = static_cast<const T*>(bags.pooled) + b * bags.stride;
    FetchAhead(piece, b);
    const auto begin = static_cast<size_t>(bags.offsets[b]);
    const auto end = static_cast<size_t>(bags.offsets[b + 1]);
    const T scale = ScaleOf<T>(bags, end - begin);
    for (size_t i = begin; i < end; ++i) {
      FetchValues(sums + static_cast<size_t>(piece.inverse[std::min(i + kAhead, piece.ids - 1)]) * dim, dim);
      T* __restrict to = sums + static_cast<size_t>(piece.inverse[i]) * dim;
      const T weight = weights == nullptr ? scale : weights[i] * scale;
      for (size_t d = 0; d < dim; ++d) to[d] += weight * from[d];
    }
  }
}

// Calls function<kDim>() with the group's dim if it is a usual one, else with 0.
template <typename Function>
void WithDim(size_t dim, const Function& function) {
  switch (dim) {
    case 8:
      return function(std::integral_constant<size_t, 8>());
    case 16:
      return function(std::integral_constant<size_t, 16>());
    case 32:
      return function(std::integral_constant<size_t, 32>());
    case 64:
      return function(std::integral_constant<size_t, 64>());
    case 128:
      return function(std::integral_constant<size_t, 128>());
    default:
      return function(std::integral_constant<size_t, 0>());
  }
}

size_t MostBags(const std::vector<Bags>& bags) {
  size_t most = 0;
  for (const Bags& one : bags) most = std::max(most, one.count);
  return most;
}

template <typename T>
BagRange<T> RangeOf(const PlannedGroup& group, const std::vector<Bags>& bags, size_t lookup, size_t begin,
                    size_t end) {
  const PlannedLookup& of = group.lookups[lookup];
  return {group.inverse.data() + of.offset,  of.size,  &bags[lookup], begin,
          std::min(end, bags[lookup].count), group.dim};
}

template <typename T>
void PoolRows(const PlannedGroup& group, const T* rows, const std::vector<Bags>& bags, ThreadPool* pool) {
  constexpr size_t kPieceBytes = size_t{1} << 20;  // less is done before another thread has woken up
  const size_t most = MostBags(bags);
  const size_t size = std::clamp(most / pool->threads(), kLeastBlock, kBlock);
  const size_t blocks = (most + size - 1) / size;
  const size_t pieces = std::min(blocks, group.inverse.size() * group.row_bytes() / kPieceBytes + 1);
  pool->ParallelFor(pieces, [&](size_t piece) {
    for (size_t block = blocks * piece / pieces; block < blocks * (piece + 1) / pieces; ++block) {
      for (size_t l = 0; l < bags.size(); ++l) {
        const BagRange<T> part = RangeOf<T>(group, bags, l, block * size, (block + 1) * size);
        WithDim(group.dim, [&](auto dim) { PoolPiece<T, decltype(dim)::value>(part, rows); });
      }
    }
  });
}

// Threads take tables: these have rows of their own.
template <typename T>
void SumRows(const PlannedGroup& group, const std::vector<Bags>& bags, T* sums, ThreadPool* pool) {
  std::memset(sums, 0, group.rows * group.row_bytes());
  const size_t blocks = (MostBags(bags) + kBlock - 1) / kBlock;
  const size_t tables = group.tables.size();
  const size_t pieces = std::min<size_t>(tables, pool->threads());
  pool->ParallelFor(pieces, [&](size_t piece) {
    const size_t first = tables * piece / pieces;
    const size_t last = tables * (piece + 1) / pieces;
    for (size_t block = 0; block < blocks; ++block) {
      for (size_t l = 0; l < bags.size(); ++l) {
        if (group.lookups[l].table < first || group.lookups[l].table >= last) continue;
        const BagRange<T> part = RangeOf<T>(group, bags, l, block * kBlock, (block + 1) * kBlock);
        WithDim(group.dim, [&](auto dim) { SumPiece<T, decltype(dim)::value>(part, sums); });
      }
    }
  });
}

}  // namespace

void CheckBags(const PlannedGroup& group, const std::vector<Bags>& bags) {
  if (bags.size() != group.lookups.size()) {
    throw SpecError("bags of " + std::to_string(bags.size()) + " lookups; the group has " +
                    std::to_string(group.lookups.size()));
  }
  for (size_t l = 0; l < bags.size(); ++l) {
    const Bags& one = bags[l];
    const std::string where = "lookup " + std::to_string(group.lookups[l].lookup) + ": the offsets ";
    if (one.offsets[0] != 0)
      throw SpecError(where + "begin with " + std::to_string(one.offsets[0]) + ", not 0");
    for (size_t b = 0; b < one.count; ++b) {
      if (one.offsets[b] <= one.offsets[b + 1]) continue;
      throw SpecError(where + "go down from " + std::to_string(one.offsets[b]) + " to " +
                      std::to_string(one.offsets[b + 1]) + " at bag " + std::to_string(b));
    }
    if (one.offsets[one.count] != static_cast<int64_t>(group.lookups[l].size)) {
      throw SpecError(where + "end with " + std::to_string(one.offsets[one.count]) + "; there are " +
                      std::to_string(group.lookups[l].size) + " ids");
    }
  }
}

void PoolBags(const PlannedGroup& group, const void* rows, const std::vector<Bags>& bags, ThreadPool* pool) {
  if (group.is_float64) {
    PoolRows(group, static_cast<const double*>(rows), bags, pool);
  } else {
    PoolRows(group, static_cast<const float*>(rows), bags, pool);
  }
}

void SumBags(const PlannedGroup& group, const std::vector<Bags>& bags, void* sums, ThreadPool* pool) {
  if (group.is_float64) {
    SumRows(group, bags, static_cast<double*>(sums), pool);
  } else {
    SumRows(group, bags, static_cast<float*>(sums), pool);
  }
}

}  // namespace oe
