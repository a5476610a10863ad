#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "oe_runtime/core/common/params.h"

namespace oe {

// An update rule by name with Keras 3's parameter names and defaults (docs in the file of each), all of which
// take `weight_decay` too. The learning rate is not here: every push brings its own.
struct OptimizerSpec {
  std::string name = "adagrad";
  Params params;
};

// `spec` with every default filled in. Throws SpecError for an unknown name, an unsupported parameter or a
// value out of range.
OptimizerSpec Complete(const OptimizerSpec& spec);

// One of the optimizer's numbers beside a row: Keras's name of it, or DeepRec's, and how many there are.
struct OptimizerSlot {
  std::string name;
  size_t values = 0;
};
// Those of `spec`, which is complete, in the order in which they lie in a row's state.
std::vector<OptimizerSlot> SlotsOf(const OptimizerSpec& spec, uint32_t dim);

// Throws SpecError for a learning rate that the optimizer cannot be pushed with.
void CheckLearningRate(const OptimizerSpec& spec, double learning_rate);

// The rows of an update: for each i < n, the dim weights, the state and the gradient (dim) of a row.
template <typename T>
struct RowRefs {
  T* const* weights = nullptr;
  T* const* states = nullptr;
  const T* const* gradients = nullptr;
  size_t n = 0;
};

// One optimizer's update rule, in T (float or double) and in the order of operations of Keras 3.15 for
// variables of that dtype. Only rows that got a gradient change: a dense Keras variable would also decay the
// momenta of the others, and with weight_decay their weights. What a rule takes from the step it computes
// from the number of the push, so that nothing but rows and that number needs to be saved. Immutable, so safe
// to share among threads.
template <typename T>
class Optimizer {
 public:
  // Throws as Complete() does.
  static std::unique_ptr<Optimizer> Create(const OptimizerSpec& spec, uint32_t dim);

  virtual ~Optimizer() = default;

  // How many numbers of state a row has.
  size_t state_values() const { return state_values_; }

  // Sets the state of a new row.
  virtual void InitState(T* state) const noexcept = 0;

  // `step` counts the pushes of the table from 1.
  void Apply(const RowRefs<T>& rows, T learning_rate, uint64_t step) const noexcept {
    if (weight_decay_ != 0) DecayWeights(rows, learning_rate);
    Update(rows, learning_rate, step);
  }

 protected:
  Optimizer(const Params& params, uint32_t dim, size_t state_values)
      : dim_(dim), state_values_(state_values), weight_decay_(static_cast<T>(params.at("weight_decay"))) {}

  size_t dim() const { return dim_; }

  // The rule without weight decay.
  virtual void Update(const RowRefs<T>& rows, T learning_rate, uint64_t step) const noexcept = 0;

 private:
  // As Keras: w -= w·weight_decay·lr, before the rule sees the weights.
  void DecayWeights(const RowRefs<T>& rows, T learning_rate) const noexcept;

  const size_t dim_;
  const size_t state_values_;
  const T weight_decay_;
};

// For the files of the optimizers.

// CompleteParams for optimizer `name`, with "weight_decay" (0 unless `defaults` has another) among them.
Params CompleteOptimizer(const std::string& name, const Params& given, Params defaults);

// Throws SpecError unless beta_1 and beta_2 can be powers' bases: in [0, 1), since at 1 the correction of the
// bias divides by zero.
void CheckBetas(const std::string& name, const Params& params);

// beta^step as Keras has it: beta and step in the variable's dtype, and the result rounded to it. With
// float32 and beta_2 = 0.999 that moves 1 - beta_2^t by 1e-5 from the exact value, so the rounding is part of
// the rules.
template <typename T>
T BetaPower(T beta, uint64_t step) noexcept;

// One pair for each optimizer: its parameters with defaults, and its rule.
Params CompleteAdadelta(const Params& given);
Params CompleteAdagrad(const Params& given);
Params CompleteAdagradDecay(const Params& given);
Params CompleteAdam(const Params& given);
Params CompleteAdamAsync(const Params& given);
Params CompleteAdamax(const Params& given);
Params CompleteAdamW(const Params& given);
Params CompleteFtrl(const Params& given);
Params CompleteLion(const Params& given);
Params CompleteNadam(const Params& given);
Params CompleteRmsprop(const Params& given);
Params CompleteSgd(const Params& given);
template <typename T>
std::unique_ptr<Optimizer<T>> NewAdadelta(const Params& params, uint32_t dim);
template <typename T>
std::unique_ptr<Optimizer<T>> NewAdagrad(const Params& params, uint32_t dim);
template <typename T>
std::unique_ptr<Optimizer<T>> NewAdagradDecay(const Params& params, uint32_t dim);
template <typename T>
std::unique_ptr<Optimizer<T>> NewAdam(const Params& params, uint32_t dim);
template <typename T>
std::unique_ptr<Optimizer<T>> NewAdamAsync(const Params& params, uint32_t dim);
template <typename T>
std::unique_ptr<Optimizer<T>> NewAdamax(const Params& params, uint32_t dim);
template <typename T>
std::unique_ptr<Optimizer<T>> NewFtrl(const Params& params, uint32_t dim);
template <typename T>
std::unique_ptr<Optimizer<T>> NewLion(const Params& params, uint32_t dim);
template <typename T>
std::unique_ptr<Optimizer<T>> NewNadam(const Params& params, uint32_t dim);
template <typename T>
std::unique_ptr<Optimizer<T>> NewRmsprop(const Params& params, uint32_t dim);
template <typename T>
std::unique_ptr<Optimizer<T>> NewSgd(const Params& params, uint32_t dim);

}  // namespace oe
