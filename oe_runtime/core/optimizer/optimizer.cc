#include "oe_runtime/core/optimizer/optimizer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

const OptimizerEntry& Find(const std::string& name) {
  const OptimizerEntry* entry = Registry<OptimizerEntry>::Find(name);
  if (entry != nullptr) return *entry;
  throw SpecError("optimizer '" + name + "' is not one of " + Registry<OptimizerEntry>::Names(", "));
}

Params Defaults(const OptimizerEntry& entry) {
  Params defaults;
  for (const OptimizerEntry::Param& param : entry.params) defaults[param.name] = param.value;
  return defaults;
}

bool IsFlag(Bound bound) { return bound == Bound::kFlag || bound == Bound::kLaterFlag; }

void CheckBound(const std::string& what, const Params& params, const std::string& name, Bound bound) {
  if (IsFlag(bound)) return CheckFlag(what, params, name);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (bound == Bound::kPositive || bound == Bound::kPositiveUnit) CheckPositive(what, params, name);
  double low = 0;
  double high = kInfinity;
  if (bound == Bound::kNotPositive) low = -kInfinity, high = 0;
  if (bound == Bound::kUnit || bound == Bound::kPositiveUnit) high = 1;
  if (bound == Bound::kBeta) high = 0.99999994;  // the last float32 below 1
  if (bound == Bound::kWhole) low = 1, high = 0x1p53;
  CheckParam(what, params, name, low, high);
  if (bound == Bound::kWhole && std::floor(params.at(name)) != params.at(name)) {
    throw SpecError(what + ": '" + name + "' must be a whole number, not " + NumberText(params.at(name)));
  }
}

}  // namespace

void OptimizerEntry::Register(OptimizerEntry entry) noexcept {
  const auto is_decay = [](const Param& param) { return param.name == "weight_decay"; };
  if (std::none_of(entry.params.begin(), entry.params.end(), is_decay)) {
    entry.params.push_back({"weight_decay", 0, Bound::kNotNegative});
  }
  Registry<OptimizerEntry>::Add add(std::move(entry));
}

std::vector<StateSlot> OptimizerEntry::SlotsWith(const Params& values, uint32_t dim) const {
  std::vector<StateSlot> with;
  for (const Slot& slot : slots) {
    if (!slot.only_with.empty() && values.at(slot.only_with) == 0) continue;
    with.push_back({{slot.name, slot.per_row ? 1 : dim}, slot.initial.empty() ? 0 : values.at(slot.initial)});
  }
  return with;
}

std::vector<OptimizerInfo> Optimizers() {
  std::vector<OptimizerInfo> all;
  for (const auto& [name, entry] : Registry<OptimizerEntry>::All()) {
    all.push_back({name, Defaults(entry), (entry.trait & OptimizerEntry::kCountsPushes) != 0});
  }
  return all;
}

OptimizerSpec Complete(const OptimizerSpec& spec) {
  const OptimizerEntry& entry = Find(spec.name);
  const std::string what = "optimizer '" + spec.name + "'";
  OptimizerSpec complete = {spec.name, CompleteParams(what, spec.params, Defaults(entry))};
  for (const OptimizerEntry::Param& param : entry.params) {
    CheckBound(what, complete.params, param.name, param.bound);
    if (param.bound == Bound::kLaterFlag && complete.params.at(param.name) == 0) {
      complete.params.erase(param.name);
    }
  }
  return complete;
}

std::vector<OptimizerSlot> SlotsOf(const OptimizerSpec& spec, uint32_t dim) {
  const std::vector<StateSlot> slots = Find(spec.name).SlotsWith(spec.params, dim);
  return {slots.begin(), slots.end()};
}

OptimizerDescription Describe(const OptimizerSpec& spec) {
  const OptimizerEntry& entry = Find(spec.name);
  const Params params = Complete(spec).params;
  OptimizerDescription description;
  for (const OptimizerEntry::Param& param : entry.params) {
    description.params.push_back({param.name, param.value, IsFlag(param.bound)});
  }
  description.slots = entry.SlotsWith(params, 1);
  if (entry.trace != nullptr) description.program = entry.trace(entry, params);
  return description;
}

size_t ValuesOf(const std::vector<OptimizerSlot>& slots) {
  size_t values = 0;
  for (const OptimizerSlot& slot : slots) values += slot.values;
  return values;
}

void CheckLearningRate(const OptimizerSpec& spec, double learning_rate) {
  const auto rate = static_cast<float>(learning_rate);  // to be finite in every dtype
  if (!std::isfinite(rate) || rate < 0) {
    throw SpecError("the learning rate must be a finite number of at least 0, not " +
                    NumberText(learning_rate));
  }
  if (rate == 0 && (Find(spec.name).trait & OptimizerEntry::kDividesByLearningRate) != 0) {
    throw SpecError("optimizer '" + spec.name +
                    "' divides by the learning rate, which must be above 0, not " +
                    NumberText(learning_rate) + "; let its schedule end above 0");
  }
}

template <typename T>
std::unique_ptr<Optimizer<T>> Optimizer<T>::Create(const OptimizerSpec& spec, uint32_t dim) {
  const OptimizerEntry& entry = Find(spec.name);
  const Params params = Complete(spec).params;
  if constexpr (std::is_same_v<T, float>) {
    return entry.new_float(entry, params, dim);
  } else {
    return entry.new_double(entry, params, dim);
  }
}

template <typename T>
void Optimizer<T>::DecayWeights(const RowRefs<T>& rows, T learning_rate) const noexcept {
  const size_t size = dim_;
  const T weight_decay = weight_decay_;
  for (size_t i = 0; i < rows.n; ++i) {
    T* __restrict weight = rows.weights[i];
    for (size_t d = 0; d < size; ++d) weight[d] -= (weight[d] * weight_decay) * learning_rate;
  }
}

template class Optimizer<float>;
template class Optimizer<double>;

template <typename T>
T BetaPower(T beta, uint64_t step) noexcept {
  const auto t = static_cast<double>(static_cast<T>(step));
  return static_cast<T>(std::pow(static_cast<double>(beta), t));
}
template float BetaPower(float beta, uint64_t step) noexcept;
template double BetaPower(double beta, uint64_t step) noexcept;

}  // namespace oe
