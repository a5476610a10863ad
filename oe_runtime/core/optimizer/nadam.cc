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

// Adam with Nesterov's momentum (Dozat, 2015), with t = the number of this push:
//   u_t = beta_1·(1 - 0.96^t / 2);  U_t = u_1·u_2·…·u_t
//   m += (g - m)(1 - beta_1);  v += (g² - v)(1 - beta_2)
//   w -= lr·(u_(t+1)·m / (1 - U_(t+1)) + (1 - u_t)·g / (1 - U_t)) / (sqrt(v / (1 - beta_2^t)) + epsilon)
// Keras keeps U in a variable. Here it is a function of t, so that a restored table goes on with the same:
// beta_1^t times a product that has converged after kWarmingSteps factors.
template <typename T>
struct Nadam : ElementwiseRule {
  static constexpr size_t kSlots = 2;

  explicit Nadam(const Values<T>& value)
      : beta_1(value["beta_1"]),
        beta_2(value["beta_2"]),
        rate_1(T{1} - beta_1),
        rate_2(T{1} - beta_2),
        epsilon(value["epsilon"]) {}

  void Begin(T /*rate*/, uint64_t step) {
    static const auto kWarming = Warming<T>();
    const T product = static_cast<T>(std::pow(static_cast<double>(beta_1), static_cast<double>(step)) *
                                     kWarming[std::min<uint64_t>(step, kWarmingSteps)]);
    u = beta_1 * (T{1} - T{0.5} * BetaPower(kDecay<T>, step));
    next_u = beta_1 * (T{1} - T{0.5} * BetaPower(kDecay<T>, step + 1));
    momentum_share = T{1} - product * next_u;
    gradient_share = T{1} - product;
    velocity_share = T{1} - BetaPower(beta_2, step);
  }

  void operator()(T rate, T g, T& weight, std::array<T, kSlots>& slots) const {
    auto& [momentum, velocity] = slots;
    momentum += (g - momentum) * rate_1;
    velocity += (g * g - velocity) * rate_2;
    const T ahead = (next_u * momentum) / momentum_share + ((T{1} - u) * g) / gradient_share;
    weight -= (ahead * rate) / (sqrt(velocity / velocity_share) + epsilon);
  }

  T beta_1, beta_2, rate_1, rate_2, epsilon;
  T u{}, next_u{}, momentum_share{}, gradient_share{}, velocity_share{};
};

const RegisterRule<Nadam, 0, false> kNadam(
    {"nadam",
     {{"beta_1", 0.9, Bound::kBeta}, {"beta_2", 0.999, Bound::kBeta}, {"epsilon", 1e-7, Bound::kNotNegative}},
     {{"momentum"}, {"velocity"}},
     OptimizerEntry::kCountsPushes});

}  // namespace
}  // namespace oe
