#include "oe_runtime/core/optimizer/optimizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <type_traits>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"

namespace oe::optimizer_test {
namespace {

constexpr uint32_t kDim = 11;  // not a multiple of a vector
constexpr double kRate = 0.05;
constexpr int kSteps = 100;

double Gradient(int step, uint32_t d) { return std::sin(1.7 * step + 0.9 * d) * (1 + d % 3); }

// A weight and up to three numbers of state after each step, in double precision.
struct State {
  double w, a, b;
  double c = 0;
  bool is_double = false;  // otherwise the optimizer computes in float
};
using Rule = std::function<void(State*, double gradient, int step)>;

// beta^t, with beta as the optimizer has it.
double Power(const State& state, double beta, int t) {
  return std::pow(state.is_double ? beta : static_cast<double>(static_cast<float>(beta)), t);
}

// Updates a row whose state lies behind its weights.
template <typename T>
void Apply(const Optimizer<T>& optimizer, std::vector<T>* row, const std::vector<T>& gradient, T rate,
           uint64_t step) {
  T* weights = row->data();
  T* state = weights + gradient.size();
  const T* of_row = gradient.data();
  optimizer.Apply({&weights, &state, &of_row, 1}, rate, step);
}

// An optimizer's rule once more, for one weight and the first two numbers of its state.
struct Reference {
  OptimizerSpec spec;
  double first_a, first_b;
  Rule rule;
};

Rule AdamRule(double beta_1, double beta_2, double epsilon) {
  return [=](State* s, double g, int t) {
    const double power_1 = Power(*s, beta_1, t);
    const double power_2 = Power(*s, beta_2, t);
    s->a += (g - s->a) * (1 - beta_1);
    s->b += (g * g - s->b) * (1 - beta_2);
    s->w -= s->a * kRate * std::sqrt(1 - power_2) / (1 - power_1) / (std::sqrt(s->b) + epsilon);
  };
}

Rule FtrlRule(double power, double l1, double l2, double shrinkage, double beta) {
  return [=](State* s, double g, int) {
    const double sum = s->a + g * g;
    const double sigma = (std::pow(sum, power) - std::pow(s->a, power)) / kRate;
    s->b += g + 2 * shrinkage * s->w - sigma * s->w;
    const double quadratic = std::pow(sum, power) / kRate + 2 * (l2 + beta / (2 * kRate));
    s->w = (std::clamp(s->b, -l1, l1) - s->b) / quadratic;
    s->a = sum;
  };
}

// As torch.optim has it: exact bias corrections, and epsilon added behind them.
Rule TorchAdamRule(double beta_1, double beta_2, double epsilon, bool is_sparse) {
  return [=](State* s, double g, int t) {
    const double root = std::sqrt(1 - std::pow(beta_2, t));
    s->a += (g - s->a) * (1 - beta_1);
    s->b += (g * g - s->b) * (1 - beta_2);
    const double divisor = is_sparse ? (std::sqrt(s->b) + epsilon) / root : std::sqrt(s->b) / root + epsilon;
    s->w -= kRate / (1 - std::pow(beta_1, t)) * s->a / divisor;
  };
}

// RAdam of torch.optim.
Rule RadamRule(double beta_1, double beta_2) {
  return [=](State* s, double g, int t) {
    s->a += (g - s->a) * (1 - beta_1);
    s->b += (g * g - s->b) * (1 - beta_2);
    const double correction_2 = 1 - std::pow(beta_2, t);
    const double limit = 2 / (1 - beta_2) - 1;
    const double length = limit - 2 * t * std::pow(beta_2, t) / correction_2;
    double share = 1;
    if (length > 5) {
      share = std::sqrt((length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length) *
                        correction_2) /
              (std::sqrt(s->b) + 1e-8);
    }
    s->w -= kRate * s->a / (1 - std::pow(beta_1, t)) * share;
  };
}

// NAdam of torch.optim, with its product in a variable that each step multiplies.
Rule TorchNadamRule(double momentum_decay) {
  return [=, product = 1.0, done = 0](State* s, double g, int t) mutable {
    const auto u = [=](int step) { return 0.9 * (1 - 0.5 * std::pow(0.96, step * momentum_decay)); };
    if (t != done) product *= u(t);
    done = t;
    s->a += (g - s->a) * (1 - 0.9);
    s->b += (g * g - s->b) * (1 - 0.999);
    const double ahead = u(t + 1) * s->a / (1 - product * u(t + 1)) + (1 - u(t)) * g / (1 - product);
    s->w -= kRate * ahead / (std::sqrt(s->b / (1 - std::pow(0.999, t))) + 1e-7);
  };
}

// The first two numbers of state are the average of squares and the momentum, as RMSprop has them.
Rule TorchRmspropRule(bool is_centered) {
  return [=](State* s, double g, int) {
    s->a = 0.9 * s->a + 0.1 * g * g;
    s->c = is_centered ? 0.9 * s->c + 0.1 * g : 0;
    s->b = 0.5 * s->b + g / (std::sqrt(s->a - s->c * s->c) + 0.01);
    s->w -= kRate * s->b;
  };
}

double MeanOfSquares(int step) {
  double sum = 0;
  for (uint32_t d = 0; d < kDim; ++d) sum += Gradient(step, d) * Gradient(step, d);
  return sum / kDim;
}

// At least one of each registered optimizer.
std::vector<Reference> References() {
  return {
      {{"adadelta", {{"rho", 0.9}, {"epsilon", 1e-3}}},
       0,
       0,
       [](State* s, double g, int) {
         s->a = 0.9 * s->a + 0.1 * g * g;
         const double update = std::sqrt(s->b + 1e-3) * g / std::sqrt(s->a + 1e-3);
         s->b = 0.9 * s->b + 0.1 * update * update;
         s->w -= kRate * update;
       }},
      {{"adagrad", {}},
       0.1,
       0,
       [](State* s, double g, int) {
         s->a += g * g;
         s->w -= kRate * g / std::sqrt(s->a + 1e-7);
       }},
      {{"adagrad", {{"initial_accumulator_value", 0.0}, {"epsilon", 0.5}}},
       0,
       0,
       [](State* s, double g, int) {
         s->a += g * g;
         s->w -= kRate * g / std::sqrt(s->a + 0.5);
       }},
      {{"adagrad", {{"torch", 1}, {"initial_accumulator_value", 0}, {"epsilon", 0.01}}},
       0,
       0,
       [](State* s, double g, int) {
         s->a += g * g;
         s->w -= kRate * g / (std::sqrt(s->a) + 0.01);
       }},
      {{"adagrad_decay", {{"accumulator_decay_step", 10}, {"accumulator_decay_rate", 0.5}}},
       0.1,
       0,
       [](State* s, double g, int t) {
         if (t % 10 == 0) s->a = std::max(0.5 * s->a, 0.1);
         s->a += g * g;
         s->w -= kRate * g / std::sqrt(s->a);
       }},
      {{"adam", {}}, 0, 0, AdamRule(0.9, 0.999, 1e-7)},
      {{"adam", {{"beta_1", 0.5}, {"beta_2", 0.9}, {"epsilon", 0.01}}}, 0, 0, AdamRule(0.5, 0.9, 0.01)},
      {{"adam", {{"amsgrad", 1}, {"beta_2", 0.9}}},
       0,
       0,
       [](State* s, double g, int t) {
         s->a += (g - s->a) * (1 - 0.9);
         s->b += (g * g - s->b) * (1 - 0.9);
         s->c = std::max(s->c, s->b);
         s->w -= s->a * kRate * std::sqrt(1 - Power(*s, 0.9, t)) / (1 - Power(*s, 0.9, t)) /
                 (std::sqrt(s->c) + 1e-7);
       }},
      {{"adam", {{"torch", 1}, {"epsilon", 0.01}}}, 0, 0, TorchAdamRule(0.9, 0.999, 0.01, false)},
      {{"adam", {{"torch", 1}, {"epsilon_hat", 1}, {"epsilon", 0.01}}},
       0,
       0,
       TorchAdamRule(0.9, 0.999, 0.01, true)},
      {{"adam_async", {{"beta_2", 0.9}}},
       0,
       0,
       [](State* s, double g, int t) {
         s->a = 0.9 * s->a + 0.1 * g;
         s->b = 0.9 * s->b + 0.1 * g * g;
         s->w -= s->a * kRate * std::sqrt(1 - Power(*s, 0.9, t)) / (1 - Power(*s, 0.9, t)) /
                 (std::sqrt(s->b) + 1e-8);
       }},
      {{"adam_async", {{"beta_2", 0.9}, {"apply_sparse_rmsprop", 1}, {"epsilon", 0.01}}},
       0,
       0,
       [](State* s, double g, int) {
         s->b = 0.9 * s->b + 0.1 * g * g;
         s->a = 0.9 * s->a + kRate * g / std::sqrt(s->b + 0.01);
         s->w -= s->a;
       }},
      {{"adamax", {{"beta_2", 0.9}}},
       0,
       0,
       [](State* s, double g, int t) {
         s->a += (g - s->a) * (1 - 0.9);
         s->b = std::max(0.9 * s->b, std::abs(g));
         s->w -= kRate * s->a / ((1 - Power(*s, 0.9, t)) * (s->b + 1e-7));
       }},
      {{"adamax", {{"torch", 1}, {"beta_2", 0.9}, {"epsilon", 0.01}}},
       0,
       0,
       [](State* s, double g, int t) {
         s->a += (g - s->a) * (1 - 0.9);
         s->b = std::max(0.9 * s->b, std::abs(g) + 0.01);
         s->w -= kRate * s->a / ((1 - std::pow(0.9, t)) * s->b);
       }},
      {{"adamw", {{"beta_2", 0.9}}},
       0,
       0,
       [](State* s, double g, int t) {
         s->w -= s->w * 0.004 * kRate;
         s->a += (g - s->a) * (1 - 0.9);
         s->b += (g * g - s->b) * (1 - 0.9);
         s->w -= s->a * kRate * std::sqrt(1 - Power(*s, 0.9, t)) / (1 - Power(*s, 0.9, t)) /
                 (std::sqrt(s->b) + 1e-7);
       }},
      {{"ftrl", {}}, 0.1, 0, FtrlRule(0.5, 0, 0, 0, 0)},
      {{"ftrl",
        {{"learning_rate_power", -0.7},
         {"initial_accumulator_value", 0.3},
         {"l1_regularization_strength", 0.5},
         {"l2_regularization_strength", 0.2},
         {"l2_shrinkage_regularization_strength", 0.01},
         {"beta", 0.1}}},
       0.3,
       0,
       FtrlRule(0.7, 0.5, 0.2, 0.01, 0.1)},
      {{"lion", {}},
       0,
       0,
       [](State* s, double g, int) {
         const double direction = 0.9 * s->a + 0.1 * g;
         s->w -= kRate * (direction > 0 ? 1 : direction < 0 ? -1 : 0);
         s->a = 0.99 * s->a + 0.01 * g;
       }},
      {{"nadam", {{"beta_2", 0.9}}},
       0,
       0,
       [product = 1.0, done = 0](State* s, double g, int t) mutable {
         const auto u = [](int step) { return 0.9 * (1 - 0.5 * std::pow(0.96, step)); };
         // As Keras has it: a variable that each step multiplies.
         if (t != done) product *= u(t);
         done = t;
         s->a += (g - s->a) * (1 - 0.9);
         s->b += (g * g - s->b) * (1 - 0.9);
         const double ahead = u(t + 1) * s->a / (1 - product * u(t + 1)) + (1 - u(t)) * g / (1 - product);
         s->w -= kRate * ahead / (std::sqrt(s->b / (1 - Power(*s, 0.9, t))) + 1e-7);
       }},
      {{"nadam", {{"torch", 1}, {"momentum_decay", 0.004}}}, 0, 0, TorchNadamRule(0.004)},
      {{"nadam", {{"torch", 1}, {"momentum_decay", 0}}}, 0, 0, TorchNadamRule(0)},
      {{"nadam", {{"torch", 1}}}, 0, 0, TorchNadamRule(1)},
      {{"radam", {}}, 0, 0, RadamRule(0.9, 0.999)},
      {{"radam", {{"beta_1", 0.5}, {"beta_2", 0.9}}}, 0, 0, RadamRule(0.5, 0.9)},
      {{"radam", {{"beta_2", 0.5}}}, 0, 0, RadamRule(0.9, 0.5)},
      {{"rmsprop", {}},
       0,
       0,
       [](State* s, double g, int) {
         s->a = 0.9 * s->a + 0.1 * g * g;
         s->w -= kRate * g / std::sqrt(s->a + 1e-7);
       }},
      {{"rmsprop", {{"momentum", 0.5}, {"rho", 0.8}, {"epsilon", 0.01}}},
       0,
       0,
       [](State* s, double g, int) {
         s->a = 0.8 * s->a + 0.2 * g * g;
         s->b = 0.5 * s->b + kRate * g / std::sqrt(s->a + 0.01);
         s->w -= s->b;
       }},
      {{"rmsprop", {{"centered", 1}, {"epsilon", 0.01}}},
       0,
       0,
       [](State* s, double g, int) {
         s->a = 0.9 * s->a + 0.1 * g * g;
         s->b = 0.9 * s->b + 0.1 * g;
         s->w -= kRate * g / std::sqrt(s->a - s->b * s->b + 0.01);
       }},
      {{"rmsprop", {{"centered", 1}, {"momentum", 0.5}, {"epsilon", 0.01}}},
       0,
       0,
       [](State* s, double g, int) {
         s->a = 0.9 * s->a + 0.1 * g * g;
         s->c = 0.9 * s->c + 0.1 * g;
         s->b = 0.5 * s->b + kRate * g / std::sqrt(s->a - s->c * s->c + 0.01);
         s->w -= s->b;
       }},
      {{"rmsprop", {{"torch", 1}, {"momentum", 0.5}, {"epsilon", 0.01}}}, 0, 0, TorchRmspropRule(false)},
      {{"rmsprop", {{"torch", 1}, {"centered", 1}, {"momentum", 0.5}, {"epsilon", 0.01}}},
       0,
       0,
       TorchRmspropRule(true)},
      {{"rowwise_adagrad", {{"epsilon", 0.01}}},
       0,
       0,
       [sum = 0.0, done = 0](State* s, double g, int t) mutable {
         if (t != done) sum += MeanOfSquares(t);
         done = t;
         s->w -= kRate / (std::sqrt(sum) + 0.01) * g;
       }},
      {{"sgd", {}}, 0, 0, [](State* s, double g, int) { s->w -= kRate * g; }},
      {{"sgd", {{"torch", 1}, {"momentum", 0.9}, {"dampening", 0.25}}},
       0,
       0,
       [](State* s, double g, int t) {
         s->a = 0.9 * s->a + (t == 1 ? 1 : 0.75) * g;
         s->w -= kRate * s->a;
       }},
      {{"sgd", {{"torch", 1}, {"momentum", 0.9}, {"nesterov", 1}}},
       0,
       0,
       [](State* s, double g, int) {
         s->a = 0.9 * s->a + g;
         s->w -= kRate * (g + 0.9 * s->a);
       }},
      {{"sgd", {{"momentum", 0.9}}},
       0,
       0,
       [](State* s, double g, int) {
         s->a = 0.9 * s->a - kRate * g;
         s->w += s->a;
       }},
      {{"sgd", {{"momentum", 0.9}, {"nesterov", 1}}},
       0,
       0,
       [](State* s, double g, int) {
         s->a = 0.9 * s->a - kRate * g;
         s->w += 0.9 * s->a - kRate * g;
       }},
  };
}

template <typename T>
void ExpectReference(const Reference& reference, double tolerance) {
  const auto optimizer = Optimizer<T>::Create(reference.spec, kDim);
  const size_t values = kDim + optimizer->state_values();
  std::vector<T> row(values + 1, T{-7});  // the last one must stay
  std::vector<State> expected(kDim);
  for (uint32_t d = 0; d < kDim; ++d) {
    row[d] = T(0.01) * static_cast<T>(d) - T(0.03);
    expected[d] = {row[d], reference.first_a, reference.first_b, 0, std::is_same_v<T, double>};
  }
  optimizer->InitState(row.data() + kDim);
  for (int step = 1; step <= kSteps; ++step) {
    std::vector<T> gradient(kDim);
    for (uint32_t d = 0; d < kDim; ++d) gradient[d] = static_cast<T>(Gradient(step, d));
    Apply(*optimizer, &row, gradient, static_cast<T>(kRate), static_cast<uint64_t>(step));
    for (uint32_t d = 0; d < kDim; ++d) {
      reference.rule(&expected[d], static_cast<double>(gradient[d]), step);
      ASSERT_NEAR(static_cast<double>(row[d]), expected[d].w, tolerance * (1 + std::abs(expected[d].w)))
          << "step " << step << " element " << d;
    }
  }
  for (uint32_t d = 0; d < kDim; ++d) {
    const double state[] = {expected[d].a, expected[d].b, expected[d].c};
    for (size_t k = 0; (k + 2) * kDim <= values; ++k) {
      EXPECT_NEAR(static_cast<double>(row[(k + 1) * kDim + d]), state[k],
                  tolerance * (1 + std::abs(state[k])))
          << "state " << k;
    }
  }
  EXPECT_EQ(row.back(), T{-7});
}

class OptimizerReferenceTest : public testing::TestWithParam<size_t> {};

TEST_P(OptimizerReferenceTest, IsFollowedInFloatAndInDouble) {
  ExpectReference<float>(References()[GetParam()], 1e-5);
  ExpectReference<double>(References()[GetParam()], 1e-12);
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerReferenceTest, testing::Range(size_t{0}, References().size()),
                         [](const auto& test) {
                           return std::to_string(test.param) + "_" + References()[test.param].spec.name;
                         });

TEST(OptimizerTest, EveryOptimizerHasAReference) {
  std::set<std::string> known;
  for (const Reference& reference : References()) known.insert(reference.spec.name);
  ASSERT_FALSE(Optimizers().empty());
  for (const OptimizerInfo& info : Optimizers()) {
    EXPECT_EQ(known.count(info.name), 1U) << "add reference values of " << info.name << " to References()";
  }
}

// Whether the number of the push matters is said, so that rows that move elsewhere can be warned of it.
TEST(OptimizerTest, SaysWhetherUpdatesDependOnTheNumberOfThePush) {
  for (const OptimizerInfo& info : Optimizers()) {
    const auto optimizer = Optimizer<double>::Create({info.name, {}}, 1);
    const auto after = [&](uint64_t step) {
      std::vector<double> row(1 + optimizer->state_values());
      optimizer->InitState(row.data() + 1);
      Apply(*optimizer, &row, {0.5}, 0.1, 1);
      Apply(*optimizer, &row, {0.5}, 0.1, step);
      return row;
    };
    EXPECT_EQ(after(2) != after(1000000), info.counts_pushes) << info.name;
  }
}

TEST(OptimizerTest, Slots) {
  const auto values = [](const OptimizerSpec& spec) { return ValuesOf(SlotsOf(Complete(spec), 4)); };
  EXPECT_EQ(values({"sgd", {{"nesterov", 1}}}), 0U);
  EXPECT_EQ(values({"adam", {{"amsgrad", 1}}}), 12U);
  EXPECT_EQ(values({"adam", {}}), 8U);
}

// The numbers of DeepRec's own test of feature columns with a counter filter
// (embedding_variable_ops_test.py): gradients of 6 and 4 for rows of ones.
TEST(OptimizerTest, FtrlWithGroupLassoHasDeepRecsNumbers) {
  const OptimizerSpec spec = {
      "ftrl",
      {{"group_lasso", 1}, {"l1_regularization_strength", 2.0}, {"l2_regularization_strength", 0.00001}}};
  const auto optimizer = Optimizer<float>::Create(spec, 3);
  for (const auto& [gradient, wanted] : {std::pair{6.0F, 0.8282884F}, std::pair{4.0F, 0.7927219F}}) {
    std::vector<float> row = {1, 1, 1, 0, 0, 0, 0, 0, 0};
    optimizer->InitState(row.data() + 3);
    Apply(*optimizer, &row, {gradient, gradient, gradient}, 0.1F, 1);
    for (size_t d = 0; d < 3; ++d) EXPECT_NEAR(row[d], wanted, 5e-7F);
  }
}

TEST(OptimizerTest, FtrlWithGroupLasso) {
  const size_t dim = 2;
  const double power = 0.7, l1 = 2.5, l2 = 0.2, shrinkage = 0.01, beta = 0.1, rate = 0.1;
  const auto optimizer = Optimizer<double>::Create({"ftrl",
                                                    {{"group_lasso", 1},
                                                     {"learning_rate_power", -power},
                                                     {"l1_regularization_strength", l1},
                                                     {"l2_regularization_strength", l2},
                                                     {"l2_shrinkage_regularization_strength", shrinkage},
                                                     {"beta", beta}}},
                                                   dim);
  std::vector<double> row = {0.5, -1, 0, 0, 0, 0};
  optimizer->InitState(row.data() + dim);
  std::vector<double> w = {0.5, -1}, n = {0.1, 0.1}, z = {0, 0};
  bool some_are_zero = false;
  for (int step = 0; step < 40; ++step) {
    const std::vector<double> gradient = {std::sin(step), 0.3 * std::cos(2 * step)};
    Apply(*optimizer, &row, gradient, rate, 1);
    std::vector<double> sum(dim);
    for (size_t d = 0; d < dim; ++d) {
      const double g = gradient[d] + 2 * shrinkage * w[d];
      sum[d] = n[d] + g * g;
      z[d] += g - (std::pow(sum[d], power) - std::pow(n[d], power)) / rate * w[d];
      n[d] += gradient[d] * gradient[d];
    }
    const double norm = std::hypot(z[0], z[1]);
    some_are_zero = some_are_zero || norm <= l1;
    for (size_t d = 0; d < dim; ++d) {
      const double quadratic = std::pow(sum[d], power) / rate + 2 * (l2 + beta / (2 * rate));
      w[d] = norm <= l1 ? 0 : -(1 - l1 / norm) * z[d] / quadratic;
      EXPECT_NEAR(row[d], w[d], 1e-9) << step;
    }
  }
  EXPECT_TRUE(some_are_zero) << "rows go to zero as a whole";
  EXPECT_TRUE(Complete({"ftrl", {{"group_lasso", 0}}}).params.count("group_lasso") == 0)
      << "specifications of earlier versions stay equal";
  EXPECT_THROW((void)Complete({"ftrl", {{"group_lasso", 0.5}}}), SpecError);
}

// With a beta_1 next to 1 the product of the momenta decides long after its factors have become constant.
TEST(OptimizerTest, NadamsProductGoesOnForever) {
  constexpr double kBeta = 0.99999;
  const auto optimizer = Optimizer<float>::Create({"nadam", {{"beta_1", kBeta}, {"beta_2", 0.5}}}, 1);
  const double beta = static_cast<double>(static_cast<float>(kBeta));
  double product = 1;
  for (int t = 1; t <= 200000; ++t) {
    product *= beta * (1 - 0.5 * std::pow(static_cast<double>(0.96F), t));
    if (t % 40000 != 0 && t != 1000) continue;
    std::vector<float> row = {0, 0.25F, 1};  // as if there had been pushes before
    Apply(*optimizer, &row, {1}, 1.0F, static_cast<uint64_t>(t));
    const double momentum = 0.25 + 0.75 * (1 - beta);
    const double expected = -(beta * momentum / (1 - product * beta) + (1 - beta) / (1 - product));
    EXPECT_NEAR(row[0], expected, 1e-4 * std::abs(expected)) << "step " << t;
  }
}

TEST(OptimizerTest, CenteredRmspropSurvivesEqualGradients) {
  const auto optimizer = Optimizer<float>::Create({"rmsprop", {{"centered", 1}}}, kDim);
  std::vector<float> row(kDim + optimizer->state_values(), 0.0F);
  optimizer->InitState(row.data() + kDim);
  std::vector<float> gradient(kDim);
  for (uint32_t d = 0; d < kDim; ++d) gradient[d] = 1000.0F + static_cast<float>(d) / 3;
  for (uint64_t step = 1; step <= 500; ++step) Apply(*optimizer, &row, gradient, 1e-6F, step);
  for (uint32_t d = 0; d < kDim; ++d) EXPECT_TRUE(std::isfinite(row[d])) << d;
}

// A row that comes back after several periods decays once in each of its next updates.
TEST(OptimizerTest, AdagradDecayOfARowThatWasAway) {
  const auto optimizer = Optimizer<float>::Create(
      {"adagrad_decay",
       {{"initial_accumulator_value", 1}, {"accumulator_decay_step", 10}, {"accumulator_decay_rate", 0.5}}},
      kDim);
  ASSERT_EQ(optimizer->state_values(), kDim + 1);
  std::vector<float> row(kDim + optimizer->state_values(), 0.0F);
  optimizer->InitState(row.data() + kDim);
  const std::vector<float> four(kDim, 4.0F);
  const std::vector<float> zero(kDim, 0.0F);
  const auto accumulator_after = [&](const std::vector<float>& gradient, uint64_t step) {
    Apply(*optimizer, &row, gradient, 0.1F, step);
    return row[kDim];
  };
  EXPECT_EQ(accumulator_after(four, 9), 17.0F);
  EXPECT_EQ(accumulator_after(zero, 30), 8.5F);
  EXPECT_EQ(accumulator_after(zero, 31), 4.25F);
  EXPECT_EQ(accumulator_after(zero, 32), 2.125F);
  EXPECT_EQ(accumulator_after(zero, 33), 2.125F);
  EXPECT_EQ(accumulator_after(zero, 40), 1.0625F);
  EXPECT_EQ(accumulator_after(zero, 50), 1.0F);
}

TEST(OptimizerTest, WeightDecayComesFirst) {
  for (const auto& [name, defaults, counts_pushes] : Optimizers()) {
    const auto plain = Optimizer<float>::Create({name, {{"weight_decay", 0}}}, kDim);
    const auto decaying = Optimizer<float>::Create({name, {{"weight_decay", 0.25}}}, kDim);
    ASSERT_EQ(plain->state_values(), decaying->state_values());
    std::vector<float> row(kDim + plain->state_values());
    for (uint32_t d = 0; d < kDim; ++d) row[d] = static_cast<float>(d) - 5;
    plain->InitState(row.data() + kDim);
    std::vector<float> other = row;
    for (uint32_t d = 0; d < kDim; ++d) other[d] -= other[d] * 0.25F * 0.5F;
    const std::vector<float> gradient(kDim, 0.75F);
    Apply(*plain, &other, gradient, 0.5F, 1);
    Apply(*decaying, &row, gradient, 0.5F, 1);
    EXPECT_EQ(row, other) << name;
  }
}

// As torch.optim: the gradient's sign, then the decay, then the rule; the decayed learning rate is that of
// all.
TEST(OptimizerTest, EveryRuleHasTheOptionsOfPyTorch) {
  for (const OptimizerInfo& info : Optimizers()) {
    const auto row_of = [&](const Optimizer<float>& optimizer) {
      std::vector<float> row(kDim + optimizer.state_values());
      for (uint32_t d = 0; d < kDim; ++d) row[d] = static_cast<float>(d) - 5;
      optimizer.InitState(row.data() + kDim);
      return row;
    };
    const auto plain = Optimizer<float>::Create({info.name, {{"weight_decay", 0}}}, kDim);
    const Params options = {
        {"weight_decay", 0}, {"coupled_weight_decay", 0.25}, {"maximize", 1}, {"learning_rate_decay", 0.5}};
    const auto other = Optimizer<float>::Create({info.name, options}, kDim);
    std::vector<float> expected = row_of(*plain);
    std::vector<float> row = row_of(*other);
    for (uint64_t step = 1; step <= 5; ++step) {
      std::vector<float> gradient(kDim);
      for (uint32_t d = 0; d < kDim; ++d) gradient[d] = expected[d] * 0.25F - 0.75F;
      Apply(*plain, &expected, gradient, 0.5F / (1 + 0.5F * static_cast<float>(step - 1)), step);
      Apply(*other, &row, std::vector<float>(kDim, 0.75F), 0.5F, step);
      EXPECT_EQ(row, expected) << info.name << " step " << step;
    }
  }
}

// More rows than fit in one piece, and rows that are longer than one.
TEST(OptimizerTest, OptionsReachEveryRow) {
  for (const uint32_t dim : {1U, 100U, 5000U}) {
    constexpr size_t kRows = 64;
    const auto optimizer = Optimizer<double>::Create({"sgd", {{"coupled_weight_decay", 0.5}}}, dim);
    std::vector<double> weights(kRows * dim, 2.0);
    const std::vector<double> gradient(dim, 1.0);
    std::vector<double*> rows;
    for (size_t i = 0; i < kRows; ++i) rows.push_back(&weights[i * dim]);
    const std::vector<const double*> gradients(kRows, gradient.data());
    optimizer->Apply({rows.data(), rows.data(), gradients.data(), kRows}, 0.25, 1);
    EXPECT_EQ(weights, std::vector<double>(kRows * dim, 1.5)) << dim;
  }
}

// PyTorch's schedule, far beyond the step at which Keras's has converged.
TEST(OptimizerTest, NadamsProductOfASlowScheduleIsThatOfItsFactors) {
  constexpr double kBeta = 0.999999;
  const auto optimizer = Optimizer<double>::Create(
      {"nadam", {{"beta_1", kBeta}, {"beta_2", 0.5}, {"torch", 1}, {"momentum_decay", 0.004}}}, 1);
  const auto u = [](int step) { return kBeta * (1 - 0.5 * std::pow(0.96, step * 0.004)); };
  double product = 1;
  for (int t = 1; t <= 20000; ++t) {
    product *= u(t);
    if (t != 1 && t != 10 && t != 1000 && t != 20000) continue;
    std::vector<double> row = {0, 0.25, 1};
    Apply(*optimizer, &row, {1}, 1.0, static_cast<uint64_t>(t));
    const double momentum = 0.25 + 0.75 * (1 - kBeta);
    const double expected = -(u(t + 1) * momentum / (1 - product * u(t + 1)) + (1 - u(t)) / (1 - product));
    const double root = std::sqrt(1 / (1 - std::pow(0.5, t))) + 1e-7;
    EXPECT_NEAR(row[0] * root, expected, 1e-9 * std::abs(expected)) << "step " << t;
  }
}

// FBGEMM's formula for rows that are away in between, of every length beside a vector's.
TEST(OptimizerTest, RowwiseAdagradHasOneAccumulatorPerRow) {
  for (const uint32_t dim : {1U, 7U, 8U, 9U, 64U}) {
    const auto optimizer = Optimizer<float>::Create({"rowwise_adagrad", {}}, dim);
    ASSERT_EQ(optimizer->state_values(), 1U);
    std::vector<float> row(dim + 1, 0.5F);
    optimizer->InitState(row.data() + dim);
    EXPECT_EQ(row[dim], 0.0F);
    std::vector<double> expected(dim, 0.5);
    double accumulator = 0;
    for (const uint64_t step : {1U, 2U, 9U, 30U}) {
      std::vector<float> gradient(dim);
      double squares = 0;
      for (uint32_t d = 0; d < dim; ++d) {
        gradient[d] = static_cast<float>(Gradient(static_cast<int>(step), d));
        squares += static_cast<double>(gradient[d]) * static_cast<double>(gradient[d]);
      }
      accumulator += squares / dim;
      Apply(*optimizer, &row, gradient, 0.05F, step);
      for (uint32_t d = 0; d < dim; ++d) {
        expected[d] -= 0.05 / (std::sqrt(accumulator) + 1e-8) * static_cast<double>(gradient[d]);
        EXPECT_NEAR(static_cast<double>(row[d]), expected[d], 1e-6) << dim;
      }
      EXPECT_NEAR(static_cast<double>(row[dim]), accumulator, 1e-6 * accumulator) << dim;
    }
  }
}

// Specifications of earlier versions stay equal, and those versions refuse what they do not know.
TEST(OptimizerTest, LaterParametersAreLeftOutWhereTheyHaveTheirDefaults) {
  for (const OptimizerInfo& info : Optimizers()) {
    const Params params = Complete({info.name, {{"coupled_weight_decay", 0}, {"maximize", 0}}}).params;
    for (const char* later : {"coupled_weight_decay", "learning_rate_decay", "maximize", "torch",
                              "epsilon_hat", "dampening", "momentum_decay", "group_lasso"}) {
      EXPECT_EQ(params.count(later), 0U) << info.name << " " << later;
    }
    EXPECT_EQ(Complete({info.name, {{"maximize", 1}}}).params.at("maximize"), 1) << info.name;
  }
  EXPECT_EQ(Complete({"nadam", {{"torch", 1}, {"momentum_decay", 1}}}).params.count("momentum_decay"), 0U);
}

TEST(OptimizerTest, ABatchEqualsRowsOneByOne) {
  for (const auto& [name, defaults, counts_pushes] : Optimizers()) {
    const auto optimizer = Optimizer<float>::Create({name, {}}, kDim);
    const size_t floats = kDim + optimizer->state_values();
    std::vector<float> together(3 * floats, 0.25F);
    std::vector<float> gradients(size_t{3} * kDim);
    for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = 0.1F * static_cast<float>(i) - 1;
    std::vector<float*> weights;
    std::vector<float*> states;
    std::vector<const float*> pointers;
    for (size_t r = 0; r < 3; ++r) {
      weights.push_back(&together[r * floats]);
      states.push_back(weights[r] + kDim);
      pointers.push_back(&gradients[r * kDim]);
      optimizer->InitState(states[r]);
    }
    std::vector<float> alone = together;
    optimizer->Apply({weights.data(), states.data(), pointers.data(), 3}, 0.1F, 4);
    for (size_t r = 0; r < 3; ++r) {
      float* row = &alone[r * floats];
      float* state = row + kDim;
      optimizer->Apply({&row, &state, &pointers[r], 1}, 0.1F, 4);
    }
    EXPECT_EQ(together, alone) << name;
  }
}

TEST(OptimizerTest, RefusesUnsupportedSpecifications) {
  const auto message = [](const OptimizerSpec& spec) {
    return MessageOf<SpecError>([&] { (void)Complete(spec); });
  };
  std::string names;
  for (const OptimizerInfo& info : Optimizers()) names += (names.empty() ? "" : ", ") + info.name;
  EXPECT_EQ(message({"unknown", {}}), "optimizer 'unknown' is not one of " + names);
  EXPECT_EQ(message({"adamax", {{"amsgrad", 1}}}),
            "optimizer 'adamax' does not support 'amsgrad'; it supports beta_1, beta_2, "
            "coupled_weight_decay, epsilon, learning_rate_decay, maximize, torch, weight_decay");
  EXPECT_EQ(message({"sgd", {{"momentum", 0.9}, {"dampening", 0.5}}}),
            "optimizer 'sgd': 'dampening' needs 'torch': true");
  EXPECT_EQ(message({"adam", {{"coupled_weight_decay", -1}}}),
            "optimizer 'adam': 'coupled_weight_decay' must be at least 0, not -1");
  EXPECT_EQ(message({"rmsprop", {{"weight_decay", -1}}}),
            "optimizer 'rmsprop': 'weight_decay' must be at least 0, not -1");
  EXPECT_EQ(message({"lion", {{"beta_1", 0}}}), "optimizer 'lion': 'beta_1' must be above 0, not 0");
  EXPECT_EQ(message({"adagrad_decay", {{"accumulator_decay_step", 2.5}}}),
            "optimizer 'adagrad_decay': 'accumulator_decay_step' must be a whole number, not 2.5");
  EXPECT_EQ(message({"sgd", {{"momentum", 1.5}}}),
            "optimizer 'sgd': 'momentum' must be between 0 and 1, not 1.5");
  EXPECT_EQ(message({"sgd", {{"nesterov", 0.5}}}),
            "optimizer 'sgd': 'nesterov' must be true or false, not 0.5");
  EXPECT_EQ(message({"ftrl", {{"learning_rate_power", 0.5}}}),
            "optimizer 'ftrl': 'learning_rate_power' must be at most 0, not 0.5");
  EXPECT_EQ(message({"adagrad", {{"epsilon", std::nan("")}}}),
            "optimizer 'adagrad': 'epsilon' must be a finite number, not nan");
  EXPECT_NE(message({"adam", {{"beta_2", 1.0}}}).find("'beta_2' must be between 0 and"), std::string::npos);
}

TEST(OptimizerTest, GoesOnFromWhat020WroteWhereTheStateMeansTheSame) {
  const auto goes_on = [](const std::string& name, const Params& earlier, Params now) {
    now["torch"] = 1;
    return GoesOnFrom(Complete({name, earlier}), Complete({name, now}));
  };
  EXPECT_TRUE(goes_on("adam", {{"epsilon", 1e-8}}, {{"epsilon", 1e-8}}));
  EXPECT_TRUE(goes_on("adamw", {{"amsgrad", 1}}, {{"amsgrad", 1}}));
  EXPECT_TRUE(goes_on("adagrad", {{"epsilon", 1e-20}}, {{"epsilon", 1e-10}}));
  EXPECT_TRUE(goes_on("adagrad", {{"epsilon", 0}}, {{"epsilon", 0}}));
  EXPECT_TRUE(goes_on("rmsprop", {{"epsilon", 1e-16}}, {{"epsilon", 1e-8}}));
  EXPECT_FALSE(
      goes_on("rmsprop", {{"epsilon", 1e-16}, {"momentum", 0.5}}, {{"epsilon", 1e-8}, {"momentum", 0.5}}));
  EXPECT_FALSE(goes_on("sgd", {{"momentum", 0.5}}, {{"momentum", 0.5}}));
  EXPECT_FALSE(goes_on("adam", {{"epsilon", 1e-8}}, {{"epsilon", 1e-7}}));
  EXPECT_FALSE(goes_on("adam", {{"epsilon", 1e-8}}, {{"epsilon", 1e-8}, {"coupled_weight_decay", 0.1}}));
  EXPECT_FALSE(goes_on("adagrad", {{"epsilon", 1e-10}}, {{"epsilon", 1e-10}}));
  EXPECT_FALSE(GoesOnFrom(Complete({"adam", {{"torch", 1}}}), Complete({"adam", {}}))) << "but not back";
}

TEST(OptimizerTest, SlotsAreTheWholeState) {
  for (const Reference& reference : References()) {
    const OptimizerSpec spec = Complete(reference.spec);
    const std::vector<OptimizerSlot> slots = SlotsOf(spec, kDim);
    std::set<std::string> names;
    for (const OptimizerSlot& slot : slots) {
      EXPECT_TRUE(names.insert(slot.name).second) << spec.name << " has two of " << slot.name;
    }
    EXPECT_EQ(ValuesOf(slots), Optimizer<float>::Create(spec, kDim)->state_values()) << spec.name;
  }
}

}  // namespace
}  // namespace oe::optimizer_test
