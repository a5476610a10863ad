// Connections that break: nothing is lost, and nothing is done twice.
#include "oe_runtime/core/server/sessions.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/write.hpp>
#include <atomic>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/server/raw_socket.h"
#include "oe_runtime/core/server/test_cluster.h"
#include "oe_runtime/core/wire/messages.h"

namespace oe::sessions_test {
namespace {

constexpr uint32_t kDim = 4;
constexpr size_t kKeys = 50;
const std::string kToken = "0123456789abcdef";

enum Way : size_t { kToServer, kToClient };

// Passes bytes between clients and a server, and resets a connection where the test says so.
class Proxy {
 public:
  explicit Proxy(uint16_t server) : server_(Loopback(server)) {
    sockaddr_in address = Loopback(0);
    socklen_t size = sizeof address;
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(::listen(listener_, 16), 0);
    (void)::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    accepting_ = std::thread([this] { Accept(); });
  }
  ~Proxy() {
    stops_ = true;
    accepting_.join();
    for (std::thread& thread : passing_) thread.join();
    ::close(listener_);
  }
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  std::string endpoint() const { return "127.0.0.1:" + std::to_string(port_); }
  // Of the connection that passes the last of so many more bytes.
  void CutAfter(Way way, int64_t bytes) { left_.at(way) = bytes; }
  void CutAll() { ++all_; }
  // Of each connection, after so many bytes to the server.
  void CutEach(int64_t bytes) { each_ = bytes; }
  uint64_t cuts() const { return cuts_; }
  uint64_t passed(Way way) const { return passed_.at(way); }

 private:
  static sockaddr_in Loopback(uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
  }

  void Accept() {
    while (!stops_) {
      pollfd ready{listener_, POLLIN, 0};
      if (::poll(&ready, 1, 20) != 1) continue;
      const int client = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      const int server = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (::connect(server, reinterpret_cast<sockaddr*>(&server_), sizeof server_) != 0) {
        ::close(client);
        ::close(server);
        continue;
      }
      passing_.emplace_back([this, client, server] { Pass({client, server}); });
    }
  }

