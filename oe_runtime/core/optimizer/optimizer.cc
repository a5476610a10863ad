#include "oe_runtime/core/optimizer/optimizer.h"

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

}  // namespace

std::vector<OptimizerInfo> Optimizers() {
  std::vector<OptimizerInfo> all;
  for (const auto& [name, entry] : Registry<OptimizerEntry>::All()) {
    all.push_back({name, entry.defaults, (entry.trait & OptimizerEntry::kCountsPushes) != 0});
  }
  return all;
}

OptimizerSpec Complete(const OptimizerSpec& spec) {
  const OptimizerEntry& entry = Find(spec.name);
  const std::string what = "optimizer '" + spec.name + "'";
  OptimizerSpec complete = {spec.name, CompleteParams(what, spec.params, entry.defaults)};
  CheckNotNegative(what, complete.params, "weight_decay");
  entry.check(what, &complete.params);
  return complete;
}

std::vector<OptimizerSlot> SlotsOf(const OptimizerSpec& spec, uint32_t dim) {
  return Find(spec.name).slots(spec.params, dim);
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
    return entry.new_float(params, dim);
  } else {
    return entry.new_double(params, dim);
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

void CheckNotNegative(const std::string& what, const Params& params, const std::string& name) {
  CheckParam(what, params, name, 0, std::numeric_limits<double>::infinity());
}

void CheckBetas(const std::string& what, const Params& params) {
  // The bound is the last float32 below 1.
  CheckParam(what, params, "beta_1", 0, 0.99999994);
  CheckParam(what, params, "beta_2", 0, 0.99999994);
}

template <typename T>
T BetaPower(T beta, uint64_t step) noexcept {
  const auto t = static_cast<double>(static_cast<T>(step));
  return static_cast<T>(std::pow(static_cast<double>(beta), t));
}
template float BetaPower(float beta, uint64_t step) noexcept;
template double BetaPower(double beta, uint64_t step) noexcept;

}  // namespace oe
