// global_step {steps_to_live}: rows that were not pushed in the table's last steps_to_live pushes go.
#include "oe_runtime/core/policy/eviction_registry.h"

namespace oe {
namespace {

EvictionSpec CompleteSpec(const EvictionSpec& spec) {
  const CheckedParams checked = CheckedSweep(spec, "steps_to_live");
  checked.Whole("steps_to_live", 1, CheckedParams::kMostSteps);
  return {spec.name, checked.params(), ""};
}

class GlobalStep final : public SweepRule {
 public:
  GlobalStep(uint32_t steps_to_live, const RowShape& rows)
      : facts_(rows.facts), steps_to_live_(steps_to_live) {}

  // Steps count modulo 2^32, so that their differences stay right; a push that failed left the next one's.
  bool Evicts(const std::byte* row, uint32_t step, TtlClock::Reading /*time*/) const noexcept override {
    return static_cast<int32_t>(step - facts_.step(row)) > static_cast<int32_t>(steps_to_live_);
  }
  bool Expires(uint64_t steps, uint64_t /*seconds*/) const noexcept override {
    return steps > steps_to_live_;
  }

 private:
  const RowFacts facts_;
  const uint32_t steps_to_live_;
};

std::unique_ptr<const SweepRule> New(const EvictionSpec& spec, const RowShape& rows) {
  return std::make_unique<GlobalStep>(static_cast<uint32_t>(spec.params.at("steps_to_live")), rows);
}

const RegisterEviction kGlobalStep({"global_step", CompleteSpec,
                                    [](const EvictionSpec&) { return RowFacts::Needs{true, false, false}; },
                                    New});

}  // namespace
}  // namespace oe
