// Tables that are dropped while others use them.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/common/test_heap.h"
#include "oe_runtime/core/server/test_cluster.h"
#include "oe_runtime/core/storage/test_storage.h"

namespace oe::drop_test {
namespace {

const std::vector<Key> kKeys = {1, 2, 3, 4, 5, 6, 7, 8};

std::unique_ptr<Client> ClientOf(const Cluster& cluster, const std::string& job = "",
                                 std::optional<uint32_t> rank = std::nullopt) {
  RemoteOptions options = cluster.remote;
  options.job = job;
  if (rank) {
    options.worker.rank = *rank;
    options.worker.of = 2;
  }
  return Client::Connect(options, 1);
}

void Assign(Client* client, uint32_t table, float value) {
  const std::vector<float> rows(kKeys.size() * client->Spec(table).dim, value);
  (void)client->Assign(table, kKeys.data(), kKeys.size(), rows.data(), nullptr);
}

std::vector<float> Rows(Client* client, uint32_t table) {
  std::vector<float> rows(kKeys.size() * client->Spec(table).dim);
  client->PullRows(table, kKeys.data(), kKeys.size(), rows.data());
  return rows;
}

size_t FilesIn(const std::string& directory) {
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    const auto kind = entry.path().extension();
    files += kind == ".pool" || kind == ".log" ? 1 : 0;
  }
  return files;
}

class DropTest : public testing::TestWithParam<const char*> {
 protected:
  StorageSpec storage() const {
    StorageSpec spec = TestStorage(GetParam(), directory_.path(), 0);
    spec.recover = KeepsCheckpoints(GetParam());
    return spec;
  }
  TestDirectory directory_;
};

// Every request finds the table as it was, or reads that it is gone; the other table knows nothing of it.
TEST_P(DropTest, ThreadsMayUseATableMeanwhile) {
  ThreadPool pool(2);
  Store store(Storage::Open(storage()), {0, 1}, &pool);
  const uint32_t other = store.CreateTable(Spec("other", 3, "adam"));
  std::atomic<uint32_t> table{store.CreateTable(Spec("e", 3, "adam"))};
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> pushed{0};
  const auto use = [&](uint32_t seed) {
    std::mt19937 random(seed);
    const std::vector<float> values(kKeys.size() * 3, 1.0F);
    std::vector<float> rows(kKeys.size() * 3);
    std::vector<float> others(rows.size());
    std::vector<uint8_t> found(kKeys.size());
    while (!stop) {
      const uint32_t id = table;
      try {
        switch (random() % 7) {
          case 0:
            store.Pull({{id, kKeys.data(), kKeys.size(), rows.data()},
                        {other, kKeys.data(), kKeys.size(), others.data()}});
            break;
          case 1:
            store.Push({{other, kKeys.data(), kKeys.size(), values.data(), 0.1, nullptr}});
            ++pushed;
            store.Push({{id, kKeys.data(), kKeys.size(), values.data(), 0.1, nullptr}});
            break;
          case 2:
            (void)store.Assign(id, kKeys.data(), kKeys.size(), values.data(), nullptr);
            break;
          case 3:
            store.ReadRows(id, kKeys.data(), kKeys.size(), rows.data(), nullptr, found.data());
            break;
          case 4:
            (void)store.Keys(id, 0);
            break;
          case 5:
            (void)store.Stats();
            store.Upkeep();
            break;
          default:
            (void)store.Erase(id, kKeys.data(), 2);
        }
      } catch (const SpecError& error) {
        EXPECT_EQ(std::string(error.what()).find("table 'e' was dropped"), 0U) << error.what();
      }
    }
  };
  std::vector<std::thread> threads;
  for (uint32_t seed = 0; seed < 3; ++seed) threads.emplace_back(use, seed);
  for (int i = 0; i < 20; ++i) {
    if (KeepsCheckpoints(GetParam())) store.Checkpoint(static_cast<uint64_t>(i) + 1, i % 2 == 0);
    EXPECT_EQ(store.Drop("e"), 1U);
    EXPECT_EQ(store.Drop("e"), 0U);
    const uint32_t next = store.CreateTable(Spec("e", 3, "adam"));
    EXPECT_NE(next, table);
    table = next;
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  const nlohmann::json stats = store.Stats();
  ASSERT_EQ(stats["tables"].size(), 2U);
  EXPECT_EQ(stats["tables"][0]["version"], pushed.load());
}

TEST_P(DropTest, IsRefusedWhileTheJobHasOtherClients) {
  ServerOptions options;
  options.storage = storage();
  options.storage.recover = false;
  const Cluster cluster(1, "", "", options);
  const auto first = ClientOf(cluster, "x");
  const uint32_t table = first->CreateTable(Spec("e", 3, "adam"));
  const uint32_t other = first->CreateTable(Spec("other", 3, "adam"));
  Assign(first.get(), table, 1);
  Assign(first.get(), other, 2);
  auto second = ClientOf(cluster, "x");
  (void)second->CreateTable(Spec("e", 3, "adam"));
  const auto stranger = ClientOf(cluster, "y");
  EXPECT_EQ(MessageOf<SpecError>([&] {
              first->Drop({"e"}, std::nullopt, false);
            }).find("no table is dropped: the job has 1 other client connected"),
            0U);
  EXPECT_NE(MessageOf<SpecError>([&] { stranger->Drop({}, "x", false); }).find("2 other clients"),
            std::string::npos);
  EXPECT_EQ(Rows(first.get(), table), std::vector<float>(24, 1));

  EXPECT_EQ(first->Drop({"e"}, std::nullopt, true), 1U);
  EXPECT_EQ(first->Drop({"e"}, std::nullopt, true), 0U);
  EXPECT_EQ(MessageOf<SpecError>([&] {
              Rows(second.get(), 0);
            }).find("table 'e' was dropped from job 'x' by a client: its rows are gone"),
            0U);
  EXPECT_EQ(MessageOf<SpecError>([&] { Rows(first.get(), table); }),
            "table id 0 is of a table that this client has dropped");
  EXPECT_EQ(Rows(first.get(), other), std::vector<float>(24, 2));
  // Another spec is no mismatch any more; whoever creates it again goes on with the new one.
  EXPECT_EQ(first->CreateTable(Spec("e", 5, "sgd")), 2U);
  EXPECT_EQ(second->CreateTable(Spec("e", 5, "sgd")), 0U);
  Assign(first.get(), 2, 4);
  EXPECT_EQ(Rows(second.get(), 0), std::vector<float>(40, 4));

  second->Close();
  second.reset();
  for (int i = 0; i < 1000; ++i) {  // until the server has seen the end of the connection
    try {
      EXPECT_EQ(first->Drop({}, std::nullopt, false), 2U);
      break;
    } catch (const SpecError&) {
      ASSERT_LT(i, 999);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
  EXPECT_EQ(cluster.servers[0]->Stats()["tables"].size(), 0U);
  EXPECT_EQ(FilesIn(directory_.path()), 0U);
}

TEST_P(DropTest, WorkersDropTogether) {
  ServerOptions options;
  options.storage = storage();
  options.storage.recover = false;
  const Cluster cluster(1, "", "", options);
  std::vector<std::unique_ptr<Client>> workers;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    workers.push_back(ClientOf(cluster, "x", rank));
    (void)workers[rank]->CreateTable(Spec("e", 3, "sgd"));
  }
  Assign(workers[0].get(), 0, 1);
  const auto drop = [&](uint32_t rank) {
    const auto dropped = workers[rank]->Drop({"e"}, std::nullopt, false);
    EXPECT_EQ(workers[rank]->CreateTable(Spec("e", 3, "sgd")), 1U);
    return dropped.has_value();
  };
  auto one = std::async(std::launch::async, drop, 1);
  const bool zero = drop(0);
  EXPECT_NE(zero, one.get()) << "it was not done once";
  EXPECT_EQ(workers[0]->Keys(1).size(), 0U);
  Assign(workers[1].get(), 1, 3);
  EXPECT_EQ(Rows(workers[0].get(), 1), std::vector<float>(24, 3));
}

TEST_P(DropTest, DropsTablesThatNobodyHasOpened) {
  if (!KeepsCheckpoints(GetParam())) return;
  ServerOptions options;
  options.storage = storage();
  const TableSpec spec = Spec("e", 3, "adam");
  for (const char* job : {"x", "y"}) {
    const Cluster cluster(1, "", "", options);
    const auto client = ClientOf(cluster, job);
    const uint32_t table = client->CreateTable(spec);
    Assign(client.get(), table, 1);
    client->Checkpoint(1, true);
  }
  {
    const Cluster cluster(1, "", "", options);
    const auto client = ClientOf(cluster);
    EXPECT_EQ(client->Drop({"other"}, "x", false), 0U);
    EXPECT_EQ(client->Drop({}, "x", false), 1U);
  }
  const Cluster cluster(1, "", "", options);
  const auto of_x = ClientOf(cluster, "x");
  const auto of_y = ClientOf(cluster, "y");
  EXPECT_EQ(of_x->Keys(of_x->CreateTable(spec)).size(), 0U);
  EXPECT_EQ(of_y->Keys(of_y->CreateTable(spec)).size(), kKeys.size());
}

// Makes and drops 10,000 tables: neither the client nor the server keeps anything of them.
void ExpectNothingStays(Client* client) {
  constexpr uint32_t kTables = 10000;
  constexpr uint32_t kRound = kTables / 5;  // the server has the names of the last 1,000
  std::optional<uint64_t> before;
  uint64_t least = UINT64_MAX;
  for (uint32_t i = 0; i < kTables; ++i) {
    ASSERT_EQ(client->CreateTable(Spec("e" + std::to_string(i % 7), 3, "adam")), i + 1);
    ASSERT_GT(client->Drop({"e" + std::to_string(i % 7)}, std::nullopt, true).value_or(0), 0U);
    if (i % kRound != kRound - 1) continue;
    const uint64_t now = HeapBytes();
    if (before) least = std::min(least, now - std::min(now, *before));
    before = now;
  }
  // What stays stays in every round. Each thread's cache of freed memory fills once, in any of them.
  EXPECT_LT(least, 10 * kRound);
}

TEST(DroppedTablesTest, LeaveNothingInThisProcess) {
  const auto client = Client::InProcess({}, 2, 1);
  ASSERT_EQ(client->CreateTable(Spec("stays", 3, "adam")), 0U);
  Assign(client.get(), 0, 1);
  ExpectNothingStays(client.get());
  EXPECT_EQ(Rows(client.get(), 0), std::vector<float>(24, 1));
  EXPECT_EQ(MessageOf<SpecError>([&] { Rows(client.get(), 1); }),
            "table id 1 is of a table that this client has dropped");
  EXPECT_EQ(MessageOf<SpecError>([&] { Rows(client.get(), 20000); }),
            "table id 20000 does not exist; this client has 1 tables");
}

// The id of a dropped table never reaches another one, however many came after it.
TEST(DroppedTablesTest, LeaveNothingOnServers) {
  const Cluster cluster(1);
  const auto old = ClientOf(cluster);
  ASSERT_EQ(old->CreateTable(Spec("e", 3, "adam")), 0U);
  Assign(old.get(), 0, 1);
  const auto client = ClientOf(cluster);
  ASSERT_EQ(client->CreateTable(Spec("e", 3, "adam")), 0U);
  EXPECT_EQ(client->Drop({"e"}, std::nullopt, true), 1U);
  EXPECT_EQ(MessageOf<SpecError>([&] { Rows(old.get(), 0); }).find("table 'e' was dropped by a client"), 0U);
  ExpectNothingStays(client.get());
  ASSERT_EQ(client->CreateTable(Spec("e", 3, "adam")), 10001U);
  EXPECT_EQ(MessageOf<SpecError>([&] { Rows(old.get(), 0); }).find("table 0 was dropped by a client"), 0U);
  EXPECT_EQ(cluster.servers[0]->Stats()["tables"].size(), 1U);
  EXPECT_EQ(old->CreateTable(Spec("e", 3, "adam")), 0U);
  Assign(client.get(), 10001, 4);
  EXPECT_EQ(Rows(old.get(), 0), std::vector<float>(24, 4));
}

INSTANTIATE_TEST_SUITE_P(Kinds, DropTest, testing::Values("dram", "pmem_libpmem", "dram_pmem", "dram_ssd"),
                         [](const auto& kind) { return std::string(kind.param); });

}  // namespace
}  // namespace oe::drop_test
