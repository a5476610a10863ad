// Several workers on the tables of one job.
#include "oe_runtime/core/server/workers.h"

#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/write.hpp>
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
#include "oe_runtime/core/server/raw_socket.h"
#include "oe_runtime/core/server/test_cluster.h"
#include "oe_runtime/core/wire/messages.h"

namespace oe::workers_test {
namespace {

constexpr uint32_t kWide = 9;  // dim of one table; the other has 1
constexpr Key kKeys = 200;

WorkerSpec Sync(bool stop_when_lost = true, double wait = 60) {
  WorkerSpec spec;
  spec.stop_when_lost = stop_when_lost;
  spec.wait = wait;
  return spec;
}

WorkerSpec Async(std::optional<uint32_t> staleness, bool stop_when_lost = true) {
  WorkerSpec spec = Sync(stop_when_lost);
  spec.synchronous = false;
  spec.staleness = staleness;
  return spec;
}

// A worker with its tables.
std::unique_ptr<Client> Join(const Cluster& cluster, uint32_t rank, uint32_t of, WorkerSpec spec,
                             const std::string& job = "") {
  RemoteOptions options = cluster.remote;
  options.worker = spec;
  options.worker.rank = rank;
  options.worker.of = of;
  options.job = job;
  auto client = Client::Connect(options, 1);
  (void)client->CreateTable(Spec("wide", kWide, "adam"));
  (void)client->CreateTable(Spec("narrow", 1, "ftrl"));
  return client;
}

std::vector<std::unique_ptr<Client>> JoinAll(const Cluster& cluster, uint32_t of, const WorkerSpec& spec) {
  std::vector<std::unique_ptr<Client>> clients;
  for (uint32_t rank = 0; rank < of; ++rank) clients.push_back(Join(cluster, rank, of, spec));
  return clients;
}

// What one worker has of a batch.
struct Share {
  std::vector<Key> ids;
  std::vector<float> wide;
  std::vector<float> narrow;
};

Share ShareOf(uint32_t batch, uint32_t rank) {
  std::mt19937_64 random(batch * 100 + rank);
  Share share;
  share.ids.resize((batch + rank) % 4 == 3 ? 0 : 80 + rank);  // now and then a worker has nothing
  for (Key& id : share.ids) id = random() % kKeys;
  const auto fill = [&random](size_t n, std::vector<float>* values) {
    values->resize(n);
    for (float& value : *values) value = static_cast<float>(random() % 2000) / 1000.0F - 1.0F;
  };
  fill(share.ids.size() * kWide, &share.wide);
  fill(share.ids.size(), &share.narrow);
  return share;
}

void Push(Client* client, const Share& share, double learning_rate = 0.05) {
  const auto pulled = client->Pull({{share.ids.data(), share.ids.size()}}, {{0, 0}, {1, 0}});
  client->Push(*pulled,
               {{share.narrow.data(), share.ids.size(), 1}, {share.wide.data(), share.ids.size(), kWide}},
               {learning_rate});
}

std::vector<float> Rows(Client* client) {
  std::vector<Key> keys(kKeys);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  std::vector<float> rows(kKeys * (kWide + 1));
  client->PullRows(0, keys.data(), keys.size(), rows.data());
  client->PullRows(1, keys.data(), keys.size(), rows.data() + kKeys * kWide);
  return rows;
}

// The rows after so many batches of one worker that has the shares of all, one after the other.
std::vector<float> RowsOfOne(uint32_t of, uint32_t batches) {
  const Cluster cluster(2);
  const auto client = Join(cluster, 0, 1, {});
  for (uint32_t batch = 0; batch < batches; ++batch) {
    Share whole;
    for (uint32_t rank = 0; rank < of; ++rank) {
      const Share share = ShareOf(batch, rank);
      whole.ids.insert(whole.ids.end(), share.ids.begin(), share.ids.end());
      whole.wide.insert(whole.wide.end(), share.wide.begin(), share.wide.end());
      whole.narrow.insert(whole.narrow.end(), share.narrow.begin(), share.narrow.end());
    }
    Push(client.get(), whole);
  }
  return Rows(client.get());
}

void ExpectNear(const std::vector<float>& rows, const std::vector<float>& wanted) {
  ASSERT_EQ(rows.size(), wanted.size());
  for (size_t i = 0; i < rows.size(); ++i) ASSERT_NEAR(rows[i], wanted[i], 1e-5) << i;
}

template <typename Function>
std::string MessageOfLost(Function function) {
  try {
    function();
  } catch (const WorkerLost& lost) {
    return lost.what();
  }
  return "no WorkerLost";
}

std::future<std::string> LostLater(const std::function<void()>& function) {
  return std::async(std::launch::async, [function] { return MessageOfLost(function); });
}

TEST(WorkersTest, AnyOrderGivesTheSameBitsAndTheRowsOfOneWorker) {
  constexpr uint32_t kOf = 3;
  constexpr uint32_t kBatches = 8;
  std::vector<float> first;
  for (const uint64_t seed : {1U, 2U, 3U}) {
    const Cluster cluster(2);
    const auto clients = JoinAll(cluster, kOf, Sync());
    std::mt19937_64 random(seed);
    std::vector<uint32_t> order = {0, 1, 2};
    for (uint32_t batch = 0; batch < kBatches; ++batch) {
      std::shuffle(order.begin(), order.end(), random);
      for (const uint32_t rank : order) Push(clients[rank].get(), ShareOf(batch, rank));
    }
    const std::vector<float> rows = Rows(clients[1].get());
    if (first.empty()) first = rows;
    EXPECT_EQ(rows, first);
    const nlohmann::json stats = cluster.servers[0]->Stats();
    for (const auto& table : stats["tables"]) EXPECT_EQ(table["version"], kBatches);
    EXPECT_EQ(stats["workers"][0]["batches"], 2 * kBatches);
    EXPECT_EQ(stats["workers"][0]["held"]["pushes"], 0);
  }
  ExpectNear(first, RowsOfOne(kOf, kBatches));
}

TEST(WorkersTest, ThreadsInAnyOrderGiveTheSameBits) {
  constexpr uint32_t kOf = 4;
  constexpr uint32_t kBatches = 12;
  std::vector<float> first;
  for (int repetition = 0; repetition < 2; ++repetition) {
    const Cluster cluster(2);
    std::vector<std::thread> threads;
    std::vector<std::vector<float>> rows(kOf);
    for (uint32_t rank = 0; rank < kOf; ++rank) {
      threads.emplace_back([&, rank] {
        const auto client = Join(cluster, rank, kOf, Sync());
        for (uint32_t batch = 0; batch < kBatches; ++batch) Push(client.get(), ShareOf(batch, rank));
        rows[rank] = Rows(client.get());  // of the last batch, which only waiting brings
        client->Leave();
      });
    }
    for (std::thread& thread : threads) thread.join();
    if (first.empty()) first = rows[0];
    for (const auto& of_rank : rows) EXPECT_EQ(of_rank, first);
  }
  ExpectNear(first, RowsOfOne(kOf, kBatches));
}

TEST(WorkersTest, CountsOfAllWorkersAdmitKeys) {
  const Cluster cluster(1);
  const auto clients = JoinAll(cluster, 2, Sync());
  TableSpec spec = Spec("counted", 1, "sgd");
  spec.admission = {"counter", {{"filter_freq", 3}}};
  for (const auto& client : clients) ASSERT_EQ(client->CreateTable(spec), 2U);
  const std::vector<std::vector<Key>> ids = {{1, 2, 2}, {1, 2}};  // 1 twice, 2 three times
  for (size_t rank = 0; rank < 2; ++rank) {
    const auto pulled = clients[rank]->Pull({{ids[rank].data(), ids[rank].size()}}, {{2, 0}});
    const std::vector<float> ones(ids[rank].size(), 1.0F);
    clients[rank]->Push(*pulled, {{ones.data(), ones.size(), 1}}, {0.1});
  }
  EXPECT_EQ(clients[0]->Keys(2), std::vector<Key>{2});
}

TEST(WorkersTest, PullsWaitWithoutAThread) {
  constexpr uint32_t kOf = 9;  // more than the server has threads
  const Cluster cluster(1);
  const auto clients = JoinAll(cluster, kOf, Sync());
  std::vector<std::future<std::vector<float>>> waiting;
  for (uint32_t rank = 1; rank < kOf; ++rank) {
    Push(clients[rank].get(), ShareOf(0, rank));
    waiting.push_back(std::async(std::launch::async, [&, rank] { return Rows(clients[rank].get()); }));
  }
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/workers/0/waiting/pulls", kOf - 1), kOf - 1);
  EXPECT_GT(cluster.servers[0]->Stats()["workers"][0]["held"]["bytes"], 0);
  const std::vector<float> before = Rows(clients[0].get());  // served meanwhile
  Push(clients[0].get(), ShareOf(0, 0));
  const std::vector<float> after = Rows(clients[0].get());
  EXPECT_NE(before, after);
  for (auto& rows : waiting) EXPECT_EQ(rows.get(), after);
}

// The server's descriptor of a connection, since both are in this process.
int ServersEndOf(const asio::ip::tcp::socket& socket) {
  const asio::ip::tcp::endpoint wanted = socket.local_endpoint();
  for (int fd = 0; fd < 4096; ++fd) {
    asio::ip::tcp::endpoint peer;
    auto size = static_cast<socklen_t>(peer.capacity());
    if (::getpeername(fd, peer.data(), &size) == 0 && peer == wanted) return fd;
  }
  throw std::runtime_error("the server has no such connection");
}

// Sends until nothing more goes into it.
void Fill(int fd) {
  const std::string zeros(4096, '\0');
  for (const size_t most : {zeros.size(), size_t{1}}) {
    while (::send(fd, zeros.data(), most, MSG_DONTWAIT) > 0) {
    }
  }
}

TEST(WorkersTest, ABusyFrameOnItsWayEndsNoWorker) {
  const Cluster cluster(1);
  const Server& server = *cluster.servers[0];
  const auto other = Join(cluster, 1, 2, Sync());
  asio::io_context context;
  asio::ip::tcp::socket slow(context);
  slow.connect({asio::ip::address_v4::loopback(), server.port()});
  const auto send = [&](Op op, const std::string& body) { asio::write(slow, asio::buffer(Frame(op, body))); };
  WorkerSpec spec = Sync();
  spec.of = 2;
  send(Op::kHello, EncodeHello({kProtocolVersion, "", "", ToJsonText(spec)}));
  (void)ReadReply(&slow);
  const Key key = 1;
  Buffer head;
  EncodeBatch({{1, 0, 0.05}}, {{&key, 1}}, &head);
  const std::string batch(head.as<char>(), head.size());
  send(Op::kPush, batch + std::string(sizeof(float), '\0'));
  (void)ReadReply(&slow);
  send(Op::kPull, batch);
  EXPECT_EQ(AwaitStat(server, "/workers/0/waiting/pulls", 1), 1U);

  // The server says so four times per second, unless the frame before cannot go out.
  const auto said = [&] { return server.Stats()["traffic"]["bytes_out"].get<uint64_t>(); };
  uint64_t before = 0;
  do {
    Fill(ServersEndOf(slow));
    before = said();
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
  } while (said() != before);
  Push(other.get(), ShareOf(0, 1));

  std::string all;
  const auto has_row = [&] {
    const HeaderBytes header = EncodeHeader({Op::kPull, 1, sizeof(float)});
    return all.find(std::string(header.begin(), header.end())) != std::string::npos;
  };
  std::array<char, 65536> some{};
  while (!has_row()) {
    asio::error_code error;
    const size_t got = slow.read_some(asio::buffer(some), error);
    ASSERT_FALSE(error) << error.message() << " after " << all.size() << " bytes";
    all.append(some.data(), got);
  }
  EXPECT_EQ(server.Stats()["workers"][0]["connected"], 2);
  EXPECT_EQ(server.Stats()["workers"][0]["lost"], 0);
}

TEST(WorkersTest, APushForTheNextBatchWaitsToo) {
  const Cluster cluster(1);
  const auto clients = JoinAll(cluster, 2, Sync());
  const Share share = ShareOf(0, 0);
  const auto pulled = clients[0]->Pull({{share.ids.data(), share.ids.size()}}, {{1, 0}});
  const auto push = [&] { clients[0]->Push(*pulled, {{share.narrow.data(), share.ids.size(), 1}}, {0.1}); };
  push();
  std::thread ahead(push);
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/workers/0/waiting/pushes", 1), 1U);
  const auto other = clients[1]->Pull({{nullptr, 0}}, {{1, 0}});
  clients[1]->Push(*other, {{nullptr, 0, 1}}, {0.1});
  ahead.join();
  clients[1]->Push(*other, {{nullptr, 0, 1}}, {0.1});
  (void)Rows(clients[1].get());
  EXPECT_EQ(cluster.servers[0]->Stats()["tables"][1]["version"], 2);
}

TEST(WorkersTest, TheDeadlineNamesWhoIsMissing) {
  const Cluster cluster(1);
  const auto first = Join(cluster, 0, 4, Sync(true, 0.1), "j");
  const auto third = Join(cluster, 2, 4, Sync(true, 0.1), "j");
  Push(first.get(), ShareOf(0, 0));
  Push(third.get(), ShareOf(0, 2));
  EXPECT_EQ(MessageOfLost([&] { (void)Rows(first.get()); })
                .rfind("worker 0 of 4 of job 'j' has waited 0.1 s for workers 1, 3 of 4 of job 'j' to push "
                       "their share",
                       0),
            0U);
  EXPECT_NE(MessageOfLost([&] { third->Save("/nowhere"); }).find("for workers 1, 3 of 4"), std::string::npos);
  // Nothing is lost by that: with the others' pushes it goes on.
  const auto second = Join(cluster, 1, 4, Sync(), "j");
  const auto fourth = Join(cluster, 3, 4, Sync(), "j");
  Push(second.get(), ShareOf(0, 1));
  Push(fourth.get(), ShareOf(0, 3));
  (void)Rows(first.get());
}

TEST(WorkersTest, ALostWorkerStopsTheOthersAndAllGoBack) {
  const TestDirectory directory;
  const Cluster cluster(2);
  auto clients = JoinAll(cluster, 3, Sync());
  for (uint32_t rank = 0; rank < 3; ++rank) Push(clients[rank].get(), ShareOf(0, rank));
  clients[0]->Save(directory.path());
  const std::vector<float> wanted = Rows(clients[0].get());
  Push(clients[0].get(), ShareOf(1, 0));
  Push(clients[1].get(), ShareOf(1, 1));
  auto waiting = LostLater([&] { (void)Rows(clients[0].get()); });
  AwaitStat(*cluster.servers[0], "/workers/0/waiting/pulls", 1);
  clients[2].reset();
  EXPECT_EQ(waiting.get().rfind("worker 2 of 3 was lost: its connection ended without leave()", 0), 0U);
  EXPECT_NE(MessageOfLost([&] { Push(clients[1].get(), ShareOf(2, 1)); }).find("worker 2 of 3"),
            std::string::npos);
  // One that came back does not go on by itself.
  clients[2] = Join(cluster, 2, 3, Sync());
  EXPECT_NE(MessageOfLost([&] { Push(clients[2].get(), ShareOf(1, 2)); }).find("worker 2 of 3 was lost"),
            std::string::npos);

  std::vector<std::thread> threads;
  for (const auto& client : clients) threads.emplace_back([&] { client->Restore(directory.path()); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(Rows(clients[2].get()), wanted);
  for (uint32_t batch = 1; batch < 4; ++batch) {
    for (uint32_t rank = 3; rank-- > 0;) Push(clients[rank].get(), ShareOf(batch, rank));
  }
  ExpectNear(Rows(clients[0].get()), RowsOfOne(3, 4));
}

TEST(WorkersTest, AllConnectAnewAfterALostServer) {
  const TestDirectory directory;
  ServerOptions base;
  base.storage = {"pmem_libpmem", directory.path(), 0, true, 3};
  std::vector<float> wanted;
  {
    const Cluster cluster(1, "", "", base);
    const auto clients = JoinAll(cluster, 2, Sync());
    for (uint32_t rank = 0; rank < 2; ++rank) Push(clients[rank].get(), ShareOf(0, rank));
    clients[1]->Checkpoint(1, true);
    wanted = Rows(clients[0].get());
    for (uint32_t rank = 0; rank < 2; ++rank) Push(clients[rank].get(), ShareOf(1, rank));
  }
  const Cluster cluster(1, "", "", base);
  const auto clients = JoinAll(cluster, 2, Sync());
  auto first = std::async(std::launch::async, [&] { return clients[0]->Recover(std::nullopt); });
  AwaitStat(*cluster.servers[0], "/workers/0/waiting/going_back", 1);
  EXPECT_EQ(clients[1]->Recover(1), 1U);
  EXPECT_EQ(first.get(), 1U);
  EXPECT_EQ(Rows(clients[0].get()), wanted);
  for (uint32_t rank = 0; rank < 2; ++rank) Push(clients[rank].get(), ShareOf(1, rank));
  ExpectNear(Rows(clients[0].get()), RowsOfOne(2, 2));
}

TEST(WorkersTest, AllMustGoBackToTheSame) {
  const TestDirectory directory;
  const Cluster cluster(1);
  const auto clients = JoinAll(cluster, 2, Sync(true, 0.2));
  clients[0]->Save(directory.path());
  EXPECT_NE(MessageOfLost([&] {
              clients[0]->Restore(directory.path());
            }).find("for worker 1 of 2 to go back to a checkpoint too"),
            std::string::npos);
  std::filesystem::create_directory(directory.file("other"));
  const auto patient = JoinAll(cluster, 2, Sync());
  auto first = std::async(std::launch::async,
                          [&] { EXPECT_THROW(patient[0]->Restore(directory.path()), CheckpointError); });
  EXPECT_THROW(patient[1]->Restore(directory.file("other")), CheckpointError);
  first.get();
}

TEST(WorkersTest, FilesOverTheWireAreSentOnce) {
  const TestDirectory directory;
  const TestDirectory scratch;
  const Cluster cluster(2, "", scratch.path());
  const auto clients = JoinAll(cluster, 2, Sync());
  for (uint32_t rank = 0; rank < 2; ++rank) Push(clients[rank].get(), ShareOf(0, rank));
  clients[1]->Save(directory.path());
  const std::vector<float> wanted = Rows(clients[0].get());
  for (uint32_t rank = 0; rank < 2; ++rank) Push(clients[rank].get(), ShareOf(1, rank));
  std::thread first([&] { clients[0]->Restore(directory.path()); });
  clients[1]->Restore(directory.path());
  first.join();
  EXPECT_EQ(Rows(clients[1].get()), wanted);
}

TEST(WorkersTest, TheOthersContinueIfOnLostSaysSo) {
  const TestDirectory directory;
  const Cluster cluster(2);
  auto clients = JoinAll(cluster, 3, Sync(false));
  for (uint32_t rank = 0; rank < 3; ++rank) Push(clients[rank].get(), ShareOf(0, rank));
  clients[0]->Save(directory.path());
  Push(clients[0].get(), ShareOf(1, 0));
  Push(clients[1].get(), ShareOf(1, 1));
  auto waiting = std::async(std::launch::async, [&] { return Rows(clients[0].get()); });
  AwaitStat(*cluster.servers[0], "/workers/0/waiting/pulls", 1);
  clients[2].reset();
  EXPECT_EQ(waiting.get(), Rows(clients[1].get()));
  for (uint32_t rank = 0; rank < 2; ++rank) Push(clients[rank].get(), ShareOf(2, rank));
  (void)Rows(clients[0].get());
  EXPECT_EQ(cluster.servers[0]->Stats()["tables"][0]["version"], 3);

  // It takes its place again at a checkpoint.
  clients[2] = Join(cluster, 2, 3, Sync(false));
  EXPECT_NE(MessageOfLost([&] { Push(clients[2].get(), ShareOf(3, 2)); }).find("was away"),
            std::string::npos);
  std::vector<std::thread> threads;
  for (const auto& client : clients) threads.emplace_back([&] { client->Restore(directory.path()); });
  for (std::thread& thread : threads) thread.join();
  for (uint32_t rank = 0; rank < 3; ++rank) Push(clients[rank].get(), ShareOf(1, rank));
  ExpectNear(Rows(clients[0].get()), RowsOfOne(3, 2));
}

TEST(WorkersTest, AWorkerThatLeavesIsNotLost) {
  const Cluster cluster(1);
  auto clients = JoinAll(cluster, 2, Sync());
  Push(clients[0].get(), ShareOf(0, 0));
  clients[0]->Leave();  // its last share is held still
  clients[0].reset();
  for (uint32_t batch = 0; batch < 3; ++batch) Push(clients[1].get(), ShareOf(batch, 1));
  (void)Rows(clients[1].get());
  const nlohmann::json stats = cluster.servers[0]->Stats();
  EXPECT_EQ(stats["tables"][0]["version"], 3);
  EXPECT_EQ(stats["workers"][0]["left"], 1);
  clients[1]->Leave();
  EXPECT_THROW(Push(clients[1].get(), ShareOf(3, 1)), SpecError);
  clients[1].reset();
  AwaitLess(*cluster.servers[0], "/connections/open", 0);
  EXPECT_TRUE(cluster.servers[0]->Stats()["workers"].empty());
}

TEST(WorkersTest, ThePushThatLeftMayCompleteTheBatch) {
  const Cluster cluster(1);
  const auto clients = JoinAll(cluster, 2, Sync());
  Push(clients[0].get(), ShareOf(0, 0));
  auto waiting = std::async(std::launch::async, [&] { return Rows(clients[0].get()); });
  AwaitStat(*cluster.servers[0], "/workers/0/waiting/pulls", 1);
  clients[1]->Leave();
  (void)waiting.get();
  EXPECT_EQ(cluster.servers[0]->Stats()["tables"][0]["version"], 1);
}

TEST(WorkersTest, AsynchronousPushesApplyOnArrival) {
  const Cluster cluster(1);
  const auto clients = JoinAll(cluster, 2, Async(std::nullopt, false));
  const std::vector<float> before = Rows(clients[1].get());
  for (uint32_t batch = 0; batch < 3; ++batch) Push(clients[0].get(), ShareOf(batch, 0));
  EXPECT_NE(Rows(clients[1].get()), before);
  EXPECT_EQ(cluster.servers[0]->Stats()["tables"][0]["version"], 3);
}

TEST(WorkersTest, StalenessIsBounded) {
  const Cluster cluster(1);
  auto clients = JoinAll(cluster, 2, Async(1, false));
  for (uint32_t batch = 0; batch < 2; ++batch) Push(clients[0].get(), ShareOf(batch, 0));
  auto waiting = std::async(std::launch::async, [&] { return Rows(clients[0].get()); });
  AwaitStat(*cluster.servers[0], "/workers/0/waiting/pulls", 1);
  Push(clients[1].get(), ShareOf(0, 1));
  (void)waiting.get();
  Push(clients[0].get(), ShareOf(2, 0));
  waiting = std::async(std::launch::async, [&] { return Rows(clients[0].get()); });
  AwaitStat(*cluster.servers[0], "/workers/0/waiting/pulls", 1);
  clients[1].reset();
  (void)waiting.get();
  // A worker that comes back begins beside the others.
  clients[1] = Join(cluster, 1, 2, Async(1, false));
  (void)Rows(clients[0].get());
  Push(clients[1].get(), ShareOf(3, 1));
}

TEST(WorkersTest, ALostWorkerStopsAsynchronousOnesToo) {
  const Cluster cluster(1);
  auto clients = JoinAll(cluster, 2, Async(std::nullopt));
  Push(clients[0].get(), ShareOf(0, 0));
  clients[1].reset();
  AwaitStat(*cluster.servers[0], "/workers/0/lost", 1);
  EXPECT_NE(MessageOfLost([&] { Push(clients[0].get(), ShareOf(1, 0)); }).find("worker 1 of 2 was lost"),
            std::string::npos);
  (void)Rows(clients[0].get());  // what is there can be read and saved
}

TEST(WorkersTest, WorkersWithOtherSettingsAreRefused) {
  const Cluster cluster(1);
  const auto clients = JoinAll(cluster, 2, Sync());
  EXPECT_THROW((void)Join(cluster, 1, 3, Sync()), SpecError);
  EXPECT_THROW((void)Join(cluster, 1, 2, Sync(false)), SpecError);
  EXPECT_THROW((void)Join(cluster, 1, 2, Async(std::nullopt)), SpecError);
  EXPECT_THROW((void)Join(cluster, 2, 2, Sync()), SpecError);
  // Somebody who is no worker reads, but does not write.
  const auto reader = Join(cluster, 0, 1, {});
  (void)Rows(reader.get());
  EXPECT_THROW(Push(reader.get(), ShareOf(0, 0)), SpecError);
  EXPECT_THROW(reader->Restore("/nowhere"), SpecError);
  // Learning rates of one batch.
  Push(clients[0].get(), ShareOf(0, 0), 0.1);
  EXPECT_THROW(Push(clients[1].get(), ShareOf(0, 1), 0.2), SpecError);
  EXPECT_THROW(Push(clients[1].get(), ShareOf(0, 1), -1), SpecError);
  Push(clients[1].get(), ShareOf(0, 1), 0.1);
  (void)Rows(clients[0].get());
  // A rank that two say they have.
  const auto second = Join(cluster, 1, 2, Sync());
  EXPECT_NE(MessageOfLost([&] { (void)Rows(clients[1].get()); }).find("has taken the place"),
            std::string::npos);
}

TEST(WorkersTest, OnlyTheSenderOfABadGradientFails) {
  const Cluster cluster(1);
  const auto clients = JoinAll(cluster, 2, Sync());
  Share bad = ShareOf(0, 1);
  bad.narrow[3] = std::numeric_limits<float>::infinity();
  Push(clients[0].get(), ShareOf(0, 0));
  EXPECT_THROW(Push(clients[1].get(), bad), GradientError);
  Push(clients[1].get(), ShareOf(0, 1));
  (void)Rows(clients[0].get());
  // Two finite ones whose sum is not: nobody's fault alone, and all are told.
  const Share large = {{1, 2, 3}, std::vector<float>(3 * kWide), std::vector<float>(3, 3e38F)};
  Push(clients[0].get(), large);
  EXPECT_THROW(Push(clients[1].get(), large), GradientError);
  EXPECT_THROW(Push(clients[0].get(), ShareOf(2, 0)), GradientError);
}

TEST(WorkersTest, HeldPushesAreBounded) {
  ServerOptions base;
  base.limits.bytes = 64 << 10;
  const Cluster cluster(1, "", "", base);
  const auto clients = JoinAll(cluster, 3, Sync(false));
  Share large;
  large.ids.resize(1000);
  for (size_t i = 0; i < large.ids.size(); ++i) large.ids[i] = i;
  large.wide.resize(large.ids.size() * kWide);
  large.narrow.resize(large.ids.size());
  Push(clients[0].get(), large);
  try {
    Push(clients[1].get(), large);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("--max-request-bytes"), std::string::npos) << error.what();
  }
  EXPECT_LE(cluster.servers[0]->Stats()["workers"][0]["held"]["bytes"], 64 << 10);
  clients[1]->Leave();
  Push(clients[2].get(), large);  // completes the batch: it need not be held
  (void)Rows(clients[0].get());
  EXPECT_EQ(cluster.servers[0]->Stats()["tables"][0]["version"], 1);
}

// Clients that come, push, wait and vanish at any time; then a whole job still runs.
// A host vanishes, its connection stays open, and the rest starts again as fewer workers.
TEST(WorkersTest, AHigherGenerationTakesAllPlaces) {
  const TestDirectory directory;
  const Cluster cluster(2);
  const auto old = JoinAll(cluster, 3, Sync());
  for (uint32_t rank = 0; rank < 3; ++rank) Push(old[rank].get(), ShareOf(0, rank));
  old[0]->Save(directory.path());
  const std::vector<float> saved = Rows(old[0].get());
  for (uint32_t rank = 0; rank < 2; ++rank) Push(old[rank].get(), ShareOf(1, rank));
  auto waiting = LostLater([&] { (void)Rows(old[0].get()); });
  AwaitStat(*cluster.servers[0], "/workers/0/waiting/pulls", 1);
  EXPECT_THROW(Join(cluster, 0, 2, Sync()), SpecError);  // nobody says that those before are over

  WorkerSpec again = Sync();
  again.generation = 7;
  const auto clients = JoinAll(cluster, 2, again);
  EXPECT_NE(waiting.get().find("has taken the place"), std::string::npos);
  std::thread first([&] { clients[0]->Restore(directory.path()); });
  clients[1]->Restore(directory.path());
  first.join();
  EXPECT_EQ(Rows(clients[0].get()), saved) << "the pushes that were held count no more";
  for (uint32_t rank = 0; rank < 2; ++rank) Push(clients[rank].get(), ShareOf(1, rank));
  const std::vector<float> rows = Rows(clients[0].get());

  // Those of before are not served again, nor do they come back.
  for (const auto& client : old) {
    EXPECT_NE(MessageOfLost([&] { Push(client.get(), ShareOf(2, 0)); }).find("has taken the place"),
              std::string::npos);
    EXPECT_THROW(client->Save(directory.file("old")), WorkerLost);
    EXPECT_THROW(client->Leave(), WorkerLost);
  }
  EXPECT_NE(MessageOfLost([&] { (void)Join(cluster, 2, 3, Sync()); }).find("started again since"),
            std::string::npos);
  EXPECT_EQ(Rows(clients[1].get()), rows);
  EXPECT_EQ(cluster.servers[0]->Stats()["workers"][0]["of"], 2);
}

// Of two workers one may be left, which is then as good as alone.
TEST(WorkersTest, OneWorkerOfAHigherGenerationGoesOnAlone) {
  const TestDirectory directory;
  const Cluster cluster(1);
  const auto old = JoinAll(cluster, 2, Sync());
  for (uint32_t rank = 0; rank < 2; ++rank) Push(old[rank].get(), ShareOf(0, rank));
  old[0]->Save(directory.path());
  WorkerSpec again = Sync();
  again.generation = 1;
  const auto client = Join(cluster, 0, 1, again);
  client->Restore(directory.path());
  for (uint32_t rank = 0; rank < 2; ++rank) Push(client.get(), ShareOf(1, rank));
  EXPECT_THROW(Push(old[1].get(), ShareOf(1, 1)), WorkerLost);
  EXPECT_EQ(cluster.servers[0]->Stats()["tables"][0]["version"], 3);
}

// Whatever the workers of one generation are in the middle of, those of the next begin with nothing of it.
TEST(WorkersTest, GenerationsInAnyOrder) {
  const Cluster cluster(1);
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] {
      std::mt19937_64 random(rank);
      for (uint32_t life = 1; life < 12; ++life) {
        WorkerSpec spec = Sync(life % 2 == 0, 0.05);
        spec.generation = life;
        try {
          const auto client = Join(cluster, rank % (1 + life % 4), 1 + life % 4, spec);
          for (uint64_t batch = random() % 4; batch > 0; --batch) Push(client.get(), ShareOf(0, rank));
        } catch (const WorkerLost&) {  // NOLINT(bugprone-empty-catch): of a later generation, or too late
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  AwaitLess(*cluster.servers[0], "/connections/open", 0);
  WorkerSpec last = Sync();
  last.generation = 12;
  const auto clients = JoinAll(cluster, 2, last);
  for (uint32_t rank = 0; rank < 2; ++rank) Push(clients[rank].get(), ShareOf(0, rank));
  (void)Rows(clients[0].get());
  EXPECT_EQ(cluster.servers[0]->Stats()["workers"][0]["held"]["bytes"], 0);
}

TEST(WorkersTest, WorkersComeAndGo) {
  const Cluster cluster(1);
  for (const bool stop : {true, false}) {
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < 4; ++rank) {
      threads.emplace_back([&, rank] {
        std::mt19937_64 random(rank);
        for (int life = 0; life < 6; ++life) {
          try {
            const auto client = Join(cluster, rank, 4, Sync(stop, 0.05));
            for (uint64_t batch = random() % 4; batch > 0; --batch) Push(client.get(), ShareOf(0, rank));
            if (random() % 4 == 0) client->Leave();
          } catch (const WorkerLost&) {  // NOLINT(bugprone-empty-catch): comes again
          } catch (const SpecError&) {   // NOLINT(bugprone-empty-catch): it had left
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    AwaitLess(*cluster.servers[0], "/connections/open", 0);
    const auto clients = JoinAll(cluster, 2, Sync());
    for (uint32_t rank = 0; rank < 2; ++rank) Push(clients[rank].get(), ShareOf(0, rank));
    (void)Rows(clients[0].get());
    const nlohmann::json workers = cluster.servers[0]->Stats()["workers"];
    ASSERT_EQ(workers.size(), 1U);
    EXPECT_EQ(workers[0]["held"]["bytes"], 0);
  }
}

TEST(WorkerSpecTest, RoundTripAndRefusals) {
  const std::string text = ToJsonText(Async(3, false));
  EXPECT_EQ(ToJsonText(WorkerSpecFromJsonText(text)), text);
  const auto message = [](const std::string& changed) -> std::string {
    try {
      (void)WorkerSpecFromJsonText(changed);
    } catch (const SpecError& error) {
      return error.what();
    }
    return "no error";
  };
  const nlohmann::json good = nlohmann::json::parse(ToJsonText(Sync()));
  const auto with = [&](const char* field, const nlohmann::json& value) {
    nlohmann::json changed = good;
    changed[field] = value;
    return message(changed.dump());
  };
  EXPECT_EQ(message("[]"), "worker: this is not a JSON object");
  EXPECT_EQ(message("{}"), "worker: 'of' is missing");
  EXPECT_EQ(with("rank", 1), "worker: 'rank' is 1; it must be a number from 0 to 0");
  EXPECT_EQ(with("of", 1025), "worker: 'of' is 1025; it must be a number from 1 to 1024");
  EXPECT_EQ(with("mode", "maybe"), "worker: 'mode' is \"maybe\"; it must be 'sync' or 'async'");
  EXPECT_EQ(with("staleness", 2), "worker: 'staleness' is 2; it must be null where the mode is 'sync'");
  EXPECT_EQ(with("wait", 0), "worker: 'wait' is 0; it must be more than 0 and at most 1e6 seconds");
  EXPECT_EQ(with("generation", -1), "worker: 'generation' is -1; it must be a number from 0 to 4294967295");
  EXPECT_FALSE(good.contains("generation")) << "servers that know none take a worker without";
  EXPECT_EQ(WorkerSpecFromJsonText(R"({"rank": 0, "of": 1, "mode": "sync", "on_lost": "stop", "wait": 1,
                                       "staleness": null, "generation": 9})")
                .generation,
            9U);
  EXPECT_EQ(with("colour", 1), "worker: 'colour' is not a field");
}

}  // namespace
}  // namespace oe::workers_test
