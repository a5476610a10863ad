#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

// Rectified Adam (Liu et al., 2020), as PyTorch has it; Keras has none:
//   m += (g - m)(1 - beta_1);  v += (g² - v)(1 - beta_2)
//   L = 2 / (1 - beta_2) - 1;  l = L - 2·t·beta_2^t / (1 - beta_2^t)
//   w -= lr·m / (1 - beta_1^t) · (l > 5 ? r·sqrt(1 - beta_2^t) / (sqrt(v) + epsilon) : 1)
//   with r = sqrt((l - 4)(l - 2)·L / ((L - 4)(L - 2)·l)), t = the number of this push.
template <typename T>
struct Radam : ElementwiseRule {
  static constexpr size_t kSlots = 2;

  explicit Radam(const Values<T>& value)
      : beta_1(value.Exactly("beta_1")),
        beta_2(value.Exactly("beta_2")),
        one_minus_beta_1(value.OneMinus("beta_1")),
        one_minus_beta_2(value.OneMinus("beta_2")),
        epsilon(value["epsilon"]) {}

  void Begin(const T& rate, const StepNumber<T>& step) {
    using W = Wide<T>;
    const W t = static_cast<W>(step);
    const W power = pow(beta_2, t);
    const W limit = W{2} / (W{1} - beta_2) - W{1};
    const W length = limit - W{2} * t * power / (W{1} - power);
    // Without a branch, so that Symbol can write it down. The bounds matter only where the factor is 0.
    const W is_long = max(Sign(length - W{5}), W{0.0});
    const W most = max(limit, W{5});
    const W l = max(length, W{5});
    const W r = sqrt((l - W{4}) * (l - W{2}) * most / ((most - W{4}) * (most - W{2}) * l));
    const W share = static_cast<W>(rate) / (W{1} - pow(beta_1, t));
    rectified = static_cast<T>(share * is_long * r * sqrt(W{1} - power));
    plain = static_cast<T>(share * (W{1} - is_long));
  }

  void operator()(T /*rate*/, T g, T& weight, std::array<T, kSlots>& slots) const {
    auto& [momentum, velocity] = slots;
    momentum += (g - momentum) * one_minus_beta_1;
    velocity += (g * g - velocity) * one_minus_beta_2;
    weight -= momentum * (rectified / (sqrt(velocity) + epsilon) + plain);
  }

  Wide<T> beta_1, beta_2;
  T one_minus_beta_1, one_minus_beta_2, epsilon;
  T rectified{}, plain{};
};

// At an epsilon of 0 a row whose gradients were all 0 would become NaN.
const RegisterRule<Radam> kRadam(
    {"radam",
     {{"beta_1", 0.9, Bound::kBeta}, {"beta_2", 0.999, Bound::kBeta}, {"epsilon", 1e-8, Bound::kPositive}},
     {{"momentum"}, {"velocity"}},
     OptimizerEntry::kCountsPushes});

}  // namespace
}  // namespace oe
