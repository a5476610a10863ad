// ttl {seconds}: rows that were not pushed for longer, by the server's clock, go (ttl_clock.h).
#include <algorithm>

#include "oe_runtime/core/policy/eviction_registry.h"

namespace oe {
namespace {

class Ttl final : public SweepRule {
 public:
  static constexpr const char* kField = "seconds";
  static constexpr RowFacts::Needs kNeeds = {false, false, true};
  static void Check(const CheckedParams& params) { params.Whole(kField, 1, CheckedParams::kMostSteps); }

  Ttl(const EvictionSpec& spec, const RowShape& rows)
      : facts_(rows.facts), seconds_(static_cast<uint32_t>(spec.params.at(kField))) {}

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

const RegisterSweep<Ttl> kTtl("ttl");

}  // namespace
}  // namespace oe
