// What admission filters counted is part of a pool's checkpoints: after any recovery it is what a table in
// DRAM, which got the same pushes, had counted at that checkpoint.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "oe_runtime/core/checkpoint/filter_file.h"
#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/policy/admission.h"
#include "oe_runtime/core/storage/log_pool.h"
#include "oe_runtime/core/storage/test_storage.h"
#include "oe_runtime/core/table/table.h"

namespace oe::pooled_filter_test {
namespace {

constexpr uint32_t kDim = 4;
constexpr Key kKeys = 3000;

struct Case {
  const char* storage;
  const char* filter;
};

class PooledFilterTest : public testing::TestWithParam<Case> {
 protected:
  static TableSpec Spec() {
    TableSpec spec;
    spec.name = "C1";
    spec.dim = kDim;
    spec.optimizer.name = "sgd";
    spec.initializer = {"constant", {{"value", 1}}, 0};
    spec.admission = {GetParam().filter, {{"filter_freq", 5}}};
    if (spec.admission.name == "cbf") {
      spec.admission.params.insert({{"max_element_size", 2e5}, {"false_positive_probability", 0.001}});
    }
    return Complete(spec);
  }
  std::unique_ptr<Table> Open() const {
    StorageSpec storage = TestStorage(GetParam().storage, directory_.path());
    storage.recover = true;
    return Table::Create(Spec(), storage);
  }
  // The superblocks of pools that are there and say that they hold `kind`.
  std::vector<std::string> Supers(const std::string& kind) const {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory_.path())) {
      const std::string path = entry.path().string();
      if (path.find("-super.pool") == std::string::npos) continue;
      if (ReadAll(path).find("\"" + kind + "\":{") != std::string::npos) found.push_back(path);
    }
    return found;
  }
  // Counts as the file says them that `table` saves now: `key` → how often.
  std::map<Key, uint32_t> CountsOf(Table* table) const {
    const std::string file = files_.file("counts.oet");
    table->Save(file);
    const auto filter = FilterOf({file}, Spec(), table->version(), {});
    std::map<Key, uint32_t> counts;
    for (Key key = 0; key < kKeys; ++key) {
      const auto part = static_cast<uint32_t>(Mix64(key) % 16);
      const uint32_t count = GetParam().filter == std::string("cbf")
                                 ? filter->Count(static_cast<uint32_t>(Mix64(key) >> 60), key, 0)
                                 : filter->Count(part, key, 0);
      if (count > 0) counts[key] = count;
    }
    return counts;
  }

  TestDirectory directory_;
  TestDirectory files_;
};

void Push(Table* table, const std::vector<Key>& keys, const std::vector<uint32_t>& counts = {}) {
  const std::vector<float> grads(keys.size() * kDim, -1.0F);
  table->Push(keys.data(), keys.size(), grads.data(), 1.0, nullptr, counts.empty() ? nullptr : counts.data());
}

std::vector<Key> Range(Key first, size_t n) {
  std::vector<Key> keys(n);
  for (size_t i = 0; i < n; ++i) keys[i] = first + i;
  return keys;
}

// Random pushes, checkpoints, ends of the process and ways back, beside a table in DRAM.
TEST_P(PooledFilterTest, CountsAreThoseOfTheCheckpoint) {
  std::mt19937_64 random(7);
  std::unique_ptr<Table> table = Open();
  auto model = Table::Create(Spec(), StorageSpec{});
  std::map<uint64_t, std::string> saved;  // the model at each checkpoint
  uint64_t id = 0;
  int compared = 0;
  for (int step = 0; step < 120; ++step) {
    std::vector<Key> keys = Range(random() % (kKeys - 100), 1 + random() % 100);
    std::vector<uint32_t> counts(keys.size());
    for (uint32_t& count : counts) count = 1 + static_cast<uint32_t>(random() % 2);
    Push(table.get(), keys, counts);
    Push(model.get(), keys, counts);
    const uint64_t what = random() % 8;
    if (what < 5) {
      table->Checkpoint(++id);
      saved[id] = files_.file(std::to_string(id) + ".oet");
      model->Save(saved[id]);
    }
    if (what != 5 || saved.empty()) continue;
    table->WaitDurable();
    std::optional<uint64_t> to;
    if (random() % 2 == 0) {
      const auto kept = table->Checkpoints();
      to = kept[random() % kept.size()].id;
      table->Recover(to);
    } else {  // another process
      table.reset();
      table = Open();
    }
    id = table->Checkpoints().back().id;
    ASSERT_EQ(id, to.value_or(id));
    model->Restore({saved.at(id)});
    ASSERT_EQ(table->version(), model->version());
    ASSERT_EQ(table->rows(), model->rows());
    ASSERT_EQ(CountsOf(table.get()), CountsOf(model.get())) << "step " << step;
    ++compared;
  }
  EXPECT_GT(compared, 5);
  EXPECT_GT(table->rows(), 300U);
  EXPECT_EQ(Supers("counts").size(), 1U);
  EXPECT_EQ(Supers("table").size(), GetParam().storage == std::string("dram_ssd") ? 0U : 1U);
}

