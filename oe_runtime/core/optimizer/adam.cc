#include <algorithm>
#include <cmath>

#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

std::vector<OptimizerSlot> Slots(const Params& params, uint32_t dim) {
  std::vector<OptimizerSlot> slots = {{"momentum", dim}, {"velocity", dim}};
  if (params.at("amsgrad") != 0) slots.push_back({"velocity_hat", dim});
  return slots;
}

void Check(const std::string& what, Params* params) {
  CheckBetas(what, *params);
  CheckNotNegative(what, *params, "epsilon");
  CheckFlag(what, *params, "amsgrad");
}

// m += (g - m)(1 - beta_1);  v += (g² - v)(1 - beta_2);  w -= m·alpha / (sqrt(v) + epsilon)
// with alpha = lr·sqrt(1 - beta_2^t) / (1 - beta_1^t), t = the number of this push. With amsgrad (Reddi et
// al., 2018) the largest v so far takes the place of v in the last one.
template <typename T>
class Adam final : public Optimizer<T> {
 public:
  Adam(const Params& params, uint32_t dim)
      : Optimizer<T>(params, dim, Slots(params, dim)),
        beta_1_(static_cast<T>(params.at("beta_1"))),
        beta_2_(static_cast<T>(params.at("beta_2"))),
        one_minus_beta_1_(static_cast<T>(1.0 - params.at("beta_1"))),
        one_minus_beta_2_(static_cast<T>(1.0 - params.at("beta_2"))),
        epsilon_(static_cast<T>(params.at("epsilon"))),
        amsgrad_(params.at("amsgrad") != 0) {}

  void Update(const RowRefs<T>& rows, T learning_rate, uint64_t step) const noexcept override {
    const T alpha =
        learning_rate * std::sqrt(T{1} - BetaPower(beta_2_, step)) / (T{1} - BetaPower(beta_1_, step));
    if (amsgrad_) {
      Run<true>(rows, alpha);
    } else {
      Run<false>(rows, alpha);
    }
  }

 private:
  template <bool kAmsgrad>
  void Run(const RowRefs<T>& rows, T alpha) const noexcept {
    const size_t size = this->dim();
    const T rate_1 = one_minus_beta_1_;
    const T rate_2 = one_minus_beta_2_;
    const T epsilon = epsilon_;
    for (size_t i = 0; i < rows.n; ++i) {
      T* __restrict weight = rows.weights[i];
      T* __restrict momentum = rows.states[i];
      T* __restrict velocity = rows.states[i] + size;
      T* __restrict largest = rows.states[i] + (kAmsgrad ? 2 : 1) * size;
      const T* __restrict gradient = rows.gradients[i];
      for (size_t d = 0; d < size; ++d) {
        const T g = gradient[d];
        const T m = momentum[d] + (g - momentum[d]) * rate_1;
        T v = velocity[d] + (g * g - velocity[d]) * rate_2;
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

  const T beta_1_;
  const T beta_2_;
  const T one_minus_beta_1_;
  const T one_minus_beta_2_;
  const T epsilon_;
  const bool amsgrad_;
};

const RegisterOptimizer<Adam> kAdam(
    {"adam",
     {{"beta_1", 0.9}, {"beta_2", 0.999}, {"epsilon", 1e-7}, {"amsgrad", 0.0}},
     Check,
     Slots,
     OptimizerEntry::kCountsPushes});

// Adam with decoupled weight decay (Loshchilov & Hutter, 2019): as in Keras, Adam with another default.
const RegisterOptimizer<Adam> kAdamW(
    {"adamw",
     {{"beta_1", 0.9}, {"beta_2", 0.999}, {"epsilon", 1e-7}, {"amsgrad", 0.0}, {"weight_decay", 0.004}},
     Check,
     Slots,
     OptimizerEntry::kCountsPushes});

}  // namespace
}  // namespace oe
