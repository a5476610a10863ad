#include <algorithm>
#include <cmath>
#include <limits>

#include "oe_runtime/core/optimizer/optimizer.h"

namespace oe {
namespace {

// accumulator += g²;  w -= lr·g / sqrt(accumulator + epsilon)
class Adagrad final : public Optimizer {
 public:
  Adagrad(const Params& params, uint32_t dim)
      : Optimizer(params, dim, dim),
        initial_(static_cast<float>(params.at("initial_accumulator_value"))),
        epsilon_(static_cast<float>(params.at("epsilon"))) {}

  void InitSlots(float* row) const noexcept override { std::fill_n(row + dim(), dim(), initial_); }

  void Update(float* const* rows, const float* const* grads, size_t n, float learning_rate,
              uint64_t /*step*/) const noexcept override {
    const size_t size = dim();
    const float epsilon = epsilon_;
    for (size_t i = 0; i < n; ++i) {
      float* __restrict weight = rows[i];
      float* __restrict accumulator = rows[i] + size;
      const float* __restrict gradient = grads[i];
      for (size_t d = 0; d < size; ++d) {
        const float g = gradient[d];
        const float sum = accumulator[d] + g * g;
        accumulator[d] = sum;
        weight[d] -= (learning_rate * g) / std::sqrt(sum + epsilon);
      }
    }
  }

 private:
  const float initial_;
  const float epsilon_;
};

}  // namespace

Params CompleteAdagrad(const Params& given) {
  const std::string what = "optimizer 'adagrad'";
  Params params =
      CompleteOptimizer("adagrad", given, {{"initial_accumulator_value", 0.1}, {"epsilon", 1e-7}});
  CheckParam(what, params, "initial_accumulator_value", 0, std::numeric_limits<double>::infinity());
  CheckParam(what, params, "epsilon", 0, std::numeric_limits<double>::infinity());
  return params;
}

std::unique_ptr<Optimizer> NewAdagrad(const Params& params, uint32_t dim) {
  return std::make_unique<Adagrad>(params, dim);
}

}  // namespace oe
