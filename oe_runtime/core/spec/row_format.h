#pragma once

#include <cstddef>
#include <cstdint>

#include "oe_runtime/core/common/dtype.h"
#include "oe_runtime/core/spec/spec.h"

namespace oe {

// Where things lie in a row: `dim` weights of the table's dtype from its first byte on, with 2 bytes of zero
// behind an odd number of halves, so that what follows is aligned; the optimizer's state, float32 or (float64
// tables) float64; what eviction knows of it (policy/row_facts.h).
struct RowFormat {
  Dtype dtype = Dtype::kFloat32;
  uint32_t dim = 0;
  size_t state_values = 0;
  size_t state_at = 0;  // bytes
  size_t facts_at = 0;

  // Of the weights as pulls return them and of a gradient: float32, but float64 for float64 tables.
  size_t value_bytes() const { return dim * ValueBytes(dtype); }
  size_t state_bytes() const { return state_values * ValueBytes(dtype); }
};

// `spec` must be complete.
RowFormat FormatOf(const TableSpec& spec);

}  // namespace oe
