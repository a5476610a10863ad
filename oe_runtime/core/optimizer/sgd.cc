#include <algorithm>

#include "oe_runtime/core/optimizer/optimizer.h"

namespace oe {
namespace {

// w -= lr·g
class PlainSgd final : public Optimizer {
 public:
  PlainSgd(const Params& params, uint32_t dim) : Optimizer(params, dim, 0) {}

  void InitSlots(float* /*row*/) const noexcept override {}

  void Update(float* const* rows, const float* const* grads, size_t n, float learning_rate,
              uint64_t /*step*/) const noexcept override {
    const size_t size = dim();
    for (size_t i = 0; i < n; ++i) {
      float* __restrict weight = rows[i];
      const float* __restrict gradient = grads[i];
      for (size_t d = 0; d < size; ++d) weight[d] -= gradient[d] * learning_rate;
    }
  }
};

// m = momentum·m - lr·g;  w += nesterov ? momentum·m - lr·g : m
class MomentumSgd final : public Optimizer {
 public:
  MomentumSgd(const Params& params, uint32_t dim)
      : Optimizer(params, dim, dim),
        momentum_(static_cast<float>(params.at("momentum"))),
        nesterov_(params.at("nesterov") != 0) {}

  void InitSlots(float* row) const noexcept override { std::fill_n(row + dim(), dim(), 0.0F); }

  void Update(float* const* rows, const float* const* grads, size_t n, float learning_rate,
              uint64_t /*step*/) const noexcept override {
    const size_t size = dim();
    const float momentum = momentum_;
    for (size_t i = 0; i < n; ++i) {
      float* __restrict weight = rows[i];
      float* __restrict velocity = rows[i] + size;
      const float* __restrict gradient = grads[i];
      if (nesterov_) {
        for (size_t d = 0; d < size; ++d) {
          const float step = gradient[d] * learning_rate;
          const float v = velocity[d] * momentum - step;
          velocity[d] = v;
          weight[d] += v * momentum - step;
        }
      } else {
        for (size_t d = 0; d < size; ++d) {
          const float v = velocity[d] * momentum - gradient[d] * learning_rate;
          velocity[d] = v;
          weight[d] += v;
        }
      }
    }
  }

 private:
  const float momentum_;
  const bool nesterov_;
};

}  // namespace

Params CompleteSgd(const Params& given) {
  const std::string what = "optimizer 'sgd'";
  Params params = CompleteOptimizer("sgd", given, {{"momentum", 0.0}, {"nesterov", 0.0}});
  CheckParam(what, params, "momentum", 0, 1);
  CheckFlag(what, params, "nesterov");
  return params;
}

std::unique_ptr<Optimizer> NewSgd(const Params& params, uint32_t dim) {
  // As in Keras, nesterov without momentum is plain SGD.
  if (params.at("momentum") == 0) return std::make_unique<PlainSgd>(params, dim);
  return std::make_unique<MomentumSgd>(params, dim);
}

}  // namespace oe
