#include "oe_runtime/core/optimizer/optimizer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/optimizer/registry.h"
#include "oe_runtime/core/spec/spec.h"

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

void CheckBound(const std::string& what, const Params& params, const std::string& name, Bound bound) {
  if (bound == Bound::kFlag) return CheckFlag(what, params, name);
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

// All parameters, those that a specification leaves out with their defaults. Throws as Complete() does.
Params AllParams(const OptimizerEntry& entry, const Params& given) {
  const std::string what = "optimizer '" + entry.name + "'";
  Params all = CompleteParams(what, given, Defaults(entry));
  for (const OptimizerEntry::Param& param : entry.params) {
    CheckBound(what, all, param.name, param.bound);
    if (!param.needs.empty() && all.at(param.needs) == 0 && all.at(param.name) != param.value) {
      throw SpecError(what + ": '" + param.name + "' needs '" + param.needs + "': true");
    }
  }
  return all;
}

}  // namespace

void OptimizerEntry::Register(OptimizerEntry entry) noexcept {
  for (const Param& option : {Param{"weight_decay", 0, Bound::kNotNegative},
                              Param{"coupled_weight_decay", 0, Bound::kNotNegative, true},
                              Param{"learning_rate_decay", 0, Bound::kNotNegative, true},
                              Param{"maximize", 0, Bound::kFlag, true}}) {
    const auto is_it = [&](const Param& param) { return param.name == option.name; };
    if (std::none_of(entry.params.begin(), entry.params.end(), is_it)) entry.params.push_back(option);
  }
  Registry<OptimizerEntry>::Add add(std::move(entry));
}

std::vector<StateSlot> OptimizerEntry::SlotsWith(const Params& values, uint32_t dim) const {
  std::vector<StateSlot> with;
  for (const Slot& slot : slots) {
    if (!slot.only_with.empty() && values.at(slot.only_with) == 0) continue;
    with.push_back({{slot.name, slot.per_row ? 1 : dim, slot.is_count},
                    slot.initial.empty() ? 0 : values.at(slot.initial)});
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
  OptimizerSpec complete = {spec.name, AllParams(entry, spec.params)};
  for (const OptimizerEntry::Param& param : entry.params) {
    if (param.is_later && complete.params.at(param.name) == param.value) complete.params.erase(param.name);
  }
  return complete;
}

std::vector<OptimizerSlot> SlotsOf(const OptimizerSpec& spec, uint32_t dim) {
  const std::vector<StateSlot> slots = Find(spec.name).SlotsWith(spec.params, dim);
  return {slots.begin(), slots.end()};
}

OptimizerDescription Describe(const OptimizerSpec& spec) {
  const OptimizerEntry& entry = Find(spec.name);
  const Params params = AllParams(entry, spec.params);
  OptimizerDescription description;
  for (const OptimizerEntry::Param& param : entry.params) {
    description.params.push_back({param.name, param.value, param.bound == Bound::kFlag});
  }
  description.slots = entry.SlotsWith(params, 1);
  if (entry.trace != nullptr) description.program = entry.trace(entry, params);
  return description;
}

bool GoesOnFrom(const OptimizerSpec& earlier, const OptimizerSpec& now) {
  Params form = now.params;
  const bool is_below_root = now.name == "adagrad" || now.name == "rmsprop";
  if (earlier.name != now.name || (!is_below_root && now.name != "adam" && now.name != "adamw")) return false;
  if (form.erase("torch") == 0 || (form.count("momentum") != 0 && form.at("momentum") != 0)) return false;
  if (is_below_root) form.at("epsilon") *= form.at("epsilon");
  const auto is_same = [](const auto& left, const auto& right) {  // but for the rounding of a square
    return left.first == right.first && std::abs(left.second - right.second) <= 1e-12 * std::abs(left.second);
  };
  return std::equal(form.begin(), form.end(), earlier.params.begin(), earlier.params.end(), is_same);
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
  const Params params = AllParams(entry, spec.params);
  if constexpr (std::is_same_v<T, float>) {
    return entry.new_float(entry, params, dim);
  } else {
    return entry.new_double(entry, params, dim);
  }
}

template <typename T>
Optimizer<T>::Optimizer(const Params& params, uint32_t dim, const std::vector<StateSlot>& slots)
    : dim_(dim),
      slots_(slots),
      weight_decay_(static_cast<T>(params.at("weight_decay"))),
      coupled_weight_decay_(static_cast<T>(params.at("coupled_weight_decay"))),
      maximize_(params.at("maximize") != 0),
      learning_rate_decay_(params.at("learning_rate_decay")),
      changes_gradients_(coupled_weight_decay_ != 0 || maximize_),
      changes_rows_(weight_decay_ != 0 || changes_gradients_) {}

template <typename T>
T Optimizer<T>::Decayed(T learning_rate, uint64_t step) const noexcept {
  const double pushes_before = static_cast<double>(step) - 1;
  return static_cast<T>(static_cast<double>(learning_rate) / (1 + pushes_before * learning_rate_decay_));
}

template <typename T>
void Optimizer<T>::UpdateByOtherGradients(const RowRefs<T>& rows, T learning_rate,
                                          uint64_t step) const noexcept {
  std::array<T, kLargestDim> changed;
  RowRefs<T> others = rows;
  others.changed_gradient = changed.data();
  Update(others, learning_rate, step);
}

template <typename T>
const T* Optimizer<T>::Prepare(const RowRefs<T>& rows, size_t i, T learning_rate) const noexcept {
  if (rows.copies != nullptr) rows.copies->Load(i);
  const size_t size = dim_;
  T* __restrict weight = rows.weights[i];
  if (weight_decay_ != 0) {  // as Keras, before the rule sees the weights
    const T decay = weight_decay_;
    for (size_t d = 0; d < size; ++d) weight[d] -= (weight[d] * decay) * learning_rate;
  }
  const T* __restrict given = rows.gradients[i];
  if (!changes_gradients_) return given;
  // As PyTorch's `maximize` and `weight_decay`.
  const T sign = maximize_ ? T{-1} : T{1};
  const T decay = coupled_weight_decay_;
  T* __restrict changed = rows.changed_gradient;
  for (size_t d = 0; d < size; ++d) changed[d] = given[d] * sign + weight[d] * decay;
  return changed;
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
