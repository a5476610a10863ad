#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

// w -= lr·g;  with momentum: m = momentum·m - lr·g;  w += nesterov ? momentum·m - lr·g : m
// As in Keras, nesterov without momentum is plain SGD.
template <typename T, bool kMomentum, bool kNesterov>
struct Sgd : ElementwiseRule {
  static constexpr size_t kSlots = kMomentum ? 1 : 0;

  explicit Sgd(const Values<T>& value) : momentum(value["momentum"]) {}

  void operator()(T rate, T g, T& weight, std::array<T, kSlots>& slots) const {
    const T step = g * rate;
    if constexpr (kMomentum) {
      slots[0] = slots[0] * momentum - step;
      weight += kNesterov ? slots[0] * momentum - step : slots[0];
    } else {
      weight -= step;
    }
  }

  T momentum;
};

const RegisterRule<Sgd, 2> kSgd({"sgd",
                                 {{"momentum", 0, Bound::kUnit}, {"nesterov", 0, Bound::kFlag}},
                                 {{"momentum", "", "momentum"}},
                                 OptimizerEntry::kNone,
                                 {"momentum", "nesterov"}});

}  // namespace
}  // namespace oe
