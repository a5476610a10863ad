#include "oe_runtime/core/table/row_ops.h"

#include <xxhash.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <type_traits>

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

// Eight numbers at once. GCC takes 16 for a loop over halves, which is more than most rows have.
constexpr uint32_t kLanes = 8;
using Lanes = uint32_t __attribute__((vector_size(kLanes * sizeof(uint32_t))));
using HalfLanes = uint16_t __attribute__((vector_size(kLanes * sizeof(uint16_t))));

template <typename To, typename From>
To Load(const From* from) noexcept {
  To lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

// The first n of some halves, n <= kLanes.
void Store(Lanes halves, size_t n, uint16_t* to) noexcept {
  const HalfLanes lanes = __builtin_convertvector(halves, HalfLanes);
  if (n == kLanes) {
    std::memcpy(to, &lanes, sizeof(lanes));
  } else {
    for (size_t i = 0; i < n; ++i) to[i] = lanes[i];
  }
}

template <typename Half>
void UnpackLanes(const uint16_t* from, float* to) noexcept {
  if constexpr (std::is_same_v<Half, Bfloat16>) {
    const Lanes bits = __builtin_convertvector(Load<HalfLanes>(from), Lanes) << 16;
    std::memcpy(to, &bits, sizeof(bits));
  } else {
#ifdef __F16C__
    _mm256_storeu_ps(to, _mm256_cvtph_ps(Load<__m128i>(from)));
#else
    for (size_t i = 0; i < kLanes; ++i) to[i] = Half::ToFloat(from[i]);
#endif
  }
}

// n numbers of a row as floats; Number is float, Bfloat16 or Float16.
template <typename Number>
void Unpack(const std::byte* row, size_t n, float* values) noexcept {
  if constexpr (!kIsHalf<Number>) {
    if (n > 0) std::memcpy(values, row, n * sizeof(float));
  } else {
    const auto* from = reinterpret_cast<const uint16_t*>(row);
    if (n < kLanes) {
      for (size_t d = 0; d < n; ++d) values[d] = Number::ToFloat(from[d]);
      return;
    }
    for (size_t d = 0; d + kLanes < n; d += kLanes) UnpackLanes<Number>(from + d, values + d);
    UnpackLanes<Number>(from + n - kLanes, values + n - kLanes);  // some of them again
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

// The weights of a row. Of `values`, kSlack more are read.
constexpr size_t kSlack = size_t{2} * kLanes;
template <typename Half>
void PackWeights(const float* values, uint32_t n, uint64_t seed, std::byte* row) noexcept {
  const RandomLanes random(seed);
  auto* to = reinterpret_cast<uint16_t*>(row);
  for (uint32_t d = 0; d < n; d += kLanes) {
    const Lanes halves = Half::template FromBits<Lanes>(Load<Lanes>(values + d), random(d));
    Store(halves, std::min(kLanes, n - d), to + d);
  }
}

// The state of a row, as weights; but the two halves of a random number serve two values.
template <typename Half>
void PackState(const float* values, uint32_t n, uint64_t seed, std::byte* row) noexcept {
  static_assert(Half::kRandomBits <= 16);
  const RandomLanes random(seed);
  auto* to = reinterpret_cast<uint16_t*>(row);
  for (uint32_t d = 0; d < n; d += 2 * kLanes) {
    const Lanes bits = random(d / 2);
    Store(Half::template FromBits<Lanes>(Load<Lanes>(values + d), bits), std::min(kLanes, n - d), to + d);
    if (n - d <= kLanes) break;
    const Lanes more = (bits ^ bits >> 16) << 16;
    Store(Half::template FromBits<Lanes>(Load<Lanes>(values + d + kLanes), more),
          std::min(kLanes, n - d - kLanes), to + d + kLanes);
  }
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
        if constexpr (kIsHalf<Weight>) PackWeights<Weight>(weights[i], dim, seed, row);
        if constexpr (kIsHalf<State>) PackState<State>(states[i], state_values, Mix64(~seed), row + state_at);
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
