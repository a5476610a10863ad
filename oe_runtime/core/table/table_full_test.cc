// Tables whose pool is full: what is refused leaves everything else right.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/policy/eviction.h"
#include "oe_runtime/core/storage/slot_store.h"
#include "oe_runtime/core/storage/test_storage.h"
#include "oe_runtime/core/table/table.h"

namespace oe::table_full_test {
namespace {

constexpr uint32_t kDim = 9;

std::vector<Key> KeysFrom(Key first, size_t n) {
  std::vector<Key> keys(n);
  for (size_t i = 0; i < n; ++i) keys[i] = first + i;
  return keys;
}

// Adds `add` to each weight.
void Push(Table* table, const std::vector<Key>& keys, float add) {
  const std::vector<float> grads(keys.size() * kDim, -add);
  table->Push(keys.data(), keys.size(), grads.data(), 1.0);
}

class TableFullTest : public testing::TestWithParam<const char*> {
 protected:
  static TableSpec Spec() {
    TableSpec spec;
    spec.name = "t";
    spec.dim = kDim;
    spec.optimizer.name = "sgd";
    spec.initializer = {"constant", {{"value", 0}}, 0};
    return spec;
  }
  std::unique_ptr<Table> New(const TableSpec& spec) const {
    StorageSpec storage = TestStorage(GetParam(), directory_.path(), uint64_t{8} << 20);
    storage.fresh = true;
    return Table::Create(spec, storage);
  }
  // Pushes new keys, each once, until they are refused; how many there are now.
  static Key Fill(Table* table, Key first) {
    constexpr size_t kAtOnce = 500;
    try {
      for (;; first += kAtOnce) Push(table, KeysFrom(first, kAtOnce), 1);
    } catch (const StorageFull&) {
      return first;
    }
  }
  // The first weight of the keys from 0 on; all weights of a row are equal.
  static std::vector<float> Weights(const Table& table, size_t n) {
    const std::vector<Key> keys = KeysFrom(0, n);
    std::vector<float> rows(n * kDim);
    table.Pull(keys.data(), n, rows.data());
    std::vector<float> weights(n);
    for (size_t i = 0; i < n; ++i) weights[i] = rows[i * kDim];
    return weights;
  }

  TestDirectory directory_;
};

// Rows move to other slots in it, until one finds none.
TEST_P(TableFullTest, AnIncrementHasWhatChangedBeforeAPushThatWasRefused) {
  const auto table = New(Spec());
  const Key filled = Fill(table.get(), 0);
  table->Checkpoint(1);
  table->WaitDurable();
  const std::string full = directory_.file("full");
  const TableFileInfo saved = table->Save(full);
  std::vector<float> expected(filled, 1);
  std::vector<Key> some;
  for (Key key = 0; key < filled; key += 20) {
    some.push_back(key);
    expected[key] += 2;
  }
  Push(table.get(), some, 2);
  table->Checkpoint(2);
  table->WaitDurable();
  EXPECT_THROW(Push(table.get(), KeysFrom(0, filled), 4), StorageFull);
  EXPECT_EQ(Weights(*table, filled), expected);
  const std::string changed = directory_.file("changed");
  ASSERT_TRUE(table->Save(changed, saved.checksum).base);
  const auto restored = Table::Create(Spec(), StorageSpec{});
  restored->RestoreChains({{full, changed}});
  EXPECT_EQ(Weights(*restored, filled), expected);
}

TEST_P(TableFullTest, AfterARecoveryKnownRowsArePushedAsBefore) {
  constexpr size_t kPushed = 2000;
  for (const size_t known : {kPushed, 40 * kPushed}) {
    const auto table = New(Spec());
    Push(table.get(), KeysFrom(0, known), 1);
    table->Checkpoint(1);
    const Key filled = Fill(table.get(), known);
    for (int turn = 0; turn < 4; ++turn) {
      table->Recover(1);
      for (int push = 0; push < 3; ++push) {
        ASSERT_NO_THROW(Push(table.get(), KeysFrom(0, kPushed), 1)) << known << " " << turn << " " << push;
        EXPECT_EQ(Weights(*table, kPushed), std::vector<float>(kPushed, static_cast<float>(2 + push)));
      }
      EXPECT_GT(Fill(table.get(), known), filled * 9 / 10) << known << " " << turn;
      if (turn % 2 == 0) continue;
      table->Checkpoint(2);  // is given up, too
      table->WaitDurable();
    }
  }
}

// What finds no slot to be noted as evicted is not counted as such.
TEST_P(TableFullTest, EvictionsThatFailAreNotCounted) {
  TableSpec spec = Spec();
  spec.eviction = {{"global_step", {{"steps_to_live", 1}}, ""}};
  const auto table = New(spec);
  (void)Fill(table.get(), 0);
  table->Checkpoint(1);
  table->WaitDurable();
  const uint64_t rows = table->rows();
  for (int push = 0; push < 3; ++push) Push(table.get(), {0}, 1);
  EXPECT_THROW(table->Evict(), StorageFull);
  EXPECT_THROW(table->Evict(), StorageFull);
  EXPECT_GT(rows, table->rows());
  EXPECT_EQ(table->policy_counts().evicted.at("global_step"), rows - table->rows());
}

// Slots that no row had are no shard's on the medium: those evicted from first do not take them from others.
TEST_P(TableFullTest, AfterARestartEvictionsLeaveWhatUpdatesNeed) {
  TableSpec spec = Spec();
  spec.eviction = {{"global_step", {{"steps_to_live", 1}}, ""}};
  StorageSpec storage = TestStorage(GetParam(), directory_.path(), uint64_t{8} << 20);
  {
    const auto table = New(spec);
    (void)Fill(table.get(), 0);
    table->Checkpoint(1);
    table->WaitDurable();
  }
  storage.recover = true;
  const auto table = Table::Create(spec, storage);
  EXPECT_THROW(table->Evict(), StorageFull);
  std::vector<Key> some;
  for (uint32_t part = 0; part < Table::kParts; ++part) {
    const std::vector<Key> keys = table->Keys(part);
    for (size_t i = 0; i < keys.size(); i += 17) some.push_back(keys[i]);
  }
  EXPECT_NO_THROW(Push(table.get(), some, 1));
}

// What a full pool's message says: the table opens, and its rows become fewer as checkpoints give slots back.
TEST_P(TableFullTest, ACapThatIsLoweredMakesRoom) {
  constexpr uint64_t kCap = 50'000;
  TableSpec spec = Spec();
  spec.eviction = {{"cap", {{"max_rows", 1e6}}, "lru"}};
  constexpr size_t kPushed = 200;
  Key filled = 0;
  uint64_t rows = 0;
  {
    const auto table = New(spec);
    filled = Fill(table.get(), 0) + 1000;
    rows = table->rows();
    table->Checkpoint(1);
    table->WaitDurable();
  }
  ASSERT_GT(rows, 2 * kCap);
  spec.eviction = {{"cap", {{"max_rows", kCap}}, "lru"}};
  StorageSpec storage = TestStorage(GetParam(), directory_.path(), uint64_t{8} << 20);
  storage.recover = true;
  const auto table = Table::Create(spec, storage);
  EXPECT_LT(table->rows(), rows);
  EXPECT_GT(table->rows(), kCap) << "the pool was not full";
  uint64_t id = 2;
  for (; id < 8; ++id) table->Checkpoint(id);  // until as many evictions are not expected again
  const uint64_t opened = table->rows();
  for (; id < 18; ++id, filled += kPushed) {
    ASSERT_NO_THROW(Push(table.get(), KeysFrom(filled, kPushed), 1)) << id;
    table->Checkpoint(id);
    table->WaitDurable();
  }
  EXPECT_LT(table->rows(), opened - 1000);
  const PolicyCounts counts = table->policy_counts();
  EXPECT_EQ(counts.evicted.at("cap"), rows + counts.admitted - table->rows());
}

// What StorageSpec promises of a full storage, by type and kept checkpoints.
class TableUpdatesTest : public testing::TestWithParam<std::tuple<const char*, uint32_t>> {
 protected:
  TableUpdatesTest() {
    TableSpec spec;
    spec.name = "t";
    spec.dim = kDim;
    spec.optimizer.name = "sgd";
    spec.initializer = {"constant", {{"value", 0}}, 0};
    StorageSpec storage = TestStorage(std::get<0>(GetParam()), directory_.path(), uint64_t{16} << 20);
    storage.kept_checkpoints = std::get<1>(GetParam());
    table_ = Table::Create(spec, storage);
  }

