// Tables whose rows outlive them, in a directory that stands in for persistent memory.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/storage/pool.h"
#include "oe_runtime/core/storage/test_storage.h"
#include "oe_runtime/core/table/table.h"

namespace oe::table_checkpoint_test {
namespace {

constexpr uint32_t kDim = 9;
constexpr uint64_t kInputDim = 3000;

std::vector<Key> Batch(uint64_t step) {
  std::mt19937_64 random(step);
  std::vector<Key> keys;
  for (int i = 0; i < 400; ++i) keys.push_back(random() % kInputDim);
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  return keys;
}

std::vector<Key> AllKeys() {
  std::vector<Key> keys(kInputDim);
  for (Key key = 0; key < kInputDim; ++key) keys[key] = key;
  return keys;
}

void Push(Table* table, uint64_t step) {
  const std::vector<Key> keys = Batch(step);
  std::vector<float> grads(keys.size() * table->spec().dim);
  for (size_t i = 0; i < grads.size(); ++i) grads[i] = static_cast<float>((i * 7 + step) % 31) / 31.0F - 0.4F;
  std::vector<float> rows(grads.size());
  table->Pull(keys.data(), keys.size(), rows.data());
  table->Upkeep();
  table->Push(keys.data(), keys.size(), grads.data(), 0.05);
}

std::vector<float> Rows(const Table& table) {
  const std::vector<Key> keys = AllKeys();
  std::vector<float> rows(keys.size() * table.spec().dim);
  table.Pull(keys.data(), keys.size(), rows.data());
  return rows;
}

std::vector<uint64_t> Ids(const Table& table) {
  std::vector<uint64_t> ids;
  for (const CheckpointInfo& checkpoint : table.Checkpoints()) ids.push_back(checkpoint.id);
  return ids;
}

class TableCheckpointTest : public testing::TestWithParam<std::tuple<const char*, const char*>> {
 protected:
  TableSpec Spec(const std::string& optimizer = "adam") const {
    TableSpec spec;
    spec.name = "C1";
    spec.dim = kDim;
    spec.index = std::get<1>(GetParam());
    spec.input_dim = spec.index == "array" ? kInputDim : 0;
    spec.optimizer.name = optimizer;
    return spec;
  }
  StorageSpec Directory(bool recover, uint32_t kept = 2, uint64_t capacity = 0) const {
    StorageSpec spec = TestStorage(std::get<0>(GetParam()), directory_.path(), capacity);
    spec.recover = recover;
    spec.kept_checkpoints = kept;
    return spec;
  }
  std::unique_ptr<Table> Open(bool recover = true, uint32_t kept = 2) const {
    return Table::Create(Spec(), Directory(recover, kept));
  }
  std::string Refusal(const TableSpec& spec, ShardInfo shard = {}) const {
    return MessageOf<StorageError>([&] { (void)Table::Create(spec, Directory(true), shard); });
  }
  static bool IsLog() { return std::string(std::get<0>(GetParam())) == "dram_ssd"; }
  // A log has room for its superblocks and a dozen segments at least.
  static uint64_t Capacity() { return uint64_t{IsLog() ? 4U : 2U} << 20; }
  std::string File(const std::string& end) const {
    for (const auto& entry : std::filesystem::directory_iterator(directory_.path())) {
      const std::string path = entry.path().string();
      if (path.size() > end.size() && path.substr(path.size() - end.size()) == end) return path;
    }
    return "no file " + end;
  }
  // A pool with checkpoint 10, of one push.
  void MakePool() const {
    const auto table = Open(false);
    Push(table.get(), 1);
    table->Checkpoint(10);
  }

