#include <algorithm>
#include <cmath>
#include <limits>

#include "oe_runtime/core/optimizer/optimizer.h"

namespace oe {
namespace {

// m += (g - m)(1 - beta_1);  v += (g² - v)(1 - beta_2);  w -= m·alpha / (sqrt(v) + epsilon)
// with alpha = lr·sqrt(1 - beta_2^t) / (1 - beta_1^t), t = the number of this push. With amsgrad (Reddi et
// al., 2018) the largest v so far takes the place of v in the last one.
class Adam final : public Optimizer {
 public:
  Adam(const Params& params, uint32_t dim)
      : Optimizer(params, dim, size_t{params.at("amsgrad") != 0 ? 3U : 2U} * dim),
        beta_1_(static_cast<float>(params.at("beta_1"))),
        beta_2_(static_cast<float>(params.at("beta_2"))),
        one_minus_beta_1_(static_cast<float>(1.0 - params.at("beta_1"))),
        one_minus_beta_2_(static_cast<float>(1.0 - params.at("beta_2"))),
        epsilon_(static_cast<float>(params.at("epsilon"))),
        amsgrad_(params.at("amsgrad") != 0) {}

  void InitSlots(float* row) const noexcept override { std::fill_n(row + dim(), row_floats() - dim(), 0.0F); }

  void Update(float* const* rows, const float* const* grads, size_t n, float learning_rate,
              uint64_t step) const noexcept override {
    const float alpha =
        learning_rate * std::sqrt(1.0F - BetaPower(beta_2_, step)) / (1.0F - BetaPower(beta_1_, step));
    if (amsgrad_) {
      Run<true>(rows, grads, n, alpha);
    } else {
      Run<false>(rows, grads, n, alpha);
    }
  }

 private:
  template <bool kAmsgrad>
  void Run(float* const* rows, const float* const* grads, size_t n, float alpha) const noexcept {
    const size_t size = dim();
    const float rate_1 = one_minus_beta_1_;
    const float rate_2 = one_minus_beta_2_;
    const float epsilon = epsilon_;
    for (size_t i = 0; i < n; ++i) {
      float* __restrict weight = rows[i];
      float* __restrict momentum = rows[i] + size;
      float* __restrict velocity = rows[i] + 2 * size;
      float* __restrict largest = rows[i] + (kAmsgrad ? 3 : 2) * size;
      const float* __restrict gradient = grads[i];
      for (size_t d = 0; d < size; ++d) {
        const float g = gradient[d];
        const float m = momentum[d] + (g - momentum[d]) * rate_1;
        float v = velocity[d] + (g * g - velocity[d]) * rate_2;
        momentum[d] = m;
        velocity[d] = v;
        if (kAmsgrad) {
          v = std::max(largest[d], v);
          largest[d] = v;
        }
        weight[d] -= (m * alpha) / (std::sqrt(v) + epsilon);
      }
    }
  }

  const float beta_1_;
  const float beta_2_;
  const float one_minus_beta_1_;
  const float one_minus_beta_2_;
  const float epsilon_;
  const bool amsgrad_;
};

Params Complete(const std::string& name, const Params& given, double weight_decay) {
  const std::string what = "optimizer '" + name + "'";
  Params params = CompleteOptimizer(name, given,
                                    {{"beta_1", 0.9},
                                     {"beta_2", 0.999},
                                     {"epsilon", 1e-7},
                                     {"amsgrad", 0.0},
                                     {"weight_decay", weight_decay}});
  CheckBetas(name, params);
  CheckParam(what, params, "epsilon", 0, std::numeric_limits<double>::infinity());
  CheckFlag(what, params, "amsgrad");
  return params;
}

}  // namespace

Params CompleteAdam(const Params& given) { return Complete("adam", given, 0.0); }

// Adam with decoupled weight decay (Loshchilov & Hutter, 2019): as in Keras, Adam with another default.
Params CompleteAdamW(const Params& given) { return Complete("adamw", given, 0.004); }

std::unique_ptr<Optimizer> NewAdam(const Params& params, uint32_t dim) {
  return std::make_unique<Adam>(params, dim);
}

}  // namespace oe
