// Bad company: what a server refuses, how it counts it, and that it goes on.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/server/test_cluster.h"

namespace oe {
namespace {

using asio::ip::tcp;
using std::chrono::milliseconds;

ServerOptions Impatient() {
  ServerOptions options;
  options.limits.hello = milliseconds(200);
  options.limits.silence = milliseconds(200);
  return options;
}

class Raw {
 public:
  explicit Raw(const Server& server) : socket_(Context()) {
    socket_.connect({asio::ip::address_v4::loopback(), server.port()});
  }
  void Send(const std::string& bytes) { asio::write(socket_, asio::buffer(bytes)); }
  void SayHello() {
    Send(Frame(Op::kHello, EncodeHello({kProtocolVersion, "", ""})));
    Reply();
  }
  std::string Reply() {
    HeaderBytes bytes{};
    asio::read(socket_, asio::buffer(bytes));
    std::string body(DecodeHeader(bytes, kMaxBody).length, '\0');
    asio::read(socket_, asio::buffer(body));
    return body;
  }
  // Until the server closes.
  std::string Rest() {
    std::string rest;
    asio::error_code ignored;
    asio::read(socket_, asio::dynamic_buffer(rest), ignored);
    return rest;
  }
  tcp::socket& socket() { return socket_; }

 private:
  // One for all: each would have three files of its own, and a flood then more than the usual 1,024.
  static asio::io_context& Context() {
    static asio::io_context context;
    return context;
  }

