#include <algorithm>

#include "oe_runtime/core/optimizer/optimizer.h"

namespace oe {
namespace {

// Lion (Chen et al., 2023): w -= lr·sign(beta_1·m + (1 - beta_1)·g);  m = beta_2·m + (1 - beta_2)·g
class Lion final : public Optimizer {
 public:
  Lion(const Params& params, uint32_t dim)
      : Optimizer(params, dim, dim),
        beta_1_(static_cast<float>(params.at("beta_1"))),
        beta_2_(static_cast<float>(params.at("beta_2"))) {}

  void InitSlots(float* row) const noexcept override { std::fill_n(row + dim(), dim(), 0.0F); }

  void Update(float* const* rows, const float* const* grads, size_t n, float learning_rate,
              uint64_t /*step*/) const noexcept override {
    const size_t size = dim();
    const float beta_1 = beta_1_;
    const float beta_2 = beta_2_;
    const float rate_1 = 1.0F - beta_1;
    const float rate_2 = 1.0F - beta_2;
    for (size_t i = 0; i < n; ++i) {
      float* __restrict weight = rows[i];
      float* __restrict momentum = rows[i] + size;
      const float* __restrict gradient = grads[i];
      for (size_t d = 0; d < size; ++d) {
        const float g = gradient[d];
        const float m = momentum[d];
        const float direction = m * beta_1 + g * rate_1;
        const float sign = (direction > 0 ? 1.0F : 0.0F) - (direction < 0 ? 1.0F : 0.0F);
        weight[d] -= learning_rate * sign;
        momentum[d] = m * beta_2 + g * rate_2;
      }
    }
  }

 private:
  const float beta_1_;
  const float beta_2_;
};

}  // namespace

Params CompleteLion(const Params& given) {
  const std::string what = "optimizer 'lion'";
  Params params = CompleteOptimizer("lion", given, {{"beta_1", 0.9}, {"beta_2", 0.99}});
  CheckPositive(what, params, "beta_1");  // at 0 it is the sign of the gradient alone; Keras refuses it too
  CheckParam(what, params, "beta_1", 0, 1);
  CheckParam(what, params, "beta_2", 0, 1);
  return params;
}

std::unique_ptr<Optimizer> NewLion(const Params& params, uint32_t dim) {
  return std::make_unique<Lion>(params, dim);
}

}  // namespace oe
