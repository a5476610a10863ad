// The update rules of rows. Included by few files: what a table needs to know is in optimizer_spec.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "oe_runtime/core/common/params.h"
#include "oe_runtime/core/optimizer/optimizer_spec.h"

namespace oe {

// The rows of an update: for each i < n, the dim weights, the state and the gradient (dim) of a row.
template <typename T>
struct RowRefs {
  T* const* weights = nullptr;
  T* const* states = nullptr;
  const T* const* gradients = nullptr;
  size_t n = 0;
};

// A slot with what it begins with in a new row.
struct StateSlot : OptimizerSlot {
  double initial = 0;
};

// One optimizer's update rule in T (float or double), in the order of operations of Keras 3.15 for variables
// of that dtype; with the flag `torch` in that of PyTorch. Only rows with a gradient change; a dense variable
// would also decay the momenta of the others, and with weight_decay or coupled_weight_decay their weights. A
// rule depends on nothing but the row and the number of the push, so that nothing else needs to be saved.
// Immutable, so safe to share among threads.
template <typename T>
class Optimizer {
 public:
  // Throws as Complete() does.
  static std::unique_ptr<Optimizer> Create(const OptimizerSpec& spec, uint32_t dim);

  virtual ~Optimizer() = default;

  // How many numbers of state a row has.
  size_t state_values() const {
    size_t values = 0;
    for (const StateSlot& slot : slots_) values += slot.values;
    return values;
  }

  // Sets the state of a new row.
  void InitState(T* state) const noexcept {
    for (const StateSlot& slot : slots_) {
      state = std::fill_n(state, slot.values, static_cast<T>(slot.initial));
    }
  }

  // `step` counts the pushes of the table from 1.
  void Apply(const RowRefs<T>& rows, T learning_rate, uint64_t step) const noexcept {
    if (has_options_) return ApplyOptions(rows, learning_rate, step);
    Update(rows, learning_rate, step);
  }

 protected:
  Optimizer(const Params& params, uint32_t dim, const std::vector<StateSlot>& slots);

  size_t dim() const { return dim_; }

  // The rule without the options of every rule.
  virtual void Update(const RowRefs<T>& rows, T learning_rate, uint64_t step) const noexcept = 0;

 private:
  // The options of every rule, then the rule.
  void ApplyOptions(const RowRefs<T>& rows, T learning_rate, uint64_t step) const noexcept;
  // As Keras: w -= w·weight_decay·lr, before the rule sees the weights.
  void DecayWeights(const RowRefs<T>& rows, T learning_rate) const noexcept;
  // Updates with ±g + coupled_weight_decay·w in place of g, as PyTorch's `maximize` and `weight_decay`.
  void UpdateByOtherGradients(const RowRefs<T>& rows, T learning_rate, uint64_t step) const noexcept;

  const size_t dim_;
  const std::vector<StateSlot> slots_;
  const T weight_decay_;
  const T coupled_weight_decay_;
  const bool maximize_;
  const double learning_rate_decay_;
  const bool has_options_;
};

// Whether rows with the state of a complete optimizer can go on with another, whose state means the same.
// 0.2.0 described PyTorch's optimizers without the flag `torch`, with the square of epsilon below the root.
// The momenta of its sgd and rmsprop had the learning rate in them.
bool GoesOnFrom(const OptimizerSpec& earlier, const OptimizerSpec& now);

}  // namespace oe
