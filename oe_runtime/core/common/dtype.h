#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace oe {

// How the weights of a table's rows are stored.
enum class Dtype { kFloat32, kFloat64, kBfloat16, kFloat16 };

inline std::optional<Dtype> ParseDtype(const std::string& name) {
  if (name == "float32") return Dtype::kFloat32;
  if (name == "float64") return Dtype::kFloat64;
  if (name == "bfloat16") return Dtype::kBfloat16;
  if (name == "float16") return Dtype::kFloat16;
  return std::nullopt;
}

inline bool IsHalf(Dtype dtype) { return dtype == Dtype::kBfloat16 || dtype == Dtype::kFloat16; }

// Bytes of a weight in a row.
inline size_t WeightBytes(Dtype dtype) { return dtype == Dtype::kFloat64 ? 8 : IsHalf(dtype) ? 2 : 4; }

// Bytes of a number that pulls and reads return and pushes and writes bring: float32, but float64 for float64
// tables.
inline size_t ValueBytes(Dtype dtype) { return dtype == Dtype::kFloat64 ? 8 : 4; }

}  // namespace oe
