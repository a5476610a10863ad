// Admission and eviction, over every storage. DeepRec's cases are those of its embedding variable tests.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "oe_runtime/core/checkpoint/filter_file.h"
#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/storage/test_storage.h"
#include "oe_runtime/core/table/table.h"

namespace oe::table_policy_test {
namespace {

constexpr uint32_t kDim = 4;

class TablePolicyTest : public testing::TestWithParam<const char*> {
 protected:
  static TableSpec Spec() {
    TableSpec spec;
    spec.name = "C1";
    spec.dim = kDim;
    spec.optimizer.name = "sgd";
    spec.initializer = {"constant", {{"value", 1}}, 0};
    return spec;
  }
  static TableSpec Evicting(std::vector<EvictionSpec> eviction) {
    TableSpec spec = Spec();
    spec.eviction = std::move(eviction);
    return spec;
  }
  static TableSpec Counter(double filter_freq) {
    TableSpec spec = Spec();
    spec.admission = {"counter", {{"filter_freq", filter_freq}}};
    return spec;
  }
  static TableSpec Cbf(double filter_freq) {
    TableSpec spec = Spec();
    spec.admission = {
        "cbf",
        {{"filter_freq", filter_freq}, {"max_element_size", 1e5}, {"false_positive_probability", 1e-4}}};
    return spec;
  }
  StorageSpec StorageFor(bool recover = false) const {
    StorageSpec storage = TestStorage(GetParam(), directory_.path());
    storage.recover = recover;
    return storage;
  }
  std::unique_ptr<Table> New(const TableSpec& spec, ShardInfo shard = {}) const {
    return Table::Create(spec, StorageFor(), shard);
  }

