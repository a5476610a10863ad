#include "oe_runtime/core/table/row_ops.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "oe_runtime/core/common/half.h"
#include "oe_runtime/core/initializer/initializer.h"
#include "oe_runtime/core/optimizer/optimizer.h"

namespace oe {
namespace {

// Rows whose weights and state are T.
template <typename T>
class PlainRows final : public RowOps {
 public:
  PlainRows(const TableSpec& spec, const RowFormat& format)
      : RowOps(format),
        optimizer_(Optimizer<T>::Create(spec.optimizer, spec.dim)),
        initializer_(Initializer::Create(spec.initializer, spec.name)) {}

  void Init(Key key, std::byte* row) const noexcept override {
    initializer_->Fill(key, At(row, 0), format().dim);
    optimizer_->InitState(At(row, format().state_at));
  }
  void ReadMissing(Key key, void* values) const noexcept override {
    initializer_->Fill(key, static_cast<T*>(values), format().dim);
  }
  void Read(const std::byte* row, void* values) const noexcept override {
    std::memcpy(values, row, format().value_bytes());
  }
  void Write(const void* values, std::byte* row) const noexcept override {
    std::memcpy(row, values, format().value_bytes());
  }
  void Update(std::byte* const* rows, const Key* /*keys*/, const void* const* gradients, size_t n,
              double learning_rate, uint64_t step) const noexcept override {
    const size_t state_at = format().state_at;
    std::array<T*, kMostRows> weights;
    std::array<T*, kMostRows> states;
    std::array<const T*, kMostRows> of_rows;
    for (size_t i = 0; i < n; ++i) {
      weights[i] = At(rows[i], 0);
      states[i] = At(rows[i], state_at);
      of_rows[i] = static_cast<const T*>(gradients[i]);
    }
    optimizer_->Apply({weights.data(), states.data(), of_rows.data(), n}, static_cast<T>(learning_rate),
                      step);
  }

 private:
  static T* At(std::byte* row, size_t bytes) { return reinterpret_cast<T*>(row + bytes); }

  const std::unique_ptr<const Optimizer<T>> optimizer_;
  const std::unique_ptr<const Initializer> initializer_;
};

// Rows whose weights are halves and whose state is float32.
template <typename Half>
class HalfRows final : public RowOps {
 public:
  HalfRows(const TableSpec& spec, const RowFormat& format)
      : RowOps(format),
        optimizer_(Optimizer<float>::Create(spec.optimizer, spec.dim)),
        initializer_(Initializer::Create(spec.initializer, spec.name)),
        stream_(Mix64(spec.initializer.seed) ^ XXH3_64bits(spec.name.data(), spec.name.size())) {}

  void Init(Key key, std::byte* row) const noexcept override {
    std::array<float, kLargestDim> weights;
    initializer_->Fill(key, weights.data(), format().dim);
    Write(weights.data(), row);
    optimizer_->InitState(State(row));
  }
  void ReadMissing(Key key, void* values) const noexcept override {
    auto* weights = static_cast<float*>(values);
    initializer_->Fill(key, weights, format().dim);
    for (size_t d = 0; d < format().dim; ++d) weights[d] = Half::ToFloat(Half::Nearest(weights[d]));
  }
  void Read(const std::byte* row, void* values) const noexcept override {
    Decode(row, static_cast<float*>(values));
  }
  void Write(const void* values, std::byte* row) const noexcept override {
    const size_t dim = format().dim;
    const auto* weights = static_cast<const float*>(values);
    uint16_t* halves = Halves(row);
    for (size_t d = 0; d < dim; ++d) halves[d] = Half::Nearest(weights[d]);
    if (dim % 2 != 0) halves[dim] = 0;
  }
  void Update(std::byte* const* rows, const Key* keys, const void* const* gradients, size_t n,
              double learning_rate, uint64_t step) const noexcept override {
    const size_t dim = format().dim;
    // So many rows at once that their weights stay in the processor's first cache, but one at least.
    const size_t most = std::clamp<size_t>(kScratch / dim, 1, kMostRows);
    std::array<float, kLargestDim> scratch;
    std::array<float*, kMostRows> weights;
    std::array<float*, kMostRows> states;
    std::array<const float*, kMostRows> of_rows;
    for (size_t begin = 0; begin < n; begin += most) {
      const size_t size = std::min(most, n - begin);
      for (size_t i = 0; i < size; ++i) {
        weights[i] = scratch.data() + i * dim;
        states[i] = State(rows[begin + i]);
        of_rows[i] = static_cast<const float*>(gradients[begin + i]);
        Decode(rows[begin + i], weights[i]);
      }
      optimizer_->Apply({weights.data(), states.data(), of_rows.data(), size},
                        static_cast<float>(learning_rate), step);
      for (size_t i = 0; i < size; ++i) Encode(weights[i], keys[begin + i], step, rows[begin + i]);
    }
  }

 private:
  static constexpr size_t kScratch = 4096;  // floats

  static uint16_t* Halves(std::byte* row) { return reinterpret_cast<uint16_t*>(row); }
  float* State(std::byte* row) const { return reinterpret_cast<float*>(row + format().state_at); }

  void Decode(const std::byte* row, float* weights) const noexcept {
    const size_t dim = format().dim;
    const uint16_t* __restrict from = reinterpret_cast<const uint16_t*>(row);
    float* __restrict to = weights;
    for (size_t d = 0; d < dim; ++d) to[d] = Half::ToFloat(from[d]);
  }

  void Encode(const float* weights, Key key, uint64_t step, std::byte* row) const noexcept {
    const uint64_t seed = Mix64(Mix64(stream_ + key) + step);
    const auto low = static_cast<uint32_t>(seed);
    const auto high = static_cast<uint32_t>(seed >> 32);
    const auto dim = static_cast<uint32_t>(format().dim);
    const float* __restrict from = weights;
    uint16_t* __restrict to = Halves(row);
    for (uint32_t d = 0; d < dim; ++d) {
      // "lowbias32" of C. Wellons (hash prospector, 2018), whose 32-bit multiplications vectorize.
      uint32_t random = low + d * 0x9E3779B9U;
      random = (random ^ random >> 16) * 0x7FEB352DU;
      random = (random ^ random >> 15 ^ high) * 0x846CA68BU;
      to[d] = Half::FromFloat(from[d], random);
    }
  }

  const std::unique_ptr<const Optimizer<float>> optimizer_;
  const std::unique_ptr<const Initializer> initializer_;
  const uint64_t stream_;
};

}  // namespace

std::unique_ptr<const RowOps> RowOps::Create(const TableSpec& spec) {
  const RowFormat format = FormatOf(spec);
  switch (format.dtype) {
    case Dtype::kFloat64:
      return std::make_unique<PlainRows<double>>(spec, format);
    case Dtype::kBfloat16:
      return std::make_unique<HalfRows<Bfloat16>>(spec, format);
    case Dtype::kFloat16:
      return std::make_unique<HalfRows<Float16>>(spec, format);
    case Dtype::kFloat32:
      break;
  }
  return std::make_unique<PlainRows<float>>(spec, format);
}

}  // namespace oe
