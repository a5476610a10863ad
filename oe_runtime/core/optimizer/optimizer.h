#ifndef OE_CORE_OPTIMIZER_OPTIMIZER_H_
#define OE_CORE_OPTIMIZER_OPTIMIZER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "oe_runtime/core/common/params.h"

namespace oe {

// An update rule by name with Keras 3's parameter names and defaults (docs in the file of each), all of which
// take `weight_decay` too. The learning rate is not here: every push brings its own.
struct OptimizerSpec {
  std::string name = "adagrad";
  Params params;
};

// One optimizer's update rule, in float32 and in the order of operations of Keras 3.15. Only rows that got a
// gradient change: a dense Keras variable would also decay the momenta of the others, and with weight_decay
// their weights. A row is `dim` weights followed by the rule's state. What a rule takes from the step it
// computes from the number of the push, so that nothing but rows and that number needs to be saved.
// Immutable, so safe to share among threads.
class Optimizer {
 public:
  // Throws SpecError for an unknown name, an unsupported parameter or a value out of range.
  static std::unique_ptr<Optimizer> Create(const OptimizerSpec& spec, uint32_t dim);

  // `spec` with every default filled in; throws as Create does.
  static OptimizerSpec Complete(const OptimizerSpec& spec);

  virtual ~Optimizer() = default;

  // Floats of a row: its weights, then its state.
  size_t row_floats() const { return row_floats_; }

  // Sets the state of a new row.
  virtual void InitSlots(float* row) const noexcept = 0;

  // Updates rows[i] with grads[i] (dim floats) for i < n. `step` counts the pushes of the table from 1.
  void Apply(float* const* rows, const float* const* grads, size_t n, float learning_rate,
             uint64_t step) const noexcept {
    if (weight_decay_ != 0) DecayWeights(rows, n, learning_rate);
    Update(rows, grads, n, learning_rate, step);
  }

 protected:
  Optimizer(const Params& params, uint32_t dim, size_t state_floats)
      : dim_(dim),
        row_floats_(dim + state_floats),
        weight_decay_(static_cast<float>(params.at("weight_decay"))) {}

  size_t dim() const { return dim_; }

  // The rule without weight decay.
  virtual void Update(float* const* rows, const float* const* grads, size_t n, float learning_rate,
                      uint64_t step) const noexcept = 0;

 private:
  // As Keras: w -= w·weight_decay·lr, before the rule sees the weights.
  void DecayWeights(float* const* rows, size_t n, float learning_rate) const noexcept;

  const size_t dim_;
  const size_t row_floats_;
  const float weight_decay_;
};

// For the files of the optimizers.

// CompleteParams for optimizer `name`, with "weight_decay" (0 unless `defaults` has another) among them.
Params CompleteOptimizer(const std::string& name, const Params& given, Params defaults);

// Throws SpecError unless beta_1 and beta_2 can be powers' bases: in [0, 1), since at 1 the correction of the
// bias divides by zero.
void CheckBetas(const std::string& name, const Params& params);

// beta^step as Keras has it: the float32 beta raised to the float32 step, and rounded to float32. For
// beta_2 = 0.999 that moves 1 - beta_2^t by 1e-5 from the exact value, so the rounding is part of the rules.
float BetaPower(float beta, uint64_t step) noexcept;

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
std::unique_ptr<Optimizer> NewAdadelta(const Params& params, uint32_t dim);
std::unique_ptr<Optimizer> NewAdagrad(const Params& params, uint32_t dim);
std::unique_ptr<Optimizer> NewAdagradDecay(const Params& params, uint32_t dim);
std::unique_ptr<Optimizer> NewAdam(const Params& params, uint32_t dim);
std::unique_ptr<Optimizer> NewAdamAsync(const Params& params, uint32_t dim);
std::unique_ptr<Optimizer> NewAdamax(const Params& params, uint32_t dim);
std::unique_ptr<Optimizer> NewFtrl(const Params& params, uint32_t dim);
std::unique_ptr<Optimizer> NewLion(const Params& params, uint32_t dim);
std::unique_ptr<Optimizer> NewNadam(const Params& params, uint32_t dim);
std::unique_ptr<Optimizer> NewRmsprop(const Params& params, uint32_t dim);
std::unique_ptr<Optimizer> NewSgd(const Params& params, uint32_t dim);

}  // namespace oe

#endif  // OE_CORE_OPTIMIZER_OPTIMIZER_H_
