#include <algorithm>
#include <array>
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
}

template <typename T>
constexpr T kDecay = T(0.96);
constexpr size_t kWarmingSteps = 1024;  // 0.96^1024 < 1e-18: the factors after that are 1 in double precision

// Adam with Nesterov's momentum (Dozat, 2015), with t = the number of this push:
//   u_t = beta_1·(1 - 0.96^t / 2);  U_t = u_1·u_2·…·u_t
//   m += (g - m)(1 - beta_1);  v += (g² - v)(1 - beta_2)
//   w -= lr·(u_(t+1)·m / (1 - U_(t+1)) + (1 - u_t)·g / (1 - U_t)) / (sqrt(v / (1 - beta_2^t)) + epsilon)
// Keras keeps U in a variable. Here it is a function of t, so that a restored table goes on with the same:
// beta_1^t times a product that has converged after kWarmingSteps factors.
template <typename T>
class Nadam final : public Optimizer<T> {
 public:
  Nadam(const Params& params, uint32_t dim)
      : Optimizer<T>(params, dim, Slots(params, dim)),
        beta_1_(static_cast<T>(params.at("beta_1"))),
        beta_2_(static_cast<T>(params.at("beta_2"))),
        epsilon_(static_cast<T>(params.at("epsilon"))) {
    double power = 1;
    double product = 1;
    for (double& warming : warming_) {
      warming = product;
      power *= static_cast<double>(kDecay<T>);
      product *= 1 - 0.5 * power;
    }
  }

  void Update(const RowRefs<T>& rows, T learning_rate, uint64_t step) const noexcept override {
    const T beta_1 = beta_1_;
    const T u = beta_1 * (T{1} - T{0.5} * BetaPower(kDecay<T>, step));
    const T next_u = beta_1 * (T{1} - T{0.5} * BetaPower(kDecay<T>, step + 1));
    const T product = Product(step);
    const T of_momentum = T{1} - product * next_u;
    const T of_gradient = T{1} - product;
    const T of_velocity = T{1} - BetaPower(beta_2_, step);
    const size_t size = this->dim();
    const T rate_1 = T{1} - beta_1;
    const T rate_2 = T{1} - beta_2_;
    const T epsilon = epsilon_;
    for (size_t i = 0; i < rows.n; ++i) {
      T* __restrict weight = rows.weights[i];
      T* __restrict momentum = rows.states[i];
      T* __restrict velocity = rows.states[i] + size;
      const T* __restrict gradient = rows.gradients[i];
      for (size_t d = 0; d < size; ++d) {
        const T g = gradient[d];
        const T m = momentum[d] + (g - momentum[d]) * rate_1;
        const T v = velocity[d] + (g * g - velocity[d]) * rate_2;
        momentum[d] = m;
        velocity[d] = v;
        const T ahead = (next_u * m) / of_momentum + ((T{1} - u) * g) / of_gradient;
        weight[d] -= (ahead * learning_rate) / (std::sqrt(v / of_velocity) + epsilon);
      }
    }
  }

 private:
  T Product(uint64_t step) const noexcept {
    const double warming = warming_[std::min<uint64_t>(step, kWarmingSteps)];
    return static_cast<T>(std::pow(static_cast<double>(beta_1_), static_cast<double>(step)) * warming);
  }

  const T beta_1_;
  const T beta_2_;
  const T epsilon_;
  std::array<double, kWarmingSteps + 1> warming_{};  // [t]: U_t / beta_1^t
};

const RegisterOptimizer<Nadam> kNadam({"nadam",
                                       {{"beta_1", 0.9}, {"beta_2", 0.999}, {"epsilon", 1e-7}},
                                       Check,
                                       Slots,
                                       OptimizerEntry::kCountsPushes});

}  // namespace
}  // namespace oe
