#include <algorithm>
#include <cmath>
#include <limits>

#include "oe_runtime/core/optimizer/optimizer.h"

namespace oe {
namespace {

// Adadelta (Zeiler, 2012), with a learning rate as in Keras:
//   G = rho·G + (1 - rho)·g²;  u = sqrt(D + epsilon)·g / sqrt(G + epsilon)
//   D = rho·D + (1 - rho)·u²;  w -= lr·u
template <typename T>
class Adadelta final : public Optimizer<T> {
 public:
  Adadelta(const Params& params, uint32_t dim)
      : Optimizer<T>(params, dim, 2 * size_t{dim}),
        rho_(static_cast<T>(params.at("rho"))),
        one_minus_rho_(static_cast<T>(1.0 - params.at("rho"))),
        epsilon_(static_cast<T>(params.at("epsilon"))) {}

  void InitState(T* state) const noexcept override { std::fill_n(state, this->state_values(), T{0}); }

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

}  // namespace

Params CompleteAdadelta(const Params& given) {
  const std::string what = "optimizer 'adadelta'";
  Params params = CompleteOptimizer("adadelta", given, {{"rho", 0.95}, {"epsilon", 1e-7}});
  CheckParam(what, params, "rho", 0, 1);
  // At 0 no row ever moves: its first update is sqrt(epsilon) times the gradient's share.
  CheckPositive(what, params, "epsilon");
  return params;
}

template <typename T>
std::unique_ptr<Optimizer<T>> NewAdadelta(const Params& params, uint32_t dim) {
  return std::make_unique<Adadelta<T>>(params, dim);
}
template std::unique_ptr<Optimizer<float>> NewAdadelta(const Params& params, uint32_t dim);
template std::unique_ptr<Optimizer<double>> NewAdadelta(const Params& params, uint32_t dim);

}  // namespace oe
