#include <algorithm>
#include <cmath>

#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

std::vector<OptimizerSlot> Slots(const Params& /*params*/, uint32_t dim) {
  return {{"momentum", dim}, {"norm", dim}};
}

void Check(const std::string& what, Params* params) {
  CheckBetas(what, *params);
  CheckNotNegative(what, *params, "epsilon");
}

// Adam with the infinity norm (Kingma & Ba, 2015, section 7.1):
//   m += (g - m)(1 - beta_1);  u = max(beta_2·u, |g|);  w -= lr·m / ((1 - beta_1^t)(u + epsilon))
// with t = the number of this push.
template <typename T>
class Adamax final : public Optimizer<T> {
 public:
  Adamax(const Params& params, uint32_t dim)
      : Optimizer<T>(params, dim, Slots(params, dim)),
        beta_1_(static_cast<T>(params.at("beta_1"))),
        beta_2_(static_cast<T>(params.at("beta_2"))),
        one_minus_beta_1_(static_cast<T>(1.0 - params.at("beta_1"))),
        epsilon_(static_cast<T>(params.at("epsilon"))) {}

  void Update(const RowRefs<T>& rows, T learning_rate, uint64_t step) const noexcept override {
    const T correction = T{1} - BetaPower(beta_1_, step);
    const size_t size = this->dim();
    const T rate_1 = one_minus_beta_1_;
    const T beta_2 = beta_2_;
    const T epsilon = epsilon_;
    for (size_t i = 0; i < rows.n; ++i) {
      T* __restrict weight = rows.weights[i];
      T* __restrict momentum = rows.states[i];
      T* __restrict norm = rows.states[i] + size;
      const T* __restrict gradient = rows.gradients[i];
      for (size_t d = 0; d < size; ++d) {
        const T g = gradient[d];
        const T m = momentum[d] + (g - momentum[d]) * rate_1;
        const T u = std::max(beta_2 * norm[d], std::abs(g));
        momentum[d] = m;
        norm[d] = u;
        weight[d] -= (learning_rate * m) / (correction * (u + epsilon));
      }
    }
  }

 private:
  const T beta_1_;
  const T beta_2_;
  const T one_minus_beta_1_;
  const T epsilon_;
};

const RegisterOptimizer<Adamax> kAdamax({"adamax",
                                         {{"beta_1", 0.9}, {"beta_2", 0.999}, {"epsilon", 1e-7}},
                                         Check,
                                         Slots,
                                         OptimizerEntry::kCountsPushes});

}  // namespace
}  // namespace oe
