#include "oe_runtime/core/policy/eviction.h"

#include <algorithm>
#include <string>

#include "oe_runtime/core/common/half.h"

namespace oe {
namespace {

const EvictionSpec* Find(const std::vector<EvictionSpec>& specs, const std::string& name) {
  const auto found =
      std::find_if(specs.begin(), specs.end(), [&](const EvictionSpec& spec) { return spec.name == name; });
  return found == specs.end() ? nullptr : &*found;
}

RowFacts FactsFor(const std::vector<EvictionSpec>& specs, Dtype dtype, size_t bytes) {
  const EvictionSpec* cap = Find(specs, "cap");
  return {bytes, ValueBytes(dtype), cap != nullptr || Find(specs, "global_step") != nullptr,
          cap != nullptr && cap->policy == "lfu", Find(specs, "ttl") != nullptr};
}

}  // namespace

Eviction::Eviction(const std::vector<EvictionSpec>& specs, Dtype dtype, uint32_t dim, size_t bytes)
    : facts_(FactsFor(specs, dtype, bytes)), dtype_(dtype), dim_(dim) {
  for (const EvictionSpec& spec : specs) {
    const auto reason =
        static_cast<Reason>(std::find(kNames.begin(), kNames.end(), spec.name) - kNames.begin());
    if (reason == kCap) {
      lfu_ = spec.policy == "lfu";
      const bool rows = spec.params.count("max_rows") > 0;
      most_rows_ = rows ? static_cast<uint64_t>(spec.params.at("max_rows"))
                        : static_cast<uint64_t>(spec.params.at("max_bytes")) / facts_.row_bytes();
      continue;
    }
    sweeps_ |= 1U << reason;
    every_[reason] = static_cast<uint64_t>(spec.params.at("every_steps"));
    if (reason == kGlobalStep) steps_to_live_ = static_cast<uint32_t>(spec.params.at("steps_to_live"));
    if (reason == kL2Weight) threshold_ = static_cast<float>(spec.params.at("threshold"));
    if (reason == kTtl) seconds_ = static_cast<uint32_t>(spec.params.at("seconds"));
  }
}

std::vector<Eviction::Turn> Eviction::Due(uint64_t step, uint32_t parts) const {
  std::vector<Turn> turns;
  for (uint32_t reason = 0; reason < kCap; ++reason) {
    const uint64_t every = every_[reason];
    if (every == 0) continue;
    const uint64_t slices = std::min(every, kMostSlices);
    // Slice i has its turn i * every / slices pushes after the first.
    const uint64_t pushes = step % every;
    const uint64_t slice = (pushes * slices + every - 1) / every;
    if (slice == slices || slice * every / slices != pushes) continue;
    turns.push_back({1U << reason, static_cast<uint32_t>(step / every % parts), slice, slices});
  }
  return turns;
}

Eviction::Reason Eviction::Judge(const std::byte* row, uint32_t reasons, uint32_t step,
                                 TtlClock::Reading time) const noexcept {
  // Steps count modulo 2^32, so that their differences stay right; a push that failed left the next one's.
  if ((reasons & (1U << kGlobalStep)) != 0 &&
      static_cast<int32_t>(step - facts_.step(row)) > static_cast<int32_t>(steps_to_live_)) {
    return kGlobalStep;
  }
  const uint32_t pushed = std::max(facts_.seconds(row), time.floor);  // or later than now, by another clock
  if ((reasons & (1U << kTtl)) != 0 && time.now > pushed && time.now - pushed > seconds_) return kTtl;
  if ((reasons & (1U << kL2Weight)) != 0 && 0.5 * SquaresOf(row) < static_cast<double>(threshold_)) {
    return kL2Weight;
  }
  return kNoReason;
}

double Eviction::SquaresOf(const std::byte* row) const noexcept {
  // In the arithmetic of the table.
  const auto sum = [this](auto zero, const auto& weight) {
    for (uint32_t d = 0; d < dim_; ++d) zero += weight(d) * weight(d);
    return static_cast<double>(zero);
  };
  const auto* halves = reinterpret_cast<const uint16_t*>(row);
  switch (dtype_) {
    case Dtype::kFloat64:
      return sum(0.0, [row](uint32_t d) { return reinterpret_cast<const double*>(row)[d]; });
    case Dtype::kBfloat16:
      return sum(0.0F, [halves](uint32_t d) { return Bfloat16::ToFloat(halves[d]); });
    case Dtype::kFloat16:
      return sum(0.0F, [halves](uint32_t d) { return Float16::ToFloat(halves[d]); });
    case Dtype::kFloat32:
      break;
  }
  return sum(0.0F, [row](uint32_t d) { return reinterpret_cast<const float*>(row)[d]; });
}

bool Eviction::Before(const std::byte* left, const std::byte* right, uint32_t step) const noexcept {
  if (lfu_ && facts_.count(left) != facts_.count(right)) return facts_.count(left) < facts_.count(right);
  return step - facts_.step(left) > step - facts_.step(right);
}

}  // namespace oe
