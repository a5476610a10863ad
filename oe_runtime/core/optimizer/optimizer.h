#ifndef OE_CORE_OPTIMIZER_OPTIMIZER_H_
#define OE_CORE_OPTIMIZER_OPTIMIZER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "oe_runtime/core/common/params.h"

namespace oe {

// "adagrad", "adam", "sgd" or "ftrl", with Keras 3's parameter names and defaults (docs in the file of each).
// The learning rate is not here: every push brings its own.
struct OptimizerSpec {
  std::string name = "adagrad";
  Params params;
};

// One optimizer's update rule, in float32 and in the order of operations of Keras 3.15. A row is `dim`
// weights followed by slots() arrays of `dim` floats. Only rows that got a gradient change (a dense Keras
// variable would also decay the momenta of the others). Immutable, so safe to share among threads.
class Optimizer {
 public:
  // Throws SpecError for an unknown name, an unsupported parameter or a value out of range.
  static std::unique_ptr<Optimizer> Create(const OptimizerSpec& spec, uint32_t dim);

  // `spec` with every default filled in; throws as Create does.
  static OptimizerSpec Complete(const OptimizerSpec& spec);

  virtual ~Optimizer() = default;

  // Floats of state per weight.
  virtual uint32_t slots() const = 0;

  // Sets the slots of a new row.
  virtual void InitSlots(float* row) const noexcept = 0;

  // Updates rows[i] with grads[i] (dim floats) for i < n. `step` counts the pushes of the table from 1.
  virtual void Apply(float* const* rows, const float* const* grads, size_t n, float learning_rate,
                     uint64_t step) const noexcept = 0;

 protected:
  explicit Optimizer(uint32_t dim) : dim_(dim) {}
  size_t dim() const { return dim_; }

 private:
  const size_t dim_;
};

// One pair for each optimizer's file: its parameters with defaults, and its rule.
Params CompleteAdagrad(const Params& given);
Params CompleteAdam(const Params& given);
Params CompleteFtrl(const Params& given);
Params CompleteSgd(const Params& given);
std::unique_ptr<Optimizer> NewAdagrad(const Params& params, uint32_t dim);
std::unique_ptr<Optimizer> NewAdam(const Params& params, uint32_t dim);
std::unique_ptr<Optimizer> NewFtrl(const Params& params, uint32_t dim);
std::unique_ptr<Optimizer> NewSgd(const Params& params, uint32_t dim);

}  // namespace oe

#endif  // OE_CORE_OPTIMIZER_OPTIMIZER_H_
