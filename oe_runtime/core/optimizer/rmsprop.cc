#include <algorithm>
#include <cmath>

#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

std::vector<OptimizerSlot> Slots(const Params& params, uint32_t dim) {
  std::vector<OptimizerSlot> slots = {{"velocity", dim}};
  if (params.at("momentum") != 0) slots.push_back({"momentum", dim});
  if (params.at("centered") != 0) slots.push_back({"average_gradient", dim});
  return slots;
}

void Check(const std::string& what, Params* params) {
  CheckParam(what, *params, "rho", 0, 1);
  CheckParam(what, *params, "momentum", 0, 1);
  CheckNotNegative(what, *params, "epsilon");
  CheckFlag(what, *params, "centered");
}

// RMSprop (Hinton, 2012), with momentum and centered (Graves, 2013) as in Keras:
//   v = rho·v + (1 - rho)·g²;  centered: a = rho·a + (1 - rho)·g, and v - a² takes the place of v below
//   u = lr·g / sqrt(v + epsilon);  with momentum: m = momentum·m + u takes the place of u;  w -= u
// A row's state is v, then m, then a.
template <typename T>
class Rmsprop final : public Optimizer<T> {
 public:
  Rmsprop(const Params& params, uint32_t dim)
      : Optimizer<T>(params, dim, Slots(params, dim)),
        rho_(static_cast<T>(params.at("rho"))),
        one_minus_rho_(static_cast<T>(1.0 - params.at("rho"))),
        momentum_(static_cast<T>(params.at("momentum"))),
        epsilon_(static_cast<T>(params.at("epsilon"))),
        centered_(params.at("centered") != 0) {}

  void Update(const RowRefs<T>& rows, T learning_rate, uint64_t /*step*/) const noexcept override {
    if (momentum_ != 0) {
      if (centered_) {
        Run<true, true>(rows, learning_rate);
      } else {
        Run<true, false>(rows, learning_rate);
      }
    } else if (centered_) {
      Run<false, true>(rows, learning_rate);
    } else {
      Run<false, false>(rows, learning_rate);
    }
  }

 private:
  template <bool kMomentum, bool kCentered>
  void Run(const RowRefs<T>& rows, T learning_rate) const noexcept {
    const size_t size = this->dim();
    const T rho = rho_;
    const T rate = one_minus_rho_;
    const T momentum = momentum_;
    const T epsilon = epsilon_;
    for (size_t i = 0; i < rows.n; ++i) {
      T* __restrict weight = rows.weights[i];
      T* __restrict velocity = rows.states[i];
      T* __restrict moment = rows.states[i] + (kMomentum ? 1 : 0) * size;
      T* __restrict average = rows.states[i] + (kCentered ? (kMomentum ? 2 : 1) : 0) * size;
      const T* __restrict gradient = rows.gradients[i];
      for (size_t d = 0; d < size; ++d) {
        const T g = gradient[d];
        const T v = rho * velocity[d] + rate * (g * g);
        velocity[d] = v;
        T variance = v;
        if (kCentered) {
          const T a = rho * average[d] + rate * g;
          average[d] = a;
          // Never negative but for rounding, after many equal large gradients; Keras's weights become NaN
          // then.
          variance = std::max(v - a * a, T{0});
        }
        T update = (learning_rate * g) / std::sqrt(variance + epsilon);
        if (kMomentum) {
          update = momentum * moment[d] + update;
          moment[d] = update;
        }
        weight[d] -= update;
      }
    }
  }

  const T rho_;
  const T one_minus_rho_;
  const T momentum_;
  const T epsilon_;
  const bool centered_;
};

const RegisterOptimizer<Rmsprop> kRmsprop(
    {"rmsprop", {{"rho", 0.9}, {"momentum", 0.0}, {"epsilon", 1e-7}, {"centered", 0.0}}, Check, Slots});

}  // namespace
}  // namespace oe
