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

// Rows that are kept in another form than they are updated in. A rule takes one row after the other, so that
// the places of RowRefs may be the same for all rows, and the processor overlaps the steps of several rows.
class RowCopies {
 public:
  virtual void Load(size_t i) noexcept = 0;   // row i into its places
  virtual void Store(size_t i) noexcept = 0;  // and back, once it is updated

 protected:
  ~RowCopies() = default;
};

// Rows whose weights and state are bfloat16, as a rule may take them at once: they are the same as by
// RowCopies.
struct Bfloat16Rows {
  static constexpr size_t kMostDim = 256;

  std::byte* const* rows = nullptr;
  size_t state_at = 0;              // bytes
  const uint64_t* seeds = nullptr;  // of the weights' random numbers
  bool wide = false;                // by AVX-512
};

// The rows of an update: for each i < n, the dim weights, the state and the gradient (dim) of a row.
template <typename T>
struct RowRefs {
  T* const* weights = nullptr;
  T* const* states = nullptr;
  const T* const* gradients = nullptr;
  size_t n = 0;
  RowCopies* copies = nullptr;
  const Bfloat16Rows* bfloat16 = nullptr;
  T* changed_gradient = nullptr;  // memory for it, where options change gradients
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
    if (learning_rate_decay_ != 0) learning_rate = Decayed(learning_rate, step);
    if (changes_gradients_) return UpdateByOtherGradients(rows, learning_rate, step);
    Update(rows, learning_rate, step);
  }

  // What rules call around the update of row i, unless all rows are plain: Begin() loads a copy, applies the
  // options of every rule to it, and returns its gradient.
  bool IsPlain(const RowRefs<T>& rows) const { return rows.copies == nullptr && !changes_rows_; }
  bool TakesBfloat16(const RowRefs<T>& rows) const {
    return rows.bfloat16 != nullptr && !changes_rows_ && dim_ <= Bfloat16Rows::kMostDim;
  }
  const T* Begin(const RowRefs<T>& rows, size_t i, T learning_rate) const noexcept {
    return IsPlain(rows) ? rows.gradients[i] : Prepare(rows, i, learning_rate);
  }
  static void End(const RowRefs<T>& rows, size_t i) noexcept {
    if (rows.copies != nullptr) rows.copies->Store(i);
  }

 protected:
  Optimizer(const Params& params, uint32_t dim, const std::vector<StateSlot>& slots);

  size_t dim() const { return dim_; }

  // The rule without the options of every rule, but between Begin() and End() of each row.
  virtual void Update(const RowRefs<T>& rows, T learning_rate, uint64_t step) const noexcept = 0;

 private:
  T Decayed(T learning_rate, uint64_t step) const noexcept;
  void UpdateByOtherGradients(const RowRefs<T>& rows, T learning_rate, uint64_t step) const noexcept;
  const T* Prepare(const RowRefs<T>& rows, size_t i, T learning_rate) const noexcept;

  const size_t dim_;
  const std::vector<StateSlot> slots_;
  const T weight_decay_;
  const T coupled_weight_decay_;
  const bool maximize_;
  const double learning_rate_decay_;
  const bool changes_gradients_;
  const bool changes_rows_;
};

// Whether rows with the state of a complete optimizer can go on with another, whose state means the same.
// 0.2.0 described PyTorch's optimizers without the flag `torch`, with the square of epsilon below the root.
// The momenta of its sgd and rmsprop had the learning rate in them.
bool GoesOnFrom(const OptimizerSpec& earlier, const OptimizerSpec& now);

}  // namespace oe
