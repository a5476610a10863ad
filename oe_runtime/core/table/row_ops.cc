#include "oe_runtime/core/table/row_ops.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <type_traits>

#include "oe_runtime/core/common/half.h"
#include "oe_runtime/core/common/half_packing.h"
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
  void ReadState(const std::byte* row, void* values) const noexcept override {
    std::memcpy(values, row + format().state_at, format().state_bytes());
  }
  void Write(const void* values, std::byte* row) const noexcept override {
    std::memcpy(row, values, format().value_bytes());
  }
  void WriteState(const void* values, std::byte* row) const noexcept override {
    std::memcpy(row + format().state_at, values, format().state_bytes());
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

// Rows whose weights are Weight and whose state is State, one of them a half, the other a half or float.
template <typename Weight, typename State>
class PackedRows final : public RowOps {
 public:
  PackedRows(const TableSpec& spec, const RowFormat& format, bool wide)
      : RowOps(format),
        wide_(wide),
        optimizer_(Optimizer<float>::Create(spec.optimizer, spec.dim)),
        initializer_(Initializer::Create(spec.initializer, spec.name)),
        stream_(Mix64(spec.initializer.seed) ^ XXH3_64bits(spec.name.data(), spec.name.size())),
        scratch_(kSlack + (kIsHalf<Weight> ? format.dim + kSlack : 0) +
                 (kIsHalf<State> ? format.state_values : 0)) {}

  void Init(Key key, std::byte* row) const noexcept override {
    if (std::max<size_t>(format().dim, format().state_values) <= kCachedScratch) {
      return InitIn<kCachedScratch>(key, row);
    }
    InitIn<kMostScratch>(key, row);
  }
  void ReadMissing(Key key, void* values) const noexcept override {
    auto* weights = static_cast<float*>(values);
    initializer_->Fill(key, weights, format().dim);
    if constexpr (kIsHalf<Weight>) {
      for (size_t d = 0; d < format().dim; ++d) weights[d] = Weight::ToFloat(Weight::Nearest(weights[d]));
    }
  }
  void Read(const std::byte* row, void* values) const noexcept override {
    Unpack<Weight>(row, format().dim, static_cast<float*>(values));
  }
  void ReadState(const std::byte* row, void* values) const noexcept override {
    Unpack<State>(row + format().state_at, format().state_values, static_cast<float*>(values));
  }
  void Write(const void* values, std::byte* row) const noexcept override {
    PackNearest<Weight>(static_cast<const float*>(values), format().dim, row);
  }
  void WriteState(const void* values, std::byte* row) const noexcept override {
    PackNearest<State>(static_cast<const float*>(values), format().state_values, row + format().state_at);
  }
  void Update(std::byte* const* rows, const Key* keys, const void* const* gradients, size_t n,
              double learning_rate, uint64_t step) const noexcept override {
    const auto rate = static_cast<float>(learning_rate);
    if (scratch_ <= kCachedScratch) return UpdateIn<kCachedScratch>(rows, keys, gradients, n, rate, step);
    UpdateIn<kMostScratch>(rows, keys, gradients, n, rate, step);
  }

 private:
  template <size_t kSize>
  using Scratch = std::array<float, kSize>;
  static constexpr size_t kCachedScratch = 4096;  // stays in the processor's first cache
  static constexpr size_t kMostScratch = (1 + kMostSlots) * size_t{kLargestDim} + 2 * kSlack;

  template <size_t kSize>
  void InitIn(Key key, std::byte* row) const noexcept {
    std::memset(row, 0, format().facts_at);  // also what lies between
    Scratch<kSize> values;
    initializer_->Fill(key, values.data(), format().dim);
    Write(values.data(), row);
    optimizer_->InitState(values.data());
    WriteState(values.data(), row);
  }

  // Rows as floats, one at a time in the same memory.
  class Copies final : public RowCopies {
   public:
    Copies(const PackedRows& ops, std::byte* const* rows, const uint64_t* seeds, float* weights,
           float* states)
        : ops_(ops), rows_(rows), seeds_(seeds), weights_(weights), states_(states) {}

    void Load(size_t i) noexcept override {
      const RowFormat& format = ops_.format();
      if constexpr (kIsHalf<Weight>) Unpack<Weight>(rows_[i], format.dim, weights_);
      if constexpr (kIsHalf<State>) {
        Unpack<State>(rows_[i] + format.state_at, format.state_values, states_);
      }
    }
    void Store(size_t i) noexcept override {
      const RowFormat& format = ops_.format();
      const uint64_t seed = seeds_[i];
      if constexpr (kIsHalf<Weight>) Pack<Weight, false>(weights_, format.dim, seed, rows_[i]);
      if constexpr (kIsHalf<State>) {
        const auto values = static_cast<uint32_t>(format.state_values);
        Pack<State, true>(states_, values, Mix64(~seed), rows_[i] + format.state_at);
      }
    }

   private:
    const PackedRows& ops_;
    std::byte* const* const rows_;
    const uint64_t* const seeds_;
    float* const weights_;
    float* const states_;
  };

  template <size_t kSize>
  void UpdateIn(std::byte* const* rows, const Key* keys, const void* const* gradients, size_t n, float rate,
                uint64_t step) const noexcept {
    alignas(64) Scratch<kSize> scratch;
    std::fill_n(scratch.data(), scratch_, 0.0F);  // what lies between is read, too
    const size_t padded = (format().dim + kSlack - 1) / kSlack * kSlack;
    float* const states = scratch.data() + (kIsHalf<Weight> ? padded : 0);
    std::array<uint64_t, kMostRows> seeds;
    Copies copies(*this, rows, seeds.data(), scratch.data(), states);
    std::array<float*, kMostRows> weights_of;
    std::array<float*, kMostRows> states_of;
    std::array<const float*, kMostRows> gradients_of;
    for (size_t i = 0; i < n; ++i) {
      const auto place = [&](bool is_half, std::byte* of_row, float* copy) {
        return is_half ? copy : reinterpret_cast<float*>(of_row);
      };
      weights_of[i] = place(kIsHalf<Weight>, rows[i], scratch.data());
      states_of[i] = place(kIsHalf<State>, rows[i] + format().state_at, states);
      gradients_of[i] = static_cast<const float*>(gradients[i]);
      seeds[i] = Mix64(Mix64(stream_ + keys[i]) + step);
    }
    constexpr bool kIsBfloat16 = std::is_same_v<Weight, Bfloat16> && std::is_same_v<State, Bfloat16>;
    const Bfloat16Rows halves = {rows, format().state_at, seeds.data(), wide_};
    optimizer_->Apply({weights_of.data(), states_of.data(), gradients_of.data(), n, &copies,
                       kIsBfloat16 ? &halves : nullptr},
                      rate, step);
  }

  const bool wide_;
  const std::unique_ptr<const Optimizer<float>> optimizer_;
  const std::unique_ptr<const Initializer> initializer_;
  const uint64_t stream_;
  const size_t scratch_;  // floats for a row
};

template <typename Weight>
std::unique_ptr<const RowOps> CreatePacked(const TableSpec& spec, const RowFormat& format, bool wide) {
  if (IsHalf(format.state_dtype)) return std::make_unique<PackedRows<Weight, Bfloat16>>(spec, format, wide);
  if constexpr (kIsHalf<Weight>) return std::make_unique<PackedRows<Weight, float>>(spec, format, wide);
  return std::make_unique<PlainRows<float>>(spec, format);
}

}  // namespace

std::unique_ptr<const RowOps> RowOps::Create(const TableSpec& spec) { return Create(spec, HasAvx512()); }

std::unique_ptr<const RowOps> RowOps::Create(const TableSpec& spec, bool wide) {
  const RowFormat format = FormatOf(spec);
  switch (format.dtype) {
    case Dtype::kFloat64:
      return std::make_unique<PlainRows<double>>(spec, format);
    case Dtype::kBfloat16:
      return CreatePacked<Bfloat16>(spec, format, wide);
    case Dtype::kFloat16:
      return CreatePacked<Float16>(spec, format, wide);
    case Dtype::kFloat32:
      break;
  }
  return CreatePacked<float>(spec, format, wide);
}

}  // namespace oe
