#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

// RMSprop (Hinton, 2012), with momentum and centered (Graves, 2013) as in Keras:
//   v = rho·v + (1 - rho)·g²;  centered: a = rho·a + (1 - rho)·g, and v - a² takes the place of v below
//   u = lr·g / sqrt(v + epsilon);  with momentum: m = momentum·m + u takes the place of u;  w -= u
// A row's state is v, then m, then a.
//
// PyTorch adds epsilon to the root, and its momentum has no learning rate: u = g / (sqrt(v) + epsilon), and
// w -= lr·u at the end.
template <typename T, bool kMomentum, bool kCentered, bool kIsTorch>
struct Rmsprop : ElementwiseRule {
  static constexpr size_t kSlots = 1 + (kMomentum ? 1 : 0) + (kCentered ? 1 : 0);

  explicit Rmsprop(const Values<T>& value)
      : rho(value["rho"]),
        one_minus_rho(value.OneMinus("rho")),
        momentum(value["momentum"]),
        epsilon(value["epsilon"]) {}

  void operator()(T rate, T g, T& weight, std::array<T, kSlots>& slots) const {
    T& velocity = slots[0];
    velocity = rho * velocity + one_minus_rho * (g * g);
    T variance = velocity;
    if constexpr (kCentered) {
      T& average = slots[kSlots - 1];
      average = rho * average + one_minus_rho * g;
      // Never negative but for rounding, after many equal large gradients; Keras's weights become NaN then.
      variance = max(velocity - average * average, T{0});
    }
    T update = kIsTorch ? g / (sqrt(variance) + epsilon) : (rate * g) / sqrt(variance + epsilon);
    if constexpr (kMomentum) update = slots[1] = momentum * slots[1] + update;
    weight -= kIsTorch ? rate * update : update;
  }

  T rho, one_minus_rho, momentum, epsilon;
};

const RegisterRule<Rmsprop, 3> kRmsprop(
    {"rmsprop",
     {{"rho", 0.9, Bound::kUnit},
      {"momentum", 0, Bound::kUnit},
      {"epsilon", 1e-7, Bound::kNotNegative},
      {"centered", 0, Bound::kFlag},
      TorchFlag()},
     {{"velocity"}, {"momentum", "", "momentum"}, {"average_gradient", "", "centered"}},
     OptimizerEntry::kNone,
     {"momentum", "centered", "torch"}});

}  // namespace
}  // namespace oe
