// What upkeep gets ready for a push after a checkpoint, and that nothing but the push's time changes by it.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/storage/test_storage.h"
#include "oe_runtime/core/table/table.h"

namespace oe {
namespace {

constexpr uint32_t kDim = 9;
constexpr size_t kKeys = 600;

std::vector<Key> Keys(Key first, size_t n) {
  std::vector<Key> keys(n);
  for (size_t i = 0; i < n; ++i) keys[i] = first + i;
  return keys;
}

void Push(Table* table, const std::vector<Key>& keys) {
  const std::vector<float> grads(keys.size() * kDim, 0.5F);
  table->Push(keys.data(), keys.size(), grads.data(), 0.1);
}

std::vector<float> Pull(Table* table, const std::vector<Key>& keys, bool to_push = false) {
  std::vector<float> rows(keys.size() * kDim);
  table->Pull(keys.data(), keys.size(), rows.data(), nullptr, to_push);
  return rows;
}

class AheadTest : public testing::TestWithParam<const char*> {
 protected:
  // With kKeys rows, a checkpoint of them, and free slots: the pool need not grow.
  std::unique_ptr<Table> NewTable() const {
    TableSpec spec;
    spec.name = "t";
    spec.dim = kDim;
    StorageSpec storage = TestStorage(GetParam(), directory_.path());
    storage.recover = true;
    auto table = Table::Create(spec, storage);
    for (uint64_t id = 1; id <= 5; ++id) {
      Push(table.get(), Keys(0, kKeys));
      table->Checkpoint(id);
      table->WaitDurable();
    }
    return table;
  }

  TestDirectory directory_;
};

TEST_P(AheadTest, APushFindsItsRowsMoved) {
  const auto table = NewTable();
  const uint64_t in_pushes = table->moved_rows().in_pushes;
  EXPECT_EQ(in_pushes, 4 * kKeys);
  const std::vector<Key> keys = Keys(100, 300);
  const std::vector<float> rows = Pull(table.get(), keys, true);
  EXPECT_TRUE(table->wants_upkeep());
  table->Upkeep();
  EXPECT_EQ(table->moved_rows().in_upkeep, 300U);
  EXPECT_EQ(Pull(table.get(), keys), rows);
  Push(table.get(), Keys(50, 400));  // and a hundred more
  EXPECT_EQ(table->moved_rows().in_pushes, in_pushes + 100);
  // They are where they may be written: nothing is to be done again.
  (void)Pull(table.get(), keys, true);
  table->Upkeep();
  EXPECT_EQ(table->moved_rows().in_upkeep, 300U);
  table->Recover(std::nullopt);
  EXPECT_EQ(Pull(table.get(), keys), rows);
}

TEST_P(AheadTest, RowsOfPullsThatAreNotTrainedStay) {
  const auto table = NewTable();
  (void)Pull(table.get(), Keys(0, kKeys + 100));
  table->Upkeep();
  EXPECT_EQ(table->moved_rows().in_upkeep, 0U);
}

TEST_P(AheadTest, WhatNoPushFollowedForIsInTheNextCheckpoint) {
  const std::vector<Key> keys = Keys(0, kKeys);
  std::vector<float> rows;
  {
    const auto table = NewTable();
    (void)Pull(table.get(), Keys(0, 400), true);
    table->Upkeep();
    EXPECT_EQ(table->moved_rows().in_upkeep, 400U);
    Push(table.get(), Keys(0, 200));
    rows = Pull(table.get(), keys);
    table->Checkpoint(6);
    (void)Pull(table.get(), keys, true);
    table->Upkeep();
    Push(table.get(), Keys(500, 100));
    table->Checkpoint(7);
  }
  StorageSpec storage = TestStorage(GetParam(), directory_.path());
  storage.recover = true;
  TableSpec spec;
  spec.name = "t";
  spec.dim = kDim;
  const auto table = Table::Create(spec, storage);
  const std::vector<Key> same = Keys(0, 500);
  EXPECT_EQ(Pull(table.get(), same), std::vector<float>(rows.begin(), rows.begin() + 500 * kDim));
  EXPECT_NE(Pull(table.get(), keys), rows);
  table->Recover(6);
  EXPECT_EQ(Pull(table.get(), keys), rows);
}

// An increment has the rows that were written since the last save, and no others, wherever they are now.
TEST_P(AheadTest, AnIncrementHasWhatWasWritten) {
  const auto table = NewTable();
  const TestDirectory saved;
  const uint64_t base = table->Save(saved.file("base")).checksum;
  Push(table.get(), Keys(0, 40));
  table->Checkpoint(6);
  (void)Pull(table.get(), Keys(20, 200), true);
  table->Upkeep();
  EXPECT_EQ(table->moved_rows().in_upkeep, 200U);
  EXPECT_EQ(table->Save(saved.file("increment"), base).rows, 40U);
}

// A pool that must grow for it does so in the push, which can say that there is no room.
TEST_P(AheadTest, NothingGrowsForIt) {
  TableSpec spec;
  spec.name = "t";
  spec.dim = kDim;
  const auto table = Table::Create(spec, TestStorage(GetParam(), directory_.path()));
  const std::vector<Key> keys = Keys(0, 50000);
  Push(table.get(), keys);
  table->Checkpoint(1);
  table->WaitDurable();
  const uint64_t bytes = table->bytes();
  const std::vector<float> rows = Pull(table.get(), keys, true);
  table->Upkeep();
  EXPECT_LT(table->moved_rows().in_upkeep, keys.size());
  EXPECT_EQ(table->bytes(), bytes);
  EXPECT_EQ(Pull(table.get(), keys), rows);
  Push(table.get(), keys);
  EXPECT_GT(table->bytes(), bytes);
}

INSTANTIATE_TEST_SUITE_P(Pools, AheadTest, testing::Values("pmem_libpmem", "dram_pmem"),
                         [](const auto& kind) { return std::string(kind.param); });

}  // namespace
}  // namespace oe
