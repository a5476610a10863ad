// The pushes of several workers to one table as one.
#pragma once

#include <vector>

#include "oe_runtime/core/server/store.h"
#include "oe_runtime/core/wire/buffer.h"

namespace oe {

class SummedPush {
 public:
  // Gradients and counts of `parts` (not empty, all of one table with rows of `dim`), summed by key in the
  // order of the parts, so that the same parts give the same bits. What is returned points into this object,
  // or into the only part that has keys. Throws SpecError for 2^31 keys or more.
  PushPart Sum(const std::vector<PushPart>& parts, size_t dim, bool is_float64, bool counted);

 private:
  template <typename T>
  const void* SumValues(const std::vector<PushPart>& parts, const std::vector<int32_t>& rows, size_t dim);

  std::vector<Key> keys_;
  Buffer values_;
  std::vector<uint32_t> counts_;
};

}  // namespace oe