TEST_P(PooledFilterTest, PoolsWithoutCountsBeginAtZero) {
  {
    const auto table = Open();
    Push(table.get(), Range(0, 100), std::vector<uint32_t>(100, 5));
    Push(table.get(), Range(0, 200), std::vector<uint32_t>(200, 4));
    table->Checkpoint(1);
    table->WaitDurable();
  }
  const auto supers = Supers("counts");
  ASSERT_EQ(supers.size(), 1U);
  std::filesystem::remove(supers[0]);  // as an earlier version left it; segments without it are removed
  {
    testing::internal::CaptureStderr();
    const auto table = Open();
    const std::string said = testing::internal::GetCapturedStderr();
    EXPECT_EQ(
        said.find("error: table 'C1': what its admission filter had counted at checkpoint 1 is not there"),
        0U)
        << said;
    EXPECT_EQ(table->version(), 2U);
    EXPECT_EQ(table->rows(), 100U);
    Push(table.get(), Range(100, 100));
    EXPECT_EQ(table->rows(), 100U) << "as if they had come for the first time";
    Push(table.get(), Range(100, 100), std::vector<uint32_t>(100, 3));
    table->Checkpoint(2);
    table->WaitDurable();
    // The first has no counts still.
    table->Recover(1);
    EXPECT_TRUE(CountsOf(table.get()).empty());
    Push(table.get(), Range(100, 100), std::vector<uint32_t>(100, 4));
    table->Checkpoint(2);
  }
  const auto table = Open();
  Push(table.get(), Range(100, 100));
  EXPECT_EQ(table->rows(), 200U);
}

TEST_P(PooledFilterTest, ADamagedFileIsNamedWithTheWayOut) {
  {
    const auto table = Open();
    Push(table.get(), Range(0, 200), std::vector<uint32_t>(200, 4));
    table->Checkpoint(1);
  }
  const auto supers = Supers("counts");
  ASSERT_EQ(supers.size(), 1U);
  const std::string good = ReadAll(supers[0]);
  std::string bad = good;
  for (size_t at = 16384; at < bad.size(); ++at) bad[at] = static_cast<char>(bad[at] ^ 1);
  WriteAll(supers[0], bad);
  const std::string message = MessageOf<StorageError>([&] { (void)Open(); });
  EXPECT_EQ(message.find(supers[0] + " is damaged"), 0U) << message;
  EXPECT_NE(message.find("what the admission filter of table 'C1' counted: with them moved away, that begins "
                         "at zero and no row is lost"),
            std::string::npos)
      << message;
  WriteAll(supers[0], good);
  {
    const auto table = Open();
    Push(table.get(), Range(0, 200));
    EXPECT_EQ(table->rows(), 200U) << "refusing it changed nothing";
  }
  std::filesystem::remove(supers[0]);
  EXPECT_EQ(Open()->version(), 1U);
}

// A restore from files takes the place of both pools; before its first checkpoint there is nothing else.
TEST_P(PooledFilterTest, RestoredCountsAreInTheNextCheckpoint) {
  const std::string file = files_.file("t.oet");
  {
    const auto table = Open();
    Push(table.get(), Range(0, 200), std::vector<uint32_t>(200, 4));
    table->Save(file);
    table->Checkpoint(1);
    Push(table.get(), Range(0, 100));
    table->Restore({file});
    EXPECT_EQ(table->rows(), 0U);
    table->Checkpoint(2);
  }
  EXPECT_EQ(Supers("counts").size(), 1U);
  const auto table = Open();
  EXPECT_EQ(CountsOf(table.get()).size(), 200U);
  Push(table.get(), Range(0, 200));
  EXPECT_EQ(table->rows(), 200U);
}

// Of a table without the segments of its log, which are large.
uint64_t StoredBytes(const Table& table) {
  const std::optional<LogPoolStats> log = table.drive();
  return table.bytes() - (log ? log->log.segments * RowLogSpec{}.segment_bytes : 0);
}

// Counts are on the storage; DRAM has their index.
TEST_P(PooledFilterTest, MemoryIsBounded) {
  const bool cbf = GetParam().filter == std::string("cbf");
  const auto table = Open();
  const auto in_dram = Table::Create(Spec(), StorageSpec{});
  const uint64_t before = StoredBytes(*table);
  constexpr Key kMany = 100000;
  for (Key first = 0; first < kMany; first += 10000) {
    Push(table.get(), Range(first, 10000));
    Push(in_dram.get(), Range(first, 10000));
  }
  const uint64_t dram = in_dram->policy_counts().filter_bytes;
  const uint64_t index = table->policy_counts().filter_bytes;
  if (cbf) {
    EXPECT_LT(index, dram / 10);
    EXPECT_GE(StoredBytes(*table) - before, dram);
    EXPECT_LT(StoredBytes(*table) - before, dram * 3 / 2 + (1 << 20));
  } else {
    EXPECT_LE(index, dram);
    EXPECT_LT(StoredBytes(*table) - before, kMany * 20 * 3 / 2 + (1 << 20));
  }
  // Room does not grow with checkpoints: what none needs is used again.
  uint64_t bytes = 0;
  for (uint64_t id = 1; id <= 20; ++id) {
    Push(table.get(), Range(0, 10000), std::vector<uint32_t>(10000, 0));
    table->Checkpoint(id);
    table->WaitDurable();
    if (id == 5) bytes = StoredBytes(*table);
  }
  EXPECT_LE(StoredBytes(*table), bytes * 5 / 4);
}

INSTANTIATE_TEST_SUITE_P(Pools, PooledFilterTest,
                         testing::Values(Case{"pmem_libpmem", "counter"}, Case{"pmem_libpmem", "cbf"},
                                         Case{"dram_pmem", "cbf"}, Case{"dram_ssd", "counter"},
                                         Case{"dram_ssd", "cbf"}),
                         [](const auto& one) {
                           return std::string(one.param.storage) + "_" + one.param.filter;
                         });

}  // namespace
}  // namespace oe::pooled_filter_test
