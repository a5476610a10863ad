#include <cmath>

#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

std::vector<OptimizerSlot> Slots(const Params& /*params*/, uint32_t dim) {
  return {{"momentum", dim}, {"velocity", dim}};
}

void Check(const std::string& what, Params* params) {
  CheckBetas(what, *params);
  CheckNotNegative(what, *params, "epsilon");
  CheckFlag(what, *params, "apply_sparse_rmsprop");
}

// DeepRec's AdamAsync, by its description (DeepRec, docs/docs_en/AdamAsync-Optimizer.md) and what its kernel
// for embedding variables does:
//   m = beta_1·m + (1 - beta_1)·g;  v = beta_2·v + (1 - beta_2)·g²
//   w -= m·lr·sqrt(1 - beta_2^t) / (1 - beta_1^t) / (sqrt(v) + epsilon)
// It differs from Adam in what t counts, the updates of this table instead of those of the model. DeepRec
// keeps beta_1^t and beta_2^t in one slot a table and multiplies them at each update of it, never a row's
// own; so do we without a slot, as powers of the number of this push. With apply_sparse_rmsprop neither is
// used:
//   v as above;  m = beta_1·m + lr·g / sqrt(v + epsilon);  w -= m
// DeepRec's parameters beta1 and beta2 have Keras's names here.
template <typename T>
class AdamAsync final : public Optimizer<T> {
 public:
  AdamAsync(const Params& params, uint32_t dim)
      : Optimizer<T>(params, dim, Slots(params, dim)),
        beta_1_(static_cast<T>(params.at("beta_1"))),
        beta_2_(static_cast<T>(params.at("beta_2"))),
        epsilon_(static_cast<T>(params.at("epsilon"))),
        rmsprop_(params.at("apply_sparse_rmsprop") != 0) {}

  void Update(const RowRefs<T>& rows, T learning_rate, uint64_t step) const noexcept override {
    if (rmsprop_) {
      Run<true>(rows, learning_rate);
    } else {
      const T alpha =
          learning_rate * std::sqrt(T{1} - BetaPower(beta_2_, step)) / (T{1} - BetaPower(beta_1_, step));
      Run<false>(rows, alpha);
    }
  }

 private:
  template <bool kRmsprop>
  void Run(const RowRefs<T>& rows, T rate) const noexcept {
    const size_t size = this->dim();
    const T beta_1 = beta_1_;
    const T beta_2 = beta_2_;
    const T rate_1 = T{1} - beta_1;
    const T rate_2 = T{1} - beta_2;
    const T epsilon = epsilon_;
    for (size_t i = 0; i < rows.n; ++i) {
      T* __restrict weight = rows.weights[i];
      T* __restrict momentum = rows.states[i];
      T* __restrict velocity = rows.states[i] + size;
      const T* __restrict gradient = rows.gradients[i];
      for (size_t d = 0; d < size; ++d) {
        const T g = gradient[d];
        const T v = velocity[d] * beta_2 + (g * g) * rate_2;
        velocity[d] = v;
        if (kRmsprop) {
          const T m = momentum[d] * beta_1 + (rate * g) / std::sqrt(v + epsilon);
          momentum[d] = m;
          weight[d] -= m;
        } else {
          const T m = momentum[d] * beta_1 + g * rate_1;
          momentum[d] = m;
          weight[d] -= (m * rate) / (std::sqrt(v) + epsilon);
        }
      }
    }
  }

  const T beta_1_;
  const T beta_2_;
  const T epsilon_;
  const bool rmsprop_;
};

const RegisterOptimizer<AdamAsync> kAdamAsync(
    {"adam_async",
     {{"beta_1", 0.9}, {"beta_2", 0.999}, {"epsilon", 1e-8}, {"apply_sparse_rmsprop", 0.0}},
     Check,
     Slots,
     OptimizerEntry::kCountsPushes});

}  // namespace
}  // namespace oe
