// What the file of an eviction policy needs. A policy is one .cc file in this folder that registers how its
// parameters are checked, what it must know of a row, and its rule. CONTRIBUTING.md shows the steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "oe_runtime/core/common/registry.h"
#include "oe_runtime/core/policy/checked_params.h"
#include "oe_runtime/core/policy/eviction.h"

namespace oe {

// Removes rows when a sweep comes by. Immutable.
class SweepRule {
 public:
  virtual ~SweepRule() = default;
  // Whether the row goes in push number `step` at `time`.
  virtual bool Evicts(const std::byte* row, uint32_t step, TtlClock::Reading time) const noexcept = 0;
  // Whether a row goes that was last pushed `steps` pushes and `seconds` seconds ago.
  virtual bool Expires(uint64_t /*steps*/, uint64_t /*seconds*/) const noexcept { return false; }
  // How many seconds rows live without a push; 0: the clock does not matter.
  virtual uint32_t seconds() const noexcept { return 0; }
};

// Bounds the number of rows: a new row makes another one go. Immutable.
class CapRule {
 public:
  virtual ~CapRule() = default;
  // Most rows of the whole table.
  virtual uint64_t most_rows() const noexcept = 0;
  // Whether row `left` goes before row `right` when there is no room, in push number `step`.
  virtual bool Before(const std::byte* left, const std::byte* right, uint32_t step) const noexcept = 0;
};

struct EvictionEntry {
  std::string name;
  // Fills in the defaults. Throws SpecError.
  EvictionSpec (*complete)(const EvictionSpec& spec);
  // The facts of a row that the policy of a complete specification reads.
  RowFacts::Needs (*needs)(const EvictionSpec& spec);
  // One of the two, of a complete specification.
  std::unique_ptr<const SweepRule> (*new_sweep)(const EvictionSpec& spec, const RowShape& rows) = nullptr;
  std::unique_ptr<const CapRule> (*new_cap)(const EvictionSpec& spec, const RowShape& rows) = nullptr;
};

// A constant of this type registers a policy that sweeps, with the parameters every_steps and Rule::kField.
template <typename Rule>
struct RegisterSweep {
  explicit RegisterSweep(const std::string& name) noexcept {
    Registry<EvictionEntry>::Add(
        {name, Complete, [](const EvictionSpec&) { return Rule::kNeeds; },
         [](const EvictionSpec& spec, const RowShape& rows) -> std::unique_ptr<const SweepRule> {
           return std::make_unique<Rule>(spec, rows);
         }});
  }

 private:
  static EvictionSpec Complete(const EvictionSpec& spec) {
    const std::string what = "'eviction' " + spec.name;
    if (!spec.policy.empty()) throw SpecError(what + " takes no 'policy'; cap does");
    const CheckedParams checked(what, spec.params, {{"every_steps", 0}}, {Rule::kField});
    checked.Whole("every_steps", 0, CheckedParams::kMostSteps);
    Rule::Check(checked);
    return {spec.name, checked.params(), ""};
  }
};

}  // namespace oe
