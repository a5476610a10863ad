#include <algorithm>
#include <cmath>
#include <limits>

#include "oe_runtime/core/optimizer/optimizer.h"

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
class AdamAsync final : public Optimizer {
 public:
  AdamAsync(const Params& params, uint32_t dim)
      : Optimizer(params, dim, 2 * size_t{dim}),
        beta_1_(static_cast<float>(params.at("beta_1"))),
        beta_2_(static_cast<float>(params.at("beta_2"))),
        epsilon_(static_cast<float>(params.at("epsilon"))),
        rmsprop_(params.at("apply_sparse_rmsprop") != 0) {}

  void InitSlots(float* row) const noexcept override { std::fill_n(row + dim(), 2 * dim(), 0.0F); }

  void Update(float* const* rows, const float* const* grads, size_t n, float learning_rate,
              uint64_t step) const noexcept override {
    if (rmsprop_) {
      Run<true>(rows, grads, n, learning_rate);
    } else {
      const float alpha =
          learning_rate * std::sqrt(1.0F - BetaPower(beta_2_, step)) / (1.0F - BetaPower(beta_1_, step));
      Run<false>(rows, grads, n, alpha);
    }
  }

 private:
  template <bool kRmsprop>
  void Run(float* const* rows, const float* const* grads, size_t n, float rate) const noexcept {
    const size_t size = dim();
    const float beta_1 = beta_1_;
    const float beta_2 = beta_2_;
    const float rate_1 = 1.0F - beta_1;
    const float rate_2 = 1.0F - beta_2;
    const float epsilon = epsilon_;
    for (size_t i = 0; i < n; ++i) {
      float* __restrict weight = rows[i];
      float* __restrict momentum = rows[i] + size;
      float* __restrict velocity = rows[i] + 2 * size;
      const float* __restrict gradient = grads[i];
      for (size_t d = 0; d < size; ++d) {
        const float g = gradient[d];
        const float v = velocity[d] * beta_2 + (g * g) * rate_2;
        velocity[d] = v;
        if (kRmsprop) {
          const float m = momentum[d] * beta_1 + (rate * g) / std::sqrt(v + epsilon);
          momentum[d] = m;
          weight[d] -= m;
        } else {
          const float m = momentum[d] * beta_1 + g * rate_1;
          momentum[d] = m;
          weight[d] -= (m * rate) / (std::sqrt(v) + epsilon);
        }
      }
    }
  }

  const float beta_1_;
  const float beta_2_;
  const float epsilon_;
  const bool rmsprop_;
};

}  // namespace

Params CompleteAdamAsync(const Params& given) {
  const std::string what = "optimizer 'adam_async'";
  Params params = CompleteOptimizer(
      "adam_async", given,
      {{"beta_1", 0.9}, {"beta_2", 0.999}, {"epsilon", 1e-8}, {"apply_sparse_rmsprop", 0.0}});
  CheckBetas("adam_async", params);
  CheckParam(what, params, "epsilon", 0, std::numeric_limits<double>::infinity());
  CheckFlag(what, params, "apply_sparse_rmsprop");
  return params;
}

std::unique_ptr<Optimizer> NewAdamAsync(const Params& params, uint32_t dim) {
  return std::make_unique<AdamAsync>(params, dim);
}

}  // namespace oe
