#include "oe_runtime/core/client/plan.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "oe_runtime/core/wire/errors.h"

namespace oe::plan_test {
namespace {

TableSpec Hash(const std::string& name, uint32_t dim) {
  TableSpec spec;
  spec.name = name;
  spec.dim = dim;
  return spec;
}

TableSpec Array(const std::string& name, uint32_t dim, uint64_t input_dim) {
  TableSpec spec = Hash(name, dim);
  spec.index = "array";
  spec.input_dim = input_dim;
  return spec;
}

IdsView View(const std::vector<Key>& ids) { return {ids.data(), ids.size()}; }

// Which key lies in each row of a group, by table; and that every row is some table's.
std::vector<std::pair<uint32_t, Key>> RowsOf(const BatchPlan& plan, const PlannedGroup& group) {
  std::vector<std::pair<uint32_t, Key>> rows(group.rows, {~0U, 0});
  for (const PlannedTable& table : group.tables) {
    const ShardedKeys& keys = plan.keys[table.keys];
    for (uint32_t server = 0; server < plan.servers; ++server) {
      for (size_t i = 0; i < keys.on(server); ++i) {
        rows.at(table.offsets[server] + i) = {table.table, keys.keys[keys.bounds[server] + i]};
      }
    }
  }
  return rows;
}

class PlanTest : public testing::TestWithParam<uint32_t> {
 protected:
  ThreadPool pool_{3};
};

// The whole point of a plan: position -> row -> the position's own key, in its own table, once per table.
TEST_P(PlanTest, EveryPositionFindsItsKey) {
  std::mt19937_64 random(3);
  std::vector<std::vector<Key>> arrays(4);
  for (auto& ids : arrays) {
    ids.resize(300);
    for (Key& id : ids) id = random() % 90;
  }
  arrays.emplace_back();  // an empty one
  std::vector<IdsView> ids;
  for (const auto& array : arrays) ids.push_back(View(array));
  const std::vector<TableSpec> tables = {Hash("a", 8), Array("b", 1, 90), Hash("c", 8), Array("d", 8, 100),
                                         Hash("unused", 8)};
  // Table 0 is looked up with three arrays, one of them twice; 0 and 2 share array 1.
  const std::vector<std::pair<uint32_t, uint32_t>> lookups = {{0, 0}, {1, 0}, {2, 1}, {0, 1},
                                                              {0, 1}, {3, 2}, {0, 3}, {2, 4}};
  const uint32_t servers = GetParam();
  const BatchPlan plan = MakePlan(tables, ids, lookups, servers, &pool_);
  ASSERT_EQ(plan.groups.size(), 2U);
  EXPECT_EQ(plan.groups[0].dim, 1U);
  EXPECT_EQ(plan.groups[1].dim, 8U);
  size_t seen = 0;
  for (const PlannedGroup& group : plan.groups) {
    const auto rows = RowsOf(plan, group);
    const std::set<std::pair<uint32_t, Key>> distinct(rows.begin(), rows.end());
    EXPECT_EQ(distinct.size(), rows.size());
    EXPECT_EQ(distinct.count({~0U, 0}), 0U);
    for (const PlannedLookup& lookup : group.lookups) {
      const auto& [table, source] = lookups[lookup.lookup];
      ASSERT_EQ(lookup.size, arrays[source].size());
      for (size_t i = 0; i < lookup.size; ++i) {
        const auto row = static_cast<size_t>(group.inverse[lookup.offset + i]);
        EXPECT_EQ(rows.at(row), (std::pair<uint32_t, Key>(table, arrays[source][i])));
      }
      ++seen;
    }
    for (const PlannedTable& table : group.tables) {
      const ShardedKeys& keys = plan.keys[table.keys];
      for (uint32_t server = 0; server < servers; ++server) {
        for (size_t i = keys.bounds[server]; i < keys.bounds[server + 1]; ++i) {
          EXPECT_EQ(server_of(keys.keys[i], servers, tables[table.table].index == "array"), server);
        }
      }
    }
  }
  EXPECT_EQ(seen, lookups.size());
}

TEST_P(PlanTest, TablesWithTheSameIdsShareTheirKeys) {
  const std::vector<Key> ids = {1, 2, 3};
  const BatchPlan plan =
      MakePlan({Hash("a", 8), Hash("b", 1)}, {View(ids)}, {{0, 0}, {1, 0}}, GetParam(), &pool_);
  EXPECT_EQ(plan.keys.size(), 1U);
}

TEST_P(PlanTest, KeyOutsideAnArrayTable) {
  const std::vector<Key> ids = {0, ~Key{0}};
  try {
    MakePlan({Array("words", 8, 10)}, {View(ids)}, {{0, 0}}, GetParam(), &pool_);
    FAIL() << "no error";
  } catch (const KeyRangeError& error) {
    EXPECT_STREQ(error.what(), "table 'words': key -1 is not in [0, 10)");
  }
}

TEST_P(PlanTest, NoLookups) {
  const BatchPlan plan = MakePlan({Hash("a", 8)}, {}, {}, GetParam(), &pool_);
  EXPECT_TRUE(plan.groups.empty());
}

INSTANTIATE_TEST_SUITE_P(Servers, PlanTest, testing::Values(1, 2, 3, 7));

}  // namespace
}  // namespace oe::plan_test
