#include "oe_runtime/core/table/row_ops.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <type_traits>

#include "oe_runtime/core/common/half.h"
#include "oe_runtime/core/common/half_lanes.h"
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

template <typename Number>
constexpr bool kIsHalf = !std::is_same_v<Number, float>;

// n numbers of a row as floats; Number is float, Bfloat16 or Float16.
template <typename Number>
void Unpack(const std::byte* row, size_t n, float* values) noexcept {
  if constexpr (!kIsHalf<Number>) {
    if (n > 0) std::memcpy(values, row, n * sizeof(float));
  } else {
    UnpackHalves<Number>(reinterpret_cast<const uint16_t*>(row), n, values);
  }
}

// Floats as n numbers of a row, halves rounded to the nearest.
template <typename Number>
void PackNearest(const float* values, size_t n, std::byte* row) noexcept {
  if constexpr (kIsHalf<Number>) {
    auto* halves = reinterpret_cast<uint16_t*>(row);
    for (size_t d = 0; d < n; ++d) halves[d] = Number::Nearest(values[d]);
  } else if (n > 0) {
    std::memcpy(row, values, n * sizeof(float));
  }
}

// Random numbers, by their numbers from d on.
class RandomLanes {
 public:
  explicit RandomLanes(uint64_t seed) noexcept
      : first_(static_cast<uint32_t>(seed) + Lanes{0, 1, 2, 3, 4, 5, 6, 7} * kStep),
        high_(static_cast<uint32_t>(seed >> 32)) {}

  // "lowbias32" of C. Wellons (hash prospector, 2018), whose 32-bit multiplications vectorize, without its
  // last step: only the upper halves are good.
  Lanes operator()(uint32_t d) const noexcept {
    Lanes random = first_ + d * kStep;
    random = (random ^ random >> 16) * 0x7FEB352DU;
    return (random ^ random >> 15 ^ high_) * 0x846CA68BU;
  }

 private:
  static constexpr uint32_t kStep = 0x9E3779B9;

  const Lanes first_;
  const uint32_t high_;
};

// Half::FromBits of numbers without NaN and infinity, and for bfloat16 below the largest, in fewer steps.
template <typename Half>
Lanes RoundCommon(Lanes bits, Lanes random) noexcept {
  if constexpr (std::is_same_v<Half, Bfloat16>) {
    return (bits + (random >> 16)) >> 16;
  } else {
    using Ints = int32_t __attribute__((vector_size(kLanes * sizeof(int32_t))));
    using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));
    const auto magnitude = reinterpret_cast<Ints>(bits & 0x7FFFFFFF);
    const auto add = reinterpret_cast<Ints>(random >> (32 - Half::kRandomBits));
    const auto value = reinterpret_cast<Floats>(magnitude);
    const Floats most = Floats{} + 0x1p-13F;
    const Floats units =
        (value < most ? value : most) * 0x1p24F + __builtin_convertvector(add, Floats) * 0x1p-13F;
    const Ints largest = Ints{} + 0x7BFF;
    Ints rounded = (magnitude + add - (112 << 23)) >> 13;
    rounded = rounded < largest ? rounded : largest;
    rounded = magnitude < (Ints{} + (113 << 23)) ? __builtin_convertvector(units, Ints) : rounded;
    return reinterpret_cast<Lanes>(rounded) | (bits >> 16 & 0x8000);
  }
}

// The largest magnitude of which RoundCommon() is no more the same.
template <typename Half>
constexpr uint32_t kUncommon = std::is_same_v<Half, Bfloat16> ? 0x7F7F0000 : 0x7F800000;

// The numbers of a row, by RandomLanes of `seed`: a random number for each, or, of the state of rows
// (`shared`), its two halves for two. Of `values`, kSlack more are read.
constexpr size_t kSlack = size_t{2} * kLanes;
template <typename Half, bool shared, typename Round>
uint32_t PackBy(const float* values, uint32_t n, uint64_t seed, uint16_t* to, const Round& round) noexcept {
  const RandomLanes random(seed);
  Lanes largest{};
  const auto pack = [&](uint32_t d, Lanes bits) {
    const auto numbers = LoadLanes<Lanes>(values + d);
    const Lanes magnitudes = numbers & 0x7FFFFFFF;
    largest = magnitudes > largest ? magnitudes : largest;
    StoreHalves(round(numbers, bits), std::min(kLanes, n - d), to + d);
  };
  for (uint32_t d = 0; d < n; d += 2 * kLanes) {
    const Lanes bits = random(shared ? d / 2 : d);
    pack(d, bits);
    if (n - d <= kLanes) break;
    pack(d + kLanes, shared ? (bits ^ bits >> 16) << 16 : random(d + kLanes));
  }
  uint32_t most = 0;
  for (uint32_t i = 0; i < kLanes; ++i) most = std::max(most, largest[i]);
  return most;
}

