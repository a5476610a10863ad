#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

// DeepRec's AdagradDecay, by its description (DeepRec, docs/docs_en/AdagradDecay-Optimizer.md) and what its
// kernel for embedding variables does. Adagrad whose accumulator is decayed once every accumulator_decay_step
// pushes, but not below its first value, so that new data count in training that never ends:
//   if floor(t / accumulator_decay_step) > n: a = max(accumulator_decay_rate·a, initial_accumulator_value), n
//   += 1 a += g²;  w -= lr·g / sqrt(a)
// with t = the number of this push. n, one number per row, counts the decays that the row has seen: one that
// was away for several periods makes up for them one update at a time, and so does a row that is made late.
template <typename T>
class AdagradDecay final : public Optimizer<T> {
 public:
  AdagradDecay(const Params& params, uint32_t dim, const std::vector<StateSlot>& slots)
      : Optimizer<T>(params, dim, slots),
        initial_(static_cast<T>(params.at("initial_accumulator_value"))),
        period_(static_cast<uint64_t>(params.at("accumulator_decay_step"))),
        rate_(static_cast<T>(params.at("accumulator_decay_rate"))) {}

  void Update(const RowRefs<T>& rows, T learning_rate, uint64_t step) const noexcept override {
    const uint64_t periods = step / period_;
    const auto due = static_cast<T>(periods);
    const size_t size = this->dim();
    const T initial = initial_;
    const T rate = rate_;
    for (size_t i = 0; i < rows.n; ++i) {
      const T* __restrict gradient = this->Begin(rows, i, learning_rate);
      T* __restrict weight = rows.weights[i];
      T* __restrict accumulator = rows.states[i];
      T* __restrict decays = rows.states[i] + size;
      if (due > *decays) {
        for (size_t d = 0; d < size; ++d) accumulator[d] = std::max(accumulator[d] * rate, initial);
        *decays += 1;
      }
      for (size_t d = 0; d < size; ++d) {
        const T g = gradient[d];
        const T sum = accumulator[d] + g * g;
        accumulator[d] = sum;
        weight[d] -= (learning_rate * g) / std::sqrt(sum);
      }
      this->End(rows, i);
    }
  }

 private:
  const T initial_;
  const uint64_t period_;
  const T rate_;
};

const RegisterOptimizer<AdagradDecay> kAdagradDecay({"adagrad_decay",
                                                     {{"initial_accumulator_value", 0.1, Bound::kPositive},
                                                      {"accumulator_decay_step", 100000, Bound::kWhole},
                                                      {"accumulator_decay_rate", 0.9, Bound::kPositiveUnit}},
                                                     {{"accumulator", "initial_accumulator_value"},
                                                      {"accumulator_decays", "", "", true, true}},
                                                     OptimizerEntry::kCountsPushes});

}  // namespace
}  // namespace oe
