#pragma once

#include <cstddef>
#include <cstdint>

#include "oe_runtime/core/common/dtype.h"
#include "oe_runtime/core/spec/spec.h"

namespace oe {

// Where things lie in a row: `dim` weights of the table's dtype from its first byte on; the optimizer's
// state; what eviction knows of it (policy/row_facts.h). 2 bytes of zero follow an odd number of halves where
// what is next, or the row's end, would not be aligned.
struct RowFormat {
  Dtype dtype = Dtype::kFloat32;
  Dtype state_dtype = Dtype::kFloat32;
  uint32_t dim = 0;
  size_t state_values = 0;
  size_t state_at = 0;  // bytes
  size_t facts_at = 0;

  // Of the weights as pulls return them and of a gradient: float32, but float64 for float64 tables.
  size_t value_bytes() const { return dim * ValueBytes(dtype); }
  // Of the state as reads return it and writes bring it.
  size_t state_bytes() const { return state_values * ValueBytes(dtype); }
  // Of a row without state and facts.
  size_t weight_bytes() const;
};

// Whether pulls of the table may bring its weights in two bytes each: where what keys without a row read is
// a half too. `spec` must be complete, here and below.
bool PullsHalves(const TableSpec& spec);

RowFormat FormatOf(const TableSpec& spec);

}  // namespace oe
