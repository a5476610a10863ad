#include "oe_runtime/core/table/reduced_weights.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/half_packing.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {
namespace {

constexpr size_t kWordBytes = 4;  // rows are whole words

// Memory for the weights of a row, one at a time in each thread.
float* Scratch(size_t dim) {
  thread_local std::vector<float> weights;
  if (weights.size() < dim) weights.resize(dim);
  return weights.data();
}

void Narrow(const double* values, size_t n, float* weights) {
  std::transform(values, values + n, weights, [](double value) { return static_cast<float>(value); });
}

// The weights of a row of a file. float64 beyond float32's largest becomes infinity.
void ReadWeights(const RowFormat& format, const std::byte* row, float* weights) {
  switch (format.dtype) {
    case Dtype::kFloat64:
      return Narrow(reinterpret_cast<const double*>(row), format.dim, weights);
    case Dtype::kBfloat16:
      return Unpack<Bfloat16>(row, format.dim, weights);
    case Dtype::kFloat16:
      return Unpack<Float16>(row, format.dim, weights);
    case Dtype::kFloat32:
      break;
  }
  Unpack<float>(row, format.dim, weights);
}

bool IsFinite(const float* weights, size_t n) {
  constexpr uint32_t kExponent = 0x7F800000;
  bool finite = true;
  for (size_t d = 0; d < n; ++d) finite &= (BitsOf(weights[d]) & kExponent) != kExponent;
  return finite;
}

class Int8Weights final : public ReducedWeights {
 public:
  Int8Weights(const TableSpec& spec, const RowFormat& format)
      : ReducedWeights("int8", spec.name, format, RoundUp(sizeof(float) + format.dim, kWordBytes)) {}

 protected:
  bool Pack(const float* weights, std::byte* reduced) const noexcept override {
    float most = 0;
    for (size_t d = 0; d < dim(); ++d) most = std::max(most, std::fabs(weights[d]));
    const float scale = most / 127;
    const float divisor = scale > 0 ? scale : 1;
    std::memset(reduced, 0, bytes());
    std::memcpy(reduced, &scale, sizeof(scale));
    auto* const steps = reinterpret_cast<int8_t*>(reduced + sizeof(scale));
    for (size_t d = 0; d < dim(); ++d) {
      // A scale that is subnormal may be too small.
      const float rounded = std::clamp(std::nearbyint(weights[d] / divisor), -127.0F, 127.0F);
      steps[d] = static_cast<int8_t>(rounded);
    }
    return true;
  }

  void Unpack(const std::byte* reduced, float* weights) const noexcept override {
    float scale = 0;
    std::memcpy(&scale, reduced, sizeof(scale));
    const auto* const steps = reinterpret_cast<const int8_t*>(reduced + sizeof(scale));
    for (size_t d = 0; d < dim(); ++d) weights[d] = static_cast<float>(steps[d]) * scale;
  }
};

class Bfloat16Weights final : public ReducedWeights {
 public:
  Bfloat16Weights(const TableSpec& spec, const RowFormat& format)
      : ReducedWeights("bfloat16", spec.name, format, RoundUp(format.dim * sizeof(uint16_t), kWordBytes)) {}

 protected:
  bool Pack(const float* weights, std::byte* reduced) const noexcept override {
    const float largest = Bfloat16::ToFloat(0x7F7F);
    for (size_t d = 0; d < dim(); ++d) {
      if (std::fabs(weights[d]) > largest) return false;
    }
    std::memset(reduced, 0, bytes());
    PackNearest<Bfloat16>(weights, dim(), reduced);
    return true;
  }

  void Unpack(const std::byte* reduced, float* weights) const noexcept override {
    oe::Unpack<Bfloat16>(reduced, dim(), weights);
  }
};

}  // namespace

std::unique_ptr<const ReducedWeights> ReducedWeights::Create(const std::string& precision,
                                                             const TableSpec& spec) {
  if (precision.empty()) return nullptr;
  if (precision == "int8") return std::make_unique<Int8Weights>(spec, FormatOf(spec));
  if (precision == "bfloat16") return std::make_unique<Bfloat16Weights>(spec, FormatOf(spec));
  throw SpecError("storage: 'row_precision' must be int8, bfloat16 or empty, not '" + precision + "'");
}

void ReducedWeights::Reduce(Key key, const std::byte* row, std::byte* reduced) const {
  float* const weights = Scratch(dim());
  ReadWeights(format_, row, weights);
  if (IsFinite(weights, dim()) && Pack(weights, reduced)) return;
  throw CheckpointError("table '" + table_ + "': the row of key " +
                        std::to_string(static_cast<int64_t>(key)) + " has NaN or a number that rows of " +
                        precision_ + " cannot hold");
}

void ReducedWeights::Read(const std::byte* reduced, void* values) const noexcept {
  if (format_.dtype != Dtype::kFloat64) return Unpack(reduced, static_cast<float*>(values));
  float* const weights = Scratch(dim());
  Unpack(reduced, weights);
  std::copy_n(weights, dim(), static_cast<double*>(values));
}

void ReducedWeights::Round(void* values) const {
  std::vector<std::byte> reduced(bytes_);
  float* weights = static_cast<float*>(values);
  if (format_.dtype == Dtype::kFloat64) {
    weights = Scratch(dim());
    Narrow(static_cast<const double*>(values), dim(), weights);
  }
  if (Pack(weights, reduced.data())) Read(reduced.data(), values);
}

}  // namespace oe
