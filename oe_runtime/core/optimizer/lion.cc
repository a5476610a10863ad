#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

// Lion (Chen et al., 2023): w -= lr·sign(beta_1·m + (1 - beta_1)·g);  m = beta_2·m + (1 - beta_2)·g
template <typename T>
struct Lion : ElementwiseRule {
  static constexpr size_t kSlots = 1;

  explicit Lion(const Values<T>& value)
      : beta_1(value["beta_1"]), beta_2(value["beta_2"]), rate_1(T{1} - beta_1), rate_2(T{1} - beta_2) {}

  void operator()(T rate, T g, T& weight, std::array<T, kSlots>& slots) const {
    auto& [momentum] = slots;
    weight -= rate * Sign(momentum * beta_1 + g * rate_1);
    momentum = momentum * beta_2 + g * rate_2;
  }

  T beta_1, beta_2, rate_1, rate_2;
};

// At a beta_1 of 0 it is the sign of the gradient alone; Keras refuses it too.
const RegisterRule<Lion> kLion({"lion",
                                {{"beta_1", 0.9, Bound::kPositiveUnit}, {"beta_2", 0.99, Bound::kUnit}},
                                {{"momentum"}}});

}  // namespace
}  // namespace oe
