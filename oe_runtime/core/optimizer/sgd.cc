#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

// w -= lr·g;  with momentum: m = momentum·m - lr·g;  w += nesterov ? momentum·m - lr·g : m
// As in Keras, nesterov without momentum is plain SGD.
//
// PyTorch's momentum has no learning rate: m = momentum·m + (1 - dampening)·g;  w -= lr·(nesterov ? g +
// momentum·m : m). The first push of the table is not dampened.
template <typename T, bool kMomentum, bool kNesterov, bool kIsTorch>
struct Sgd : ElementwiseRule {
  static constexpr size_t kSlots = kMomentum ? 1 : 0;

  explicit Sgd(const Values<T>& value) : momentum(value["momentum"]), dampening(value["dampening"]) {}

  void Begin(T /*rate*/, StepNumber<T> step) {
    if constexpr (kMomentum && kIsTorch) share = T{1} - dampening * Sign(static_cast<T>(step) - T{1});
  }

  void operator()(T rate, T g, T& weight, std::array<T, kSlots>& slots) const {
    const T step = g * rate;
    if constexpr (kMomentum && kIsTorch) {
      slots[0] = slots[0] * momentum + g * share;
      weight -= rate * (kNesterov ? g + slots[0] * momentum : slots[0]);
    } else if constexpr (kMomentum) {
      slots[0] = slots[0] * momentum - step;
      weight += kNesterov ? slots[0] * momentum - step : slots[0];
    } else {
      weight -= step;
    }
  }

  T momentum, dampening;
  T share{};
};

const RegisterRule<Sgd, 3> kSgd({"sgd",
                                 {{"momentum", 0, Bound::kUnit},
                                  {"nesterov", 0, Bound::kFlag},
                                  TorchFlag(),
                                  {"dampening", 0, Bound::kUnit, true, "torch"}},
                                 {{"momentum", "", "momentum"}},
                                 OptimizerEntry::kNone,
                                 {"momentum", "nesterov", "torch"}});

}  // namespace
}  // namespace oe
