#include <algorithm>
#include <cmath>
#include <limits>

#include "oe_runtime/core/optimizer/optimizer.h"

namespace oe {
namespace {

// Adadelta (Zeiler, 2012), with a learning rate as in Keras:
//   G = rho·G + (1 - rho)·g²;  u = sqrt(D + epsilon)·g / sqrt(G + epsilon)
//   D = rho·D + (1 - rho)·u²;  w -= lr·u
class Adadelta final : public Optimizer {
 public:
  Adadelta(const Params& params, uint32_t dim)
      : Optimizer(params, dim, 2 * size_t{dim}),
        rho_(static_cast<float>(params.at("rho"))),
        one_minus_rho_(static_cast<float>(1.0 - params.at("rho"))),
        epsilon_(static_cast<float>(params.at("epsilon"))) {}

  void InitSlots(float* row) const noexcept override { std::fill_n(row + dim(), 2 * dim(), 0.0F); }

  void Update(float* const* rows, const float* const* grads, size_t n, float learning_rate,
              uint64_t /*step*/) const noexcept override {
    const size_t size = dim();
    const float rho = rho_;
    const float rate = one_minus_rho_;
    const float epsilon = epsilon_;
    for (size_t i = 0; i < n; ++i) {
      float* __restrict weight = rows[i];
      float* __restrict gradients = rows[i] + size;
      float* __restrict updates = rows[i] + 2 * size;
      const float* __restrict gradient = grads[i];
      for (size_t d = 0; d < size; ++d) {
        const float g = gradient[d];
        const float sum = rho * gradients[d] + rate * (g * g);
        const float update = (std::sqrt(updates[d] + epsilon) * g) / std::sqrt(sum + epsilon);
        gradients[d] = sum;
        updates[d] = rho * updates[d] + rate * (update * update);
        weight[d] -= learning_rate * update;
      }
    }
  }

 private:
  const float rho_;
  const float one_minus_rho_;
  const float epsilon_;
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

std::unique_ptr<Optimizer> NewAdadelta(const Params& params, uint32_t dim) {
  return std::make_unique<Adadelta>(params, dim);
}

}  // namespace oe