  // Adds a row for each of the next keys; false: it was refused.
  bool Grow(size_t n) {
    try {
      Push(table_.get(), KeysFrom(keys_.size(), n), 1);
    } catch (const StorageFull&) {
      return false;
    }
    for (size_t i = 0; i < n; ++i) keys_.push_back(keys_.size());
    return true;
  }
  // Changes as many rows, by chance, in ten pushes, and makes a checkpoint for which nobody waits.
  void ChangeAndCheckpoint(size_t rows) {
    std::shuffle(keys_.begin(), keys_.end(), random_);
    const size_t part = rows / 10;
    for (size_t push = 0; push < 10; ++push) {
      const Key* const first = &keys_[push * part];
      Push(table_.get(), std::vector<Key>(first, first + part), 2);
    }
    table_->Checkpoint(++id_);
  }

  TestDirectory directory_;
  std::unique_ptr<Table> table_;
  std::vector<Key> keys_;
  std::mt19937_64 random_{1};
  uint64_t id_ = 0;
};

TEST_P(TableUpdatesTest, ASixteenthOfTheRowsMayChangeBetweenCheckpoints) {
  while (Grow(500)) {
  }
  // Of more than three kept checkpoints, as many rows as three have in all.
  const uint64_t epochs = std::max<uint64_t>(4, std::get<1>(GetParam()) + uint64_t{1});
  for (int turn = 0; turn < 28; ++turn) {
    ASSERT_NO_THROW(ChangeAndCheckpoint(keys_.size() * 4 / epochs / 16)) << turn;
  }
  ASSERT_NO_THROW(table_->WaitDurable());
}

TEST_P(TableUpdatesTest, AsManyRowsMayChangeAsDidBetweenEarlierCheckpoints) {
  ASSERT_TRUE(Grow(40'000));
  size_t rows = 0;
  do {
    table_->WaitDurable();
    rows = keys_.size() / 5;
    ASSERT_NO_THROW(ChangeAndCheckpoint(rows)) << keys_.size();
  } while (Grow(keys_.size() / 30));
  for (int turn = 0; turn < 12; ++turn) ASSERT_NO_THROW(ChangeAndCheckpoint(rows)) << turn;
  ASSERT_NO_THROW(table_->WaitDurable());
}

INSTANTIATE_TEST_SUITE_P(Storages, TableUpdatesTest,
                         testing::Combine(testing::Values("pmem_libpmem", "dram_pmem", "dram_ssd"),
                                          testing::Values(2, 3, 5)),
                         [](const auto& kind) {
                           return std::string(std::get<0>(kind.param)) + "_" +
                                  std::to_string(std::get<1>(kind.param));
                         });

INSTANTIATE_TEST_SUITE_P(Pools, TableFullTest, testing::Values("pmem_libpmem", "dram_pmem"),
                         [](const auto& kind) { return std::string(kind.param); });

}  // namespace
}  // namespace oe::table_full_test
