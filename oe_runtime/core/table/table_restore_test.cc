// Restores of more rows than are read at once, on several threads.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "oe_runtime/core/checkpoint/table_chain.h"
#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/common/thread_pool.h"
#include "oe_runtime/core/table/table.h"

namespace oe::table_restore_test {
namespace {

constexpr uint32_t kDim = 16;
constexpr size_t kRows = 200000;  // 25 MiB with their state

TableSpec SpecOf(const std::string& index) {
  TableSpec spec;
  spec.name = "t";
  spec.dim = kDim;
  spec.index = index;
  if (index == "array") spec.input_dim = kRows + 7;
  spec.optimizer.name = "adagrad";
  return spec;
}

// Keys of one server, all of which a push has given rows.
std::vector<Key> Fill(Table* table) {
  const bool array = table->spec().index == "array";
  std::vector<Key> keys;
  for (Key key = 0; key < kRows; ++key) {
    const Key spread = array ? key : key * 0x9E3779B97F4A7C15ULL;
    if (server_of(spread, table->shard().servers, array) == table->shard().server) keys.push_back(spread);
  }
  std::vector<float> gradients(keys.size() * kDim);
  for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = static_cast<float>(i % 977) / 977.0F;
  table->Push(keys.data(), keys.size(), gradients.data(), 0.1);
  return keys;
}

std::vector<float> Rows(const Table& table, const std::vector<Key>& keys) {
  std::vector<float> rows(keys.size() * kDim);
  table.Pull(keys.data(), keys.size(), rows.data());
  return rows;
}

class TableRestoreTest : public testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  StorageSpec StorageOf(const std::string& name) const {
    StorageSpec storage;
    storage.type = std::get<1>(GetParam());
    if (storage.type != "dram") storage.path = directory_.path() + "/" + name;
    if (storage.type == "dram_ssd") storage.cache_bytes = uint64_t{100} << 10;
    return storage;
  }
  const TestDirectory directory_;
  ThreadPool pool_{3};
};

TEST_P(TableRestoreTest, EveryRowComesBack) {
  const TableSpec spec = SpecOf(std::get<0>(GetParam()));
  std::vector<TableChain> chains;
  std::vector<std::vector<Key>> keys;
  std::vector<std::vector<float>> rows;
  for (uint32_t server = 0; server < 2; ++server) {
    const auto table = Table::Create(spec, StorageOf("saved-" + std::to_string(server)), {server, 2});
    keys.push_back(Fill(table.get()));
    rows.push_back(Rows(*table, keys.back()));
    chains.push_back({directory_.path() + "/" + std::to_string(server) + ".oet"});
    table->Save(chains.back().front());
  }
  // As many servers, and one that takes the keys of both; with the table's own threads and without.
  for (Executor* const executor : {static_cast<Executor*>(&pool_), static_cast<Executor*>(nullptr)}) {
    const std::string run = executor == nullptr ? "-alone" : "-threads";
    const auto one = Table::Create(spec, StorageOf("one" + run));
    one->RestoreChains(chains, executor);
    EXPECT_EQ(one->rows(), kRows);
    EXPECT_EQ(one->version(), 1U);
    for (size_t server = 0; server < 2; ++server) EXPECT_EQ(Rows(*one, keys[server]), rows[server]);
    const auto second = Table::Create(spec, StorageOf("second" + run), {1, 2});
    second->RestoreChains(chains, executor);
    EXPECT_EQ(second->rows(), keys[1].size());
    EXPECT_EQ(Rows(*second, keys[1]), rows[1]);
  }
}

INSTANTIATE_TEST_SUITE_P(All, TableRestoreTest,
                         testing::Combine(testing::Values("hash", "array"),
                                          testing::Values("dram", "pmem_libpmem", "dram_ssd")));

// A file of `table` with so many rows, of which the last has the key of the one numbered `twice`.
std::string WriteWithTwice(const Table& table, const std::string& directory, size_t rows, size_t twice) {
  TableFileInfo info;
  info.file = directory + "/twice-" + std::to_string(rows) + "-" + std::to_string(twice) + ".oet";
  info.spec = table.spec();
  info.shard = {0, 1};
  info.rows = rows;
  info.row_bytes = table.row_bytes();
  TableFileWriter writer(info);
  std::vector<Key> keys(rows);
  std::iota(keys.begin(), keys.end(), 0);
  keys.back() = twice;
  const std::vector<std::byte> bytes(rows * info.row_bytes);
  for (size_t begin = 0; begin < rows; begin += writer.block_rows()) {
    const size_t n = std::min(writer.block_rows(), rows - begin);
    writer.WriteBlock(&keys[begin], &bytes[begin * info.row_bytes], n);
  }
  return writer.Finish().file;
}

TEST(TableRestoreErrorTest, AKeyThatComesTwiceIsNamedAndNothingChanges) {
  const TestDirectory directory;
  ThreadPool pool(3);
  const auto table = Table::Create(SpecOf("hash"), StorageSpec{});
  const std::vector<Key> keys = Fill(table.get());
  const std::vector<float> rows = Rows(*table, keys);
  for (const size_t n : {size_t{3}, kRows}) {
    for (const size_t twice : {size_t{0}, n - 2}) {
      const std::string file = WriteWithTwice(*table, directory.path(), n, twice);
      try {
        table->RestoreChains({{file}}, &pool);
        ADD_FAILURE() << "it was taken";
      } catch (const CheckpointError& error) {
        EXPECT_NE(std::string(error.what()).find(": key " + std::to_string(twice) + " has a row already"),
                  std::string::npos)
            << error.what();
      }
    }
  }
  EXPECT_EQ(Rows(*table, keys), rows);
}

}  // namespace
}  // namespace oe::table_restore_test
