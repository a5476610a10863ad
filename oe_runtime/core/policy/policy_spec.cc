#include "oe_runtime/core/policy/policy_spec.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

constexpr double kMostSteps = 2147483647;       // differences of words in rows
constexpr double kMostRows = 9007199254740992;  // 2^53: every whole number up to it is a double
constexpr double kMostKeys = 1e8;               // 2 GB of counts, and as much again in a pool

// The parameters of one policy: complains about what is missing, unknown or out of range.
class Checked {
 public:
  Checked(std::string what, const Params& given, const Params& defaults,
          const std::vector<std::string>& required)
      : what_(std::move(what)) {
    Params known = defaults;
    for (const std::string& name : required) known.emplace(name, 0);
    params_ = CompleteParams(what_, given, known);
    for (const std::string& name : required) {
      if (given.count(name) == 0) throw SpecError(what_ + " needs '" + name + "'");
    }
  }

  void Whole(const std::string& name, double low, double high) const {
    CheckParam(what_, params_, name, low, high);
    if (std::floor(params_.at(name)) == params_.at(name)) return;
    throw SpecError(what_ + ": '" + name + "' must be a whole number, not " + NumberText(params_.at(name)));
  }
  void Positive(const std::string& name) const { CheckPositive(what_, params_, name); }

  Params params_;

 private:
  const std::string what_;
};

EvictionSpec CompleteCap(const EvictionSpec& spec) {
  const std::string what = "'eviction' cap";
  if (spec.params.count("max_rows") + spec.params.count("max_bytes") != 1) {
    throw SpecError(what + " needs either 'max_rows' or 'max_bytes'");
  }
  const std::string limit = spec.params.count("max_rows") > 0 ? "max_rows" : "max_bytes";
  const Checked checked(what, spec.params, {}, {limit});
  checked.Whole(limit, 1, kMostRows);
  if (!spec.policy.empty() && spec.policy != "lru" && spec.policy != "lfu") {
    throw SpecError(what + ": 'policy' must be lru or lfu, not '" + spec.policy + "'");
  }
  return {spec.name, checked.params_, spec.policy.empty() ? "lru" : spec.policy};
}

EvictionSpec CompleteOne(const EvictionSpec& spec) {
  if (spec.name == "cap") return CompleteCap(spec);
  const std::string what = "'eviction' " + spec.name;
  std::string field;
  if (spec.name == "global_step") field = "steps_to_live";
  if (spec.name == "l2_weight") field = "threshold";
  if (spec.name == "ttl") field = "seconds";
  if (field.empty()) {
    throw SpecError("'eviction.name' must be global_step, l2_weight, ttl or cap, not '" + spec.name + "'");
  }
  if (!spec.policy.empty()) throw SpecError(what + " takes no 'policy'; cap does");
  const Checked checked(what, spec.params, {{"every_steps", 0}}, {field});
  checked.Whole("every_steps", 0, kMostSteps);
  if (spec.name == "l2_weight") {
    checked.Positive(field);
  } else {
    checked.Whole(field, 1, kMostSteps);
  }
  return {spec.name, checked.params_, ""};
}

}  // namespace

AdmissionSpec Complete(const AdmissionSpec& spec, bool hash) {
  if (spec.name.empty()) {
    if (!spec.params.empty()) throw SpecError("'admission' needs 'name'");
    return spec;
  }
  const std::string what = "'admission' " + spec.name;
  if (spec.name == "counter") {
    Checked checked(what, spec.params, {{"default_value", 0.0}, {"max_keys", kMostKeys}}, {"filter_freq"});
    checked.Whole("filter_freq", 1, kMostSteps - 1);
    checked.Whole("max_keys", 1, kMostRows);
    // The default is not written down, so that what earlier versions saved has the same specification.
    if (checked.params_.at("max_keys") == kMostKeys) checked.params_.erase("max_keys");
    return {spec.name, checked.params_};
  }
  if (spec.name != "cbf") {
    throw SpecError("'admission.name' must be counter or cbf, not '" + spec.name + "'");
  }
  const Checked checked(what, spec.params, {{"default_value", 0.0}},
                        {"filter_freq", "max_element_size", "false_positive_probability"});
  checked.Whole("filter_freq", 1, 255);  // its cells have a byte
  checked.Whole("max_element_size", 1, kMostRows);
  CheckParam(what, checked.params_, "false_positive_probability", 1e-9, 0.5);
  if (!hash) {
    throw SpecError(what + " is for hash tables; an array table has no more counters than keys: use counter");
  }
  return {spec.name, checked.params_};
}

std::vector<EvictionSpec> Complete(const std::vector<EvictionSpec>& specs) {
  std::vector<EvictionSpec> complete;
  complete.reserve(specs.size());
  for (const EvictionSpec& spec : specs) complete.push_back(CompleteOne(spec));
  std::sort(complete.begin(), complete.end(),
            [](const EvictionSpec& left, const EvictionSpec& right) { return left.name < right.name; });
  for (size_t i = 1; i < complete.size(); ++i) {
    if (complete[i].name == complete[i - 1].name) {
      throw SpecError("'eviction' has " + complete[i].name + " twice");
    }
  }
  return complete;
}

uint64_t MostKeys(const AdmissionSpec& spec) {
  const auto found = spec.params.find("max_keys");
  return static_cast<uint64_t>(found == spec.params.end() ? kMostKeys : found->second);
}

bool CountsKeys(const AdmissionSpec& admission, const std::vector<EvictionSpec>& eviction) {
  return !admission.name.empty() ||
         std::any_of(eviction.begin(), eviction.end(), [](const auto& one) { return one.policy == "lfu"; });
}

}  // namespace oe
