// ttl {seconds}: rows that were not pushed for longer, by the server's clock, go (ttl_clock.h).
#include <algorithm>

#include "oe_runtime/core/policy/eviction_registry.h"

namespace oe {
namespace {

EvictionSpec CompleteSpec(const EvictionSpec& spec) {
  const CheckedParams checked = CheckedSweep(spec, "seconds");
  checked.Whole("seconds", 1, CheckedParams::kMostSteps);
  return {spec.name, checked.params(), ""};
}

class Ttl final : public SweepRule {
 public:
  Ttl(uint32_t seconds, const RowShape& rows) : facts_(rows.facts), seconds_(seconds) {}

  bool Evicts(const std::byte* row, uint32_t /*step*/, TtlClock::Reading time) const noexcept override {
    const uint32_t pushed = std::max(facts_.seconds(row), time.floor);  // or later than now, by another clock
    return time.now > pushed && time.now - pushed > seconds_;
  }
  bool Expires(uint64_t /*steps*/, uint64_t seconds) const noexcept override { return seconds > seconds_; }
  uint32_t seconds() const noexcept override { return seconds_; }

 private:
  const RowFacts facts_;
  const uint32_t seconds_;
};

std::unique_ptr<const SweepRule> New(const EvictionSpec& spec, const RowShape& rows) {
  return std::make_unique<Ttl>(static_cast<uint32_t>(spec.params.at("seconds")), rows);
}

const RegisterEviction kTtl({"ttl", CompleteSpec,
                             [](const EvictionSpec&) { return RowFacts::Needs{false, false, true}; }, New});

}  // namespace
}  // namespace oe
