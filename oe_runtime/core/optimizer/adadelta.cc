#include <cmath>

#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

std::vector<OptimizerSlot> Slots(const Params& /*params*/, uint32_t dim) {
  return {{"accumulated_grad", dim}, {"accumulated_delta_var", dim}};
}

void Check(const std::string& what, Params* params) {
  CheckParam(what, *params, "rho", 0, 1);
  // At 0 no row ever moves: its first update is sqrt(epsilon) times the gradient's share.
  CheckPositive(what, *params, "epsilon");
}

// Adadelta (Zeiler, 2012), with a learning rate as in Keras:
//   G = rho·G + (1 - rho)·g²;  u = sqrt(D + epsilon)·g / sqrt(G + epsilon)
//   D = rho·D + (1 - rho)·u²;  w -= lr·u
template <typename T>
class Adadelta final : public Optimizer<T> {
 public:
  Adadelta(const Params& params, uint32_t dim)
      : Optimizer<T>(params, dim, Slots(params, dim)),
        rho_(static_cast<T>(params.at("rho"))),
        one_minus_rho_(static_cast<T>(1.0 - params.at("rho"))),
        epsilon_(static_cast<T>(params.at("epsilon"))) {}

  void Update(const RowRefs<T>& rows, T learning_rate, uint64_t /*step*/) const noexcept override {
    const size_t size = this->dim();
    const T rho = rho_;
    const T rate = one_minus_rho_;
    const T epsilon = epsilon_;
    for (size_t i = 0; i < rows.n; ++i) {
      T* __restrict weight = rows.weights[i];
      T* __restrict gradients = rows.states[i];
      T* __restrict updates = rows.states[i] + size;
      const T* __restrict gradient = rows.gradients[i];
      for (size_t d = 0; d < size; ++d) {
        const T g = gradient[d];
        const T sum = rho * gradients[d] + rate * (g * g);
        const T update = (std::sqrt(updates[d] + epsilon) * g) / std::sqrt(sum + epsilon);
        gradients[d] = sum;
        updates[d] = rho * updates[d] + rate * (update * update);
        weight[d] -= learning_rate * update;
      }
    }
  }

 private:
  const T rho_;
  const T one_minus_rho_;
  const T epsilon_;
};

const RegisterOptimizer<Adadelta> kAdadelta({"adadelta", {{"rho", 0.95}, {"epsilon", 1e-7}}, Check, Slots});

}  // namespace
}  // namespace oe
