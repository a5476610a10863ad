#include "oe_runtime/core/server/summed_push.h"

#include <algorithm>
#include <limits>

#include "oe_runtime/core/common/unique.h"

namespace oe {

PushPart SummedPush::Sum(const std::vector<PushPart>& parts, size_t dim, bool is_float64, bool counted) {
  size_t all = 0;
  const PushPart* only = &parts.front();
  for (const PushPart& part : parts) {
    all += part.size;
    if (part.size > 0) only = &part;
  }
  if (only->size == all) return *only;
  if (all >= size_t{1} << 31) throw SpecError("a batch has " + std::to_string(all) + " keys of all workers");

  std::vector<Key> keys;
  keys.reserve(all);
  for (const PushPart& part : parts) keys.insert(keys.end(), part.keys, part.keys + part.size);
  UniqueKeys unique = FindUnique(keys.data(), all);
  keys_ = std::move(unique.keys);
  if (counted) counts_.assign(keys_.size(), 0);
  const void* sums = is_float64 ? SumValues<double>(parts, unique.inverse, dim)
                                : SumValues<float>(parts, unique.inverse, dim);
  size_t first = 0;
  for (const PushPart& part : parts) {
    const int32_t* rows = unique.inverse.data() + first;
    for (size_t i = 0; counted && i < part.size; ++i) {
      uint32_t& count = counts_[static_cast<size_t>(rows[i])];
      const uint32_t more = part.counts == nullptr ? 1 : part.counts[i];
      count += std::min(more, std::numeric_limits<uint32_t>::max() - count);
    }
    first += part.size;
  }
  return {only->table, keys_.data(),        keys_.size(),
          sums,        only->learning_rate, counted ? counts_.data() : nullptr};
}

template <typename T>
const void* SummedPush::SumValues(const std::vector<PushPart>& parts, const std::vector<int32_t>& rows,
                                  size_t dim) {
  values_.Resize(keys_.size() * dim * sizeof(T));
  auto* sums = values_.as<T>();
  std::vector<uint8_t> seen(keys_.size());
  size_t first = 0;
  for (const PushPart& part : parts) {
    SumByRow(static_cast<const T*>(part.values), rows.data() + first, part.size, dim, sums, seen.data());
    first += part.size;
  }
  return sums;
}

}  // namespace oe
