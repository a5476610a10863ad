#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

std::vector<OptimizerSlot> Slots(const Params& params, uint32_t dim) {
  std::vector<OptimizerSlot> slots;
  if (params.at("momentum") != 0) slots.push_back({"momentum", dim});
  return slots;
}

void Check(const std::string& what, Params* params) {
  CheckParam(what, *params, "momentum", 0, 1);
  CheckFlag(what, *params, "nesterov");
}

// w -= lr·g;  with momentum: m = momentum·m - lr·g;  w += nesterov ? momentum·m - lr·g : m
// As in Keras, nesterov without momentum is plain SGD.
template <typename T>
class Sgd final : public Optimizer<T> {
 public:
  Sgd(const Params& params, uint32_t dim)
      : Optimizer<T>(params, dim, Slots(params, dim)),
        momentum_(static_cast<T>(params.at("momentum"))),
        nesterov_(params.at("nesterov") != 0) {}

  void Update(const RowRefs<T>& rows, T learning_rate, uint64_t /*step*/) const noexcept override {
    if (this->state_values() == 0) {
      RunPlain(rows, learning_rate);
    } else {
      RunMomentum(rows, learning_rate);
    }
  }

 private:
  void RunPlain(const RowRefs<T>& rows, T learning_rate) const noexcept {
    const size_t size = this->dim();
    for (size_t i = 0; i < rows.n; ++i) {
      T* __restrict weight = rows.weights[i];
      const T* __restrict gradient = rows.gradients[i];
      for (size_t d = 0; d < size; ++d) weight[d] -= gradient[d] * learning_rate;
    }
  }

  void RunMomentum(const RowRefs<T>& rows, T learning_rate) const noexcept {
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

  const T momentum_;
  const bool nesterov_;
};

const RegisterOptimizer<Sgd> kSgd({"sgd", {{"momentum", 0.0}, {"nesterov", 0.0}}, Check, Slots});

}  // namespace
}  // namespace oe
