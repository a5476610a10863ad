#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

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
  Ftrl(const Params& params, uint32_t dim, const std::vector<StateSlot>& slots)
      : Optimizer<T>(params, dim, slots),
        power_(static_cast<T>(-params.at("learning_rate_power"))),
        l1_(static_cast<T>(params.at("l1_regularization_strength"))),
        l2_(static_cast<T>(params.at("l2_regularization_strength"))),
        shrinkage_(static_cast<T>(2 * params.at("l2_shrinkage_regularization_strength"))),
        beta_(static_cast<T>(params.at("beta"))),
        group_lasso_(params.at("group_lasso") != 0) {}

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
      UpdateElements(*this, Elementwise<Power>{power, l1_, shrinkage_, TwiceL2(learning_rate)}, rows,
                     this->dim(), learning_rate);
    }
  }

  T TwiceL2(T learning_rate) const { return 2 * (l2_ + beta_ / (T{2} * learning_rate)); }

  template <typename Power>
  struct Elementwise {
    static constexpr size_t kSlots = 2;

    void operator()(T rate, T g, T& weight, std::array<T, kSlots>& slots) const {
      auto& [accumulator, linear] = slots;
      const T old_power = power(accumulator);
      accumulator += g * g;
      const T new_power = power(accumulator);
      linear += (g + shrinkage * weight) - (new_power - old_power) / rate * weight;
      const T clipped = std::min(std::max(linear, -l1), l1);
      weight = (clipped - linear) / (new_power / rate + twice_l2);
    }

    Power power;
    T l1, shrinkage, twice_l2;
  };

  template <typename Power>
  void RunGroups(const RowRefs<T>& rows, T learning_rate, Power power) const noexcept {
    const size_t size = this->dim();
    const T twice_l2 = TwiceL2(learning_rate);
    for (size_t i = 0; i < rows.n; ++i) {
      const T* gradient = this->Begin(rows, i, learning_rate);
      T* weight = rows.weights[i];
      T* accumulator = rows.states[i];
      T* linear = rows.states[i] + size;
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
      this->End(rows, i);
    }
  }

  const T power_;
  const T l1_;
  const T l2_;
  const T shrinkage_;
  const T beta_;
  const bool group_lasso_;
};

const RegisterOptimizer<Ftrl> kFtrl({"ftrl",
                                     {{"learning_rate_power", -0.5, Bound::kNotPositive},
                                      {"initial_accumulator_value", 0.1, Bound::kNotNegative},
                                      {"l1_regularization_strength", 0, Bound::kNotNegative},
                                      {"l2_regularization_strength", 0, Bound::kNotNegative},
                                      {"l2_shrinkage_regularization_strength", 0, Bound::kNotNegative},
                                      {"beta", 0, Bound::kNotNegative},
                                      {"group_lasso", 0, Bound::kFlag, true}},
                                     {{"accumulator", "initial_accumulator_value"}, {"linear"}},
                                     OptimizerEntry::kDividesByLearningRate});

}  // namespace
}  // namespace oe
