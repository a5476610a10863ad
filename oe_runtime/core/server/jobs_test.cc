// Several jobs on the same servers.
#include "oe_runtime/core/server/jobs.h"

#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/server/test_cluster.h"

namespace oe::jobs_test {
namespace {

std::unique_ptr<Client> ClientOf(const Cluster& cluster, const std::string& job) {
  RemoteOptions options = cluster.remote;
  options.job = job;
  return Client::Connect(options, 1);
}

TEST(JobsTest, TablesOfOneNameAreEachJobsOwn) {
  const Cluster alone(2);
  const std::vector<float> wanted = Train(ClientOf(alone, "").get(), 1);
  const Cluster cluster(2);
  const auto first = ClientOf(cluster, "first");
  const auto second = ClientOf(cluster, "second");
  (void)Train(first.get(), 7);
  EXPECT_EQ(Train(second.get(), 1), wanted);
  EXPECT_EQ(Train(ClientOf(cluster, "").get(), 1), wanted);
  // Another specification is no mismatch, and ids of tables are each job's own.
  EXPECT_EQ(ClientOf(cluster, "third")->CreateTable(Spec("wide", 3, "sgd")), 0U);
  const Key key = 5;
  std::vector<float> of_first(9);
  std::vector<float> of_second(9);
  first->PullRows(0, &key, 1, of_first.data());
  second->PullRows(0, &key, 1, of_second.data());
  EXPECT_NE(of_first, of_second);

  const nlohmann::json stats = cluster.servers[0]->Stats();
  EXPECT_EQ(stats["tables"].size(), 3 * 2 + 1);
  EXPECT_EQ(stats["tables"].back()["job"], "third");
  EXPECT_EQ(stats["pushes"]["requests"], 3 * 6);
  EXPECT_EQ(stats["memory"]["dram"].get<uint64_t>() > 0, true);
}

TEST(JobsTest, EachJobSavesAndRestoresItsOwn) {
  const TestDirectory directory;
  const Cluster cluster(2);
  const auto first = ClientOf(cluster, "first");
  const auto second = ClientOf(cluster, "second");
  (void)Train(first.get(), 1);
  (void)Train(second.get(), 2);
  EXPECT_EQ(first->Save(directory.path()).size(), 4U);
  const std::vector<float> wanted = Train(first.get(), 3);
  // What a job saved belongs to whoever has it.
  second->Restore(directory.path());
  EXPECT_EQ(Train(second.get(), 3), wanted);
}

TEST(JobsTest, EachJobHasItsCheckpointsInThePools) {
  const TestDirectory directory;
  ServerOptions base;
  base.storage = {"pmem_libpmem", directory.path(), 0, true, 3};
  std::vector<float> wanted;
  {
    const Cluster cluster(1, "", "", base);
    const auto first = ClientOf(cluster, "a");
    // Not to be taken for table "wide" of job "a".
    (void)ClientOf(cluster, "")->CreateTable(Spec("a/wide", 9, "adam"));
    const auto second = ClientOf(cluster, "b");
    (void)Train(first.get(), 1);
    (void)Train(second.get(), 2);
    first->Checkpoint(5, true);
    second->Checkpoint(3, true);
    wanted = Train(first.get(), 4);
    (void)Train(second.get(), 4);
    second->Checkpoint(4, true);
    EXPECT_EQ(first->Checkpoints(), std::vector<uint64_t>{5});
  }
  const Cluster cluster(1, "", "", base);
  for (const char* job : {"b", "a"}) {
    const auto client = ClientOf(cluster, job);
    (void)client->CreateTable(Spec("wide", 9, "adam"));
    (void)client->CreateTable(Spec("narrow", 1, "ftrl"));
    const uint64_t newest = job[0] == 'a' ? 5 : 4;
    EXPECT_EQ(client->Recover(std::nullopt), newest);
    const std::vector<float> seen = Train(client.get(), 4);
    EXPECT_EQ(seen == wanted, job[0] == 'a');
  }
}

TEST(JobsTest, NamesThatCannotBeAreRefusedOnBothSides) {
  const Cluster cluster(1);
  for (const std::string& job : {std::string("a/b"), std::string("a b"), std::string(65, 'x')}) {
    EXPECT_THROW((void)ClientOf(cluster, job), SpecError);
    const std::string reply =
        Talk(cluster.servers[0]->port(), Frame(Op::kHello, EncodeHello({kProtocolVersion, "", job})));
    EXPECT_NE(reply.find("a job's name has up to 64 letters"), std::string::npos) << job;
  }
  EXPECT_EQ(cluster.servers[0]->Stats()["tables"].size(), 0U);
  EXPECT_NO_THROW((void)ClientOf(cluster, std::string(64, 'x')));
}

TEST(JobsTest, TheNumberOfJobsIsLimited) {
  ThreadPool pool(1);
  Jobs jobs(Storage::Open({}), {0, 1}, &pool);
  Job* const first = jobs.Get("0");
  for (size_t i = 1; i < Jobs::kMost; ++i) (void)jobs.Get(std::to_string(i));
  EXPECT_THROW((void)jobs.Get("one-more"), SpecError);
  EXPECT_EQ(jobs.Get("0"), first);
}

}  // namespace
}  // namespace oe::jobs_test
