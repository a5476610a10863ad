#include <algorithm>

#include "oe_runtime/core/optimizer/optimizer.h"

namespace oe {
namespace {

// w -= lr·g
template <typename T>
class PlainSgd final : public Optimizer<T> {
 public:
  PlainSgd(const Params& params, uint32_t dim) : Optimizer<T>(params, dim, 0) {}

  void InitState(T* /*state*/) const noexcept override {}

  void Update(const RowRefs<T>& rows, T learning_rate, uint64_t /*step*/) const noexcept override {
    const size_t size = this->dim();
    for (size_t i = 0; i < rows.n; ++i) {
      T* __restrict weight = rows.weights[i];
      const T* __restrict gradient = rows.gradients[i];
      for (size_t d = 0; d < size; ++d) weight[d] -= gradient[d] * learning_rate;
    }
  }
};

// m = momentum·m - lr·g;  w += nesterov ? momentum·m - lr·g : m
template <typename T>
class MomentumSgd final : public Optimizer<T> {
 public:
  MomentumSgd(const Params& params, uint32_t dim)
      : Optimizer<T>(params, dim, dim),
        momentum_(static_cast<T>(params.at("momentum"))),
        nesterov_(params.at("nesterov") != 0) {}

  void InitState(T* state) const noexcept override { std::fill_n(state, this->state_values(), T{0}); }

  void Update(const RowRefs<T>& rows, T learning_rate, uint64_t /*step*/) const noexcept override {
    const size_t size = this->dim();
    const T momentum = momentum_;
    for (size_t i = 0; i < rows.n; ++i) {
      T* __restrict weight = rows.weights[i];
      T* __restrict velocity = rows.states[i];
      const T* __restrict gradient = rows.gradients[i];
      if (nesterov_) {
        for (size_t d = 0; d < size; ++d) {
          const T step = gradient[d] * learning_rate;
          const T v = velocity[d] * momentum - step;
          velocity[d] = v;
          weight[d] += v * momentum - step;
        }
      } else {
        for (size_t d = 0; d < size; ++d) {
          const T v = velocity[d] * momentum - gradient[d] * learning_rate;
          velocity[d] = v;
          weight[d] += v;
        }
      }
    }
  }

 private:
  const T momentum_;
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

template <typename T>
std::unique_ptr<Optimizer<T>> NewSgd(const Params& params, uint32_t dim) {
  // As in Keras, nesterov without momentum is plain SGD.
  if (params.at("momentum") == 0) return std::make_unique<PlainSgd<T>>(params, dim);
  return std::make_unique<MomentumSgd<T>>(params, dim);
}
template std::unique_ptr<Optimizer<float>> NewSgd(const Params& params, uint32_t dim);
template std::unique_ptr<Optimizer<double>> NewSgd(const Params& params, uint32_t dim);

}  // namespace oe
