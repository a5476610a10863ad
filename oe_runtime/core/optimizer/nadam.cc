#include "oe_runtime/core/optimizer/registry.h"

namespace oe {
namespace {

template <typename T>
constexpr T kDecay = T(0.96);
constexpr size_t kWarmingSteps = 1024;  // 0.96^1024 < 1e-18: the factors after that are 1 in double precision

// [t]: the product of the factors 1 - 0.96^k / 2 for k up to t.
template <typename T>
std::array<double, kWarmingSteps + 1> Warming() {
  std::array<double, kWarmingSteps + 1> warming{};
  double power = 1;
  double product = 1;
  for (double& value : warming) {
    value = product;
    power *= static_cast<double>(kDecay<T>);
    product *= 1 - 0.5 * power;
  }
  return warming;
}

// The product of 1 - rate^k / 2 for k from 1 to step, for a rate next to 1 whose factors never converge soon:
// its logarithm is -sum_j (1 / (j·2^j)) · sum_k rate^(j·k), and the inner sum is a geometric series.
double WarmingOf(double rate, double step) {
  const double power = std::pow(rate, step);
  double rate_j = 1;
  double power_j = 1;
  double half_j = 1;
  double logarithm = 0;
  for (int j = 1; j <= 60; ++j) {
    rate_j *= rate;
    power_j *= power;
    half_j /= 2;
    logarithm -= half_j / j * (rate_j < 1 ? rate_j * (1 - power_j) / (1 - rate_j) : step);
  }
  return std::exp(logarithm);
}

// Adam with Nesterov's momentum (Dozat, 2015), with t = the number of this push:
//   u_t = beta_1·(1 - 0.96^t / 2);  U_t = u_1·u_2·…·u_t
//   m += (g - m)(1 - beta_1);  v += (g² - v)(1 - beta_2)
//   w -= lr·(u_(t+1)·m / (1 - U_(t+1)) + (1 - u_t)·g / (1 - U_t)) / (sqrt(v / (1 - beta_2^t)) + epsilon)
// Keras keeps U in a variable. Here it is a function of t, so that a restored table goes on with the same:
// beta_1^t times a product that has converged after kWarmingSteps factors. PyTorch has
// 0.96^(t·momentum_decay) in place of 0.96^t, and computes all of this in double precision.
template <typename T>
struct Nadam : ElementwiseRule {
  static constexpr size_t kSlots = 2;

  explicit Nadam(const Values<T>& value)
      : correction_2(value, "beta_2"),
        exact_beta_1(value.Exactly("beta_1")),
        momentum_decay(value.Exactly("momentum_decay")),
        is_torch(value.IsSet("torch")),
        beta_1(value["beta_1"]),
        rate_1(is_torch ? value.OneMinus("beta_1") : T{1} - beta_1),
        rate_2(is_torch ? value.OneMinus("beta_2") : T{1} - value["beta_2"]),
        epsilon(value["epsilon"]) {}

  void Begin(T /*rate*/, uint64_t step) {
    velocity_share = correction_2(step);
    if (is_torch) return BeginTorch(static_cast<double>(step));
    static const auto kWarming = Warming<T>();
    const T product = static_cast<T>(std::pow(static_cast<double>(beta_1), static_cast<double>(step)) *
                                     kWarming[std::min<uint64_t>(step, kWarmingSteps)]);
    u = beta_1 * (T{1} - T{0.5} * BetaPower(kDecay<T>, step));
    next_u = beta_1 * (T{1} - T{0.5} * BetaPower(kDecay<T>, step + 1));
    momentum_share = T{1} - product * next_u;
    gradient_share = T{1} - product;
  }

  void BeginTorch(double step) {
    const double rate = std::pow(0.96, momentum_decay);
    const double exact_u = exact_beta_1 * (1 - 0.5 * std::pow(rate, step));
    const double exact_next = exact_beta_1 * (1 - 0.5 * std::pow(rate, step + 1));
    const double product = std::pow(exact_beta_1, step) * WarmingOf(rate, step);
    u = static_cast<T>(exact_u);
    next_u = static_cast<T>(exact_next);
    momentum_share = static_cast<T>(1 - product * exact_next);
    gradient_share = static_cast<T>(1 - product);
  }

  void operator()(T rate, T g, T& weight, std::array<T, kSlots>& slots) const {
    auto& [momentum, velocity] = slots;
    momentum += (g - momentum) * rate_1;
    velocity += (g * g - velocity) * rate_2;
    const T ahead = (next_u * momentum) / momentum_share + ((T{1} - u) * g) / gradient_share;
    weight -= (ahead * rate) / (sqrt(velocity / velocity_share) + epsilon);
  }

  BiasCorrection<T> correction_2;
  double exact_beta_1, momentum_decay;
  bool is_torch;
  T beta_1, rate_1, rate_2, epsilon;
  T u{}, next_u{}, momentum_share{}, gradient_share{}, velocity_share{};
};

const RegisterRule<Nadam, 0, false> kNadam({"nadam",
                                            {{"beta_1", 0.9, Bound::kBeta},
                                             {"beta_2", 0.999, Bound::kBeta},
                                             {"epsilon", 1e-7, Bound::kNotNegative},
                                             TorchFlag(),
                                             {"momentum_decay", 1, Bound::kNotNegative, true, "torch"}},
                                            {{"momentum"}, {"velocity"}},
                                            OptimizerEntry::kCountsPushes});

}  // namespace
}  // namespace oe