  // By a reset, as of a connection that a firewall has forgotten.
  static void Reset(const std::array<int, 2>& ends) {
    const linger at_once{1, 0};
    for (const int end : ends) {
      (void)::setsockopt(end, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
      ::close(end);
    }
  }

  void Pass(const std::array<int, 2>& ends) {
    const int begun = all_;
    int64_t sent = 0;
    std::array<char, 4096> bytes{};
    while (!stops_) {
      if (all_ != begun) {
        ++cuts_;
        return Reset(ends);
      }
      std::array<pollfd, 2> ready{{{ends[0], POLLIN, 0}, {ends[1], POLLIN, 0}}};
      if (::poll(ready.data(), 2, 5) < 1) continue;
      for (const Way way : {kToServer, kToClient}) {
        if (ready.at(way).revents == 0) continue;
        ssize_t size = ::recv(ends.at(way), bytes.data(), bytes.size(), 0);
        if (size <= 0) {
          ::close(ends[0]);
          ::close(ends[1]);
          return;
        }
        int64_t left = left_.at(way);
        const bool cut = left >= 0 && left < size;
        if (cut) size = left;
        while (left >= 0 && !cut && !left_.at(way).compare_exchange_weak(left, left - size)) {
        }
        if (size > 0) (void)::send(ends.at(1 - way), bytes.data(), static_cast<size_t>(size), MSG_NOSIGNAL);
        passed_.at(way) += static_cast<uint64_t>(size);
        sent += way == kToServer ? size : 0;
        if (each_ >= 0 && sent > each_) {
          ++cuts_;
          return Reset(ends);
        }
        if (!cut) continue;
        left_.at(way) = -1;
        std::this_thread::sleep_for(std::chrono::milliseconds(2));  // a reset overtakes what is unread
        ++cuts_;
        return Reset(ends);
      }
    }
    ::close(ends[0]);
    ::close(ends[1]);
  }

  sockaddr_in server_;
  int listener_ = -1;
  uint16_t port_ = 0;
  std::atomic<bool> stops_{false};
  std::atomic<int> all_{0};
  std::atomic<int64_t> each_{-1};
  std::array<std::atomic<int64_t>, 2> left_{-1, -1};
  std::array<std::atomic<uint64_t>, 2> passed_{0, 0};
  std::atomic<uint64_t> cuts_{0};
  std::vector<std::thread> passing_;
  std::thread accepting_;
};

// Rows that count pushes.
TableSpec Counting() {
  TableSpec spec = Spec("counters", kDim, "sgd");
  spec.initializer.name = "zeros";
  return spec;
}

std::vector<Key> Ids() {
  std::vector<Key> ids(kKeys);
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

void Step(Client* client) {
  const std::vector<Key> ids = Ids();
  const std::vector<float> gradients(kKeys * kDim, -1);
  const auto pulled = client->Pull({{ids.data(), kKeys}}, {{0, 0}});
  client->Push(*pulled, {{gradients.data(), kKeys, kDim}}, {1.0});
}

std::vector<float> Rows(Client* client) {
  std::vector<float> rows(kKeys * kDim);
  client->PullRows(0, Ids().data(), kKeys, rows.data());
  return rows;
}

// Servers, the last behind a proxy.
struct Behind {
  explicit Behind(uint32_t count = 2, const std::string& token = "", const ServerOptions& base = {})
      : cluster(count, token, "", base), proxy(cluster.servers.back()->port()) {
    cluster.remote.endpoints.back() = proxy.endpoint();
  }
  std::unique_ptr<Client> Connect(uint32_t rank = 0, uint32_t of = 1, const WorkerSpec& spec = {}) const {
    RemoteOptions options = cluster.remote;
    options.worker = spec;
    options.worker.rank = rank;
    options.worker.of = of;
    auto client = Client::Connect(options, 1);
    (void)client->CreateTable(Counting());
    return client;
  }
  const Server& server() const { return *cluster.servers.back(); }
  nlohmann::json Connections() const { return server().Stats()["connections"]; }

  Cluster cluster;
  Proxy proxy;
};

void CutEverywhere(Behind* behind, uint64_t sharing = 0) {
  const auto client = behind->Connect();
  Step(client.get());
  float steps = 1;
  int missed = 0;
  for (const Way way : {kToServer, kToClient}) {
    const uint64_t before = behind->proxy.passed(way);
    Step(client.get());
    ++steps;
    const auto bytes = static_cast<int64_t>(behind->proxy.passed(way) - before);
    for (int64_t at = 0; at < bytes; at += at < 60 ? 4 : bytes / 20 + 1) {
      const uint64_t cuts = behind->proxy.cuts();
      behind->proxy.CutAfter(way, at);
      Step(client.get());
      ++steps;
      missed += behind->proxy.cuts() == cuts ? 1 : 0;  // the step that was measured had a busy frame more
      ASSERT_EQ(Rows(client.get()), std::vector<float>(kKeys * kDim, steps)) << way << " " << at;
    }
  }
  EXPECT_LT(missed, 40);
  EXPECT_GE(behind->Connections()["resumed"], behind->proxy.cuts());
  EXPECT_EQ(behind->Connections()["sharing_memory"], sharing);
  EXPECT_EQ(client->torn(), "");
  for (const auto& server : behind->cluster.servers) {
    EXPECT_EQ(server->Stats()["tables"][0]["version"], static_cast<uint64_t>(steps));
  }
}

TEST(SessionsTest, ABreakAtAnyByteCostsNothing) {
  Behind behind;
  behind.cluster.remote.share_memory = false;
  CutEverywhere(&behind);
}

TEST(SessionsTest, NorWithSharedMemory) {
  Behind behind;
  CutEverywhere(&behind, 1);
}

TEST(SessionsTest, NorWithEncryption) {
  ServerOptions options;
  options.tls = TlsMode::kOn;
  Behind behind(2, kToken, options);
  CutEverywhere(&behind);
}

// Whatever else changes something: its reply is lost, and it is done once.
TEST(SessionsTest, OtherRequestsAreServedOnceToo) {
  Behind behind(1);
  const auto client = behind.Connect();
  const std::vector<Key> keys = {1, 2, 3};
  const std::vector<float> rows(keys.size() * kDim, 7);
  const auto lose_reply = [&behind] { behind.proxy.CutAfter(kToClient, 0); };
  lose_reply();
  EXPECT_EQ(client->Assign(0, keys.data(), keys.size(), rows.data(), nullptr).created, 3U);
  lose_reply();
  EXPECT_EQ(client->Erase(0, keys.data(), 2), 2U);
  SharedRequest write{"queue", true, 0, {reinterpret_cast<const uint8_t*>("a"), 1}};
  lose_reply();
  const SharedReply written = client->ExchangeShared(write);
  EXPECT_TRUE(written.written);
  write.version = written.version;
  lose_reply();
  EXPECT_TRUE(client->ExchangeShared(write).written);
  // Also what was refused.
  lose_reply();
  EXPECT_THROW((void)client->Recover(7), CheckpointError);
  EXPECT_EQ(behind.proxy.cuts(), 5U);
}

TEST(SessionsTest, SynchronousWorkersKeepTheirSeats) {
  Behind behind;
  constexpr int kSteps = 60;
  std::vector<std::thread> workers;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    workers.emplace_back([&behind, rank] {
      const auto client = behind.Connect(rank, 2);
      for (int step = 0; step < kSteps; ++step) {
        if (step % 5 == 4 && rank == 0)
          behind.proxy.CutAfter(step % 2 == 0 ? kToServer : kToClient, step * 17);
        if (step % 11 == 10 && rank == 1) behind.proxy.CutAll();  // some while they wait for each other
        Step(client.get());
      }
      EXPECT_EQ(Rows(client.get()), std::vector<float>(kKeys * kDim, 2 * kSteps));
      client->Leave();
    });
  }
  for (std::thread& worker : workers) worker.join();
  EXPECT_GT(behind.proxy.cuts(), 10U);
  EXPECT_EQ(behind.server().Stats()["tables"][0]["version"], kSteps);
}

TEST(SessionsTest, AsynchronousWorkersGoOn) {
  Behind behind;
  WorkerSpec spec;
  spec.synchronous = false;
  spec.staleness = 2;
  constexpr int kSteps = 60;
  std::vector<std::thread> workers;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    workers.emplace_back([&behind, &spec, rank] {
      const auto client = behind.Connect(rank, 2, spec);
      for (int step = 0; step < kSteps; ++step) {
        if (step % 7 == 6) behind.proxy.CutAll();
        Step(client.get());
      }
      client->Leave();
    });
  }
  for (std::thread& worker : workers) worker.join();
  EXPECT_GT(behind.proxy.cuts(), 5U);
  EXPECT_EQ(behind.server().Stats()["tables"][0]["version"], 2 * kSteps);
  EXPECT_EQ(Rows(behind.Connect().get()), std::vector<float>(kKeys * kDim, 2 * kSteps));
}

// One that does not come back is lost after the wait.
TEST(SessionsTest, AWorkerThatStaysAwayIsLost) {
  Behind behind;
  WorkerSpec spec;
  spec.wait = 1;
  const auto first = behind.Connect(0, 2, spec);
  const auto second = behind.Connect(1, 2, spec);
  auto other = std::async(std::launch::async, [&] { Step(second.get()); });
  Step(first.get());
  other.get();
  behind.proxy.CutAll();
  EXPECT_EQ(AwaitStat(behind.server(), "/connections/away", 2), 2U);
  EXPECT_EQ(behind.server().Stats()["workers"][0]["connected"], 2);
  EXPECT_EQ(AwaitLess(behind.server(), "/connections/away", 0), 0U);
  while (!behind.server().Stats()["workers"].empty()) std::this_thread::yield();
  EXPECT_THROW(Step(first.get()), ServerLost);
}

// Where others go on without one that is lost, they do so before their own wait ends.
TEST(SessionsTest, OthersOutlastAWorkerThatStaysAway) {
  Behind behind(1);
  WorkerSpec spec;
  spec.wait = 2;
  spec.stop_when_lost = false;
  const auto away = behind.Connect(1, 2, spec);
  RemoteOptions directly = behind.cluster.remote;
  directly.endpoints = {"127.0.0.1:" + std::to_string(behind.server().port())};
  directly.worker = spec;
  directly.worker.rank = 0;
  directly.worker.of = 2;
  const auto here = Client::Connect(directly, 1);
  (void)here->CreateTable(Counting());
  auto step = std::async(std::launch::async, [&] { Step(away.get()); });
  Step(here.get());
  step.get();
  step = std::async(std::launch::async, [&] { Step(here.get()); });
  EXPECT_EQ(AwaitStat(behind.server(), "/workers/0/held/pushes", 1), 1U);
  behind.proxy.CutAll();
  EXPECT_NO_THROW(step.get());
  EXPECT_EQ(Rows(here.get()), std::vector<float>(kKeys * kDim, 3));
}

// As where something on the way takes no messages of this size.
TEST(SessionsTest, AConnectionThatBreaksEachTimeIsGivenUp) {
  Behind behind(1);
  behind.cluster.remote.share_memory = false;
  behind.cluster.remote.timeout = 1;
  const auto client = behind.Connect();
  Step(client.get());
  behind.proxy.CutEach(600);
  EXPECT_THROW(Step(client.get()), ServerLost);
  EXPECT_GT(behind.proxy.cuts(), 2U);
  EXPECT_LT(behind.proxy.cuts(), 20U);  // with pauses between
}

// The reply has the files, and is too large to be kept.
TEST(SessionsTest, ASaveWhoseReplyIsLostIsNotBegunTwice) {
  Behind behind(1);
  behind.cluster.remote.share_memory = false;
  const auto client = behind.Connect();
  std::vector<Key> keys(10'000);
  std::iota(keys.begin(), keys.end(), 0);
  const std::vector<float> rows(keys.size() * kDim, 1);
  const auto change = [&] { (void)client->Assign(0, keys.data(), keys.size(), rows.data(), nullptr); };
  change();
  const TestDirectory full;
  const TestDirectory first;
  const TestDirectory second;
  (void)client->Save(full.path());
  change();
  Contents contents;
  behind.proxy.CutAfter(kToClient, 100'000);
  try {
    (void)client->Save(first.path(), full.path(), &contents);
    ADD_FAILURE() << "nothing was lost";
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find("its connection broke: save again"), std::string::npos)
        << error.what();
  }
  contents.clear();
  (void)client->Save(second.path(), full.path(), &contents);
  EXPECT_FALSE(contents.empty());
}

// Workers that are started anew find no seats of those whose connections broke.
TEST(SessionsTest, OthersMayTakeThePlacesOfWorkersThatAreAllAway) {
  Behind behind(1);
  const auto step = [&] {
    const auto first = behind.Connect(0, 2);
    const auto second = behind.Connect(1, 2);
    auto other = std::async(std::launch::async, [&] { Step(second.get()); });
    Step(first.get());
    other.get();
    behind.proxy.CutAll();
    EXPECT_GE(AwaitStat(behind.server(), "/connections/away", 2), 2U);  // those of an earlier step count, too
  };
  step();
  step();
}

// A client of before does not ask to be kept.
TEST(SessionsTest, AnOldClientIsLostAtOnce) {
  const Cluster cluster(1);
  const auto greet = [&](asio::ip::tcp::socket* socket, uint32_t rank) {
    socket->connect({asio::ip::address_v4::loopback(), cluster.servers[0]->port()});
    WorkerSpec spec;
    spec.rank = rank;
    spec.of = 2;
    asio::write(*socket, asio::buffer(Frame(Op::kHello, EncodeHello({kVersion6, "", "", ToJsonText(spec)}))));
    return nlohmann::json::parse(ReadReply(socket));
  };
  asio::io_context io;
  std::array<asio::ip::tcp::socket, 2> sockets{asio::ip::tcp::socket(io), asio::ip::tcp::socket(io)};
  EXPECT_TRUE(greet(&sockets[0], 0)["sessions"].get<bool>());
  (void)greet(&sockets[1], 1);
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/workers/0/connected", 2), 2U);
  sockets[0].set_option(asio::socket_base::linger(true, 0));
  sockets[0].close();
  EXPECT_EQ(AwaitLess(*cluster.servers[0], "/workers/0/connected", 1), 1U);
}

TEST(SessionsTest, AServerThatWasStartedAgainKnowsNoneOfThem) {
  const Cluster cluster(1);
  const std::string reply = Talk(
      cluster.servers[0]->port(),
      Frame(Op::kHello, EncodeHello({kProtocolVersion, "", "", "", "00112233445566778899aabbccddeeff"})));
  EXPECT_NE(reply.find("this server knows nothing of the connection that broke: it was started again"),
            std::string::npos)
      << reply;
}

}  // namespace
}  // namespace oe::sessions_test
