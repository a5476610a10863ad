#include <algorithm>
#include <cmath>
#include <limits>

#include "oe_runtime/core/optimizer/optimizer.h"

namespace oe {
namespace {

// Adam with the infinity norm (Kingma & Ba, 2015, section 7.1):
//   m += (g - m)(1 - beta_1);  u = max(beta_2·u, |g|);  w -= lr·m / ((1 - beta_1^t)(u + epsilon))
// with t = the number of this push.
class Adamax final : public Optimizer {
 public:
  Adamax(const Params& params, uint32_t dim)
      : Optimizer(params, dim, 2 * size_t{dim}),
        beta_1_(static_cast<float>(params.at("beta_1"))),
        beta_2_(static_cast<float>(params.at("beta_2"))),
        one_minus_beta_1_(static_cast<float>(1.0 - params.at("beta_1"))),
        epsilon_(static_cast<float>(params.at("epsilon"))) {}

  void InitSlots(float* row) const noexcept override { std::fill_n(row + dim(), 2 * dim(), 0.0F); }

  void Update(float* const* rows, const float* const* grads, size_t n, float learning_rate,
              uint64_t step) const noexcept override {
    const float correction = 1.0F - BetaPower(beta_1_, step);
    const size_t size = dim();
    const float rate_1 = one_minus_beta_1_;
    const float beta_2 = beta_2_;
    const float epsilon = epsilon_;
    for (size_t i = 0; i < n; ++i) {
      float* __restrict weight = rows[i];
      float* __restrict momentum = rows[i] + size;
      float* __restrict norm = rows[i] + 2 * size;
      const float* __restrict gradient = grads[i];
      for (size_t d = 0; d < size; ++d) {
        const float g = gradient[d];
        const float m = momentum[d] + (g - momentum[d]) * rate_1;
        const float u = std::max(beta_2 * norm[d], std::abs(g));
        momentum[d] = m;
        norm[d] = u;
        weight[d] -= (learning_rate * m) / (correction * (u + epsilon));
      }
    }
  }

 private:
  const float beta_1_;
  const float beta_2_;
  const float one_minus_beta_1_;
  const float epsilon_;
};

}  // namespace

Params CompleteAdamax(const Params& given) {
  Params params = CompleteOptimizer("adamax", given, {{"beta_1", 0.9}, {"beta_2", 0.999}, {"epsilon", 1e-7}});
  CheckBetas("adamax", params);
  CheckParam("optimizer 'adamax'", params, "epsilon", 0, std::numeric_limits<double>::infinity());
  return params;
}

std::unique_ptr<Optimizer> NewAdamax(const Params& params, uint32_t dim) {
  return std::make_unique<Adamax>(params, dim);
}

}  // namespace oe
