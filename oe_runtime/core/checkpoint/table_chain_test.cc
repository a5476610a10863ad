// Increments, what is made of a chain of them, and tables compared and rewritten without a server.
#include "oe_runtime/core/checkpoint/table_chain.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "oe_runtime/core/checkpoint/compare.h"
#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/storage/change_log.h"
#include "oe_runtime/core/storage/test_storage.h"
#include "oe_runtime/core/table/table.h"

namespace oe::table_chain_test {
namespace {

constexpr uint32_t kDim = 3;

TableSpec Spec(const std::string& optimizer = "adam") {
  TableSpec spec;
  spec.name = "C7";
  spec.dim = kDim;
  spec.optimizer.name = optimizer;
  spec.initializer.name = "uniform";
  return spec;
}

std::unique_ptr<Table> NewTable(ShardInfo shard = {}) { return Table::Create(Spec(), StorageSpec{}, shard); }

std::vector<Key> KeysFrom(Key first, size_t n) {
  std::vector<Key> keys(n);
  std::iota(keys.begin(), keys.end(), first);
  return keys;
}

void Push(Table* table, const std::vector<Key>& keys, float gradient) {
  const std::vector<float> grads(keys.size() * kDim, gradient);
  table->Push(keys.data(), keys.size(), grads.data(), 0.1);
}

std::vector<Key> AllKeys(const Table& table) {
  std::vector<Key> all;
  for (uint32_t part = 0; part < Table::kParts; ++part) {
    const std::vector<Key> keys = table.Keys(part);
    all.insert(all.end(), keys.begin(), keys.end());
  }
  std::sort(all.begin(), all.end());
  return all;
}

// No row differs, in no weight and no slot.
void ExpectEqual(const std::vector<TableChain>& left, const std::vector<TableChain>& right) {
  const TableDifference found = CompareTables(left, right, size_t{1} << 20);
  EXPECT_EQ(found.before, found.after);
  EXPECT_EQ(found.only_before + found.only_after + found.changed, 0U);
}

class TableChainTest : public testing::Test {
 protected:
  std::string file(const std::string& name) const { return directory_.file(name); }
  std::string Restored(const std::vector<TableChain>& chains) const {
    const auto table = NewTable();
    Push(table.get(), {1000}, 1.0F);
    std::string message = MessageOf<CheckpointError>([&] { table->RestoreChains(chains); });
    EXPECT_EQ(AllKeys(*table), std::vector<Key>{1000});
    return message;
  }

