#include "oe_runtime/core/spec/row_format.h"

#include "oe_runtime/core/common/half.h"
#include "oe_runtime/core/common/pages.h"
#include "oe_runtime/core/optimizer/optimizer_spec.h"

namespace oe {

size_t RowFormat::weight_bytes() const { return RoundUp(dim * WeightBytes(dtype), ValueBytes(dtype)); }

bool PullsHalves(const TableSpec& spec) {
  const Dtype dtype = DtypeOf(spec);
  if (!IsHalf(dtype) || spec.admission.name.empty()) return IsHalf(dtype);
  const auto value = static_cast<float>(spec.admission.params.at("default_value"));
  return (dtype == Dtype::kBfloat16 ? Bfloat16::ToFloat(Bfloat16::Nearest(value))
                                    : Float16::ToFloat(Float16::Nearest(value))) == value;
}

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
