#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "oe_runtime/core/optimizer/optimizer.h"

namespace oe {
namespace {

constexpr float kDecay = 0.96F;
constexpr size_t kWarmingSteps = 1024;  // 0.96^1024 < 1e-18: the factors after that are 1 in double precision

// Adam with Nesterov's momentum (Dozat, 2015), with t = the number of this push:
//   u_t = beta_1·(1 - 0.96^t / 2);  U_t = u_1·u_2·…·u_t
//   m += (g - m)(1 - beta_1);  v += (g² - v)(1 - beta_2)
//   w -= lr·(u_(t+1)·m / (1 - U_(t+1)) + (1 - u_t)·g / (1 - U_t)) / (sqrt(v / (1 - beta_2^t)) + epsilon)
// Keras keeps U in a variable. Here it is a function of t, so that a restored table goes on with the same:
// beta_1^t times a product that has converged after kWarmingSteps factors.
class Nadam final : public Optimizer {
 public:
  Nadam(const Params& params, uint32_t dim)
      : Optimizer(params, dim, 2 * size_t{dim}),
        beta_1_(static_cast<float>(params.at("beta_1"))),
        beta_2_(static_cast<float>(params.at("beta_2"))),
        epsilon_(static_cast<float>(params.at("epsilon"))) {
    double power = 1;
    double product = 1;
    for (double& warming : warming_) {
      warming = product;
      power *= static_cast<double>(kDecay);
      product *= 1 - 0.5 * power;
    }
  }

  void InitSlots(float* row) const noexcept override { std::fill_n(row + dim(), 2 * dim(), 0.0F); }

  void Update(float* const* rows, const float* const* grads, size_t n, float learning_rate,
              uint64_t step) const noexcept override {
    const float beta_1 = beta_1_;
    const float u = beta_1 * (1.0F - 0.5F * BetaPower(kDecay, step));
    const float next_u = beta_1 * (1.0F - 0.5F * BetaPower(kDecay, step + 1));
    const float product = Product(step);
    const float of_momentum = 1.0F - product * next_u;
    const float of_gradient = 1.0F - product;
    const float of_velocity = 1.0F - BetaPower(beta_2_, step);
    const size_t size = dim();
    const float rate_1 = 1.0F - beta_1;
    const float rate_2 = 1.0F - beta_2_;
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
        const float ahead = (next_u * m) / of_momentum + ((1.0F - u) * g) / of_gradient;
        weight[d] -= (ahead * learning_rate) / (std::sqrt(v / of_velocity) + epsilon);
      }
    }
  }

 private:
  float Product(uint64_t step) const noexcept {
    const double warming = warming_[std::min<uint64_t>(step, kWarmingSteps)];
    return static_cast<float>(std::pow(static_cast<double>(beta_1_), static_cast<double>(step)) * warming);
  }

  const float beta_1_;
  const float beta_2_;
  const float epsilon_;
  std::array<double, kWarmingSteps + 1> warming_{};  // [t]: U_t / beta_1^t
};

}  // namespace

Params CompleteNadam(const Params& given) {
  Params params = CompleteOptimizer("nadam", given, {{"beta_1", 0.9}, {"beta_2", 0.999}, {"epsilon", 1e-7}});
  CheckBetas("nadam", params);
  CheckParam("optimizer 'nadam'", params, "epsilon", 0, std::numeric_limits<double>::infinity());
  return params;
}

std::unique_ptr<Optimizer> NewNadam(const Params& params, uint32_t dim) {
  return std::make_unique<Nadam>(params, dim);
}

}  // namespace oe