  const TestDirectory directory_;
};

// Rows of a pool get other numbers with each checkpoint, and those of a cache when they are read.
TEST_F(TableChainTest, AnIncrementHasTheRowsThatWerePushedSince) {
  for (const std::string type : kStorageTypes) {
    SCOPED_TRACE(type);
    StorageSpec storage = TestStorage(type, directory_.path());
    storage.fresh = true;  // of the type before
    const auto table = Table::Create(Spec(), storage);
    const auto read = [&](Key first, size_t n) {
      std::vector<float> rows(n * table->spec().dim);
      table->Pull(KeysFrom(first, n).data(), n, rows.data());
      table->Upkeep();
    };
    Push(table.get(), KeysFrom(0, 3000), 0.5F);
    const TableFileInfo full = table->Save(file("full"), 0);
    EXPECT_FALSE(full.base);
    if (KeepsCheckpoints(type)) table->Checkpoint(1);
    read(0, 3000);
    Push(table.get(), KeysFrom(2990, 30), 1.0F);
    const TableFileInfo first = table->Save(file("first"), full.checksum);
    EXPECT_EQ(first.base, full.checksum);
    EXPECT_EQ(first.rows, 30U);
    EXPECT_LT(first.bytes, full.bytes / 20);
    if (KeepsCheckpoints(type)) table->Checkpoint(2);
    read(1500, 1500);
    Push(table.get(), {7, 3005}, 2.0F);
    const TableFileInfo second = table->Save(file("second"), first.checksum);
    EXPECT_EQ(second.rows, 2U);
    read(0, 3000);
    const TableFileInfo none = table->Save(file("none"), second.checksum);
    EXPECT_EQ(none.rows, 0U);

    (void)table->Save(file("all"));
    ExpectEqual({{file("full"), file("first"), file("second"), file("none")}}, {{file("all")}});
    const auto copy = NewTable();
    copy->RestoreChains({{file("full"), file("first"), file("second")}});
    EXPECT_EQ(copy->rows(), table->rows());
    EXPECT_EQ(copy->version(), table->version());
    EXPECT_EQ(copy->Save(file("copy")).rows, 3020U);
    ExpectEqual({{file("copy")}}, {{file("all")}});
  }
}

TEST_F(TableChainTest, AnUnknownBaseIsSavedInFull) {
  const auto table = NewTable();
  Push(table.get(), KeysFrom(0, 10), 0.5F);
  const uint64_t full = table->Save(file("full")).checksum;
  const uint64_t other = table->Save(file("other")).checksum;
  EXPECT_EQ(full, other);  // the same bytes
  Push(table.get(), {3}, 0.5F);
  const uint64_t since = table->Save(file("since"), full).checksum;
  Push(table.get(), {4}, 0.5F);
  EXPECT_FALSE(table->Save(file("again"), full).base) << "its changes up to the last save are forgotten";
  EXPECT_FALSE(table->Save(file("more"), since).base);
  // A save that fails forgets nothing.
  const uint64_t last = table->Save(file("last")).checksum;
  Push(table.get(), {5}, 0.5F);
  EXPECT_THROW((void)table->Save(file("no/such"), last), CheckpointError);
  EXPECT_EQ(table->Save(file("next"), last).rows, 1U);
  // Nobody has saved what a new table holds; restored from all of its part, it goes on.
  const auto copy = NewTable();
  Push(copy.get(), {3}, 0.5F);
  EXPECT_FALSE(copy->Save(file("first"), last).base);
  copy->RestoreChains({{file("last"), file("next")}});
  Push(copy.get(), {6, 7}, 0.5F);
  EXPECT_EQ(copy->Save(file("gone on"), ReadTableFileInfo(file("next")).checksum).rows, 2U);
  const auto half = NewTable({0, 2});
  half->Restore({file("last")});
  EXPECT_FALSE(half->Save(file("half"), last).base);
}

TEST_F(TableChainTest, AChainWithoutItsBaseIsRefused) {
  const auto table = NewTable();
  std::vector<std::string> hex;
  Push(table.get(), KeysFrom(0, 10), 0.5F);
  uint64_t last = 0;
  for (const char* name : {"0", "1", "2"}) {
    last = table->Save(file(name), last).checksum;
    hex.push_back(HexText(last));
    Push(table.get(), {3}, 0.5F);
  }
  EXPECT_EQ(Restored({{file("1")}}),
            file("1") + " is an increment on the file with the checksum " + hex[0] +
                ", which is missing; restore them together, the full checkpoint first");
  EXPECT_EQ(Restored({{file("0"), file("2")}}),
            file("2") + " is an increment on the file with the checksum " + hex[1] +
                ", but before it comes " + file("0") + ", whose checksum is " + hex[0]);
  EXPECT_EQ(Restored({{file("0"), file("0")}}), file("0") + " is no increment, but before it comes " +
                                                    file("0") + ", whose checksum is " + hex[0]);
  EXPECT_EQ(Restored({{file("0"), file("1"), file("none")}}),
            "cannot read " + file("none") + ": No such file or directory");
  WriteAll(file("0"), ReadAll(file("0")).substr(0, 100));
  EXPECT_NE(Restored({{file("0"), file("1"), file("2")}}).find(file("0") + " is damaged"), std::string::npos);
}

TEST_F(TableChainTest, TombstonesHideOlderRows) {
  const auto table = NewTable();
  Push(table.get(), KeysFrom(0, 6), 0.5F);
  const TableFileInfo full = table->Save(file("full"));
  const auto write = [&](const std::string& name, const TableFileInfo& base, const std::vector<Key>& erased,
                         const std::vector<Key>& keys) {
    TableFileInfo info = base;
    info.file = file(name);
    info.base = base.checksum;
    info.tombstones = erased.size();
    info.rows = keys.size();
    ++info.version;
    TableFileWriter writer(info);
    writer.WriteTombstones(erased.data(), erased.size());
    const std::vector<std::byte> rows(keys.size() * info.row_bytes);
    writer.WriteBlock(keys.data(), rows.data(), keys.size());
    EXPECT_EQ(writer.Finish().bytes, TableFileBytes(info));
    return ReadTableFileInfo(info.file);
  };
  // 1 and 2 go, 2 comes back; 9 came and went between two saves.
  const TableFileInfo first = write("first", full, {1, 2, 9}, {0, 7});
  (void)write("second", first, {7}, {2, 8});
  const auto copy = NewTable();
  copy->RestoreChains({{file("full"), file("first"), file("second")}});
  EXPECT_EQ(AllKeys(*copy), (std::vector<Key>{0, 2, 3, 4, 5, 8}));
  EXPECT_EQ(copy->version(), full.version + 2);
  // The same key twice in one file is a writer's mistake.
  (void)write("twice", first, {}, {2, 2});
  EXPECT_NE(Restored({{file("full"), file("first"), file("twice")}}).find("key 2 "), std::string::npos);

  const std::string content = ReadAll(file("first"));
  for (size_t at = 0; at < content.size(); ++at) {
    std::string damaged = content;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << (at % 8)));
    WriteAll(file("damaged"), damaged);
    ASSERT_THROW((void)VerifyTableFile(file("damaged")), CheckpointError) << "byte " << at;
    WriteAll(file("damaged"), content.substr(0, at));
    ASSERT_THROW((void)VerifyTableFile(file("damaged")), CheckpointError) << "size " << at;
  }
}

