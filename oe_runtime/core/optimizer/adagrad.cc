#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

// accumulator += g²;  w -= lr·g / sqrt(accumulator + epsilon);  PyTorch: … / (sqrt(accumulator) + epsilon)
template <typename T, bool kIsTorch>
struct Adagrad : ElementwiseRule {
  static constexpr size_t kSlots = 1;

  explicit Adagrad(const Values<T>& value) : epsilon(value["epsilon"]) {}

  void operator()(T rate, T g, T& weight, std::array<T, kSlots>& slots) const {
    auto& [accumulator] = slots;
    accumulator += g * g;
    weight -= (rate * g) / (kIsTorch ? sqrt(accumulator) + epsilon : sqrt(accumulator + epsilon));
  }

  T epsilon;
};

const RegisterRule<Adagrad, 1> kAdagrad({"adagrad",
                                         {{"initial_accumulator_value", 0.1, Bound::kNotNegative},
                                          {"epsilon", 1e-7, Bound::kNotNegative},
                                          TorchFlag()},
                                         {{"accumulator", "initial_accumulator_value"}},
                                         OptimizerEntry::kNone,
                                         {"torch"}});

}  // namespace
}  // namespace oe
