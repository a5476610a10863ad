// Checkpoints in the storage of servers: all tables under one id, and what a client can go back to.

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/server/test_cluster.h"

namespace oe::store_checkpoint_test {
namespace {

using Ids = std::vector<uint64_t>;

// Servers, each with a directory of its own, and a client.
struct PoolCluster {
  PoolCluster(const std::string& directory, uint32_t count, bool recover) {
    RemoteOptions remote;
    for (uint32_t i = 0; i < count; ++i) {
      ServerOptions options;
      options.shard = {i, count};
      options.threads = 2;
      options.storage = {"pmem_libpmem", directory + "/" + std::to_string(i), 0, recover, 3};
      servers.push_back(std::make_unique<Server>(options));
      remote.endpoints.push_back("127.0.0.1:" + std::to_string(servers.back()->port()));
    }
    remote.timeout = 30;
    client = Client::Connect(remote, 1);
  }
  ~PoolCluster() {
    client->Close();
    for (const auto& server : servers) server->Stop();
  }

  std::vector<std::unique_ptr<Server>> servers;
  std::unique_ptr<Client> client;
};

TEST(StoreCheckpointTest, ServersThatWereStartedAgainGoOn) {
  const TestDirectory directory;
  std::vector<float> wanted;
  {
    PoolCluster cluster(directory.path(), 2, false);
    (void)Train(cluster.client.get(), 1);
    cluster.client->Checkpoint(6, true);
    EXPECT_EQ(cluster.client->Checkpoints(), Ids{6});
    wanted = Train(cluster.client.get(), 2);
    cluster.client->Checkpoint(12, false);
    (void)Train(cluster.client.get(), 3);
  }
  PoolCluster cluster(directory.path(), 2, true);
  (void)cluster.client->CreateTable(Spec("wide", 9, "adam"));
  (void)cluster.client->CreateTable(Spec("narrow", 1, "ftrl"));
  EXPECT_EQ(cluster.client->Checkpoints(), (Ids{6, 12}));
  EXPECT_EQ(cluster.client->Recover(6), 6U);
  EXPECT_EQ(Train(cluster.client.get(), 2), wanted);
  // Checkpoint 12 went with the recovery to 6, and can be made again.
  EXPECT_EQ(cluster.client->Checkpoints(), Ids{6});
  cluster.client->Checkpoint(12, true);
  EXPECT_EQ(cluster.client->Recover(std::nullopt), 12U);
}

TEST(StoreCheckpointTest, TheNewestThatAllServersHaveIsChosen) {
  const TestDirectory directory;
  std::vector<float> wanted;
  {
    PoolCluster cluster(directory.path(), 2, false);
    for (uint64_t id = 1; id <= 3; ++id) {
      const std::vector<float> seen = Train(cluster.client.get(), id);
      if (id == 2) wanted = seen;
      cluster.client->Checkpoint(id, true);
    }
  }
  // A server that was lost before its last checkpoint was durable.
  {
    TableSpec spec = Spec("wide", 9, "adam");
    const auto table =
        Table::Create(spec, StorageSpec{"pmem_libpmem", directory.path() + "/1", 0, true, 3}, {1, 2});
    table->Recover(2);
  }
  PoolCluster cluster(directory.path(), 2, true);
  (void)cluster.client->CreateTable(Spec("wide", 9, "adam"));
  (void)cluster.client->CreateTable(Spec("narrow", 1, "ftrl"));
  EXPECT_EQ(cluster.client->Checkpoints(), (Ids{1, 2}));
  EXPECT_EQ(
      MessageOf<CheckpointError>([&] { (void)cluster.client->Recover(3); }),
      "not every table of every server has checkpoint 3; all have 1, 2; restore from a directory, or begin "
      "anew");
  EXPECT_EQ(cluster.client->Recover(1), 1U);
  EXPECT_EQ(Train(cluster.client.get(), 2), wanted);
}

TEST(StoreCheckpointTest, WithoutACommonCheckpointNothingChanges) {
  const TestDirectory directory;
  PoolCluster cluster(directory.path(), 1, true);
  const uint32_t first = cluster.client->CreateTable(Spec("first", 4, "sgd"));
  const Key key = 5;
  const auto push = [&] {
    const auto pulled = cluster.client->Pull({{&key, 1}}, {{first, 0}});
    const std::vector<float> gradient(4, 1.0F);
    cluster.client->Push(*pulled, {{gradient.data(), 1, 4}}, {0.5});
  };
  push();
  cluster.client->Checkpoint(1, true);
  push();
  (void)cluster.client->CreateTable(Spec("second", 4, "sgd"));
  std::vector<float> before(4);
  cluster.client->PullRows(first, &key, 1, before.data());
  EXPECT_TRUE(cluster.client->Checkpoints().empty());
  EXPECT_EQ(
      MessageOf<CheckpointError>([&] { (void)cluster.client->Recover(std::nullopt); }),
      "there is no checkpoint that every table of every server has; restore from a directory, or begin anew");
  EXPECT_EQ(MessageOf<SpecError>([&] { cluster.client->Checkpoint(1, true); }).substr(0, 15),
            "table 'first': ");
  std::vector<float> after(4);
  cluster.client->PullRows(first, &key, 1, after.data());
  EXPECT_EQ(after, before);
}

TEST(StoreCheckpointTest, SeveralServersInOneProcessShareADirectory) {
  const TestDirectory directory;
  const StorageSpec storage{"pmem_libpmem", directory.path(), 0, true, 2};
  std::vector<float> wanted;
  {
    const auto client = Client::InProcess(storage, 3, 1);
    (void)Train(client.get(), 1);
    client->Checkpoint(6, true);
    wanted = Train(client.get(), 2);
  }
  {
    const auto client = Client::InProcess(storage, 3, 1);
    (void)client->CreateTable(Spec("wide", 9, "adam"));
    (void)client->CreateTable(Spec("narrow", 1, "ftrl"));
    EXPECT_EQ(client->Recover(std::nullopt), 6U);
    EXPECT_EQ(Train(client.get(), 2), wanted);
  }
  // On another number of servers the pools are refused.
  const auto client = Client::InProcess(storage, 2, 1);
  const std::string message =
      MessageOf<StorageError>([&] { (void)client->CreateTable(Spec("wide", 9, "adam")); });
  EXPECT_NE(message.find("'servers' is 3 in this pool, but table 'wide' has 2"), std::string::npos)
      << message;
}

TEST(StoreCheckpointTest, DramServersSayThatTheyKeepNone) {
  const auto client = Client::InProcess(StorageSpec{}, 2, 1);
  (void)Train(client.get(), 1);
  EXPECT_THROW(client->Checkpoint(1, true), SpecError);
  EXPECT_TRUE(client->Checkpoints().empty());
  EXPECT_THROW((void)client->Recover(std::nullopt), CheckpointError);
}

}  // namespace
}  // namespace oe::store_checkpoint_test
