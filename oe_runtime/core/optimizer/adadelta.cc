#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

// Adadelta (Zeiler, 2012), with a learning rate as in Keras:
//   G = rho·G + (1 - rho)·g²;  u = sqrt(D + epsilon)·g / sqrt(G + epsilon)
//   D = rho·D + (1 - rho)·u²;  w -= lr·u
template <typename T>
struct Adadelta : ElementwiseRule {
  static constexpr size_t kSlots = 2;

  explicit Adadelta(const Values<T>& value)
      : rho(value["rho"]), one_minus_rho(value.OneMinus("rho")), epsilon(value["epsilon"]) {}

  void operator()(T rate, T g, T& weight, std::array<T, kSlots>& slots) const {
    auto& [gradients, updates] = slots;
    gradients = rho * gradients + one_minus_rho * (g * g);
    const T update = (sqrt(updates + epsilon) * g) / sqrt(gradients + epsilon);
    updates = rho * updates + one_minus_rho * (update * update);
    weight -= rate * update;
  }

  T rho, one_minus_rho, epsilon;
};

// At an epsilon of 0 no row ever moves: its first update is sqrt(epsilon) times the gradient's share.
const RegisterRule<Adadelta> kAdadelta({"adadelta",
                                        {{"rho", 0.95, Bound::kUnit}, {"epsilon", 1e-7, Bound::kPositive}},
                                        {{"accumulated_grad"}, {"accumulated_delta_var"}}});

}  // namespace
}  // namespace oe
