#include "oe_runtime/core/optimizer/optimizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"

namespace oe {
namespace {

constexpr uint32_t kDim = 11;  // not a multiple of a vector
constexpr double kRate = 0.05;
constexpr int kSteps = 100;

double Gradient(int step, uint32_t d) { return std::sin(1.7 * step + 0.9 * d) * (1 + d % 3); }

// A weight and two slots after each step, in double precision.
struct State {
  double w, a, b;
};
using Rule = std::function<void(State*, double gradient, int step)>;

void ExpectRule(const OptimizerSpec& spec, double first_a, double first_b, const Rule& rule) {
  const auto optimizer = Optimizer::Create(spec, kDim);
  const size_t floats = size_t{kDim} * (1 + optimizer->slots());
  std::vector<float> row(floats + 1, -7.0F);  // the last one must stay
  std::vector<State> expected(kDim);
  for (uint32_t d = 0; d < kDim; ++d) {
    row[d] = 0.01F * static_cast<float>(d) - 0.03F;
    expected[d] = {row[d], first_a, first_b};
  }
  optimizer->InitSlots(row.data());
  for (int step = 1; step <= kSteps; ++step) {
    std::vector<float> gradient(kDim);
    for (uint32_t d = 0; d < kDim; ++d) gradient[d] = static_cast<float>(Gradient(step, d));
    float* rows = row.data();
    const float* gradients = gradient.data();
    optimizer->Apply(&rows, &gradients, 1, static_cast<float>(kRate), static_cast<uint64_t>(step));
    for (uint32_t d = 0; d < kDim; ++d) {
      rule(&expected[d], gradient[d], step);
      ASSERT_NEAR(row[d], expected[d].w, 1e-5 * (1 + std::abs(expected[d].w)))
          << "step " << step << " element " << d;
    }
  }
  for (uint32_t d = 0; d < kDim; ++d) {
    if (optimizer->slots() > 0) {
      EXPECT_NEAR(row[kDim + d], expected[d].a, 1e-5 * (1 + std::abs(expected[d].a)));
    }
    if (optimizer->slots() > 1) {
      EXPECT_NEAR(row[2 * kDim + d], expected[d].b, 1e-5 * (1 + std::abs(expected[d].b)));
    }
  }
  EXPECT_EQ(row.back(), -7.0F);
}

TEST(OptimizerTest, Adagrad) {
  ExpectRule({"adagrad", {}}, 0.1, 0, [](State* s, double g, int) {
    s->a += g * g;
    s->w -= kRate * g / std::sqrt(s->a + 1e-7);
  });
  ExpectRule({"adagrad", {{"initial_accumulator_value", 0.0}, {"epsilon", 0.5}}}, 0, 0,
             [](State* s, double g, int) {
               s->a += g * g;
               s->w -= kRate * g / std::sqrt(s->a + 0.5);
             });
}

TEST(OptimizerTest, Adam) {
  const auto rule = [](double beta_1, double beta_2, double epsilon) {
    return [=](State* s, double g, int t) {
      // The betas as float32, as Keras has them.
      const double power_1 = std::pow(static_cast<double>(static_cast<float>(beta_1)), t);
      const double power_2 = std::pow(static_cast<double>(static_cast<float>(beta_2)), t);
      s->a += (g - s->a) * (1 - beta_1);
      s->b += (g * g - s->b) * (1 - beta_2);
      s->w -= s->a * kRate * std::sqrt(1 - power_2) / (1 - power_1) / (std::sqrt(s->b) + epsilon);
    };
  };
  ExpectRule({"adam", {}}, 0, 0, rule(0.9, 0.999, 1e-7));
  ExpectRule({"adam", {{"beta_1", 0.5}, {"beta_2", 0.9}, {"epsilon", 0.01}}}, 0, 0, rule(0.5, 0.9, 0.01));
}

TEST(OptimizerTest, Sgd) {
  ExpectRule({"sgd", {}}, 0, 0, [](State* s, double g, int) { s->w -= kRate * g; });
  EXPECT_EQ(Optimizer::Create({"sgd", {{"nesterov", 1}}}, 4)->slots(), 0U);
  ExpectRule({"sgd", {{"momentum", 0.9}}}, 0, 0, [](State* s, double g, int) {
    s->a = 0.9 * s->a - kRate * g;
    s->w += s->a;
  });
  ExpectRule({"sgd", {{"momentum", 0.9}, {"nesterov", 1}}}, 0, 0, [](State* s, double g, int) {
    s->a = 0.9 * s->a - kRate * g;
    s->w += 0.9 * s->a - kRate * g;
  });
}

TEST(OptimizerTest, Ftrl) {
  const auto rule = [](double power, double l1, double l2, double shrinkage, double beta) {
    return [=](State* s, double g, int) {
      const double sum = s->a + g * g;
      const double sigma = (std::pow(sum, power) - std::pow(s->a, power)) / kRate;
      s->b += g + 2 * shrinkage * s->w - sigma * s->w;
      const double quadratic = std::pow(sum, power) / kRate + 2 * (l2 + beta / (2 * kRate));
      s->w = (std::clamp(s->b, -l1, l1) - s->b) / quadratic;
      s->a = sum;
    };
  };
  ExpectRule({"ftrl", {}}, 0.1, 0, rule(0.5, 0, 0, 0, 0));
  ExpectRule({"ftrl",
              {{"learning_rate_power", -0.7},
               {"initial_accumulator_value", 0.3},
               {"l1_regularization_strength", 0.5},
               {"l2_regularization_strength", 0.2},
               {"l2_shrinkage_regularization_strength", 0.01},
               {"beta", 0.1}}},
             0.3, 0, rule(0.7, 0.5, 0.2, 0.01, 0.1));
}

TEST(OptimizerTest, ABatchEqualsRowsOneByOne) {
  for (const char* name : {"adagrad", "adam", "sgd", "ftrl"}) {
    const auto optimizer = Optimizer::Create({name, {}}, kDim);
    const size_t floats = size_t{kDim} * (1 + optimizer->slots());
    std::vector<float> together(3 * floats, 0.25F);
    std::vector<float> gradients(size_t{3} * kDim);
    for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = 0.1F * static_cast<float>(i) - 1;
    std::vector<float*> rows;
    std::vector<const float*> pointers;
    for (size_t r = 0; r < 3; ++r) {
      optimizer->InitSlots(&together[r * floats]);
      rows.push_back(&together[r * floats]);
      pointers.push_back(&gradients[r * kDim]);
    }
    std::vector<float> alone = together;
    optimizer->Apply(rows.data(), pointers.data(), 3, 0.1F, 4);
    for (size_t r = 0; r < 3; ++r) {
      float* row = &alone[r * floats];
      optimizer->Apply(&row, &pointers[r], 1, 0.1F, 4);
    }
    EXPECT_EQ(together, alone) << name;
  }
}

TEST(OptimizerTest, RefusesWhatItCannotDo) {
  const auto message = [](const OptimizerSpec& spec) {
    return MessageOf<SpecError>([&] { (void)Optimizer::Create(spec, 4); });
  };
  EXPECT_EQ(message({"lion", {}}), "optimizer 'lion' is not one of adagrad, adam, ftrl, sgd");
  EXPECT_EQ(message({"adam", {{"amsgrad", 1}}}),
            "optimizer 'adam' does not support 'amsgrad'; it supports beta_1, beta_2, epsilon");
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

}  // namespace
}  // namespace oe
