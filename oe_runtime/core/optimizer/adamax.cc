#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

// Adam with the infinity norm (Kingma & Ba, 2015, section 7.1):
//   m += (g - m)(1 - beta_1);  u = max(beta_2·u, |g|);  w -= lr·m / ((1 - beta_1^t)(u + epsilon))
// with t = the number of this push. PyTorch: u = max(beta_2·u, |g| + epsilon), and no epsilon in w.
template <typename T, bool kIsTorch>
struct Adamax : ElementwiseRule {
  static constexpr size_t kSlots = 2;

  explicit Adamax(const Values<T>& value)
      : correction_1(value, "beta_1"),
        beta_2(value["beta_2"]),
        one_minus_beta_1(value.OneMinus("beta_1")),
        epsilon(value["epsilon"]) {}

  void Begin(T /*rate*/, StepNumber<T> step) { correction = correction_1(step); }

  void operator()(T rate, T g, T& weight, std::array<T, kSlots>& slots) const {
    auto& [momentum, norm] = slots;
    momentum += (g - momentum) * one_minus_beta_1;
    norm = max(beta_2 * norm, kIsTorch ? abs(g) + epsilon : abs(g));
    weight -= (rate * momentum) / (correction * (kIsTorch ? norm : norm + epsilon));
  }

  BiasCorrection<T> correction_1;
  T beta_2, one_minus_beta_1, epsilon;
  T correction{};
};

const RegisterRule<Adamax, 1> kAdamax({"adamax",
                                       {{"beta_1", 0.9, Bound::kBeta},
                                        {"beta_2", 0.999, Bound::kBeta},
                                        {"epsilon", 1e-7, Bound::kNotNegative},
                                        TorchFlag()},
                                       {{"momentum"}, {"norm"}},
                                       OptimizerEntry::kCountsPushes,
                                       {"torch"}});

}  // namespace
}  // namespace oe
