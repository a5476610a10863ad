// Operations that take long: whom they keep waiting, and whom not. A named pipe in the place of a file holds
// a save or a restore in the middle, for as long as a test likes.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/read.hpp>
#include <asio/write.hpp>
#include <atomic>
#include <chrono>
#include <csignal>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

#include "oe_runtime/core/common/file.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/server/slots.h"
#include "oe_runtime/core/server/task_threads.h"
#include "oe_runtime/core/server/test_cluster.h"

namespace oe::stalls_test {
namespace {

constexpr uint32_t kDim = 64;
constexpr size_t kRows = 4000;  // a mebibyte: more than a pipe takes
constexpr int kPushers = 8;     // more than a server of two threads has slots, and threads

std::unique_ptr<Client> Connect(const Cluster& cluster, const std::string& job, uint32_t* table = nullptr) {
  RemoteOptions options = cluster.remote;
  options.job = job;
  auto client = Client::Connect(options, 1);
  const uint32_t id = client->CreateTable(Spec("t", kDim, "sgd"));
  if (table != nullptr) *table = id;
  return client;
}

void PushRows(Client* client, size_t rows) {
  std::vector<Key> keys(rows);
  for (size_t i = 0; i < rows; ++i) keys[i] = i;
  const std::vector<float> gradients(rows * kDim, 1.0F);
  const auto pulled = client->Pull({{keys.data(), rows}}, {{0, 0}});
  client->Push(*pulled, {{gradients.data(), rows, kDim}}, {0.1});
}

uint64_t VersionOf(const Server& server, const std::string& job) {
  const nlohmann::json stats = server.Stats();
  for (const nlohmann::json& table : stats["tables"]) {
    if (table["job"] == job) return table["version"];
  }
  return 0;
}

// A save of the only table of job "a" that does not end before this does.
class HeldSave {
 public:
  explicit HeldSave(const Cluster& cluster) {
    const std::string pipe = directory_.file("server-0-of-1.t.oet.tmp");
    if (mkfifo(pipe.c_str(), 0600) != 0) throw std::runtime_error("no pipe");
    std::signal(SIGPIPE, SIG_IGN);  // the save is to fail, when nobody reads any more
    reader_ = File(::open(pipe.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
    saver_ = Connect(cluster, "a");
    save_ = std::async(std::launch::async, [this] { EXPECT_ANY_THROW(saver_->Save(directory_.path())); });
    // It writes, so it has the table; it cannot have written all.
    pollfd wait{reader_.get(), POLLIN, 0};
    EXPECT_EQ(poll(&wait, 1, 60'000), 1);
  }
  ~HeldSave() { Release(); }
  void Release() {
    if (!save_.valid()) return;
    reader_ = File();  // it cannot be written any more
    save_.get();
  }

 private:
  const TestDirectory directory_;
  File reader_;
  std::unique_ptr<Client> saver_;
  std::future<void> save_;
};

// All that must go on, whatever job "a" waits for; `reads`: also the pulls of that job.
void OthersGoOn(const Cluster& cluster, bool reads = true) {
  std::vector<float> row(kDim);
  const Key key = 7;
  if (reads) {
    RemoteOptions options = cluster.remote;
    options.job = "a";
    options.read_only = true;
    const auto reader = Client::Connect(options, 1);
    const uint32_t table = reader->CreateTable(Spec("t", kDim, "sgd"));
    for (int i = 0; i < 3; ++i) reader->PullRows(table, &key, 1, row.data());
  }
  const auto other = Connect(cluster, "b");
  PushRows(other.get(), 50);
  const TestDirectory directory;
  EXPECT_EQ(other->Save(directory.path()).size(), 1U);
  other->Restore(directory.path());
  EXPECT_FALSE(other->Stats().empty());
}

TEST(StallsTest, ASaveStopsNeitherReadersNorOtherJobs) {
  Cluster cluster(1);
  PushRows(Connect(cluster, "a").get(), kRows);
  HeldSave save(cluster);
  std::vector<std::future<void>> pushers;
  pushers.reserve(kPushers);
  for (int i = 0; i < kPushers; ++i) {
    pushers.push_back(std::async(std::launch::async, [&] { PushRows(Connect(cluster, "a").get(), 10); }));
  }
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/queue/requests", kPushers), uint64_t{kPushers});
  OthersGoOn(cluster);
  EXPECT_EQ(VersionOf(*cluster.servers[0], "a"), 1U);
  save.Release();
  for (auto& pusher : pushers) pusher.get();
  EXPECT_EQ(VersionOf(*cluster.servers[0], "a"), 1U + kPushers);
  EXPECT_EQ(AwaitLess(*cluster.servers[0], "/queue/requests", 0), 0U);
}

TEST(StallsTest, PushesOfSeveralWorkersThatWaitForASaveHoldNoSlotEither) {
  Cluster cluster(1);
  PushRows(Connect(cluster, "a").get(), kRows);
  RemoteOptions options = cluster.remote;
  options.job = "a";
  options.worker.of = 1;
  options.worker.generation = 1;
  options.worker.synchronous = true;
  options.worker.wait = 60;
  const auto worker = Client::Connect(options, 1);
  worker->CreateTable(Spec("t", kDim, "sgd"));
  HeldSave save(cluster);
  auto push = std::async(std::launch::async, [&] { PushRows(worker.get(), 10); });
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/workers/0/held/pushes", 1), 1U);
  OthersGoOn(cluster);
  EXPECT_EQ(VersionOf(*cluster.servers[0], "a"), 1U);
  save.Release();
  push.get();
  EXPECT_EQ(VersionOf(*cluster.servers[0], "a"), 2U);
}

TEST(StallsTest, ARestoreStopsNeitherReadersNorOtherJobs) {
  Cluster cluster(1);
  const auto owner = Connect(cluster, "a");
  PushRows(owner.get(), kRows);
  const TestDirectory directory;
  const std::string leased = directory.file("server-0-of-1.t.oet");
  // Whoever opens the file waits until the lease is given back, at most 45 s.
  std::signal(SIGIO, SIG_IGN);
  const File lease(::open(leased.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (::fcntl(lease.get(), F_SETLEASE, F_WRLCK) != 0) GTEST_SKIP() << "this file system has no leases";
  const Key key = 1;
  const std::vector<float> gradient(kDim);
  std::atomic<bool> over{false};
  auto restore = std::async(std::launch::async, [&] {
    return MessageOf<CheckpointError>([&] { Connect(cluster, "a")->Restore(directory.path()); });
  });
  std::vector<std::future<void>> pushers;
  pushers.reserve(kPushers);
  for (int i = 0; i < kPushers; ++i) {
    pushers.push_back(std::async(std::launch::async, [&] {
      const auto client = Connect(cluster, "a");
      const auto pulled = client->Pull({{&key, 1}}, {{0, 0}});
      try {  // as soon as the restore has begun, they wait
        while (!over) client->Push(*pulled, {{gradient.data(), 1, kDim}}, {0.1});
      } catch (const CheckpointError&) {  // pulled before the restore began
        return;
      }
    }));
  }
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/queue/requests", kPushers), uint64_t{kPushers});
  OthersGoOn(cluster);
  ASSERT_EQ(::fcntl(lease.get(), F_SETLEASE, F_UNLCK), 0);  // the server can open it now
  EXPECT_NE(restore.get().find(leased), std::string::npos);
  over = true;
  for (auto& pusher : pushers) pusher.get();
  EXPECT_EQ(AwaitLess(*cluster.servers[0], "/queue/requests", 0), 0U);
}

// A server that ends lets what is under way end, and forgets who waits.
TEST(StallsTest, AServerEndsWhileRequestsWait) {
  Cluster cluster(1);
  cluster.remote.timeout = 60;
  PushRows(Connect(cluster, "a").get(), kRows);
  auto save = std::make_unique<HeldSave>(cluster);
  auto push = std::async(std::launch::async, [&] {
    try {
      PushRows(Connect(cluster, "a").get(), 10);
    } catch (const ServerLost&) {  // if it ends before
      return;
    }
  });
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/queue/requests", 1), 1U);
  auto stop = std::async(std::launch::async, [&] { cluster.servers[0]->Stop(); });
  save.reset();
  stop.get();
  push.get();
}

// ---- "busy"

class Raw {
 public:
  Raw(const Server& server, uint16_t version, const std::string& job) {
    socket_.connect({asio::ip::address_v4::loopback(), server.port()});
    Send(Frame(Op::kHello, EncodeHello({version, "", job})));
    (void)Next();
    Send(Frame(Op::kCreateTable, nlohmann::json(Spec("t", kDim, "sgd")).dump()));
    while (Next().op == Op::kBusy) {
    }
  }
  void Send(const std::string& bytes) { asio::write(socket_, asio::buffer(bytes)); }
  void SendPush() {
    const Key key = 3;
    const std::vector<float> gradient(kDim, 1.0F);
    Buffer head;
    EncodeBatch({{0, 0, 0.1}}, {{&key, 1}}, &head);
    Send(Frame(Op::kPush, std::string(head.as<char>(), head.size()) +
                              std::string(reinterpret_cast<const char*>(gradient.data()), kDim * 4)));
  }
  FrameHeader Next() {
    HeaderBytes bytes{};
    asio::read(socket_, asio::buffer(bytes));
    const FrameHeader header = DecodeHeader(bytes, kMaxBody);
    body.resize(header.length);
    asio::read(socket_, asio::buffer(body));
    return header;
  }
  std::string body;

 private:
  asio::io_context io_;
  asio::ip::tcp::socket socket_{io_};
};

TEST(BusyTest, ClientsThatUnderstandItAreToldAndOthersAreNot) {
  Cluster cluster(1);
  PushRows(Connect(cluster, "a").get(), kRows);
  HeldSave save(cluster);
  Raw now(*cluster.servers[0], kVersion6, "a");
  Raw before(*cluster.servers[0], kVersion6 - 1, "a");
  before.SendPush();
  now.SendPush();
  for (int i = 0; i < 3; ++i) {
    const FrameHeader header = now.Next();
    EXPECT_EQ(header.op, Op::kBusy);
    EXPECT_EQ(header.request, 1U);
    EXPECT_NE(now.body.find("save"), std::string::npos) << now.body;
  }
  save.Release();
  FrameHeader header = now.Next();
  while (header.op == Op::kBusy) header = now.Next();
  EXPECT_EQ(header.op, Op::kPush);
  EXPECT_EQ(before.Next().op, Op::kPush);
  EXPECT_EQ(VersionOf(*cluster.servers[0], "a"), 3U);
}

// A server that says hello, that it is busy for longer than the client's patience, and then the reply.
TEST(BusyTest, AClientWaitsForAServerThatSaysSo) {
  asio::io_context io;
  asio::ip::tcp::acceptor acceptor(io, {asio::ip::address_v4::loopback(), 0});
  const uint16_t port = acceptor.local_endpoint().port();
  auto server = std::async(std::launch::async, [&] {
    asio::ip::tcp::socket socket(io);
    acceptor.accept(socket);
    const auto read = [&] {
      HeaderBytes bytes{};
      asio::read(socket, asio::buffer(bytes));
      const FrameHeader header = DecodeHeader(bytes, kMaxBody);
      std::string body(header.length, '\0');
      asio::read(socket, asio::buffer(body));
      return header;
    };
    const auto reply = [&](Op op, uint64_t request, const std::string& body) {
      const HeaderBytes header = EncodeHeader({op, request, body.size()});
      asio::write(socket, std::array<asio::const_buffer, 2>{asio::buffer(header), asio::buffer(body)});
    };
    const FrameHeader hello = read();
    reply(
        Op::kHello, hello.request,
        R"({"index": 0, "count": 1, "storage": "dram", "is_pmem": false, "pid": 1, "checkpoint_dir": false})");
    const FrameHeader asked = read();
    for (int i = 0; i < 15; ++i) {
      reply(Op::kBusy, asked.request, R"({"for": "a test"})");
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
    reply(asked.op, asked.request, "[4]");
  });
  RemoteOptions options;
  options.endpoints = {"127.0.0.1:" + std::to_string(port)};
  options.timeout = 2;
  const auto client = Client::Connect(options, 1);
  EXPECT_EQ(client->Checkpoints(), std::vector<uint64_t>{4});
  server.get();
}

// ---- Parts

TEST(SlotsTest, NoOwnerTakesAllSlots) {
  Slots slots(3, 2);
  Slots::Owner one;
  Slots::Owner two;
  std::vector<int> order;
  std::vector<Slots::Share> later;
  const auto note = [&](int who) {
    return [&order, &later, who](Slots::Share share) {
      order.push_back(who);
      later.push_back(std::move(share));
    };
  };
  auto first = slots.Ask(&one, note(-1));
  auto second = slots.Ask(&one, note(-1));
  ASSERT_TRUE(first && second);
  EXPECT_FALSE(slots.Ask(&one, note(1)));
  auto other = slots.Ask(&two, note(-1));  // overtakes it
  ASSERT_TRUE(other);
  EXPECT_FALSE(slots.Ask(&two, note(2)));
  EXPECT_EQ(slots.waiting(), 2U);
  other->Release();
  EXPECT_EQ(order, std::vector<int>{2});
  first->Release();
  EXPECT_EQ(order, (std::vector<int>{2, 1}));
  EXPECT_EQ(slots.used(), 3U);
  slots.Close();
  later.clear();
  second->Release();
  EXPECT_EQ(slots.used(), 0U);
  EXPECT_FALSE(slots.Ask(&one, note(3)));
}

TEST(TaskThreadsTest, TasksThatWaitForEachOtherAllRun) {
  constexpr int kTasks = 5;
  TaskThreads threads;
  for (int round = 0; round < 3; ++round) {
    std::promise<void> go;
    const std::shared_future<void> gone = go.get_future().share();
    std::atomic<int> waiting{0};
    std::array<std::promise<void>, kTasks> done;
    for (std::promise<void>& one : done) {
      threads.Run([&waiting, &go, &one, gone] {
        if (++waiting == kTasks) go.set_value();
        gone.wait();
        one.set_value();
      });
    }
    for (std::promise<void>& one : done) one.get_future().wait();
  }
  std::atomic<bool> ran{false};
  threads.Run([&] { ran = true; });
  threads.Stop();
  EXPECT_TRUE(ran);
}

}  // namespace
}  // namespace oe::stalls_test
