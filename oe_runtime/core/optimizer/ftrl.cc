#include <algorithm>
#include <cmath>
#include <limits>

#include "oe_runtime/core/optimizer/optimizer.h"

namespace oe {
namespace {

// FTRL-proximal (McMahan et al., 2013), with l2 shrinkage and beta, as in Keras:
//   g' = g + 2·shrinkage·w;  n' = n + g²;  z += g' - (n'^p - n^p) / lr · w     (p = -learning_rate_power)
//   w = (clip(z, ±l1) - z) / (n'^p / lr + 2·(l2 + beta / (2·lr)))
class Ftrl final : public Optimizer {
 public:
  Ftrl(const Params& params, uint32_t dim)
      : Optimizer(params, dim, 2 * size_t{dim}),
        power_(static_cast<float>(-params.at("learning_rate_power"))),
        initial_(static_cast<float>(params.at("initial_accumulator_value"))),
        l1_(static_cast<float>(params.at("l1_regularization_strength"))),
        l2_(static_cast<float>(params.at("l2_regularization_strength"))),
        shrinkage_(static_cast<float>(2 * params.at("l2_shrinkage_regularization_strength"))),
        beta_(static_cast<float>(params.at("beta"))) {}

  void InitSlots(float* row) const noexcept override {
    std::fill_n(row + dim(), dim(), initial_);
    std::fill_n(row + 2 * dim(), dim(), 0.0F);
  }

  void Update(float* const* rows, const float* const* grads, size_t n, float learning_rate,
              uint64_t /*step*/) const noexcept override {
    if (power_ == 0.5F) {
      Run(rows, grads, n, learning_rate, [](float x) { return std::sqrt(x); });
    } else {
      const float power = power_;
      Run(rows, grads, n, learning_rate, [power](float x) { return std::pow(x, power); });
    }
  }

 private:
  template <typename Power>
  void Run(float* const* rows, const float* const* grads, size_t n, float learning_rate,
           Power power) const noexcept {
    const size_t size = dim();
    const float l1 = l1_;
    const float shrinkage = shrinkage_;
    const float twice_l2 = 2 * (l2_ + beta_ / (2.0F * learning_rate));
    for (size_t i = 0; i < n; ++i) {
      float* __restrict weight = rows[i];
      float* __restrict accumulator = rows[i] + size;
      float* __restrict linear = rows[i] + 2 * size;
      const float* __restrict gradient = grads[i];
      for (size_t d = 0; d < size; ++d) {
        const float g = gradient[d];
        const float w = weight[d];
        const float old_sum = accumulator[d];
        const float new_sum = old_sum + g * g;
        const float new_power = power(new_sum);
        const float z = linear[d] + ((g + shrinkage * w) - (new_power - power(old_sum)) / learning_rate * w);
        const float quadratic = new_power / learning_rate + twice_l2;
        const float clipped = std::min(std::max(z, -l1), l1);
        linear[d] = z;
        weight[d] = (clipped - z) / quadratic;
        accumulator[d] = new_sum;
      }
    }
  }

  const float power_;
  const float initial_;
  const float l1_;
  const float l2_;
  const float shrinkage_;
  const float beta_;
};

}  // namespace

Params CompleteFtrl(const Params& given) {
  const std::string what = "optimizer 'ftrl'";
  Params params = CompleteOptimizer("ftrl", given,
                                    {{"learning_rate_power", -0.5},
                                     {"initial_accumulator_value", 0.1},
                                     {"l1_regularization_strength", 0.0},
                                     {"l2_regularization_strength", 0.0},
                                     {"l2_shrinkage_regularization_strength", 0.0},
                                     {"beta", 0.0}});
  const double infinity = std::numeric_limits<double>::infinity();
  CheckParam(what, params, "learning_rate_power", -infinity, 0);
  CheckParam(what, params, "initial_accumulator_value", 0, infinity);
  CheckParam(what, params, "l1_regularization_strength", 0, infinity);
  CheckParam(what, params, "l2_regularization_strength", 0, infinity);
  CheckParam(what, params, "l2_shrinkage_regularization_strength", 0, infinity);
  CheckParam(what, params, "beta", 0, infinity);
  return params;
}

std::unique_ptr<Optimizer> NewFtrl(const Params& params, uint32_t dim) {
  return std::make_unique<Ftrl>(params, dim);
}

}  // namespace oe
