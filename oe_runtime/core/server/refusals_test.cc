// Bad company: what a server refuses, how it counts it, and that it goes on.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/read.hpp>
#include <asio/write.hpp>
#include <chrono>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/server/raw_socket.h"
#include "oe_runtime/core/server/test_cluster.h"

namespace oe::refusals_test {
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
  explicit Raw(const Server& server, const char* from = "127.0.0.1") : socket_(Context()) {
    socket_.open(tcp::v4());
    socket_.bind({asio::ip::make_address(from), 0});
    socket_.connect({asio::ip::address_v4::loopback(), server.port()});
  }
  void Send(const std::string& bytes) { asio::write(socket_, asio::buffer(bytes)); }
  void SayHello(const std::string& worker = "") {
    Send(Frame(Op::kHello, EncodeHello({kProtocolVersion, "", "", worker})));
    Reply();
  }
  std::string Reply() { return ReadReply(&socket_); }
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

TEST(RefusalsTest, AMissingHelloIsRefused) {
  Cluster cluster(1, "", "", Impatient());
  Raw silent(*cluster.servers[0]);
  Raw half(*cluster.servers[0]);
  half.Send("OEP");
  EXPECT_EQ(silent.Rest() + half.Rest(), "");
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/connections/refused/slow", 2), 2U);
  EXPECT_FALSE(Train(Client::Connect(cluster.remote, 1).get(), 1).empty());
}

TEST(RefusalsTest, AHalfSentFrameIsRefused) {
  Cluster cluster(1, "", "", Impatient());
  Raw half_header(*cluster.servers[0]);
  half_header.SayHello();
  half_header.Send(Frame(Op::kStats, "").substr(0, 20));
  Raw half_body(*cluster.servers[0]);
  half_body.SayHello();
  half_body.Send(Frame(Op::kPush, std::string(70'000, 'x'), uint64_t{1} << 30));
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/queue/bytes", 1), uint64_t{1} << 20) << "not what it announced";
  EXPECT_EQ(half_header.Rest() + half_body.Rest(), "");
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/connections/refused/slow", 2), 2U);
  EXPECT_EQ(AwaitLess(*cluster.servers[0], "/queue/bytes", 0), 0U) << "the memory is free again";
}

TEST(RefusalsTest, ASlowRequestIsRefused) {
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

// A peer must go on in proportion to the memory that it holds, not only by a few bytes.
TEST(RefusalsTest, ASlowLargeRequestIsRefused) {
  Cluster cluster(1, "", "", Impatient());
  Raw trickle(*cluster.servers[0]);
  trickle.SayHello();
  const std::string some(size_t{16} << 10, 'x');
  asio::error_code error;
  // A slow machine may be told already here.
  asio::write(trickle.socket(),
              asio::buffer(Frame(Op::kPush, std::string(size_t{64} << 20, 'x'), uint64_t{1} << 30)), error);
  while (!error) {
    asio::write(trickle.socket(), asio::buffer(some), error);
    std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/connections/refused/slow", 1), 1U);
}

TEST(RefusalsTest, AStalledPeerIsRefusedSoonerUnderMemoryPressure) {
  ServerOptions options;
  options.limits.bytes = uint64_t{4} << 20;
  options.limits.silence = std::chrono::seconds(4);
  Cluster cluster(1, "", "", options);
  Raw small(*cluster.servers[0]);
  small.SayHello();
  small.Send(Frame(Op::kPush, "x", 1000));
  Raw large(*cluster.servers[0]);
  large.SayHello();
  large.Send(Frame(Op::kPush, std::string(size_t{3} << 20, 'x'), uint64_t{8} << 20));
  EXPECT_EQ(large.Rest(), "");
  EXPECT_EQ(cluster.servers[0]->Stats()["connections"]["refused"]["slow"], 1) << "the small one came first";
  EXPECT_EQ(small.Rest(), "");
}

TEST(RefusalsTest, PeersThatAnnounceMuchDoNotStopOthers) {
  Cluster cluster(1);
  Raw first(*cluster.servers[0]);
  Raw second(*cluster.servers[0]);
  for (Raw* hog : {&first, &second}) {
    hog->SayHello();
    hog->Send(Frame(Op::kPush, std::string(1024, 'x'), kMaxBody));
  }
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/queue/bytes", uint64_t{2} << 20), uint64_t{2} << 20);
  cluster.remote.share_memory = false;
  EXPECT_FALSE(Train(Client::Connect(cluster.remote, 1).get(), 1).empty());
}

// What comes in several steps, as there is little memory, is what was sent.
TEST(RefusalsTest, ARequestLargerThanTheMemoryIsServed) {
  constexpr size_t kRows = 20'000;
  ServerOptions options;
  options.limits.bytes = uint64_t{1} << 20;
  Cluster cluster(1, "", "", options);
  cluster.remote.share_memory = false;
  std::vector<std::vector<float>> seen;
  for (const auto& client : {Client::InProcess({}, 1, 2), Client::Connect(cluster.remote, 1)}) {
    const uint32_t table = client->CreateTable(Spec("t", 64, "adagrad"));
    std::vector<Key> ids(kRows);
    for (size_t i = 0; i < kRows; ++i) ids[i] = i;
    const auto pulled = client->Pull({{ids.data(), ids.size()}}, {{table, 0}});
    std::vector<float> gradients(kRows * 64);
    for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = static_cast<float>(i % 977) / 100.0F;
    client->Push(*pulled, {{gradients.data(), kRows, 64}}, {0.1});
    seen.emplace_back(gradients.size());
    client->PullRows(table, ids.data(), ids.size(), seen.back().data());
  }
  EXPECT_EQ(seen[0], seen[1]);
}

TEST(RefusalsTest, ARequestIsAsLargeAsItsOperationNeeds) {
  Cluster cluster(1);
  const auto refusal = [&](Op op, const std::string& body, const std::string& worker) {
    Raw raw(*cluster.servers[0]);
    raw.SayHello(worker);
    raw.Send(Frame(op, body, body.empty() ? uint64_t{8} << 20 : body.size()));
    return raw.Reply().substr(sizeof(uint32_t));
  };
  EXPECT_EQ(refusal(Op::kCreateTable, "", kReader),
            "a request of 8388608 bytes for operation 2; at most 65536 are allowed");
  EXPECT_EQ(refusal(Op::kSave, "", ""),
            "a request of 8388608 bytes for operation 5; at most 4194304 are allowed");
  EXPECT_EQ(refusal(Op::kRestore, std::string(size_t{1} << 20, '['), ""),
            "the request nests more than 16 JSON arrays and objects");
  EXPECT_NE(refusal(Op::kRestore, "{\"directories\": [\"x[[[[[[[[[[[[[[[[\\\"[[[\"]}", "")
                .find("is not an absolute path"),
            std::string::npos)
      << "brackets in a text";
  EXPECT_EQ(cluster.servers[0]->Stats()["connections"]["refused"]["malformed"], 4);
}

TEST(RefusalsTest, EntriesWithoutKeys) {
  Cluster cluster(1);
  const auto client = Client::Connect(cluster.remote, 1);
  client->CreateTable(Spec("t", 4, "sgd"));
  const auto reply = [&](size_t count, uint32_t said) {
    Buffer head;
    EncodeBatch(std::vector<BatchEntry>(count), {{nullptr, 0}}, &head);
    std::string body(reinterpret_cast<const char*>(head.data()), head.size());
    std::memcpy(body.data() + 4, &said, sizeof said);
    Raw raw(*cluster.servers[0]);
    raw.SayHello();
    raw.Send(Frame(Op::kPull, body));
    return raw.Reply();
  };
  EXPECT_EQ(reply(kMaxEntries, kMaxEntries), "");
  EXPECT_EQ(reply(10, kMaxEntries + 1).substr(sizeof(uint32_t)),
            "batch: 65537 entries and 1 blocks; at most 65536 of each are allowed");
  Buffer head;
  EXPECT_THROW(EncodeBatch(std::vector<BatchEntry>(kMaxEntries + 1), {}, &head), SpecError);
}

TEST(RefusalsTest, APeerThatReadsNoReplyIsRefused) {
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

TEST(RefusalsTest, AnIdleConnectionStays) {
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
    } catch (const TooManyConnections& error) {
      EXPECT_EQ(std::string(error.what()),
                "too many connections: the server has its limit of 2; end clients that are not needed, or "
                "start it with more --max-connections (server " +
                    cluster.remote.endpoints[0] + ")");
    }
    EXPECT_GE(cluster.servers[0]->Stats()["connections"]["refused"]["connections"], 1) << "for each try";
  }
  EXPECT_EQ(AwaitLess(*cluster.servers[0], "/connections/open", 1), 1U);
  EXPECT_FALSE(Train(Client::Connect(cluster.remote, 1).get(), 1).empty());
}

TEST(RefusalsTest, AFloodOfConnectionsEndsAndTheServerStays) {
  ServerOptions options;
  options.limits.connections = 8;
  options.limits.hello = std::chrono::minutes(5);
  Cluster cluster(1, "", "", options);
  std::vector<std::unique_ptr<Raw>> flood;
  for (int i = 0; i < 300; ++i) flood.push_back(std::make_unique<Raw>(*cluster.servers[0]));
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/connections/refused/connections", 284), 284U);
  EXPECT_EQ(AwaitLess(*cluster.servers[0], "/connections/open", 16), 16U);
  EXPECT_EQ(cluster.servers[0]->Stats()["connections"]["before_hello"], 16);
  const std::string told = flood.front()->Rest();
  EXPECT_NE(told.find("too many connections that do not say hello"), std::string::npos) << "the oldest";
  EXPECT_FALSE(Train(Client::Connect(cluster.remote, 1).get(), 1).empty()) << "while they are there";
  flood.clear();
  EXPECT_EQ(AwaitLess(*cluster.servers[0], "/connections/open", 0), 0U);
  EXPECT_FALSE(Train(Client::Connect(cluster.remote, 1).get(), 1).empty());
}

TEST(RefusalsTest, AFloodFromOneHostLeavesOthersAlone) {
  ServerOptions options;
  options.limits.arrivals = 4;
  Cluster cluster(1, "", "", options);
  Raw slow(*cluster.servers[0]);
  std::vector<std::unique_ptr<Raw>> flood;
  for (int i = 0; i < 50; ++i) flood.push_back(std::make_unique<Raw>(*cluster.servers[0], "127.0.0.2"));
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/connections/refused/connections", 47), 47U);
  slow.SayHello();  // throws if it was closed
  EXPECT_EQ(AwaitLess(*cluster.servers[0], "/connections/before_hello", 3), 3U);
}

// More requests than fit at once: each waits until others are done, none is dropped.
TEST(RefusalsTest, ClientsWaitForMemory) {
  ServerOptions options;
  options.limits.bytes = uint64_t{1} << 20;
  Cluster cluster(1, "", "", options);
  const auto owner = Client::Connect(cluster.remote, 1);
  owner->CreateTable(Spec("t", 64, "sgd"));
  Raw stalled(*cluster.servers[0]);
  stalled.SayHello();
  stalled.Send(Frame(Op::kPush, std::string(100, 'x'), uint64_t{1} << 21));  // has all of it, and stops
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/queue/bytes", 1), uint64_t{1} << 20);
  Raw hog(*cluster.servers[0]);
  hog.SayHello();
  hog.Send(Frame(Op::kPush, std::string(100, 'x'), uint64_t{1} << 21));  // goes beyond it
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/queue/bytes", uint64_t{1} << 21), uint64_t{1} << 21);
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
  EXPECT_EQ(answered.load(), 12) << "though the first still has all of it";
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
  hog.Send(Frame(Op::kPull, PullOf(std::vector<Key>(7'000))));  // 28 MB: more than there is; reads nothing
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/queue/bytes", 1), 7'000U * 1024 * sizeof(float));
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
  Raw second(*cluster.servers[0]);
  second.SayHello();
  second.Send(Frame(Op::kPush, "", uint64_t{1} << 21));
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/queue/bytes", uint64_t{1} << 21), uint64_t{1} << 21);
  Raw other(*cluster.servers[0]);
  other.SayHello();
  other.Send(Frame(Op::kPush, "", uint64_t{1} << 21));
  EXPECT_EQ(AwaitStat(*cluster.servers[0], "/queue/waiting_for_memory", 1), 1U);
  cluster.servers.clear();
  EXPECT_EQ(hog.Rest() + second.Rest() + other.Rest(), "");
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
}  // namespace oe::refusals_test