  TestDirectory directory_;
  TestDirectory files_;
};

// Gradients of -1 at rate 1: each push of a key adds 1 to its weights.
void Push(Table* table, const std::vector<Key>& keys, const std::vector<uint32_t>& counts = {}) {
  const std::vector<float> grads(keys.size() * kDim, -1.0F);
  std::vector<float> rows(keys.size() * kDim);
  table->Pull(keys.data(), keys.size(), rows.data());
  table->Upkeep();
  table->Push(keys.data(), keys.size(), grads.data(), 1.0, nullptr, counts.empty() ? nullptr : counts.data());
}

// The first weight of each key.
std::vector<float> Weights(const Table& table, const std::vector<Key>& keys) {
  std::vector<float> rows(keys.size() * kDim);
  table.Pull(keys.data(), keys.size(), rows.data());
  std::vector<float> weights;
  for (size_t i = 0; i < keys.size(); ++i) {
    for (uint32_t d = 1; d < kDim; ++d) EXPECT_EQ(rows[i * kDim + d], rows[i * kDim]);
    weights.push_back(rows[i * kDim]);
  }
  return weights;
}

std::set<Key> Keys(const Table& table) {
  std::set<Key> all;
  for (uint32_t part = 0; part < Table::kParts; ++part) {
    for (const Key key : table.Keys(part)) all.insert(key);
  }
  return all;
}

std::vector<Key> Range(Key first, size_t n) {
  std::vector<Key> keys(n);
  for (size_t i = 0; i < n; ++i) keys[i] = first + i;
  return keys;
}

using Floats = std::vector<float>;

TEST_P(TablePolicyTest, DeepRecCounterFilter) {
  // ids 1x4, 2x3, 3x2, 4x1
  const auto table = New(Counter(3));
  EXPECT_EQ(Weights(*table, {1, 2, 3, 4}), (Floats{0, 0, 0, 0}));
  Push(table.get(), {1, 2, 3, 4}, {4, 3, 2, 1});
  EXPECT_EQ(Weights(*table, {1, 2, 3, 4}), (Floats{2, 2, 0, 0}));
  EXPECT_EQ(table->rows(), 2U);
  Push(table.get(), {3, 4}, {1, 1});
  EXPECT_EQ(Weights(*table, {1, 2, 3, 4}), (Floats{2, 2, 2, 0}));
  const PolicyCounts counts = table->policy_counts();
  EXPECT_EQ(counts.admitted, 3U);
  EXPECT_EQ(counts.not_admitted, 3U);
  EXPECT_GT(counts.filter_bytes, 0U);
}

TEST_P(TablePolicyTest, DeepRecCbfFilter) {
  TableSpec spec = Cbf(3);
  for (const float other : {0.0F, 0.5F}) {
    spec.admission.params["default_value"] = other;
    const auto table = New(spec);
    for (int step = 1; step <= 3; ++step) {
      EXPECT_EQ(Weights(*table, {1}), (Floats{other})) << "step " << step;
      EXPECT_EQ(table->rows(), 0U);
      Push(table.get(), {1});
    }
    EXPECT_EQ(Weights(*table, {1, 2}), (Floats{2, other})) << "step 4";
  }
}

TEST_P(TablePolicyTest, SkippedGradientsDoNotCount) {
  TableSpec spec = Counter(2);
  spec.nonfinite_gradients = "skip";
  const auto table = New(spec);
  const std::vector<Key> keys = {1, 2};
  const std::vector<uint32_t> counts = {5, 2};
  std::vector<float> grads(2 * kDim, -1.0F);
  grads[1] = std::numeric_limits<float>::infinity();
  table->Push(keys.data(), 2, grads.data(), 1.0, nullptr, counts.data());
  EXPECT_EQ(Weights(*table, keys), (Floats{0, 2}));
}

TEST_P(TablePolicyTest, StepsToLive) {
  const auto table = New(Evicting({{"global_step", {{"steps_to_live", 2}}, ""}}));
  Push(table.get(), {1, 2});
  Push(table.get(), {2});
  Push(table.get(), {3});
  EXPECT_EQ(table->Evict(), 0U);  // key 1 was pushed 2 pushes ago
  Push(table.get(), {});
  EXPECT_EQ(table->Evict(), 1U);
  EXPECT_EQ(Keys(*table), (std::set<Key>{2, 3}));
  EXPECT_EQ(Weights(*table, {1, 2}), (Floats{1, 3})) << "an evicted key has its initial value";
  EXPECT_EQ(table->policy_counts().evicted.at("global_step"), 1U);
}

TEST_P(TablePolicyTest, L2Weight) {
  // Half the sum of four squares of 2, 3, 4: 8, 18, 32.
  const auto table = New(Evicting({{"l2_weight", {{"threshold", 18}}, ""}}));
  Push(table.get(), {1, 2, 3});
  Push(table.get(), {2, 3});
  Push(table.get(), {3});
  EXPECT_EQ(table->Evict(), 1U);
  EXPECT_EQ(Keys(*table), (std::set<Key>{2, 3}));
}

TEST_P(TablePolicyTest, TimeToLive) {
  const auto table = New(Evicting({{"ttl", {{"seconds", 10}}, ""}}));
  int64_t now = 1800000000;
  table->UseClock([&now] { return now; }, [&now] { return now; });
  Push(table.get(), {1, 2});
  now += 6;
  Push(table.get(), {2});
  now += 4;
  EXPECT_EQ(table->Evict(), 0U);
  now += 1;
  EXPECT_EQ(table->Evict(), 1U);
  EXPECT_EQ(Keys(*table), (std::set<Key>{2}));
  now -= 1000;  // a clock that is set back makes nothing old
  EXPECT_EQ(table->Evict(), 0U);
}

// The clock of the machine is set three years ahead, and then right again.
TEST_P(TablePolicyTest, AClockThatJumpsMakesNoRowOld) {
  const auto table = New(Evicting({{"ttl", {{"seconds", 100}}, ""}}));
  const int64_t start = 1800000000;
  int64_t steady = 0;
  int64_t wrong = 0;
  table->UseClock([&] { return start + steady + wrong; }, [&] { return steady; });
  Push(table.get(), Range(0, 1000));
  wrong = int64_t{3} * 365 * 24 * 3600;
  EXPECT_EQ(table->Evict(), 0U) << "rows count as pushed at the jump";
  EXPECT_EQ(table->policy_counts().clock_jumps, 1U);
  steady += 50;
  Push(table.get(), Range(0, 10));
  steady += 51;
  EXPECT_EQ(table->Evict(), 990U);
  wrong = 0;
  EXPECT_EQ(table->Evict(), 0U);
  EXPECT_EQ(table->policy_counts().clock_jumps, 2U);
  steady += 100;
  EXPECT_EQ(table->Evict(), 0U);
  steady += 1;
  EXPECT_EQ(table->Evict(), 10U) << "stamps from the future count as of when they were seen";
  wrong = -start - 1000;  // before 1970
  Push(table.get(), {1});
  EXPECT_EQ(table->Evict(), 0U);
  steady += 90000;
  wrong += 7200;
  EXPECT_EQ(table->Evict(), 0U);
}

TEST_P(TablePolicyTest, RowsOfLongAgoCountAsPushedWhenTheyAreLoaded) {
  const TableSpec spec = Evicting({{"ttl", {{"seconds", 100}}, ""}});
  int64_t now = 1800000000;
  const auto clock = [&now] { return now; };
  const auto table = New(spec);
  table->UseClock(clock, clock);
  Push(table.get(), Range(0, 1000));
  now += 60;
  Push(table.get(), Range(0, 10));
  const std::string file = files_.file("a.oet");
  (void)table->Save(file);
  now += 50;
  table->Restore({file});
  EXPECT_EQ(table->Evict(), 990U) << "an ordinary pause ages rows";
  table->Restore({file});
  now += 31 * 24 * 3600;
  table->Restore({file});
  EXPECT_EQ(table->rows(), 1000U);
  EXPECT_EQ(table->Evict(), 0U);
  now += 101;
  EXPECT_EQ(table->Evict(), 1000U);
}

// A machine without a clock of its own starts in 1970, trains, learns the time, and starts again.
TEST_P(TablePolicyTest, AClockThatWasSetBeforeARestartMakesNoRowOld) {
  const TableSpec spec = Evicting({{"ttl", {{"seconds", 100}}, ""}});
  int64_t now = 5000;
  int64_t steady = 0;
  const auto clock = [&now] { return now; };
  const auto before = New(spec);
  before->UseClock(clock, [&steady] { return steady; });
  Push(before.get(), Range(0, 1000));
  now = 1800000000;
  Push(before.get(), Range(0, 10));
  const std::string file = files_.file("a.oet");
  EXPECT_EQ(before->Save(file).rows, 1000U);
  const auto table = New(spec);
  table->UseClock(clock, clock);
  now += 10;
  table->Restore({file});
  EXPECT_EQ(table->Evict(), 0U) << "pushed when the clock was set, as far as is known";
  EXPECT_EQ(table->policy_counts().clock_jumps, 1U);
  Push(table.get(), Range(0, 10));
  now += 91;
  EXPECT_EQ(table->Evict(), 990U);
}

TEST_P(TablePolicyTest, ACounterForgetsByTimeAsRowsGo) {
  TableSpec spec = Counter(3);
  spec.eviction = {{"ttl", {{"seconds", 100}}, ""}};
  const auto table = New(spec);
  const int64_t start = 1800000000;
  const int64_t years = int64_t{3} * 365 * 24 * 3600;
  int64_t steady = 0;
  int64_t wrong = 0;
  table->UseClock([&] { return start + steady + wrong; }, [&] { return steady; });
  Push(table.get(), Range(0, 100));
  for (int i = 0; i < 3; ++i) {
    (void)table->Evict();
    wrong += years;
  }
  EXPECT_EQ(table->policy_counts().forgotten, 0U) << "a clock that jumps makes no count old";
  wrong = 0;
  for (int i = 0; i < 3; ++i) {
    (void)table->Evict();
    steady += 101;
  }
  (void)table->Evict();
  EXPECT_EQ(table->policy_counts().forgotten, 100U) << "nor does one that was set back keep it";
}

// A want of room ends periods too: what was counted before that is not as old as a sweep takes it for.
TEST_P(TablePolicyTest, ASweepAfterAWantOfRoomForgetsNothingNew) {
  TableSpec spec = Counter(1000);
  spec.admission.params["max_keys"] = 1600;
  spec.eviction = {{"global_step", {{"steps_to_live", 10}}, ""}};
  const auto table = New(spec);
  for (Key step = 0; step < 10; ++step) {
    Push(table.get(), Range(0, 1400));
    Push(table.get(), Range(10000 + step * 250, 250));
    const uint64_t forgotten = table->policy_counts().forgotten;
    (void)table->Evict();
    EXPECT_EQ(table->policy_counts().forgotten, forgotten) << step;
  }
  EXPECT_GT(table->policy_counts().forgotten, 1000U) << "for others";
}

TEST_P(TablePolicyTest, ACounterForgetsWithTheEvictions) {
  TableSpec spec = Counter(3);
  spec.eviction = {{"global_step", {{"steps_to_live", 10}}, ""}};
  const auto table = New(spec);
  uint64_t most = 0;
  for (Key step = 0; step < 400; ++step) {
    std::vector<Key> keys = Range(1000 + step * 100, 100);  // that never come again
    if (step % 8 == 0) keys.push_back(7);                   // comes often enough
    Push(table.get(), keys);
    (void)table->Evict();
    const PolicyCounts counts = table->policy_counts();
    most = std::max<uint64_t>(most, counts.not_admitted - counts.forgotten);
    if (step == 16) {
      EXPECT_EQ(Keys(*table), (std::set<Key>{7})) << "its count was not forgotten";
    }
  }
  EXPECT_LE(most, 2 * 11 * 100U + 100U + 16U) << "counts live for one to two times steps_to_live";
  EXPECT_GT(table->policy_counts().forgotten, 35000U);
}

// However many new keys come: more than a slice once looked at. The filter grows while it is swept.
TEST_P(TablePolicyTest, ACounterForgetsWhileItTrains) {
  constexpr uint64_t kNew = 6000;  // keys of each push, which never come again
  constexpr uint64_t kPushes = 50;
  constexpr uint64_t kSteps = 4;
  constexpr uint64_t kEvery = 2;
  constexpr uint64_t kMost = 2 * (kSteps + 17 * kEvery);  // pushes that a count lives
  for (const bool array : {false, true}) {
    SCOPED_TRACE(array ? "array" : "hash");
    TableSpec spec = Counter(2);
    if (array) {
      spec.index = "array";
      spec.input_dim = kNew * (kPushes + 1);
    }
    spec.eviction = {{"global_step", {{"steps_to_live", kSteps}, {"every_steps", kEvery}}, ""},
                     {"l2_weight", {{"threshold", 1}, {"every_steps", 3}}, ""},
                     {"ttl", {{"seconds", 50}, {"every_steps", 5}}, ""}};
    int64_t now = 1800000000;
    const auto table = New(spec);
    table->UseClock([&now] { return now; }, [&now] { return now; });
    for (uint64_t step = 1; step <= kPushes + kMost; ++step) {
      ++now;
      Push(table.get(), step <= kPushes ? Range(step * kNew, kNew) : std::vector<Key>());
      const uint64_t forgotten = table->policy_counts().forgotten;
      ASSERT_LE(forgotten, kNew * (step - std::min(step, kSteps))) << "too early in push " << step;
      ASSERT_GE(forgotten, kNew * (step - std::min(step, kMost))) << "too late in push " << step;
    }
    EXPECT_EQ(table->policy_counts().forgotten, kNew * kPushes);
  }
}

TEST_P(TablePolicyTest, ACounterCountsAtMostMaxKeys) {
  TableSpec spec = Counter(3);
  spec.admission.params["max_keys"] = 1600;
  const auto table = New(spec);
  const std::vector<Key> often = Range(0, 50);
  uint64_t bytes = 0;
  for (Key step = 0; step < 300; ++step) {
    std::vector<Key> keys = Range(1000 + step * 400, 400);
    if (step < 3) keys.insert(keys.end(), often.begin(), often.end());
    Push(table.get(), keys);
    if (step == 20) bytes = table->policy_counts().filter_bytes;
  }
  const PolicyCounts counts = table->policy_counts();
  EXPECT_EQ(counts.filter_bytes, bytes) << "the places of forgotten keys are used again";
  EXPECT_EQ(table->rows(), often.size()) << "keys that come again are forgotten last";
  EXPECT_EQ(counts.not_admitted - 2 * often.size() - counts.forgotten, 1600U);
  EXPECT_EQ(MessageOf<SpecError>([&] {
              spec.admission.params["max_keys"] = 0.5;
              (void)New(spec);
            }),
            "table 'C1': 'admission' counter: 'max_keys' must be between 1 and 9.007199255e+15, not 0.5");
}

TEST_P(TablePolicyTest, ASaveEvictsFirst) {
  const auto table = New(Evicting({{"global_step", {{"steps_to_live", 1}}, ""}}));
  Push(table.get(), Range(0, 5000));
  Push(table.get(), Range(0, 10));
  Push(table.get(), Range(0, 10));
  EXPECT_EQ(table->rows(), 5000U);
  EXPECT_EQ(table->Save(files_.file("a.oet")).rows, 10U);
  EXPECT_EQ(table->rows(), 10U);
}

TEST_P(TablePolicyTest, TheCapHoldsAndKeepsWhatIsUsed) {
  for (const char* policy : {"lru", "lfu"}) {
    const auto table = New(Evicting({{"cap", {{"max_rows", 1600}}, policy}}));
    const std::vector<Key> hot = Range(0, 400);
    uint64_t bytes = 0;
    for (Key step = 0; step < 100; ++step) {
      std::vector<Key> keys = hot;
      for (const Key key : Range(1000 + step * 200, 200)) keys.push_back(key);
      Push(table.get(), keys);
      ASSERT_LE(table->rows(), 1600U);
      if (step == 50) bytes = table->bytes();
    }
    EXPECT_GT(table->rows(), 1500U);
    EXPECT_EQ(table->bytes(), bytes) << "rows are used again";
    EXPECT_EQ(Weights(*table, hot), Floats(400, 101)) << policy;
    const PolicyCounts counts = table->policy_counts();
    EXPECT_EQ(counts.admitted, table->rows() + counts.evicted.at("cap"));
    EXPECT_EQ(counts.no_room, 0U);
  }
}

TEST_P(TablePolicyTest, LfuKeepsFrequentRowsAndLruRecentOnes) {
  for (const char* policy : {"lru", "lfu"}) {
    const auto table = New(Evicting({{"cap", {{"max_rows", 3200}}, policy}}));
    const std::vector<Key> often = Range(0, 800);
    Push(table.get(), often, std::vector<uint32_t>(800, 50));
    for (Key step = 0; step < 30; ++step) Push(table.get(), Range(1000 + step * 800, 800));
    const std::set<Key> left = Keys(*table);
    const auto kept = static_cast<size_t>(
        std::count_if(often.begin(), often.end(), [&](Key key) { return left.count(key) > 0; }));
    EXPECT_EQ(kept, policy == std::string("lfu") ? 800U : 0U);
  }
}

// A storage with room for little more than the cap: no push needs more.
TEST_P(TablePolicyTest, AFullStorageLetsRowsTakeTheirTurns) {
  StorageSpec storage = StorageFor();
  // A log needs room for two superblocks and for cleaning.
  storage.capacity_bytes = GetParam() == std::string("dram_ssd") ? uint64_t{3} << 20 : uint64_t{3} << 19;
  TableSpec spec = Evicting({{"cap", {{"max_rows", 8000}}, "lru"}});
  const auto table = Table::Create(spec, storage);
  for (Key step = 0; step < 60; ++step) Push(table.get(), Range(step * 1000, 1000));
  EXPECT_GT(table->rows(), 7500U);
  EXPECT_GT(table->policy_counts().evicted.at("cap"), 50000U);
}

TEST_P(TablePolicyTest, ABatchThatDoesNotFitIsNoError) {
  const auto table = New(Evicting({{"cap", {{"max_rows", 64}}, ""}}));
  Push(table.get(), Range(0, 1000));
  EXPECT_EQ(table->rows(), 64U);
  EXPECT_EQ(table->policy_counts().no_room, 936U);
  EXPECT_EQ(table->policy_counts().evicted.at("cap"), 0U);
  const std::set<Key> before = Keys(*table);
  Push(table.get(), std::vector<Key>(before.begin(), before.end()));
  EXPECT_EQ(Keys(*table), before);
  Push(table.get(), {5000, 5000, 5000});  // not unique, as no client of ours sends it
  EXPECT_LE(table->rows(), 64U);
}

TEST_P(TablePolicyTest, MaxBytesCountsWholeRows) {
  // 4 weights and the step: 20 bytes a row; 1,000 bytes: 50 rows
  const auto table = New(Evicting({{"cap", {{"max_bytes", 1000}}, "lru"}}));
  Push(table.get(), Range(0, 5000));
  EXPECT_EQ(table->rows(), 50U);
  EXPECT_EQ(MessageOf<SpecError>([&] { (void)New(Evicting({{"cap", {{"max_rows", 40}}, ""}}), {0, 3}); }),
            "table 'C1': 'eviction' cap has room for 40 rows, but 3 server(s) need at least 48");
  uint64_t rows = 0;
  for (uint32_t server = 0; server < 3; ++server) {
    const auto part = New(Evicting({{"cap", {{"max_rows", 100}}, ""}}), {server, 3});
    std::vector<Key> keys = Range(0, 9000);
    keys.erase(
        std::remove_if(keys.begin(), keys.end(), [&](Key key) { return server_of(key, 3, false) != server; }),
        keys.end());
    Push(part.get(), keys);
    rows += part->rows();
  }
  EXPECT_EQ(rows, 100U);
}

// Everything together, on any tier and any number of servers: the same rows with the same values.
TEST_P(TablePolicyTest, ComposedAndScheduledPoliciesDoTheSameEverywhere) {
  for (const auto& [array, every] : {std::pair(false, 1), {true, 1}, {false, 4}, {true, 4}}) {
    SCOPED_TRACE((array ? "array, every " : "hash, every ") + std::to_string(every));
    TableSpec spec = Counter(2);
    if (array) {
      spec.index = "array";
      spec.input_dim = 4000;
    }
    spec.eviction = {{"global_step", {{"steps_to_live", 6}, {"every_steps", every}}, ""},
                     {"l2_weight", {{"threshold", 30}, {"every_steps", 3}}, ""},
                     {"ttl", {{"seconds", 3}, {"every_steps", 2}}, ""}};
    int64_t now = 1000;
    const auto clock = [&now] { return now; };
    const auto one = Table::Create(spec, StorageSpec{});
    one->UseClock(clock, clock);
    std::vector<std::unique_ptr<Table>> three;
    for (uint32_t i = 0; i < 3; ++i) three.push_back(New(spec, {i, 3}));
    for (const auto& table : three) table->UseClock(clock, clock);
    std::map<std::string, uint64_t> evicted;
    for (Key step = 0; step < 80; ++step) {
      now += step % 20 == 0 ? 5 : 0;
      std::vector<Key> keys = Range(step * 37 % 3000, 500);
      Push(one.get(), keys);
      for (uint32_t server = 0; server < 3; ++server) {
        std::vector<Key> mine;
        for (const Key key : keys) {
          if (server_of(key, 3, array) == server) mine.push_back(key);
        }
        Push(three[server].get(), mine);
      }
      std::set<Key> all;
      evicted = {};
      for (const auto& table : three) {
        all.merge(Keys(*table));
        for (const auto& [policy, rows] : table->policy_counts().evicted) evicted[policy] += rows;
      }
      ASSERT_EQ(all, Keys(*one)) << "step " << step;
    }
    EXPECT_EQ(evicted, one->policy_counts().evicted);
    ASSERT_EQ(evicted.size(), 3U);
    for (const auto& [policy, rows] : evicted) {
      EXPECT_TRUE(rows > 0 || every > 1) << policy;  // or others come first
    }
    const std::vector<Key> keys = Range(0, 3500);
    for (const Key key : keys) {
      ASSERT_EQ(Weights(*three[server_of(key, 3, array)], {key}), Weights(*one, {key}));
    }
  }
}

// Whatever there is to evict, a push evicts about as much of it as any other; and after all slices of all
// sixteenths had their turn, nothing of it is left.
TEST_P(TablePolicyTest, AScheduledSweepIsSpreadOverThePushes) {
  constexpr uint64_t kEvery = 32;
  constexpr uint64_t kRows = 32768;
  for (const bool array : {false, true}) {
    TableSpec spec = Evicting({{"global_step", {{"steps_to_live", 1}, {"every_steps", kEvery}}, ""}});
    if (array) {
      spec.index = "array";
      spec.input_dim = kRows;
    }
    const auto table = New(spec);
    Push(table.get(), Range(0, kRows));
    uint64_t most = 0;
    for (uint64_t step = 0; step < 17 * kEvery; ++step) {
      const uint64_t before = table->rows();
      Push(table.get(), {});
      most = std::max(most, before - table->rows());
    }
    EXPECT_EQ(table->rows(), 0U);
    // 64 on average; in one go it was a sixteenth of all, 2048, and of an array all of them.
    EXPECT_LE(most, 128U);
  }
}

// Rows bring what policies know of them, filters their counts.
TEST_P(TablePolicyTest, SavedAndRestoredOnOtherNumbersOfServers) {
  for (TableSpec spec : {Counter(3), Cbf(3)}) {
    spec.eviction = {{"global_step", {{"steps_to_live", 4}}, ""}, {"cap", {{"max_rows", 100000}}, "lfu"}};
    const auto one = New(spec);
    const auto push = [&](const std::vector<std::unique_ptr<Table>>& tables, const std::vector<Key>& keys) {
      const auto servers = static_cast<uint32_t>(tables.size());
      for (uint32_t server = 0; server < servers; ++server) {
        std::vector<Key> mine;
        for (const Key key : keys) {
          if (server_of(key, servers, false) == server) mine.push_back(key);
        }
        Push(tables[server].get(), mine);
      }
    };
    const std::vector<Key> all = Range(0, 2000);
    Push(one.get(), all);
    Push(one.get(), Range(0, 1500));
    Push(one.get(), Range(0, 1000));  // admitted
    const std::string file = files_.file("one.oet");
    one->Save(file);
    std::vector<std::string> names;
    std::vector<std::unique_ptr<Table>> three;
    for (uint32_t i = 0; i < 3; ++i) {
      three.push_back(New(spec, {i, 3}));
      three.back()->Restore({file});
      names.push_back(files_.file(std::to_string(i) + ".oet"));
      three.back()->Save(names.back());
    }
    std::vector<std::unique_ptr<Table>> again;
    again.push_back(New(spec));
    again.back()->Restore(names);
    EXPECT_EQ(Keys(*again[0]), Keys(*one));
    // One more push admits those that were counted twice; and then the first 1,000 have grown old.
    for (int step = 0; step < 5; ++step) {
      const std::vector<Key> keys = Range(1000, 1000);
      Push(one.get(), keys);
      push(three, keys);
      push(again, keys);
    }
    one->Evict();
    again[0]->Evict();
    std::set<Key> of_three;
    for (const auto& table : three) {
      table->Evict();
      of_three.merge(Keys(*table));
    }
    EXPECT_EQ(Keys(*one).size(), 1000U) << spec.admission.name;
    EXPECT_EQ(Keys(*one), of_three);
    EXPECT_EQ(Keys(*one), Keys(*again[0]));
    EXPECT_EQ(Weights(*one, all), Weights(*again[0], all));
    for (const Key key : all) {
      ASSERT_EQ(Weights(*three[server_of(key, 3, false)], {key}), Weights(*one, {key}));
    }
  }
}

TEST_P(TablePolicyTest, ARestoreKeepsTheCap) {
  TableSpec spec = Evicting({{"cap", {{"max_rows", 1600}}, "lru"}});
  const auto one = New(spec);
  for (Key step = 0; step < 20; ++step) Push(one.get(), Range(step * 500, 500));
  const std::string file = files_.file("one.oet");
  one->Save(file);
  uint64_t rows = 0;
  for (uint32_t i = 0; i < 3; ++i) {
    const auto part = New(spec, {i, 3});
    part->Restore({file});
    EXPECT_LE(part->rows(), 534U);
    rows += part->rows();
  }
  EXPECT_GT(rows, 1400U);
}

// Rows of steps 0 to 9, 100 each, under a cap of 1600; what is left under a smaller cap must be the newest.
TEST_P(TablePolicyTest, TheCapMayChangeOnARestore) {
  const auto with_cap = [](double rows) { return Evicting({{"cap", {{"max_rows", rows}}, "lru"}}); };
  const bool pool = KeepsCheckpoints(GetParam());
  const std::string file = files_.file("one.oet");
  {
    const auto table = Table::Create(with_cap(1600), StorageFor(pool));
    for (Key step = 0; step < 10; ++step) Push(table.get(), Range(step * 100, 100));
    EXPECT_EQ(table->rows(), 1000U);
    table->Save(file);
    if (pool) {
      table->Checkpoint(1);
      table->WaitDurable();
    }
  }
  const TestDirectory elsewhere;
  const auto expect = [&](const char* how, const std::function<std::unique_ptr<Table>(TableSpec)>& with) {
    {
      const auto smaller = with(with_cap(320));
      EXPECT_LE(smaller->rows(), 320U) << how;
      EXPECT_GT(smaller->rows(), 250U) << how;
      EXPECT_GE(smaller->policy_counts().evicted.at("cap"), 680U) << how;
      for (const Key key : Keys(*smaller)) EXPECT_EQ(Weights(*smaller, {key}), Floats{2}) << how;
      Push(smaller.get(), Range(5000, 100));
      EXPECT_LE(smaller->rows(), 320U) << how;
    }
    const auto larger = with(with_cap(3200));
    Push(larger.get(), Range(6000, 1500));
    EXPECT_GT(larger->rows(), 1600U) << how;
    EXPECT_LE(larger->rows(), 3200U) << how;
  };
  expect("from a file", [&](const TableSpec& spec) {
    auto table = Table::Create(spec, TestStorage(GetParam(), elsewhere.path()));
    table->Restore({file});
    return table;
  });
  if (pool) {
    expect("from a pool",
           [&](const TableSpec& spec) { return Table::Create(spec, StorageFor(/*recover=*/true)); });
  }
  TableSpec lfu = with_cap(320);
  lfu.eviction[0].policy = "lfu";
  const auto other = Table::Create(lfu, TestStorage(GetParam(), elsewhere.path()));
  EXPECT_NE(MessageOf<CheckpointError>([&] { other->Restore({file}); }).find("'eviction.0.policy' was"),
            std::string::npos);
}

TEST_P(TablePolicyTest, DamagedAndForeignFiltersAreRefused) {
  const auto table = New(Counter(3));
  Push(table.get(), Range(0, 100));
  const std::string file = files_.file("t.oet");
  const std::string filter = FilterFileName(file);
  table->Save(file);
  const std::string good = ReadAll(filter);
  const auto refusal = [&] { return MessageOf<CheckpointError>([&] { table->Restore({file}); }); };
  for (const size_t at : {size_t{0}, size_t{9}, size_t{40}, good.size() / 2, good.size() - 1}) {
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 4);
    WriteAll(filter, bad);
    EXPECT_NE(refusal().find(filter), std::string::npos) << refusal();
  }
  for (const size_t size : {size_t{0}, size_t{30}, good.size() - 1}) {
    WriteAll(filter, good.substr(0, size));
    EXPECT_NE(refusal().find(filter + " is damaged"), std::string::npos) << refusal();
  }
  Push(table.get(), {1});
  table->Save(files_.file("later.oet"));
  WriteAll(filter, ReadAll(FilterFileName(files_.file("later.oet"))));
  EXPECT_EQ(refusal(), filter + ": 'version' is 2, but for table \"C1\" it should be 1");
  EXPECT_EQ(table->version(), 2U);
  const auto other = New(Counter(4));
  EXPECT_EQ(MessageOf<CheckpointError>([&] { other->Restore({file}); }),
            file + ": 'admission.filter_freq' was 3.0 when table 'C1' was saved, but table 'C1' has 4.0");
}

TEST_P(TablePolicyTest, PoolsRecoverWhatPoliciesKnow) {
  if (!KeepsCheckpoints(GetParam())) GTEST_SKIP() << GetParam() << " keeps no checkpoints";
  TableSpec spec = Counter(2);
  spec.eviction = {{"global_step", {{"steps_to_live", 2}}, ""}, {"cap", {{"max_rows", 800}}, "lru"}};
  std::set<Key> then;
  {
    const auto table = Table::Create(spec, StorageFor(true));
    for (Key step = 0; step < 12; ++step) {
      Push(table.get(), Range(step * 100, 400), std::vector<uint32_t>(400, 1 + step % 2));
      if (step == 11) Push(table.get(), Range(5000, 100));
      if (step % 3 == 2) table->Checkpoint(step);
      if (step % 4 == 3) table->Evict();
    }
    table->Recover(std::nullopt);
    then = Keys(*table);
    EXPECT_GT(then.size(), 100U);
    Push(table.get(), Range(9000, 400), std::vector<uint32_t>(400, 2));
  }
  const auto table = Table::Create(spec, StorageFor(true));
  EXPECT_EQ(Keys(*table), then);
  Push(table.get(), {});
  Push(table.get(), {});
  Push(table.get(), {});
  table->Evict();
  EXPECT_EQ(table->rows(), 0U) << "they still know when they were pushed";
  Push(table.get(), Range(5000, 100));
  Push(table.get(), Range(1100, 400));
  EXPECT_EQ(table->rows(), 100U) << "these 100 were counted once before; those that had rows begin again";
}

TEST_P(TablePolicyTest, IncrementsHaveWhatWasEvicted) {
  TableSpec spec = Counter(2);
  spec.eviction = {{"global_step", {{"steps_to_live", 3}}, ""}, {"cap", {{"max_rows", 20000}}, "lru"}};
  const auto table = New(spec);
  const std::vector<uint32_t> twice(10000, 2);
  Push(table.get(), Range(0, 10000), twice);
  Push(table.get(), Range(5000, 10000), twice);
  const TableFileInfo full = table->Save(files_.file("full"));
  Push(table.get(), Range(8000, 2000));
  Push(table.get(), Range(8000, 2000));
  Push(table.get(), Range(20000, 2000), twice);
  const TableFileInfo increment = table->Save(files_.file("increment"), full.checksum);
  EXPECT_EQ(increment.base, full.checksum);
  EXPECT_EQ(increment.tombstones, 5000U);
  EXPECT_EQ(increment.rows, 4000U);
  const std::vector<Key> all = Range(0, 22000);
  for (const uint32_t servers : {1U, 3U}) {
    std::set<Key> keys;
    for (uint32_t server = 0; server < servers; ++server) {
      const TestDirectory elsewhere;
      StorageSpec storage = TestStorage(GetParam(), elsewhere.path());
      const auto copy = Table::Create(spec, storage, {server, servers});
      copy->RestoreChains({{files_.file("full"), files_.file("increment")}});
      for (const Key key : Keys(*copy)) {
        EXPECT_TRUE(keys.insert(key).second);
        ASSERT_EQ(Weights(*copy, {key}), Weights(*table, {key})) << key;
      }
    }
    EXPECT_EQ(keys, Keys(*table)) << servers << " servers";
  }
  EXPECT_EQ(table->rows(), 12000U);
}

TEST_P(TablePolicyTest, ThreadsPushPullEvictAndSave) {
  TableSpec spec = Counter(2);
  spec.eviction = {{"global_step", {{"steps_to_live", 20}}, ""}, {"cap", {{"max_rows", 640}}, "lfu"}};
  const auto table = New(spec);
  std::atomic<int> torn{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      const std::vector<float> grads(100 * kDim, -1.0F);
      std::vector<float> out(100 * kDim);
      for (Key step = 0; step < 60; ++step) {
        const std::vector<Key> keys = Range((step * 61 + static_cast<Key>(thread)) % 1500, 100);
        table->Push(keys.data(), keys.size(), grads.data(), 1.0);
        table->Pull(keys.data(), keys.size(), out.data());
        for (size_t i = 0; i < keys.size(); ++i) {
          for (uint32_t d = 1; d < kDim; ++d) torn += out[i * kDim + d] != out[i * kDim] ? 1 : 0;
        }
        if (thread == 0 && step % 8 == 0) table->Evict();
        if (thread == 1 && step % 16 == 0) table->Save(files_.file("t.oet"));
        if (thread == 2) (void)table->policy_counts();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(torn, 0);
  EXPECT_LE(table->rows(), 640U);
  uint64_t evicted = 0;
  for (const auto& [policy, rows] : table->policy_counts().evicted) evicted += rows;
  EXPECT_EQ(table->policy_counts().admitted, table->rows() + evicted);
}

INSTANTIATE_TEST_SUITE_P(Storages, TablePolicyTest, testing::ValuesIn(kStorageTypes),
                         [](const auto& kind) { return std::string(kind.param); });

}  // namespace
}  // namespace oe::table_policy_test
