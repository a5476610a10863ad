
#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

std::vector<OptimizerSlot> Slots(const Params& /*params*/, uint32_t dim) { return {{"momentum", dim}}; }

void Check(const std::string& what, Params* params) {
  CheckPositive(what, *params, "beta_1");  // at 0 it is the sign of the gradient alone; Keras refuses it too
  CheckParam(what, *params, "beta_1", 0, 1);
  CheckParam(what, *params, "beta_2", 0, 1);
}

// Lion (Chen et al., 2023): w -= lr·sign(beta_1·m + (1 - beta_1)·g);  m = beta_2·m + (1 - beta_2)·g
template <typename T>
class Lion final : public Optimizer<T> {
 public:
  Lion(const Params& params, uint32_t dim)
      : Optimizer<T>(params, dim, Slots(params, dim)),
        beta_1_(static_cast<T>(params.at("beta_1"))),
        beta_2_(static_cast<T>(params.at("beta_2"))) {}

  void Update(const RowRefs<T>& rows, T learning_rate, uint64_t /*step*/) const noexcept override {
    const size_t size = this->dim();
    const T beta_1 = beta_1_;
    const T beta_2 = beta_2_;
    const T rate_1 = T{1} - beta_1;
    const T rate_2 = T{1} - beta_2;
    for (size_t i = 0; i < rows.n; ++i) {
      T* __restrict weight = rows.weights[i];
      T* __restrict momentum = rows.states[i];
      const T* __restrict gradient = rows.gradients[i];
      for (size_t d = 0; d < size; ++d) {
        const T g = gradient[d];
        const T m = momentum[d];
        const T direction = m * beta_1 + g * rate_1;
        const T sign = (direction > 0 ? T{1} : T{0}) - (direction < 0 ? T{1} : T{0});
        weight[d] -= learning_rate * sign;
        momentum[d] = m * beta_2 + g * rate_2;
      }
    }
  }

 private:
  const T beta_1_;
  const T beta_2_;
};

const RegisterOptimizer<Lion> kLion({"lion", {{"beta_1", 0.9}, {"beta_2", 0.99}}, Check, Slots});

}  // namespace
}  // namespace oe
