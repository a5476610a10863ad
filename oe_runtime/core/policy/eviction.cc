#include "oe_runtime/core/policy/eviction.h"

#include <algorithm>

#include "oe_runtime/core/policy/eviction_registry.h"

namespace oe {
namespace {

const EvictionEntry& EntryOf(const EvictionSpec& spec) { return *Registry<EvictionEntry>::Find(spec.name); }

RowFacts FactsFor(const std::vector<EvictionSpec>& specs, Dtype dtype, size_t bytes) {
  RowFacts::Needs needs;
  for (const EvictionSpec& spec : specs) needs |= EntryOf(spec).needs(spec);
  return {bytes, ValueBytes(dtype), needs};
}

}  // namespace

Eviction::Eviction(const std::vector<EvictionSpec>& specs, Dtype dtype, uint32_t dim, size_t bytes)
    : rows_{FactsFor(specs, dtype, bytes), dtype, dim} {
  for (Reason reason = 0; reason < specs.size(); ++reason) {
    const EvictionSpec& spec = specs[reason];
    const EvictionEntry& entry = EntryOf(spec);
    if (entry.new_cap != nullptr) {
      cap_ = entry.new_cap(spec, rows_);
      cap_reason_ = reason;
      continue;
    }
    const auto every = static_cast<uint64_t>(spec.params.at("every_steps"));
    by_name_.push_back({reason, every, entry.new_sweep(spec, rows_)});
    sweeps_ |= 1U << reason;
    if (!entry.needs(spec).any()) needs_rows_ |= 1U << reason;
    scheduled_ = scheduled_ || every > 0;
    seconds_ = std::max(seconds_, by_name_.back().rule->seconds());
  }
  for (const Sweep& sweep : by_name_) by_cost_.push_back(&sweep);
  std::stable_partition(by_cost_.begin(), by_cost_.end(), [&](const Sweep* sweep) {
    return EntryOf(specs[sweep->reason]).needs(specs[sweep->reason]).any();
  });
}

Eviction::~Eviction() = default;

std::vector<Eviction::Turn> Eviction::Due(uint64_t step, uint32_t parts) const {
  std::vector<Turn> turns;
  for (const Sweep& sweep : by_name_) {
    const uint64_t every = sweep.every;
    if (every == 0) continue;
    const uint64_t slices = std::min(every, kMostSlices);
    // Slice i has its turn i * every / slices pushes after the first.
    const uint64_t pushes = step % every;
    const uint64_t slice = (pushes * slices + every - 1) / every;
    if (slice == slices || slice * every / slices != pushes) continue;
    turns.push_back({1U << sweep.reason, static_cast<uint32_t>(step / every % parts), slice, slices});
  }
  return turns;
}

Eviction::Reason Eviction::Judge(const std::byte* row, uint32_t reasons, uint32_t step,
                                 TtlClock::Reading time) const noexcept {
  for (const Sweep* sweep : by_cost_) {
    if ((reasons >> sweep->reason & 1) != 0 && sweep->rule->Evicts(row, step, time)) return sweep->reason;
  }
  return kNoReason;
}

bool Eviction::Expired(uint32_t reasons, uint64_t steps, uint64_t seconds) const noexcept {
  return std::any_of(by_name_.begin(), by_name_.end(), [&](const Sweep& sweep) {
    return (reasons >> sweep.reason & 1) != 0 && sweep.rule->Expires(steps, seconds);
  });
}

uint64_t Eviction::most_rows() const {
  return capped() ? cap_->most_rows() : std::numeric_limits<uint64_t>::max();
}

bool Eviction::Before(const std::byte* left, const std::byte* right, uint32_t step) const noexcept {
  return cap_->Before(left, right, step);
}

}  // namespace oe
