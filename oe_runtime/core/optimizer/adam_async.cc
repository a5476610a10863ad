#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

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
template <typename T, bool kRmsprop>
struct AdamAsync : ElementwiseRule {
  static constexpr size_t kSlots = 2;

  explicit AdamAsync(const Values<T>& value)
      : beta_1(value["beta_1"]),
        beta_2(value["beta_2"]),
        rate_1(T{1} - beta_1),
        rate_2(T{1} - beta_2),
        epsilon(value["epsilon"]) {}

  void Begin(T rate, StepNumber<T> step) {
    if constexpr (!kRmsprop) {
      alpha = rate * sqrt(T{1} - BetaPower(beta_2, step)) / (T{1} - BetaPower(beta_1, step));
    }
  }

  void operator()(T rate, T g, T& weight, std::array<T, kSlots>& slots) const {
    auto& [momentum, velocity] = slots;
    velocity = velocity * beta_2 + (g * g) * rate_2;
    if constexpr (kRmsprop) {
      momentum = momentum * beta_1 + (rate * g) / sqrt(velocity + epsilon);
      weight -= momentum;
    } else {
      momentum = momentum * beta_1 + g * rate_1;
      weight -= (momentum * alpha) / (sqrt(velocity) + epsilon);
    }
  }

  T beta_1, beta_2, rate_1, rate_2, epsilon;
  T alpha{};
};

const RegisterRule<AdamAsync, 1> kAdamAsync({"adam_async",
                                             {{"beta_1", 0.9, Bound::kBeta},
                                              {"beta_2", 0.999, Bound::kBeta},
                                              {"epsilon", 1e-8, Bound::kNotNegative},
                                              {"apply_sparse_rmsprop", 0, Bound::kFlag}},
                                             {{"momentum"}, {"velocity"}},
                                             OptimizerEntry::kCountsPushes,
                                             {"apply_sparse_rmsprop"}});

}  // namespace
}  // namespace oe
