// What the file of an optimizer needs. An optimizer is one .cc file in this folder that registers its rule;
// its reference values stand in optimizer_test.cc. CONTRIBUTING.md shows the steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/common/params.h"
#include "oe_runtime/core/common/registry.h"
#include "oe_runtime/core/optimizer/optimizer.h"
#include "oe_runtime/core/optimizer/optimizer_spec.h"

namespace oe {

struct OptimizerEntry {
  enum Trait : unsigned { kNone = 0, kCountsPushes = 1, kDividesByLearningRate = 2 };

  std::string name;
  Params defaults;  // "weight_decay" is added, as 0, where it is missing
  // Throws SpecError, with `what` in front, for a value out of range. `params` has every default.
  void (*check)(const std::string& what, Params* params);
  std::vector<OptimizerSlot> (*slots)(const Params& params, uint32_t dim);
  Trait trait = kNone;

  std::unique_ptr<Optimizer<float>> (*new_float)(const Params& params, uint32_t dim) = nullptr;
  std::unique_ptr<Optimizer<double>> (*new_double)(const Params& params, uint32_t dim) = nullptr;
};

// Registers Rule<float> and Rule<double>: a constant of this type in an unnamed namespace does.
template <template <typename> class Rule>
struct RegisterOptimizer {
  explicit RegisterOptimizer(OptimizerEntry entry) noexcept {
    entry.new_float = New<float>;
    entry.new_double = New<double>;
    entry.defaults.emplace("weight_decay", 0.0);
    Registry<OptimizerEntry>::Add add(std::move(entry));
  }

 private:
  template <typename T>
  static std::unique_ptr<Optimizer<T>> New(const Params& params, uint32_t dim) {
    return std::make_unique<Rule<T>>(params, dim);
  }
};

// Throws SpecError unless the parameter is at least 0.
void CheckNotNegative(const std::string& what, const Params& params, const std::string& name);

// Throws SpecError unless beta_1 and beta_2 are in [0, 1): at 1 the bias correction divides by zero.
void CheckBetas(const std::string& what, const Params& params);

// beta^step as Keras computes it: beta and step in the variable's dtype, and the result rounded to it. With
// float32 and beta_2 = 0.999 that moves 1 - beta_2^t by 1e-5 from the exact value, so the rounding is part of
// the rules.
template <typename T>
T BetaPower(T beta, uint64_t step) noexcept;

}  // namespace oe
