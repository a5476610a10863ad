// cap {max_rows or max_bytes, policy}: bounds the rows of a table. For each new row another one goes: the
// least recently pushed ("lru") or the one that was pushed least often ("lfu"). Each internal shard has its
// share of the rows, since a shared counter would be a shared lock.
#include "oe_runtime/core/policy/eviction_registry.h"

namespace oe {
namespace {

EvictionSpec CompleteSpec(const EvictionSpec& spec) {
  const std::string what = "'eviction' cap";
  if (spec.params.count("max_rows") + spec.params.count("max_bytes") != 1) {
    throw SpecError(what + " needs either 'max_rows' or 'max_bytes'");
  }
  const std::string limit = spec.params.count("max_rows") > 0 ? "max_rows" : "max_bytes";
  const CheckedParams checked(what, spec.params, {}, {limit});
  checked.Whole(limit, 1, CheckedParams::kMostRows);
  if (!spec.policy.empty() && spec.policy != "lru" && spec.policy != "lfu") {
    throw SpecError(what + ": 'policy' must be lru or lfu, not '" + spec.policy + "'");
  }
  return {spec.name, checked.params(), spec.policy.empty() ? "lru" : spec.policy};
}

class Cap final : public CapRule {
 public:
  Cap(const EvictionSpec& spec, const RowShape& rows)
      : facts_(rows.facts),
        lfu_(spec.policy == "lfu"),
        most_rows_(spec.params.count("max_rows") > 0
                       ? static_cast<uint64_t>(spec.params.at("max_rows"))
                       : static_cast<uint64_t>(spec.params.at("max_bytes")) / facts_.row_bytes()) {}

  uint64_t most_rows() const noexcept override { return most_rows_; }
  bool Before(const std::byte* left, const std::byte* right, uint32_t step) const noexcept override {
    if (lfu_ && facts_.count(left) != facts_.count(right)) return facts_.count(left) < facts_.count(right);
    return step - facts_.step(left) > step - facts_.step(right);
  }

 private:
  const RowFacts facts_;
  const bool lfu_;
  const uint64_t most_rows_;
};

const Registry<EvictionEntry>::Add kCap(
    {"cap", CompleteSpec,
     [](const EvictionSpec& spec) { return RowFacts::Needs{true, spec.policy == "lfu", false}; }, nullptr,
     [](const EvictionSpec& spec, const RowShape& rows) -> std::unique_ptr<const CapRule> {
       return std::make_unique<Cap>(spec, rows);
     }});

}  // namespace
}  // namespace oe
