#include "oe_runtime/core/optimizer/optimizer.h"

#include <cmath>
#include <limits>
#include <utility>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

struct Entry {
  const char* name;
  Params (*complete)(const Params&);
  std::unique_ptr<Optimizer> (*create)(const Params&, uint32_t);
};

const Entry kOptimizers[] = {
    {"adadelta", CompleteAdadelta, NewAdadelta},
    {"adagrad", CompleteAdagrad, NewAdagrad},
    {"adagrad_decay", CompleteAdagradDecay, NewAdagradDecay},
    {"adam", CompleteAdam, NewAdam},
    {"adam_async", CompleteAdamAsync, NewAdamAsync},
    {"adamax", CompleteAdamax, NewAdamax},
    {"adamw", CompleteAdamW, NewAdam},
    {"ftrl", CompleteFtrl, NewFtrl},
    {"lion", CompleteLion, NewLion},
    {"nadam", CompleteNadam, NewNadam},
    {"rmsprop", CompleteRmsprop, NewRmsprop},
    {"sgd", CompleteSgd, NewSgd},
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

OptimizerSpec Optimizer::Complete(const OptimizerSpec& spec) {
  return {spec.name, Find(spec.name).complete(spec.params)};
}

std::unique_ptr<Optimizer> Optimizer::Create(const OptimizerSpec& spec, uint32_t dim) {
  const Entry& entry = Find(spec.name);
  return entry.create(entry.complete(spec.params), dim);
}

void Optimizer::DecayWeights(float* const* rows, size_t n, float learning_rate) const noexcept {
  const size_t size = dim_;
  const float weight_decay = weight_decay_;
  for (size_t i = 0; i < n; ++i) {
    float* __restrict weight = rows[i];
    for (size_t d = 0; d < size; ++d) weight[d] -= (weight[d] * weight_decay) * learning_rate;
  }
}

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

float BetaPower(float beta, uint64_t step) noexcept {
  const auto t = static_cast<double>(static_cast<float>(step));
  return static_cast<float>(std::pow(static_cast<double>(beta), t));
}

}  // namespace oe
