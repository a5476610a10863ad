#include "oe_runtime/core/spec/row_format.h"

#include "oe_runtime/core/optimizer/optimizer_spec.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {

size_t RowFormat::weight_bytes() const { return RoundUp(dim * WeightBytes(dtype), ValueBytes(dtype)); }

RowFormat FormatOf(const TableSpec& spec) {
  RowFormat format;
  format.dtype = DtypeOf(spec);
  format.state_dtype = StateDtypeOf(spec);
  format.dim = spec.dim;
  format.state_values = ValuesOf(SlotsOf(Complete(spec.optimizer), spec.dim));
  const size_t state_value = WeightBytes(format.state_dtype);
  format.state_at = RoundUp(spec.dim * WeightBytes(format.dtype), state_value);
  format.facts_at = RoundUp(format.state_at + format.state_values * state_value, ValueBytes(format.dtype));
  return format;
}

}  // namespace oe
