#include "oe_runtime/core/checkpoint/convert_rows.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/half.h"
#include "oe_runtime/core/common/params.h"
#include "oe_runtime/core/policy/eviction.h"

namespace oe {
namespace {

template <typename T>
T ReadAs(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <typename T>
void WriteAs(T value, std::byte* to) {
  std::memcpy(to, &value, sizeof(value));
}

double LargestOf(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64:
      return std::numeric_limits<double>::max();
    case Dtype::kBfloat16:
      return static_cast<double>(Bfloat16::ToFloat(0x7F7F));
    case Dtype::kFloat16:
      return static_cast<double>(Float16::ToFloat(0x7BFF));
    case Dtype::kFloat32:
      break;
  }
  return static_cast<double>(std::numeric_limits<float>::max());
}

void WriteNumber(double value, Dtype dtype, std::byte* to) {
  switch (dtype) {
    case Dtype::kFloat64:
      return WriteAs(value, to);
    case Dtype::kBfloat16:
      return WriteAs(Bfloat16::Nearest(static_cast<float>(value)), to);
    case Dtype::kFloat16:
      return WriteAs(Float16::Nearest(static_cast<float>(value)), to);
    case Dtype::kFloat32:
      break;
  }
  WriteAs(static_cast<float>(value), to);
}

}  // namespace

double NumberAt(const std::byte* from, Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat64:
      return ReadAs<double>(from);
    case Dtype::kBfloat16:
      return static_cast<double>(Bfloat16::ToFloat(ReadAs<uint16_t>(from)));
    case Dtype::kFloat16:
      return static_cast<double>(Float16::ToFloat(ReadAs<uint16_t>(from)));
    case Dtype::kFloat32:
      break;
  }
  return static_cast<double>(ReadAs<float>(from));
}

RowConverter::RowConverter(const TableSpec& from, const TableSpec& to)
    : table_(to.name),
      from_(FormatOf(from)),
      to_(FormatOf(to)),
      facts_(Eviction(to.eviction, to_.dtype, to_.dim, to_.facts_at).facts()) {}

void RowConverter::Convert(Key key, const std::byte* row, std::byte* to) const {
  std::memset(to, 0, row_bytes());
  ConvertNumbers(key, row, from_.dtype, from_.dim, to, to_.dtype);
  ConvertNumbers(key, row + from_.state_at, from_.state_dtype, from_.state_values, to + to_.state_at,
                 to_.state_dtype);
  std::memcpy(to + to_.facts_at, row + from_.facts_at, facts_.words() * sizeof(uint32_t));
}

void RowConverter::ConvertNumbers(Key key, const std::byte* row, Dtype dtype, size_t n, std::byte* to,
                                  Dtype to_dtype) const {
  const double largest = LargestOf(to_dtype);
  for (size_t i = 0; i < n; ++i) {
    const double value = NumberAt(row + i * WeightBytes(dtype), dtype);
    if (!std::isfinite(value) || std::fabs(value) > largest) {
      throw CheckpointError("table '" + table_ + "': the row of key " +
                            std::to_string(static_cast<int64_t>(key)) + " has " + NumberText(value) +
                            ", and the largest number of the new dtype is " + NumberText(largest));
    }
    WriteNumber(value, to_dtype, to + i * WeightBytes(to_dtype));
  }
}

}  // namespace oe