  TestDirectory directory_;
};

TEST_P(TableCheckpointTest, GoesOnWithTheSameBits) {
  const auto model = Table::Create(Spec(), StorageSpec{});
  uint64_t step = 0;
  for (int life = 0; life < 4; ++life) {
    const auto table = Open();
    EXPECT_EQ(table->version(), step);
    EXPECT_EQ(table->rows(), model->rows());
    ASSERT_EQ(Rows(*table), Rows(*model)) << "life " << life;
    for (int i = 0; i < 6; ++i) {
      ++step;
      Push(table.get(), step);
      Push(model.get(), step);
      if (i % 2 == 1) table->Checkpoint(step);
    }
    ASSERT_EQ(Rows(*table), Rows(*model));
    if (life % 2 == 0) table->WaitDurable();  // otherwise the destructor waits
  }
}

// A row that is copied after a checkpoint is copied once, and none is taken for another one's copy.
TEST_P(TableCheckpointTest, RepeatedKeysInAPush) {
  const auto model = Table::Create(Spec(), StorageSpec{});
  std::vector<Key> keys = AllKeys();
  keys.insert(keys.end(), keys.begin(), keys.begin() + 500);
  std::shuffle(keys.begin(), keys.end(), std::mt19937_64(3));
  std::vector<float> grads(keys.size() * kDim);
  for (size_t i = 0; i < grads.size(); ++i) grads[i] = static_cast<float>(i % 31) / 31.0F - 0.4F;
  {
    const auto table = Open();
    for (uint64_t step = 1; step <= 3; ++step) {
      for (Table* each : {table.get(), model.get()}) each->Push(keys.data(), keys.size(), grads.data(), 0.05);
      ASSERT_EQ(Rows(*table), Rows(*model));
      table->Checkpoint(step);
    }
  }
  const auto table = Open();
  EXPECT_EQ(table->rows(), kInputDim);
  EXPECT_EQ(Rows(*table), Rows(*model));
}

TEST_P(TableCheckpointTest, ChangesAfterTheCheckpointAreLost) {
  std::vector<float> then;
  {
    const auto table = Open();
    Push(table.get(), 1);
    table->Checkpoint(7);
    then = Rows(*table);
    Push(table.get(), 2);
    Push(table.get(), 3);
    EXPECT_NE(Rows(*table), then);
  }
  const auto table = Open();
  EXPECT_EQ(Rows(*table), then);
  EXPECT_EQ(table->version(), 1U);
  EXPECT_EQ(Ids(*table), std::vector<uint64_t>{7});
}

TEST_P(TableCheckpointTest, WithoutACheckpointNothingIsLeft) {
  {
    const auto table = Open();
    Push(table.get(), 1);
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
  EXPECT_EQ(Open()->rows(), 0U);
}

TEST_P(TableCheckpointTest, GoesBackToAnyKeptCheckpoint) {
  const auto table = Open(true, 3);
  std::vector<std::vector<float>> rows;
  for (uint64_t id = 0; id < 6; ++id) {
    Push(table.get(), id);
    table->Checkpoint(id);
    rows.push_back(Rows(*table));
  }
  table->WaitDurable();
  EXPECT_EQ(Ids(*table), (std::vector<uint64_t>{3, 4, 5}));
  Push(table.get(), 100);
  EXPECT_EQ(MessageOf<StorageError>([&] { table->Recover(2); }),
            "the pool of table 'C1' has no checkpoint 2; it has 3, 4, 5");
  EXPECT_EQ(table->version(), 7U);
  table->Recover(std::nullopt);
  EXPECT_EQ(Rows(*table), rows[5]);
  table->Recover(4);
  EXPECT_EQ(Rows(*table), rows[4]);
  EXPECT_EQ(table->version(), 5U);
  EXPECT_EQ(Ids(*table), (std::vector<uint64_t>{3, 4}));
  // Another future from there.
  Push(table.get(), 200);
  table->Checkpoint(5);
  table->WaitDurable();
  EXPECT_EQ(Ids(*table), (std::vector<uint64_t>{3, 4, 5}));
  EXPECT_NE(Rows(*table), rows[5]);
  table->Recover(3);
  EXPECT_EQ(Rows(*table), rows[3]);
}

TEST_P(TableCheckpointTest, GoesBackAfterACheckpointThatFailed) {
  for (const bool pushes : {true, false}) {
    auto table = Open(false);
    Push(table.get(), 1);
    table->Checkpoint(1);
    table->WaitDurable();
    const std::vector<float> rows = Rows(*table);
    if (pushes) Push(table.get(), 2);
    const std::string away = directory_.path() + "-away";
    std::filesystem::rename(directory_.path(), away);
    table->Checkpoint(2);
    EXPECT_NE(MessageOf<StorageError>([&] { table->WaitDurable(); }).find(" is gone"), std::string::npos);
    EXPECT_THROW(table->Checkpoint(3), StorageError);
    EXPECT_NE(MessageOf<StorageError>([&] { table->Recover(1); }).find(" is gone"), std::string::npos);
    std::filesystem::rename(away, directory_.path());
    table->Recover(1);
    EXPECT_EQ(Rows(*table), rows);
    Push(table.get(), 3);
    const std::vector<float> later = Rows(*table);
    table->Checkpoint(2);
    table->WaitDurable();
    table = nullptr;
    table = Open();
    EXPECT_EQ(Ids(*table), (std::vector<uint64_t>{1, 2}));
    EXPECT_EQ(Rows(*table), later);
    table->Drop();
  }
}

TEST_P(TableCheckpointTest, IdsGrow) {
  const auto table = Open();
  table->Checkpoint(0);
  table->Checkpoint(5);
  EXPECT_EQ(MessageOf<SpecError>([&] { table->Checkpoint(5); }),
            "table 'C1': checkpoint 5 is not after the last one, 5");
  table->WaitDurable();
  EXPECT_EQ(Ids(*table), (std::vector<uint64_t>{0, 5}));
}

TEST_P(TableCheckpointTest, SlotsAreUsedAgain) {
  // Room for the rows three times, not for all the versions that they go through.
  const TableSpec spec = Spec("sgd");
  const auto table = Table::Create(spec, Directory(true, 1, Capacity()));
  const auto model = Table::Create(spec, StorageSpec{});
  for (uint64_t step = 0; step < 60; ++step) {
    Push(table.get(), step);
    Push(model.get(), step);
    table->Checkpoint(step);
  }
  EXPECT_EQ(Rows(*table), Rows(*model));
  EXPECT_LE(table->bytes(), Capacity());
}

TEST_P(TableCheckpointTest, AFullStorageRefusesThePushAndKeepsTheRest) {
  TableSpec spec = Spec("sgd");
  spec.dim = 64;
  // A log has two superblocks of a quarter MiB beside its segments, and room for its cleaner.
  const auto table = Table::Create(spec, Directory(true, 2, uint64_t{IsLog() ? 3072U : 1536U} << 10));
  Push(table.get(), 1);
  table->Checkpoint(1);
  table->WaitDurable();
  const std::vector<float> then = Rows(*table);
  // Every row is to be copied and new ones are to be made, for which there is no room.
  const std::vector<Key> keys = AllKeys();
  const std::vector<float> grads(keys.size() * 64, 1.0F);
  const std::string message = MessageOf<StorageError>([&] {
    for (uint64_t id = 2; id < 9; ++id) {
      table->Push(keys.data(), keys.size() / 8 * (id - 1), grads.data(), 1.0);
      table->Checkpoint(id);
    }
  });
  EXPECT_NE(message.find("is full: table 'C1' needs"), std::string::npos) << message;
  table->WaitDurable();
  const auto ids = Ids(*table);
  const std::vector<float> before = Rows(*table);
  table->Recover(std::nullopt);
  EXPECT_EQ(Rows(*table), before) << "a push that was refused is to be seen";
  EXPECT_EQ(Ids(*table), ids);
}

TEST_P(TableCheckpointTest, SaveAndRestoreWorkBesideCheckpoints) {
  const TestDirectory saved;
  {
    const auto table = Open();
    Push(table.get(), 1);
    table->Checkpoint(1);
    Push(table.get(), 2);
    table->Save(saved.file("t"));
    Push(table.get(), 3);
    table->Checkpoint(3);
    table->Restore({saved.file("t")});
    // The old pool is gone with its checkpoints: they are of another past.
    EXPECT_TRUE(Ids(*table).empty());
    table->Checkpoint(1);
    Push(table.get(), 4);
  }
  const auto table = Open();
  const auto model = Table::Create(Spec(), StorageSpec{});
  model->Restore({saved.file("t")});
  EXPECT_EQ(Rows(*table), Rows(*model));
  EXPECT_EQ(table->version(), 2U);
  EXPECT_EQ(Ids(*table), std::vector<uint64_t>{1});
}

TEST_P(TableCheckpointTest, OldPoolsAreRemovedOnRequestOnly) {
  MakePool();
  EXPECT_NE(MessageOf<StorageError>([&] { (void)Open(false); }).find("has checkpoints of table 'C1': start"),
            std::string::npos);
  EXPECT_GT(Open()->rows(), 0U);
  StorageSpec fresh = Directory(false);
  fresh.fresh = true;
  EXPECT_EQ(Table::Create(Spec(), fresh)->rows(), 0U);
  EXPECT_TRUE(std::filesystem::is_empty(directory_.path()));
}

TEST_P(TableCheckpointTest, PoolsOfOtherTablesStay) {
  MakePool();
  TableSpec other = Spec();
  other.name = "C2";
  EXPECT_EQ(Table::Create(other, Directory(true))->rows(), 0U);
  EXPECT_GT(Open()->rows(), 0U);
}

TEST_P(TableCheckpointTest, GoesOnWithAnotherPolicyForGradients) {
  MakePool();
  TableSpec other = Spec();
  other.nonfinite_gradients = "skip";
  EXPECT_GT(Table::Create(other, Directory(true))->rows(), 0U);
}

TEST_P(TableCheckpointTest, ADifferentSpecIsRefusedAndNothingChanges) {
  MakePool();
  const std::string super = File(IsLog() ? ".log" : "-super.pool");
  const auto expected = [&](const std::string& difference) {
    return super + ": " + difference +
           "; start it as it was, or fresh (--storage-fresh), which removes all tables of the directory";
  };
  TableSpec spec = Spec();
  spec.dim = 8;
  EXPECT_EQ(Refusal(spec), expected("'table.dim' is 9 in this pool, but table 'C1' has 8"));
  spec = Spec();
  spec.optimizer.params["epsilon"] = 1e-3;
  EXPECT_EQ(Refusal(spec),
            expected("'table.optimizer.epsilon' is 1e-07 in this pool, but table 'C1' has 0.001"));
  EXPECT_EQ(Refusal(Spec("sgd")),
            expected("'table.optimizer.name' is \"adam\" in this pool, but table 'C1' has \"sgd\""));
  EXPECT_EQ(Refusal(Spec(), {0, 2}), expected("'servers' is 1 in this pool, but table 'C1' has 2"));
  EXPECT_EQ(Open()->version(), 1U);
}

TEST_P(TableCheckpointTest, DamageIsRefusedByFileAndField) {
  if (IsLog()) GTEST_SKIP() << "of logs in row_log_test.cc";
  MakePool();
  const std::string super = File("-super.pool");
  const std::string segment = File("-000000.pool");
  const std::string super_bytes = ReadAll(super);
  const std::string segment_bytes = ReadAll(segment);
  const auto refusal_with = [&](const std::string& file, const std::string& bytes) {
    WriteAll(file, bytes);
    const std::string message = Refusal(Spec());
    EXPECT_EQ(ReadAll(file), bytes) << "a file that was refused was changed";
    WriteAll(super, super_bytes);
    WriteAll(segment, segment_bytes);
    return message;
  };
  const auto flipped = [](std::string bytes, size_t at) {
    bytes[at] = static_cast<char>(bytes[at] ^ 4);
    return bytes;
  };
  const auto starts = [](const std::string& message, const std::string& begin) {
    EXPECT_EQ(message.substr(0, begin.size()), begin) << message;
  };
  starts(refusal_with(super, flipped(super_bytes, 2)), super + " is damaged: 'magic' is wrong");
  starts(refusal_with(super, flipped(super_bytes, 8)), super + ": 'format' is 7, but this version reads 1");
  starts(refusal_with(super, flipped(super_bytes, 100)), super + " is damaged: the 'checksum' of its header");
  starts(refusal_with(super, super_bytes.substr(0, 20480)),
         super + " is damaged: it is truncated: 'bytes' are 20480");
  starts(refusal_with(super, flipped(flipped(super_bytes, kSuperTextBytes), kSuperTextBytes + kPoolPage)),
         super + " is damaged: the 'checksum' of both copies");
  starts(refusal_with(segment, flipped(segment_bytes, 2)), segment + " is damaged: 'magic' is wrong");
  starts(refusal_with(segment, flipped(segment_bytes, 8)), segment + ": 'format' is 7");
  starts(refusal_with(segment, flipped(segment_bytes, 30)),
         segment + " is damaged: the 'checksum' of its header");
  starts(refusal_with(segment, segment_bytes.substr(0, 8192)),
         segment + " is damaged: it is truncated: 'bytes' are 8192");
  starts(refusal_with(segment, ""), segment + " is damaged: it is truncated, 'bytes' are 0");
  starts(refusal_with(segment, std::string(segment_bytes.size(), '\0')),
         segment + " is damaged: 'magic' is missing");
  // Any bit of the metadata of a slot that is in use, its key, epoch or checksum.
  size_t used = kPoolPage;
  while (std::all_of(&segment_bytes[used + 8], &segment_bytes[used + 16], [](char c) { return c == 0; }))
    used += 16;
  for (size_t at = used; at < used + 16; ++at) {
    const std::string message = refusal_with(segment, flipped(segment_bytes, at));
    EXPECT_NE(message.find("is damaged"), std::string::npos) << message;
    EXPECT_NE(message.find(".pool"), std::string::npos) << message;
  }
  std::filesystem::remove(segment);
  starts(Refusal(Spec()), segment + " is missing: the pool of table 'C1' has");
  WriteAll(segment, segment_bytes);
  EXPECT_EQ(Open()->version(), 1U);
}

TEST_P(TableCheckpointTest, ATornCopyOfTheSuperblockLeavesTheOtherOne) {
  if (IsLog()) GTEST_SKIP() << "of logs in row_log_crash_test.cc";
  MakePool();  // copies 1 (no checkpoint) and 2 (checkpoint 10)
  const std::string super = File("-super.pool");
  std::string bytes = ReadAll(super);
  bytes[kSuperTextBytes + kPoolPage + 5] ^= 1;
  WriteAll(super, bytes);
  EXPECT_EQ(Open()->version(), 1U);
}

INSTANTIATE_TEST_SUITE_P(Kinds, TableCheckpointTest,
                         testing::Combine(testing::Values("pmem_libpmem", "dram_pmem", "dram_ssd"),
                                          testing::Values("hash", "array")),
                         [](const auto& kind) {
                           return std::string(std::get<0>(kind.param)) + "_" + std::get<1>(kind.param);
                         });

TEST(DramCheckpointTest, DramKeepsNone) {
  TableSpec spec;
  spec.name = "t";
  spec.dim = 1;
  const auto table = Table::Create(spec, StorageSpec{});
  EXPECT_TRUE(table->Checkpoints().empty());
  EXPECT_EQ(MessageOf<SpecError>([&] { table->Checkpoint(1); }),
            "table 't': its storage is dram, which keeps no checkpoints; save the table to a file, or use "
            "pmem_libpmem, dram_pmem or dram_ssd");
  EXPECT_THROW(table->Recover(std::nullopt), SpecError);
  StorageSpec storage;
  storage.recover = true;
  EXPECT_EQ(MessageOf<SpecError>([&] { (void)Storage::Open(storage); }),
            "storage dram cannot recover tables; only pmem_libpmem and dram_pmem outlive a process");
}

}  // namespace
}  // namespace oe::table_checkpoint_test
