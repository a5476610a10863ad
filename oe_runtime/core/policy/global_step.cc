// global_step {steps_to_live}: rows go whose last push is more than steps_to_live pushes of the table ago.
#include "oe_runtime/core/policy/eviction_registry.h"

namespace oe {
namespace {

class GlobalStep final : public SweepRule {
 public:
  static constexpr const char* kField = "steps_to_live";
  static constexpr RowFacts::Needs kNeeds = {true, false, false};
  static void Check(const CheckedParams& params) { params.Whole(kField, 1, CheckedParams::kMostSteps); }

  GlobalStep(const EvictionSpec& spec, const RowShape& rows)
      : facts_(rows.facts), steps_to_live_(static_cast<uint32_t>(spec.params.at(kField))) {}

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

const RegisterSweep<GlobalStep> kGlobalStep("global_step");

}  // namespace
}  // namespace oe
