#include <algorithm>
#include <cmath>

#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

std::vector<OptimizerSlot> Slots(const Params& /*params*/, uint32_t dim) { return {{"accumulator", dim}}; }

void Check(const std::string& what, Params* params) {
  CheckNotNegative(what, *params, "initial_accumulator_value");
  CheckNotNegative(what, *params, "epsilon");
}

// accumulator += g²;  w -= lr·g / sqrt(accumulator + epsilon)
template <typename T>
class Adagrad final : public Optimizer<T> {
 public:
  Adagrad(const Params& params, uint32_t dim)
      : Optimizer<T>(params, dim, Slots(params, dim)),
        initial_(static_cast<T>(params.at("initial_accumulator_value"))),
        epsilon_(static_cast<T>(params.at("epsilon"))) {}

  void InitState(T* state) const noexcept override { std::fill_n(state, this->dim(), initial_); }

  void Update(const RowRefs<T>& rows, T learning_rate, uint64_t /*step*/) const noexcept override {
    const size_t size = this->dim();
    const T epsilon = epsilon_;
    for (size_t i = 0; i < rows.n; ++i) {
      T* __restrict weight = rows.weights[i];
      T* __restrict accumulator = rows.states[i];
      const T* __restrict gradient = rows.gradients[i];
      for (size_t d = 0; d < size; ++d) {
        const T g = gradient[d];
        const T sum = accumulator[d] + g * g;
        accumulator[d] = sum;
        weight[d] -= (learning_rate * g) / std::sqrt(sum + epsilon);
      }
    }
  }

 private:
  const T initial_;
  const T epsilon_;
};

const RegisterOptimizer<Adagrad> kAdagrad(
    {"adagrad", {{"initial_accumulator_value", 0.1}, {"epsilon", 1e-7}}, Check, Slots});

}  // namespace
}  // namespace oe