TEST_F(TableChainTest, TheChangeLogRemembersErasuresWithinBounds) {
  ChangeLog log;
  log.Changed(1);
  log.Erased(1, 0);
  EXPECT_FALSE(log.known());
  log.Start();
  log.Changed(70);
  log.Erased(5, 0);
  EXPECT_TRUE(log.Has(70));
  EXPECT_FALSE(log.Has(71));
  EXPECT_FALSE(log.Has(1 << 20));
  EXPECT_EQ(log.erased(), std::vector<Key>{5});
  for (Key key = 0; log.known(); ++key) {
    log.Erased(key, 10);
    ASSERT_LT(key, 10000U) << "it grows without end";
  }
  log.Start();
  EXPECT_FALSE(log.Has(70));
  EXPECT_TRUE(log.erased().empty());
}

// Saved by some number of servers, a file each.
std::vector<TableChain> SaveOf(const std::string& directory, uint32_t servers, const std::vector<Key>& keys,
                               const std::vector<Key>& again) {
  std::vector<TableChain> chains;
  for (uint32_t server = 0; server < servers; ++server) {
    const auto table = NewTable({server, servers});
    for (const std::vector<Key>* pushed : {&keys, &again}) {
      std::vector<Key> ours;
      for (const Key key : *pushed) {
        if (server_of(key, servers, false) == server) ours.push_back(key);
      }
      Push(table.get(), ours, 0.5F);
    }
    chains.push_back({directory + "/" + std::to_string(server) + "-of-" + std::to_string(servers)});
    (void)table->Save(chains.back().front());
  }
  return chains;
}

TEST_F(TableChainTest, ComparesTablesOfAnyServers) {
  const std::vector<Key> keys = KeysFrom(0, 2000);
  std::vector<Key> others = KeysFrom(10, 2000);
  const auto one = SaveOf(directory_.path(), 1, keys, {});
  const auto three = SaveOf(directory_.path(), 3, keys, {});
  const auto two = SaveOf(directory_.path(), 2, others, {20, 21, 22});
  for (const size_t memory : {size_t{1} << 30, size_t{10000}}) {  // at once and in parts
    ExpectEqual(one, three);
    for (const auto& before : {one, three}) {
      const TableDifference found = CompareTables(before, two, memory);
      EXPECT_EQ(found.before, 2000U);
      EXPECT_EQ(found.after, 2000U);
      EXPECT_EQ(found.only_before, 10U);
      EXPECT_EQ(found.only_after, 10U);
      EXPECT_EQ(found.changed, 3U);
      // A step of Adam is the learning rate; its first moment grew from 0.05 to 0.095.
      EXPECT_NEAR(found.weights, 0.1, 1e-3);
      EXPECT_NEAR(found.state, 0.045, 1e-6);
    }
  }
  EXPECT_THROW((void)CompareTables({three[0], three[2]}, one, 1000), CheckpointError);
}

TEST_F(TableChainTest, RewritesATableForOtherServers) {
  const std::vector<Key> keys = KeysFrom(0, 5000);
  const auto one = SaveOf(directory_.path(), 1, keys, {7});
  std::vector<TableChain> last = one;
  for (const uint32_t servers : {3U, 2U, 1U}) {
    std::vector<std::string> files;
    std::vector<TableChain> chains;
    for (uint32_t server = 0; server < servers; ++server) {
      files.push_back(file("new-" + std::to_string(server) + "-of-" + std::to_string(servers)));
      chains.push_back({files.back()});
    }
    const std::vector<TableFileInfo> written = ReshardTable(last, files);
    ASSERT_EQ(written.size(), servers);
    ExpectEqual(one, chains);
    for (uint32_t server = 0; server < servers; ++server) {
      const auto table = NewTable({server, servers});
      table->Restore(files);
      EXPECT_EQ(table->rows(), written[server].rows);
      EXPECT_EQ(table->version(), 2U);
    }
    last = chains;
  }
}

}  // namespace
}  // namespace oe::table_chain_test