template <typename Half, bool shared>
void Pack(const float* values, uint32_t n, uint64_t seed, std::byte* row) noexcept {
  static_assert(!shared || Half::kRandomBits <= 16);
  auto* to = reinterpret_cast<uint16_t*>(row);
  if (PackBy<Half, shared>(values, n, seed, to, RoundCommon<Half>) < kUncommon<Half>) return;
  PackBy<Half, shared>(values, n, seed, to, Half::template FromBits<Lanes>);
}

// Rows whose weights are Weight and whose state is State, one of them a half, the other a half or float.
template <typename Weight, typename State>
class PackedRows final : public RowOps {
 public:
  PackedRows(const TableSpec& spec, const RowFormat& format)
      : RowOps(format),
        optimizer_(Optimizer<float>::Create(spec.optimizer, spec.dim)),
        initializer_(Initializer::Create(spec.initializer, spec.name)),
        stream_(Mix64(spec.initializer.seed) ^ XXH3_64bits(spec.name.data(), spec.name.size())),
        scratch_((kIsHalf<Weight> ? format.dim : 0) + (kIsHalf<State> ? format.state_values : 0)) {}

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
  static constexpr size_t kMostScratch = (1 + kMostSlots) * size_t{kLargestDim};

  template <size_t kSize>
  void InitIn(Key key, std::byte* row) const noexcept {
    std::memset(row, 0, format().facts_at);  // also what lies between
    Scratch<kSize> values;
    initializer_->Fill(key, values.data(), format().dim);
    Write(values.data(), row);
    optimizer_->InitState(values.data());
    WriteState(values.data(), row);
  }

  // As many rows at once as fit into the first cache, but one at least.
  template <size_t kSize>
  void UpdateIn(std::byte* const* rows, const Key* keys, const void* const* gradients, size_t n, float rate,
                uint64_t step) const noexcept {
    const auto dim = format().dim;
    const auto state_values = static_cast<uint32_t>(format().state_values);
    const size_t state_at = format().state_at;
    const size_t most = std::clamp<size_t>(kCachedScratch / std::max<size_t>(scratch_, 1), 1, kMostRows);
    Scratch<kSize + kSlack> scratch;
    std::array<float*, kMostRows> weights;
    std::array<float*, kMostRows> states;
    std::array<const float*, kMostRows> of_rows;
    for (size_t begin = 0; begin < n; begin += most) {
      const size_t size = std::min(most, n - begin);
      float* free = scratch.data();
      const auto unpack = [&](auto number, std::byte* from, size_t values) {
        using Number = decltype(number);
        if constexpr (!kIsHalf<Number>) return reinterpret_cast<float*>(from);  // updated where it is
        float* to = free;
        free += values;
        Unpack<Number>(from, values, to);
        return to;
      };
      for (size_t i = 0; i < size; ++i) {
        std::byte* row = rows[begin + i];
        weights[i] = unpack(Weight{}, row, dim);
        states[i] = unpack(State{}, row + state_at, state_values);
        of_rows[i] = static_cast<const float*>(gradients[begin + i]);
      }
      std::fill_n(free, kSlack, 0.0F);
      optimizer_->Apply({weights.data(), states.data(), of_rows.data(), size}, rate, step);
      for (size_t i = 0; i < size; ++i) {
        std::byte* row = rows[begin + i];
        const uint64_t seed = Mix64(Mix64(stream_ + keys[begin + i]) + step);
        if constexpr (kIsHalf<Weight>) Pack<Weight, false>(weights[i], dim, seed, row);
        if constexpr (kIsHalf<State>)
          Pack<State, true>(states[i], state_values, Mix64(~seed), row + state_at);
      }
    }
  }

  const std::unique_ptr<const Optimizer<float>> optimizer_;
  const std::unique_ptr<const Initializer> initializer_;
  const uint64_t stream_;
  const size_t scratch_;  // floats for a row
};

template <typename Weight>
std::unique_ptr<const RowOps> CreatePacked(const TableSpec& spec, const RowFormat& format) {
  if (IsHalf(format.state_dtype)) return std::make_unique<PackedRows<Weight, Bfloat16>>(spec, format);
  if constexpr (kIsHalf<Weight>) return std::make_unique<PackedRows<Weight, float>>(spec, format);
  return std::make_unique<PlainRows<float>>(spec, format);
}

}  // namespace

std::unique_ptr<const RowOps> RowOps::Create(const TableSpec& spec) {
  const RowFormat format = FormatOf(spec);
  switch (format.dtype) {
    case Dtype::kFloat64:
      return std::make_unique<PlainRows<double>>(spec, format);
    case Dtype::kBfloat16:
      return CreatePacked<Bfloat16>(spec, format);
    case Dtype::kFloat16:
      return CreatePacked<Float16>(spec, format);
    case Dtype::kFloat32:
      break;
  }
  return CreatePacked<float>(spec, format);
}

}  // namespace oe
