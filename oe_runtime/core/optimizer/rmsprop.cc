#include <algorithm>
#include <cmath>
#include <limits>

#include "oe_runtime/core/optimizer/optimizer.h"

namespace oe {
namespace {

// RMSprop (Hinton, 2012), with momentum and centered (Graves, 2013) as in Keras:
//   v = rho·v + (1 - rho)·g²;  centered: a = rho·a + (1 - rho)·g, and v - a² takes the place of v below
//   u = lr·g / sqrt(v + epsilon);  with momentum: m = momentum·m + u takes the place of u;  w -= u
// A row's state is v, then m, then a.
class Rmsprop final : public Optimizer {
 public:
  Rmsprop(const Params& params, uint32_t dim)
      : Optimizer(
            params, dim,
            dim * (size_t{1} + (params.at("momentum") != 0 ? 1 : 0) + (params.at("centered") != 0 ? 1 : 0))),
        rho_(static_cast<float>(params.at("rho"))),
        one_minus_rho_(static_cast<float>(1.0 - params.at("rho"))),
        momentum_(static_cast<float>(params.at("momentum"))),
        epsilon_(static_cast<float>(params.at("epsilon"))),
        centered_(params.at("centered") != 0) {}

  void InitSlots(float* row) const noexcept override { std::fill_n(row + dim(), row_floats() - dim(), 0.0F); }

  void Update(float* const* rows, const float* const* grads, size_t n, float learning_rate,
              uint64_t /*step*/) const noexcept override {
    if (momentum_ != 0) {
      if (centered_) {
        Run<true, true>(rows, grads, n, learning_rate);
      } else {
        Run<true, false>(rows, grads, n, learning_rate);
      }
    } else if (centered_) {
      Run<false, true>(rows, grads, n, learning_rate);
    } else {
      Run<false, false>(rows, grads, n, learning_rate);
    }
  }

 private:
  template <bool kMomentum, bool kCentered>
  void Run(float* const* rows, const float* const* grads, size_t n, float learning_rate) const noexcept {
    const size_t size = dim();
    const float rho = rho_;
    const float rate = one_minus_rho_;
    const float momentum = momentum_;
    const float epsilon = epsilon_;
    for (size_t i = 0; i < n; ++i) {
      float* __restrict weight = rows[i];
      float* __restrict velocity = rows[i] + size;
      float* __restrict moment = rows[i] + (kMomentum ? 2 : 1) * size;
      float* __restrict average = rows[i] + (kCentered ? (kMomentum ? 3 : 2) : 1) * size;
      const float* __restrict gradient = grads[i];
      for (size_t d = 0; d < size; ++d) {
        const float g = gradient[d];
        const float v = rho * velocity[d] + rate * (g * g);
        velocity[d] = v;
        float variance = v;
        if (kCentered) {
          const float a = rho * average[d] + rate * g;
          average[d] = a;
          // Never negative but for rounding, after many equal large gradients; Keras's weights become NaN
          // then.
          variance = std::max(v - a * a, 0.0F);
        }
        float update = (learning_rate * g) / std::sqrt(variance + epsilon);
        if (kMomentum) {
          update = momentum * moment[d] + update;
          moment[d] = update;
        }
        weight[d] -= update;
      }
    }
  }

  const float rho_;
  const float one_minus_rho_;
  const float momentum_;
  const float epsilon_;
  const bool centered_;
};

}  // namespace

Params CompleteRmsprop(const Params& given) {
  const std::string what = "optimizer 'rmsprop'";
  Params params = CompleteOptimizer("rmsprop", given,
                                    {{"rho", 0.9}, {"momentum", 0.0}, {"epsilon", 1e-7}, {"centered", 0.0}});
  CheckParam(what, params, "rho", 0, 1);
  CheckParam(what, params, "momentum", 0, 1);
  CheckParam(what, params, "epsilon", 0, std::numeric_limits<double>::infinity());
  CheckFlag(what, params, "centered");
  return params;
}

std::unique_ptr<Optimizer> NewRmsprop(const Params& params, uint32_t dim) {
  return std::make_unique<Rmsprop>(params, dim);
}

}  // namespace oe
