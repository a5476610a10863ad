#include "oe_runtime/core/policy/policy_spec.h"

#include <algorithm>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/policy/admission_registry.h"
#include "oe_runtime/core/policy/eviction_registry.h"

namespace oe {
namespace {

template <typename Entry>
const Entry& Find(const std::string& field, const std::string& name) {
  const Entry* entry = Registry<Entry>::Find(name);
  if (entry != nullptr) return *entry;
  throw SpecError("'" + field + ".name' must be " + Registry<Entry>::Names(" or ") + ", not '" + name + "'");
}

const EvictionEntry& CheckedEntryOf(const EvictionSpec& spec) {
  return Find<EvictionEntry>("eviction", spec.name);
}

}  // namespace

AdmissionSpec Complete(const AdmissionSpec& spec, bool hash) {
  if (!spec.name.empty()) return Find<AdmissionEntry>("admission", spec.name).complete(spec, hash);
  if (!spec.params.empty()) throw SpecError("'admission' needs 'name'");
  return spec;
}

std::vector<EvictionSpec> Complete(const std::vector<EvictionSpec>& specs) {
  std::vector<EvictionSpec> complete;
  complete.reserve(specs.size());
  for (const EvictionSpec& spec : specs) complete.push_back(CheckedEntryOf(spec).complete(spec));
  std::sort(complete.begin(), complete.end(),
            [](const EvictionSpec& left, const EvictionSpec& right) { return left.name < right.name; });
  for (size_t i = 1; i < complete.size(); ++i) {
    if (complete[i].name == complete[i - 1].name) {
      throw SpecError("'eviction' has " + complete[i].name + " twice");
    }
  }
  return complete;
}

bool CountsKeys(const AdmissionSpec& admission, const std::vector<EvictionSpec>& eviction) {
  return !admission.name.empty() || std::any_of(eviction.begin(), eviction.end(), [](const auto& one) {
    return CheckedEntryOf(one).needs(one).count;
  });
}

bool CapsRows(const EvictionSpec& spec) { return CheckedEntryOf(spec).new_cap != nullptr; }

bool UsesClock(const EvictionSpec& spec) { return CheckedEntryOf(spec).needs(spec).seconds; }

}  // namespace oe
