#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

// m += (g - m)(1 - beta_1);  v += (g² - v)(1 - beta_2);  w -= m·alpha / (sqrt(v) + epsilon)
// with alpha = lr·sqrt(1 - beta_2^t) / (1 - beta_1^t), t = the number of this push. With amsgrad (Reddi et
// al., 2018) the largest v so far takes the place of v in the last one.
//
// PyTorch's Adam adds epsilon to sqrt(v / (1 - beta_2^t)), as Kingma and Ba's algorithm 1 does: that is
// epsilon·sqrt(1 - beta_2^t) here. Its SparseAdam adds it where Keras does: the epsilon-hat of the paper.
template <typename T, bool kAmsgrad>
struct Adam : ElementwiseRule {
  static constexpr size_t kSlots = kAmsgrad ? 3 : 2;

  explicit Adam(const Values<T>& value)
      : correction_1(value, "beta_1"),
        correction_2(value, "beta_2"),
        one_minus_beta_1(value.OneMinus("beta_1")),
        one_minus_beta_2(value.OneMinus("beta_2")),
        epsilon(value["epsilon"]),
        is_epsilon_corrected(value.IsSet("torch") && !value.IsSet("epsilon_hat")) {}

  void Begin(T rate, StepNumber<T> step) {
    const T root = sqrt(correction_2(step));
    alpha = rate * root / correction_1(step);
    if (is_epsilon_corrected) epsilon = epsilon * root;
  }

  void operator()(T /*rate*/, T g, T& weight, std::array<T, kSlots>& slots) const {
    T& momentum = slots[0];
    T& velocity = slots[1];
    momentum += (g - momentum) * one_minus_beta_1;
    velocity += (g * g - velocity) * one_minus_beta_2;
    T v = velocity;
    if constexpr (kAmsgrad) v = slots[2] = max(slots[2], velocity);
    weight -= (momentum * alpha) / (sqrt(v) + epsilon);
  }

  BiasCorrection<T> correction_1, correction_2;
  T one_minus_beta_1, one_minus_beta_2, epsilon;
  bool is_epsilon_corrected;
  T alpha{};
};

OptimizerEntry Describe(const std::string& name) {
  return {name,
          {{"beta_1", 0.9, Bound::kBeta},
           {"beta_2", 0.999, Bound::kBeta},
           {"epsilon", 1e-7, Bound::kNotNegative},
           {"amsgrad", 0, Bound::kFlag},
           TorchFlag(),
           {"epsilon_hat", 0, Bound::kFlag, true, "torch"}},
          {{"momentum"}, {"velocity"}, {"velocity_hat", "", "amsgrad"}},
          OptimizerEntry::kCountsPushes,
          {"amsgrad"}};
}

// Adam with decoupled weight decay (Loshchilov & Hutter, 2019): as in Keras, Adam with another default.
OptimizerEntry DescribeAdamW() {
  OptimizerEntry entry = Describe("adamw");
  entry.params.push_back({"weight_decay", 0.004, Bound::kNotNegative});
  return entry;
}

const RegisterRule<Adam, 1> kAdam(Describe("adam"));
const RegisterRule<Adam, 1> kAdamW(DescribeAdamW());

}  // namespace
}  // namespace oe
