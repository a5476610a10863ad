#include "oe_runtime/core/optimizer/optimizer.h"

#include <cmath>
#include <limits>
#include <type_traits>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

template <typename T>
using New = std::unique_ptr<Optimizer<T>> (*)(const Params&, uint32_t);

struct Entry {
  const char* name;
  Params (*complete)(const Params&);
  New<float> new_float;
  New<double> new_double;
};

const Entry kOptimizers[] = {
    {"adadelta", CompleteAdadelta, NewAdadelta<float>, NewAdadelta<double>},
    {"adagrad", CompleteAdagrad, NewAdagrad<float>, NewAdagrad<double>},
    {"adagrad_decay", CompleteAdagradDecay, NewAdagradDecay<float>, NewAdagradDecay<double>},
    {"adam", CompleteAdam, NewAdam<float>, NewAdam<double>},
    {"adam_async", CompleteAdamAsync, NewAdamAsync<float>, NewAdamAsync<double>},
    {"adamax", CompleteAdamax, NewAdamax<float>, NewAdamax<double>},
    {"adamw", CompleteAdamW, NewAdam<float>, NewAdam<double>},
    {"ftrl", CompleteFtrl, NewFtrl<float>, NewFtrl<double>},
    {"lion", CompleteLion, NewLion<float>, NewLion<double>},
    {"nadam", CompleteNadam, NewNadam<float>, NewNadam<double>},
    {"rmsprop", CompleteRmsprop, NewRmsprop<float>, NewRmsprop<double>},
    {"sgd", CompleteSgd, NewSgd<float>, NewSgd<double>},
};

const Entry& Find(const std::string& name) {
  std::string known;
  for (const Entry& entry : kOptimizers) {
    if (name == entry.name) return entry;
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
  }
  throw SpecError("optimizer '" + name + "' is not one of " + known);
}

}  // namespace

OptimizerSpec Complete(const OptimizerSpec& spec) {
  return {spec.name, Find(spec.name).complete(spec.params)};
}

std::vector<OptimizerSlot> SlotsOf(const OptimizerSpec& spec, uint32_t dim) {
  const auto has = [&spec](const char* param) { return spec.params.at(param) != 0; };
  const std::string& name = spec.name;
  if (name == "adadelta") return {{"accumulated_grad", dim}, {"accumulated_delta_var", dim}};
  if (name == "adagrad") return {{"accumulator", dim}};
  if (name == "adagrad_decay") return {{"accumulator", dim}, {"accumulator_decays", 1}};
  if (name == "adamax") return {{"momentum", dim}, {"norm", dim}};
  if (name == "ftrl") return {{"accumulator", dim}, {"linear", dim}};
  if (name == "lion") return {{"momentum", dim}};
  if (name == "sgd")
    return has("momentum") ? std::vector<OptimizerSlot>{{"momentum", dim}} : std::vector<OptimizerSlot>{};
  std::vector<OptimizerSlot> slots;
  if (name == "rmsprop") {
    slots.push_back({"velocity", dim});
    if (has("momentum")) slots.push_back({"momentum", dim});
    if (has("centered")) slots.push_back({"average_gradient", dim});
    return slots;
  }
  slots = {{"momentum", dim}, {"velocity", dim}};  // adam, adamw, adam_async, nadam
  if ((name == "adam" || name == "adamw") && has("amsgrad")) slots.push_back({"velocity_hat", dim});
  return slots;
}

void CheckLearningRate(const OptimizerSpec& spec, double learning_rate) {
  const auto rate = static_cast<float>(learning_rate);  // to be finite in every dtype
  if (!std::isfinite(rate) || rate < 0) {
    throw SpecError("the learning rate must be a finite number of at least 0, not " +
                    NumberText(learning_rate));
  }
  if (rate == 0 && spec.name == "ftrl") {
    throw SpecError("optimizer 'ftrl' divides by the learning rate, which must be above 0, not " +
                    NumberText(learning_rate) + "; let its schedule end above 0");
  }
}

template <typename T>
std::unique_ptr<Optimizer<T>> Optimizer<T>::Create(const OptimizerSpec& spec, uint32_t dim) {
  const Entry& entry = Find(spec.name);
  const Params params = entry.complete(spec.params);
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

Params CompleteOptimizer(const std::string& name, const Params& given, Params defaults) {
  const std::string what = "optimizer '" + name + "'";
  defaults.emplace("weight_decay", 0.0);
  Params params = CompleteParams(what, given, defaults);
  CheckParam(what, params, "weight_decay", 0, std::numeric_limits<double>::infinity());
  return params;
}

void CheckBetas(const std::string& name, const Params& params) {
  // The bound is the last float32 below 1.
  CheckParam("optimizer '" + name + "'", params, "beta_1", 0, 0.99999994);
  CheckParam("optimizer '" + name + "'", params, "beta_2", 0, 0.99999994);
}

template <typename T>
T BetaPower(T beta, uint64_t step) noexcept {
  const auto t = static_cast<double>(static_cast<T>(step));
  return static_cast<T>(std::pow(static_cast<double>(beta), t));
}
template float BetaPower(float beta, uint64_t step) noexcept;
template double BetaPower(double beta, uint64_t step) noexcept;

}  // namespace oe
