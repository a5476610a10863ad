#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

// The sum of the squares of n numbers, in an order that does not depend on the processor's vectors.
template <typename T>
T SumOfSquares(const T* values, size_t n) {
  constexpr size_t kLanes = 8;
  std::array<T, kLanes> sums{};
  size_t d = 0;
  for (; d + kLanes <= n; d += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) sums[lane] += values[d + lane] * values[d + lane];
  }
  T sum = 0;
  for (const T part : sums) sum += part;
  for (; d < n; ++d) sum += values[d] * values[d];
  return sum;
}

// Adagrad with one accumulator per row, as FBGEMM's EXACT_ROWWISE_ADAGRAD, which TorchRec's tables have:
//   accumulator += mean(g²);  w -= lr / (sqrt(accumulator) + epsilon)·g
// A row then takes 4 bytes of state; Adagrad's takes as many as its weights.
template <typename T>
class RowwiseAdagrad final : public Optimizer<T> {
 public:
  RowwiseAdagrad(const Params& params, uint32_t dim, const std::vector<StateSlot>& slots)
      : Optimizer<T>(params, dim, slots), epsilon_(static_cast<T>(params.at("epsilon"))) {}

  void Update(const RowRefs<T>& rows, T learning_rate, uint64_t /*step*/) const noexcept override {
    const size_t size = this->dim();
    const T epsilon = epsilon_;
    for (size_t i = 0; i < rows.n; ++i) {
      const T* __restrict gradient = this->Begin(rows, i, learning_rate);
      T* __restrict weight = rows.weights[i];
      T& accumulator = *rows.states[i];
      accumulator += SumOfSquares(gradient, size) / static_cast<T>(size);
      const T rate = learning_rate / (std::sqrt(accumulator) + epsilon);
      for (size_t d = 0; d < size; ++d) weight[d] -= rate * gradient[d];
      this->End(rows, i);
    }
  }

 private:
  const T epsilon_;
};

// FBGEMM's defaults.
const RegisterOptimizer<RowwiseAdagrad> kRowwiseAdagrad(
    {"rowwise_adagrad",
     {{"initial_accumulator_value", 0, Bound::kNotNegative}, {"epsilon", 1e-8, Bound::kPositive}},
     {{"accumulator", "initial_accumulator_value", "", true}}});

}  // namespace
}  // namespace oe