  tcp::socket socket_;
};

std::string PullOf(const std::vector<Key>& keys) {
  Buffer head;
  EncodeBatch({{0, 0, 0}}, {{keys.data(), keys.size()}}, &head);
  return {reinterpret_cast<const char*>(head.data()), head.size()};
}

TEST(RefusalsTest, AReaderChangesNothing) {
  Cluster cluster(2);
  RemoteOptions reading = cluster.remote;
  reading.read_only = true;
  const auto reader = Client::Connect(reading, 1);
  EXPECT_EQ(
      MessageOf<SpecError>([&] { reader->CreateTable(Spec("wide", 9, "adam")); }),
      "table 'wide' does not exist on server 0, and a read-only client makes none: training does (server " +
          cluster.remote.endpoints[0] + ")");
  const auto client = Client::Connect(cluster.remote, 1);
  Train(client.get(), 1);
  EXPECT_THROW(reader->CreateTable(Spec("wide", 8, "adam")), SpecMismatch);
  const uint32_t table = reader->CreateTable(Spec("wide", 9, "adam"));
  const uint64_t rows = cluster.servers[0]->Stats()["tables"][0]["rows"].get<uint64_t>();
  std::vector<Key> ids(2000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = i;  // most have no row
  const auto pulled = reader->Pull({{ids.data(), ids.size()}}, {{table, 0}});
  std::vector<float> mine(ids.size() * 9);
  std::vector<float> of_client(mine.size());
  reader->PullRows(table, ids.data(), ids.size(), mine.data());
  client->PullRows(client->CreateTable(Spec("wide", 9, "adam")), ids.data(), ids.size(), of_client.data());
  EXPECT_EQ(mine, of_client);
  EXPECT_EQ(reader->Keys(table).size(), client->Keys(table).size());
  const std::vector<float> gradients(mine.size());
  const std::string refusal =
      "this client is read-only: it may neither change tables nor have them saved (server " +
      cluster.remote.endpoints[0] + ")";
  const TestDirectory directory;
  EXPECT_EQ(MessageOf<SpecError>([&] { reader->Push(*pulled, {{gradients.data(), ids.size(), 9}}, {0.1}); }),
            refusal);
  EXPECT_EQ(MessageOf<SpecError>([&] { reader->Save(directory.path()); }), refusal);
  EXPECT_EQ(MessageOf<SpecError>([&] { reader->Restore(directory.path()); }), refusal);
  EXPECT_EQ(MessageOf<SpecError>([&] { reader->Checkpoint(1, false); }), refusal);
  EXPECT_EQ(MessageOf<SpecError>([&] { reader->Evict(); }), refusal);
  EXPECT_EQ(MessageOf<SpecError>([&] { reader->Shutdown(); }), refusal);
  EXPECT_EQ(cluster.servers[0]->Stats()["tables"][0]["rows"].get<uint64_t>(), rows);
  EXPECT_EQ(reader->Stats().size(), 2U);
  Train(client.get(), 2);  // the servers go on
}

TEST(RefusalsTest, NoHelloInTime) {
  Cluster cluster(1, "", "", Impatient());
  Raw silent(*cluster.servers[0]);
  Raw half(*cluster.servers[0]);
  half.Send("OEP");
  EXPECT_EQ(silent.Rest() + half.Rest(), "");
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/connections/refused/slow", 2), 2U);
  EXPECT_FALSE(Train(Client::Connect(cluster.remote, 1).get(), 1).empty());
}

TEST(RefusalsTest, HalfAFrame) {
  Cluster cluster(1, "", "", Impatient());
  Raw half_header(*cluster.servers[0]);
  half_header.SayHello();
  half_header.Send(Frame(Op::kStats, "").substr(0, 20));
  Raw half_body(*cluster.servers[0]);
  half_body.SayHello();
  half_body.Send(Frame(Op::kPush, std::string(70'000, 'x'), uint64_t{1} << 30));
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/queue/bytes", 1), uint64_t{1} << 30);
  EXPECT_EQ(half_header.Rest() + half_body.Rest(), "");
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/connections/refused/slow", 2), 2U);
  EXPECT_EQ(AwaitLess(*cluster.servers[0], "/queue/bytes", 0), 0U) << "the memory is free again";
}

TEST(RefusalsTest, ATrickleIsAsGoodAsNothing) {
  Cluster cluster(1, "", "", Impatient());
  Raw trickle(*cluster.servers[0]);
  trickle.SayHello();
  trickle.Send(Frame(Op::kPush, "", uint64_t{1} << 20));
  asio::error_code error;
  while (!error) {
    asio::write(trickle.socket(), asio::buffer("x", 1), error);
    std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/connections/refused/slow", 1), 1U);
}

TEST(RefusalsTest, RepliesThatNobodyReads) {
  Cluster cluster(1, "", "", Impatient());
  const auto client = Client::Connect(cluster.remote, 1);
  client->CreateTable(Spec("t", 1024, "sgd"));
  Raw deaf(*cluster.servers[0]);
  deaf.SayHello();
  deaf.Send(Frame(Op::kPull, PullOf(std::vector<Key>(20'000))));  // 80 MB come back
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/connections/refused/slow", 1), 1U);
  EXPECT_FALSE(Train(client.get(), 1).empty());
  EXPECT_EQ(AwaitLess(*cluster.servers[0], "/queue/bytes", 0), 0U);
}

TEST(RefusalsTest, IdleIsNotSlow) {
  Cluster cluster(1, "", "", Impatient());
  const auto client = Client::Connect(cluster.remote, 1);
  const auto seen = Train(client.get(), 1);
  std::this_thread::sleep_for(milliseconds(700));
  EXPECT_EQ(Train(client.get(), 1).size(), seen.size());
  EXPECT_EQ(cluster.servers[0]->Stats()["connections"]["refused"]["slow"], 0);
}

TEST(RefusalsTest, MoreConnectionsThanTheServerTakes) {
  ServerOptions options;
  options.limits.connections = 2;
  Cluster cluster(1, "", "", options);
  const auto first = Client::Connect(cluster.remote, 1);
  {
    const auto second = Client::Connect(cluster.remote, 1);
    try {
      Client::Connect(cluster.remote, 1);
      FAIL() << "a third connection";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("2 connections already"), std::string::npos) << error.what();
    }
    EXPECT_EQ(cluster.servers[0]->Stats()["connections"]["refused"]["connections"], 1);
  }
  EXPECT_EQ(AwaitLess(*cluster.servers[0], "/connections/open", 1), 1U);
  EXPECT_FALSE(Train(Client::Connect(cluster.remote, 1).get(), 1).empty());
}

TEST(RefusalsTest, AFloodOfConnectionsEndsAndTheServerStays) {
  ServerOptions options;
  options.limits.connections = 8;
  options.limits.hello = milliseconds(500);
  Cluster cluster(1, "", "", options);
  std::vector<std::unique_ptr<Raw>> flood;
  for (int i = 0; i < 300; ++i) flood.push_back(std::make_unique<Raw>(*cluster.servers[0]));
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/connections/refused/connections", 292), 292U);
  EXPECT_LE(cluster.servers[0]->Stats()["connections"]["open"], 8 + 64);
  flood.clear();
  EXPECT_EQ(AwaitLess(*cluster.servers[0], "/connections/open", 0), 0U);
  EXPECT_FALSE(Train(Client::Connect(cluster.remote, 1).get(), 1).empty());
}

// More requests than fit at once: each waits until others are done, none is dropped.
TEST(RefusalsTest, BeyondTheMemoryClientsWait) {
  ServerOptions options;
  options.limits.bytes = uint64_t{1} << 20;
  Cluster cluster(1, "", "", options);
  const auto owner = Client::Connect(cluster.remote, 1);
  owner->CreateTable(Spec("t", 64, "sgd"));
  Raw hog(*cluster.servers[0]);
  hog.SayHello();
  hog.Send(Frame(Op::kPush, std::string(100, 'x'), uint64_t{1} << 21));  // has all of it, and stops half-way
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/queue/bytes", 1), uint64_t{1} << 20);
  std::vector<std::thread> others;
  std::atomic<int> answered{0};
  for (int i = 0; i < 4; ++i) {
    others.emplace_back([&] {
      Raw other(*cluster.servers[0]);
      other.SayHello();
      for (int n = 0; n < 3; ++n) {
        other.Send(Frame(Op::kPull, PullOf(std::vector<Key>(20'000))));
        if (other.Reply().size() == 20'000U * 64 * 4) answered.fetch_add(1);
      }
    });
  }
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/queue/waiting_for_memory", 4), 4U);
  EXPECT_EQ(answered.load(), 0);
  hog.socket().close();
  for (std::thread& other : others) other.join();
  EXPECT_EQ(answered.load(), 12);
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/connections/refused/cut", 1), 1U);
}

// The keys of a table are replies like rows: one that waits for memory does not take it.
TEST(RefusalsTest, KeysWaitForMemoryToo) {
  constexpr size_t kRows = 120'000;
  ServerOptions options;
  options.limits.bytes = uint64_t{1} << 20;
  Cluster cluster(1, "", "", options);
  const auto owner = Client::Connect(cluster.remote, 1);
  owner->CreateTable(Spec("wide", 1024, "sgd"));
  const uint32_t table = owner->CreateTable(Spec("t", 1, "sgd"));
  std::vector<Key> ids(kRows);
  for (size_t i = 0; i < kRows; ++i) ids[i] = i;
  const auto pulled = owner->Pull({{ids.data(), ids.size()}}, {{table, 0}});
  const std::vector<float> gradients(kRows);
  owner->Push(*pulled, {{gradients.data(), kRows, 1}}, {0.1});
  Raw hog(*cluster.servers[0]);
  hog.SayHello();
  hog.socket().set_option(asio::socket_base::receive_buffer_size(64 << 10));  // the system keeps less than it
  hog.Send(Frame(Op::kPull, PullOf(std::vector<Key>(7'000))));  // 28 MB: has all of it, and reads nothing
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/queue/bytes", 1), uint64_t{1} << 20);
  Raw other(*cluster.servers[0]);
  other.SayHello();
  other.Send(Frame(Op::kKeys, EncodeKeysRequest({table, 3})));
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/queue/waiting_for_memory", 1), 1U);
  hog.socket().close();
  const size_t bytes = other.Reply().size();
  EXPECT_GT(bytes, kRows / 16 * sizeof(Key) * 9 / 10);
  EXPECT_LT(bytes, kRows / 16 * sizeof(Key) * 11 / 10);
}

TEST(RefusalsTest, AServerEndsWhileClientsWait) {
  ServerOptions options;
  options.limits.bytes = uint64_t{1} << 20;
  Cluster cluster(1, "", "", options);
  Raw hog(*cluster.servers[0]);
  hog.SayHello();
  hog.Send(Frame(Op::kPush, "", uint64_t{1} << 21));
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/queue/bytes", 1), uint64_t{1} << 20);
  Raw other(*cluster.servers[0]);
  other.SayHello();
  other.Send(Frame(Op::kPush, "", uint64_t{1} << 21));
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/queue/waiting_for_memory", 1), 1U);
  cluster.servers.clear();
  EXPECT_EQ(hog.Rest() + other.Rest(), "");
}

TEST(RefusalsTest, TimesAreCounted) {
  Cluster cluster(1);
  Train(Client::Connect(cluster.remote, 1).get(), 1);
  const nlohmann::json times = cluster.servers[0]->Stats()["times"];
  const auto total = [&times](const char* name) {
    uint64_t sum = 0;
    for (const auto& count : times[name]["counts"]) sum += count.get<uint64_t>();
    return sum;
  };
  EXPECT_EQ(total("pull"), 6U);
  EXPECT_EQ(total("push"), 6U);
  EXPECT_EQ(total("queue_wait"), 14U);  // two tables too
  EXPECT_GT(times["pull"]["sum_seconds"].get<double>(), 0);
  EXPECT_EQ(times["pull"]["bounds"].size() + 1, times["pull"]["counts"].size());
}

}  // namespace
}  // namespace oe
