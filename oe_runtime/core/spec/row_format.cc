#include "oe_runtime/core/spec/row_format.h"

#include "oe_runtime/core/optimizer/optimizer_spec.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {

RowFormat FormatOf(const TableSpec& spec) {
  RowFormat format;
  format.dtype = DtypeOf(spec);
  format.dim = spec.dim;
  format.state_values = ValuesOf(SlotsOf(Complete(spec.optimizer), spec.dim));
  format.state_at = RoundUp(spec.dim * WeightBytes(format.dtype), ValueBytes(format.dtype));
  format.facts_at = format.state_at + format.state_values * ValueBytes(format.dtype);
  return format;
}

}  // namespace oe
