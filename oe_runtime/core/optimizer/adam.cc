#include <algorithm>
#include <cmath>
#include <limits>

#include "oe_runtime/core/optimizer/optimizer.h"

namespace oe {
namespace {

// m += (g - m)(1 - beta_1);  v += (g² - v)(1 - beta_2);  w -= m·alpha / (sqrt(v) + epsilon)
// with alpha = lr·sqrt(1 - beta_2^t) / (1 - beta_1^t), t = the number of this push.
class Adam final : public Optimizer {
 public:
  Adam(const Params& params, uint32_t dim)
      : Optimizer(dim),
        beta_1_(static_cast<float>(params.at("beta_1"))),
        beta_2_(static_cast<float>(params.at("beta_2"))),
        one_minus_beta_1_(static_cast<float>(1.0 - params.at("beta_1"))),
        one_minus_beta_2_(static_cast<float>(1.0 - params.at("beta_2"))),
        epsilon_(static_cast<float>(params.at("epsilon"))) {}

  uint32_t slots() const override { return 2; }

  void InitSlots(float* row) const noexcept override { std::fill_n(row + dim(), 2 * dim(), 0.0F); }

  void Apply(float* const* rows, const float* const* grads, size_t n, float learning_rate,
             uint64_t step) const noexcept override {
    // Keras raises the float32 betas to the float32 step and subtracts in float32. For beta_2 = 0.999 that
    // moves 1 - beta_2^t by 1e-5 from the exact value, so the rounding is part of the rule.
    const auto t = static_cast<double>(static_cast<float>(step));
    const auto power_1 = static_cast<float>(std::pow(static_cast<double>(beta_1_), t));
    const auto power_2 = static_cast<float>(std::pow(static_cast<double>(beta_2_), t));
    const float alpha = learning_rate * std::sqrt(1.0F - power_2) / (1.0F - power_1);
    const size_t size = dim();
    const float rate_1 = one_minus_beta_1_;
    const float rate_2 = one_minus_beta_2_;
    const float epsilon = epsilon_;
    for (size_t i = 0; i < n; ++i) {
      float* __restrict weight = rows[i];
      float* __restrict momentum = rows[i] + size;
      float* __restrict velocity = rows[i] + 2 * size;
      const float* __restrict gradient = grads[i];
      for (size_t d = 0; d < size; ++d) {
        const float g = gradient[d];
        const float m = momentum[d] + (g - momentum[d]) * rate_1;
        const float v = velocity[d] + (g * g - velocity[d]) * rate_2;
        momentum[d] = m;
        velocity[d] = v;
        weight[d] -= (m * alpha) / (std::sqrt(v) + epsilon);
      }
    }
  }

 private:
  const float beta_1_;
  const float beta_2_;
  const float one_minus_beta_1_;
  const float one_minus_beta_2_;
  const float epsilon_;
};

}  // namespace

Params CompleteAdam(const Params& given) {
  const std::string what = "optimizer 'adam'";
  Params params = CompleteParams(what, given, {{"beta_1", 0.9}, {"beta_2", 0.999}, {"epsilon", 1e-7}});
  // At 1 the bias correction divides by zero; the bound is the last float32 below it.
  CheckParam(what, params, "beta_1", 0, 0.99999994);
  CheckParam(what, params, "beta_2", 0, 0.99999994);
  CheckParam(what, params, "epsilon", 0, std::numeric_limits<double>::infinity());
  return params;
}

std::unique_ptr<Optimizer> NewAdam(const Params& params, uint32_t dim) {
  return std::make_unique<Adam>(params, dim);
}

}  // namespace oe
