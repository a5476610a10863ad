#include "oe_runtime/core/client/bags.h"

#include <gtest/gtest.h>

#include <random>

#include "oe_runtime/core/wire/errors.h"

namespace oe::bags_test {
namespace {

struct Case {
  uint32_t dim;
  bool is_float64;
  bool weighted;
  bool mean;
};

// Three lookups of two tables, with different numbers of bags, some of them empty.
class BagsTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    std::mt19937_64 random(7);
    for (const size_t count : {size_t{150}, size_t{0}, size_t{70}}) {
      std::vector<int64_t> offsets = {0};
      for (size_t b = 0; b < count; ++b)
        offsets.push_back(offsets.back() + static_cast<int64_t>(random() % 5));
      std::vector<Key> ids(static_cast<size_t>(offsets.back()));
      for (Key& id : ids) id = random() % 40;
      offsets_.push_back(offsets);
      ids_.push_back(ids);
    }
    std::vector<TableSpec> tables(2);
    for (size_t t = 0; t < 2; ++t) {
      tables[t].name = std::to_string(t);
      tables[t].dim = GetParam().dim;
      if (GetParam().is_float64) tables[t].dtype = "float64";
    }
    std::vector<IdsView> views;
    for (const auto& ids : ids_) views.push_back({ids.data(), ids.size()});
    plan_ = MakePlan(tables, views, {{0, 0}, {0, 1}, {1, 2}}, 2, &pool_);
    ASSERT_EQ(plan_.groups.size(), 1U);
  }

  const PlannedGroup& group() const { return plan_.groups[0]; }

  ThreadPool pool_{3};
  std::vector<std::vector<int64_t>> offsets_;
  std::vector<std::vector<Key>> ids_;
  BatchPlan plan_;
};

// Both passes beside the definition, written out in doubles.
template <typename T>
void ExpectAsDefined(const PlannedGroup& group, const std::vector<std::vector<int64_t>>& offsets, Case as,
                     ThreadPool* pool) {
  std::mt19937_64 random(9);
  std::uniform_real_distribution<T> number(-1, 1);
  const size_t dim = group.dim;
  const size_t stride = dim + 3;
  std::vector<T> rows(group.rows * dim);
  for (T& value : rows) value = number(random);
  std::vector<std::vector<T>> weights, pooled;
  std::vector<Bags> bags;
  for (const PlannedLookup& lookup : group.lookups) {
    const auto& of = offsets[lookup.lookup];
    weights.emplace_back(lookup.size);
    for (T& value : weights.back()) value = number(random);
    pooled.emplace_back((of.size() - 1) * stride, T{77});
  }
  for (size_t l = 0; l < group.lookups.size(); ++l) {
    const auto& of = offsets[group.lookups[l].lookup];
    bags.push_back({of.data(), of.size() - 1, as.weighted ? weights[l].data() : nullptr, as.mean,
                    pooled[l].data(), stride});
  }
  CheckBags(group, bags);
  PoolBags(group, rows.data(), bags, pool);

  std::vector<double> sums(group.rows * dim);
  const auto each = [&](const auto& function) {
    for (size_t l = 0; l < bags.size(); ++l) {
      for (size_t b = 0; b < bags[l].count; ++b) {
        for (int64_t i = bags[l].offsets[b]; i < bags[l].offsets[b + 1]; ++i) {
          const auto at = static_cast<size_t>(i);
          double weight = as.weighted ? static_cast<double>(weights[l][at]) : 1.0;
          if (as.mean) weight /= static_cast<double>(bags[l].offsets[b + 1] - bags[l].offsets[b]);
          function(l, b, static_cast<size_t>(group.inverse[group.lookups[l].offset + at]) * dim, weight);
        }
      }
    }
  };
  std::vector<std::vector<double>> expected;
  for (const Bags& one : bags) expected.emplace_back(one.count * stride, 0.0);
  each([&](size_t l, size_t b, size_t row, double weight) {
    for (size_t d = 0; d < dim; ++d)
      expected[l][b * stride + d] += weight * static_cast<double>(rows[row + d]);
  });
  for (size_t l = 0; l < bags.size(); ++l) {
    for (size_t b = 0; b < bags[l].count; ++b) {
      for (size_t d = 0; d < stride; ++d) {
        const double wanted = d < dim ? expected[l][b * stride + d] : 77;
        ASSERT_NEAR(static_cast<double>(pooled[l][b * stride + d]), wanted, 1e-5)
            << l << ' ' << b << ' ' << d;
      }
    }
  }

  for (auto& values : pooled) {
    for (T& value : values) value = number(random);
  }
  each([&](size_t l, size_t b, size_t row, double weight) {
    for (size_t d = 0; d < dim; ++d) sums[row + d] += weight * static_cast<double>(pooled[l][b * stride + d]);
  });
  std::vector<T> found(group.rows * dim, T{55});
  SumBags(group, bags, found.data(), pool);
  for (size_t i = 0; i < sums.size(); ++i) ASSERT_NEAR(static_cast<double>(found[i]), sums[i], 1e-5) << i;
  ThreadPool alone(1);
  std::vector<T> again(group.rows * dim, T{44});
  SumBags(group, bags, again.data(), &alone);
  EXPECT_EQ(found, again);
}

TEST_P(BagsTest, BothPassesAreAsDefined) {
  if (GetParam().is_float64) {
    ExpectAsDefined<double>(group(), offsets_, GetParam(), &pool_);
  } else {
    ExpectAsDefined<float>(group(), offsets_, GetParam(), &pool_);
  }
}

TEST_P(BagsTest, OffsetsThatDoNotFitAreRefused) {
  std::vector<Bags> bags;
  for (const auto& offsets : offsets_) bags.push_back({offsets.data(), offsets.size() - 1});
  CheckBags(group(), bags);
  for (const auto& [at, value, words] :
       {std::tuple<size_t, int64_t, const char*>{0, 1, "begin with 1, not 0"},
        {70, 1000, "end with 1000; there are"},
        {5, 2000, "go down from 2000 to"}}) {
    std::vector<int64_t> wrong = offsets_[2];
    wrong[at] = value;
    bags[2].offsets = wrong.data();
    try {
      CheckBags(group(), bags);
      FAIL() << words;
    } catch (const SpecError& error) {
      EXPECT_NE(std::string(error.what()).find(std::string("lookup 2: the offsets ") + words),
                std::string::npos)
          << error.what();
    }
  }
  bags.pop_back();
  EXPECT_THROW(CheckBags(group(), bags), SpecError);
}

INSTANTIATE_TEST_SUITE_P(All, BagsTest,
                         testing::Values(Case{8, false, false, false}, Case{16, false, true, false},
                                         Case{9, false, false, true}, Case{64, false, true, true},
                                         Case{16, true, true, false}, Case{5, true, false, true}));

}  // namespace
}  // namespace oe::bags_test
