#include <algorithm>
#include <cmath>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/optimizer/optimizer.h"

namespace oe {
namespace {

// DeepRec's AdagradDecay, by its description (DeepRec, docs/docs_en/AdagradDecay-Optimizer.md) and what its
// kernel for embedding variables does. Adagrad whose accumulator is decayed once every accumulator_decay_step
// pushes, but not below its first value, so that new data count in training that never ends:
//   if floor(t / accumulator_decay_step) > n: a = max(accumulator_decay_rate·a, initial_accumulator_value), n
//   += 1 a += g²;  w -= lr·g / sqrt(a)
// with t = the number of this push. n, one number a row, counts the decays that the row has seen: one that
// was away for several periods makes up for them one update at a time, and so does a row that is made late.
class AdagradDecay final : public Optimizer {
 public:
  AdagradDecay(const Params& params, uint32_t dim)
      : Optimizer(params, dim, size_t{dim} + 1),
        initial_(static_cast<float>(params.at("initial_accumulator_value"))),
        period_(static_cast<uint64_t>(params.at("accumulator_decay_step"))),
        rate_(static_cast<float>(params.at("accumulator_decay_rate"))) {}

  void InitSlots(float* row) const noexcept override {
    std::fill_n(row + dim(), dim(), initial_);
    row[2 * dim()] = 0;
  }

  void Update(float* const* rows, const float* const* grads, size_t n, float learning_rate,
              uint64_t step) const noexcept override {
    const uint64_t periods = step / period_;
    const auto due = static_cast<float>(periods);
    const size_t size = dim();
    const float initial = initial_;
    const float rate = rate_;
    for (size_t i = 0; i < n; ++i) {
      float* __restrict weight = rows[i];
      float* __restrict accumulator = rows[i] + size;
      float* __restrict decays = rows[i] + 2 * size;
      const float* __restrict gradient = grads[i];
      if (due > *decays) {
        for (size_t d = 0; d < size; ++d) accumulator[d] = std::max(accumulator[d] * rate, initial);
        *decays += 1;
      }
      for (size_t d = 0; d < size; ++d) {
        const float g = gradient[d];
        const float sum = accumulator[d] + g * g;
        accumulator[d] = sum;
        weight[d] -= (learning_rate * g) / std::sqrt(sum);
      }
    }
  }

 private:
  const float initial_;
  const uint64_t period_;
  const float rate_;
};

}  // namespace

Params CompleteAdagradDecay(const Params& given) {
  const std::string what = "optimizer 'adagrad_decay'";
  Params params = CompleteOptimizer("adagrad_decay", given,
                                    {{"initial_accumulator_value", 0.1},
                                     {"accumulator_decay_step", 100000},
                                     {"accumulator_decay_rate", 0.9}});
  CheckPositive(what, params, "initial_accumulator_value");
  CheckParam(what, params, "accumulator_decay_step", 1, 0x1p53);
  if (std::floor(params["accumulator_decay_step"]) != params["accumulator_decay_step"]) {
    throw SpecError(what + ": 'accumulator_decay_step' must be a whole number, not " +
                    NumberText(params["accumulator_decay_step"]));
  }
  CheckPositive(what, params, "accumulator_decay_rate");
  CheckParam(what, params, "accumulator_decay_rate", 0, 1);
  return params;
}

std::unique_ptr<Optimizer> NewAdagradDecay(const Params& params, uint32_t dim) {
  return std::make_unique<AdagradDecay>(params, dim);
}

}  // namespace oe
