#include <algorithm>
#include <cmath>
#include <limits>

#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

std::vector<OptimizerSlot> Slots(const Params& /*params*/, uint32_t dim) {
  return {{"accumulator", dim}, {"linear", dim}};
}

void Check(const std::string& what, Params* params) {
  CheckParam(what, *params, "learning_rate_power", -std::numeric_limits<double>::infinity(), 0);
  CheckNotNegative(what, *params, "initial_accumulator_value");
  CheckNotNegative(what, *params, "l1_regularization_strength");
  CheckNotNegative(what, *params, "l2_regularization_strength");
  CheckNotNegative(what, *params, "l2_shrinkage_regularization_strength");
  CheckNotNegative(what, *params, "beta");
  CheckFlag(what, *params, "group_lasso");
  // Left out where it is off, as in the specifications that earlier versions wrote into pools and files.
  if (params->at("group_lasso") == 0) params->erase("group_lasso");
}

// FTRL-proximal (McMahan et al., 2013), with l2 shrinkage and beta, as in Keras:
//   g' = g + 2·shrinkage·w;  n' = n + g²;  z += g' - (n'^p - n^p) / lr · w     (p = -learning_rate_power)
//   w = (clip(z, ±l1) - z) / (n'^p / lr + 2·(l2 + beta / (2·lr)))
//
// With group_lasso, l1 is against the norm of the row's z, so that rows become zero as a whole, as DeepRec's
// kernel for embedding variables has it (KvResourceSparseApplyFtrl, training_ali_ops.cc):
//   w = (l1 / |z| - 1)·z / (n'^p / lr + 2·(l2 + beta / (2·lr))) where |z| > l1, else 0
// There n' has the square of g', shrinkage included, within an update, and that of g from then on.
template <typename T>
class Ftrl final : public Optimizer<T> {
 public:
  Ftrl(const Params& params, uint32_t dim)
      : Optimizer<T>(params, dim, Slots(params, dim)),
        power_(static_cast<T>(-params.at("learning_rate_power"))),
        initial_(static_cast<T>(params.at("initial_accumulator_value"))),
        l1_(static_cast<T>(params.at("l1_regularization_strength"))),
        l2_(static_cast<T>(params.at("l2_regularization_strength"))),
        shrinkage_(static_cast<T>(2 * params.at("l2_shrinkage_regularization_strength"))),
        beta_(static_cast<T>(params.at("beta"))),
        group_lasso_(params.count("group_lasso") != 0) {}

  void InitState(T* state) const noexcept override {
    std::fill_n(state, this->dim(), initial_);
    std::fill_n(state + this->dim(), this->dim(), T{0});
  }

  void Update(const RowRefs<T>& rows, T learning_rate, uint64_t /*step*/) const noexcept override {
    if (power_ == T{0.5}) {
      RunRule(rows, learning_rate, [](T x) { return std::sqrt(x); });
    } else {
      const T power = power_;
      RunRule(rows, learning_rate, [power](T x) { return std::pow(x, power); });
    }
  }

 private:
  template <typename Power>
  void RunRule(const RowRefs<T>& rows, T learning_rate, Power power) const noexcept {
    if (group_lasso_) {
      RunGroups(rows, learning_rate, power);
    } else {
      Run(rows, learning_rate, power);
    }
  }

  template <typename Power>
  void RunGroups(const RowRefs<T>& rows, T learning_rate, Power power) const noexcept {
    const size_t size = this->dim();
    const T twice_l2 = 2 * (l2_ + beta_ / (T{2} * learning_rate));
    for (size_t i = 0; i < rows.n; ++i) {
      T* weight = rows.weights[i];
      T* accumulator = rows.states[i];
      T* linear = rows.states[i] + size;
      const T* gradient = rows.gradients[i];
      const auto shrunk = [&](size_t d) { return gradient[d] + shrinkage_ * weight[d]; };
      double squares = 0;
      for (size_t d = 0; d < size; ++d) {
        const T g = shrunk(d);
        const T old_sum = accumulator[d];
        linear[d] += g - (power(old_sum + g * g) - power(old_sum)) / learning_rate * weight[d];
        squares += static_cast<double>(linear[d]) * static_cast<double>(linear[d]);
      }
      const auto norm = static_cast<T>(std::sqrt(squares));
      for (size_t d = 0; d < size; ++d) {
        const T g = shrunk(d);
        const T quadratic = power(accumulator[d] + g * g) / learning_rate + twice_l2;
        weight[d] = norm > l1_ ? (l1_ - norm) / (quadratic * norm) * linear[d] : T{0};
        accumulator[d] += gradient[d] * gradient[d];
      }
    }
  }

  template <typename Power>
  void Run(const RowRefs<T>& rows, T learning_rate, Power power) const noexcept {
    const size_t size = this->dim();
    const T l1 = l1_;
    const T shrinkage = shrinkage_;
    const T twice_l2 = 2 * (l2_ + beta_ / (T{2} * learning_rate));
    for (size_t i = 0; i < rows.n; ++i) {
      T* __restrict weight = rows.weights[i];
      T* __restrict accumulator = rows.states[i];
      T* __restrict linear = rows.states[i] + size;
      const T* __restrict gradient = rows.gradients[i];
      for (size_t d = 0; d < size; ++d) {
        const T g = gradient[d];
        const T w = weight[d];
        const T old_sum = accumulator[d];
        const T new_sum = old_sum + g * g;
        const T new_power = power(new_sum);
        const T z = linear[d] + ((g + shrinkage * w) - (new_power - power(old_sum)) / learning_rate * w);
        const T quadratic = new_power / learning_rate + twice_l2;
        const T clipped = std::min(std::max(z, -l1), l1);
        linear[d] = z;
        weight[d] = (clipped - z) / quadratic;
        accumulator[d] = new_sum;
      }
    }
  }

  const T power_;
  const T initial_;
  const T l1_;
  const T l2_;
  const T shrinkage_;
  const T beta_;
  const bool group_lasso_;
};

const RegisterOptimizer<Ftrl> kFtrl({"ftrl",
                                     {{"learning_rate_power", -0.5},
                                      {"initial_accumulator_value", 0.1},
                                      {"l1_regularization_strength", 0.0},
                                      {"l2_regularization_strength", 0.0},
                                      {"l2_shrinkage_regularization_strength", 0.0},
                                      {"beta", 0.0},
                                      {"group_lasso", 0.0}},
                                     Check,
                                     Slots,
                                     OptimizerEntry::kDividesByLearningRate});

}  // namespace
}  // namespace oe
