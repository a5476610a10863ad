#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

// accumulator += g²;  w -= lr·g / sqrt(accumulator + epsilon)
template <typename T>
struct Adagrad : ElementwiseRule {
  static constexpr size_t kSlots = 1;

  explicit Adagrad(const Values<T>& value) : epsilon(value["epsilon"]) {}

  void operator()(T rate, T g, T& weight, std::array<T, kSlots>& slots) const {
    auto& [accumulator] = slots;
    accumulator += g * g;
    weight -= (rate * g) / sqrt(accumulator + epsilon);
  }

  T epsilon;
};

const RegisterRule<Adagrad> kAdagrad({"adagrad",
                                      {{"initial_accumulator_value", 0.1, Bound::kNotNegative},
                                       {"epsilon", 1e-7, Bound::kNotNegative}},
                                      {{"accumulator", "initial_accumulator_value"}}});

}  // namespace
}  // namespace oe
