// A server and clients in one process, so that the sanitizers see both sides.
#include "oe_runtime/core/server/server.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "oe_runtime/core/client/client.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/server/test_cluster.h"
#include "oe_runtime/core/wire/frame.h"

namespace oe::server_test {
namespace {

TEST(ServerTest, ServersGiveTheRowsOfOneProcess) {
  const auto local = Client::InProcess({}, 1, 2);
  const std::vector<float> wanted = Train(local.get(), 5);
  for (const uint32_t count : {1U, 3U}) {
    Cluster cluster(count);
    const auto client = Client::Connect(cluster.remote, 2);
    EXPECT_EQ(Train(client.get(), 5), wanted);
  }
}

TEST(ServerTest, ManyClientsAtOnce) {
  Cluster cluster(2);
  std::vector<std::thread> workers;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    workers.emplace_back([&cluster, seed] {
      const auto client = Client::Connect(cluster.remote, 1);
      Train(client.get(), seed);
      client->Stats();
    });
  }
  for (std::thread& worker : workers) worker.join();
  EXPECT_EQ(cluster.servers[1]->Stats()["pushes"]["requests"], 4 * 6);
}

TEST(ServerTest, SaveAndRestoreIntoAnotherCount) {
  const std::string directory = testing::TempDir() + "oe_server_test_" + std::to_string(getpid());
  std::filesystem::create_directory(directory);
  Cluster three(3);
  const auto writer = Client::Connect(three.remote, 1);
  Train(writer.get(), 1);
  EXPECT_EQ(writer->Save(directory).size(), 6U);
  Cluster two(2);
  const auto reader = Client::Connect(two.remote, 1);
  const uint32_t wide = reader->CreateTable(Spec("wide", 9, "adam"));
  reader->CreateTable(Spec("narrow", 1, "ftrl"));
  reader->Restore(directory);
  std::vector<Key> keys(300);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  std::vector<float> first(keys.size() * 9);
  std::vector<float> second(keys.size() * 9);
  writer->PullRows(wide, keys.data(), keys.size(), first.data());
  reader->PullRows(wide, keys.data(), keys.size(), second.data());
  EXPECT_EQ(first, second);
  // The slots too: both go on alike.
  EXPECT_EQ(Train(writer.get(), 2), Train(reader.get(), 2));
  std::filesystem::remove_all(directory);
}

TEST(ServerTest, WrongToken) {
  Cluster cluster(1, "secret");
  cluster.remote.token = "guess";
  EXPECT_THROW(Client::Connect(cluster.remote, 1), AuthError);
  cluster.remote.token = "";
  EXPECT_THROW(Client::Connect(cluster.remote, 1), AuthError);
  cluster.remote.token = "secret";
  EXPECT_NO_THROW(Client::Connect(cluster.remote, 1));
  EXPECT_EQ(cluster.servers[0]->Stats()["connections"]["refused"]["token"], 2);
}

TEST(ServerTest, LostServerIsToldAtOnceAndEveryTimeAfter) {
  Cluster cluster(2);
  const auto client = Client::Connect(cluster.remote, 1);
  Train(client.get(), 1);
  cluster.servers[1].reset();
  for (int i = 0; i < 2; ++i) {
    try {
      client->Stats();
      FAIL() << "no error";
    } catch (const ServerLost& error) {
      EXPECT_EQ(error.endpoint(), cluster.remote.endpoints[1]);
    }
  }
}

TEST(ServerTest, ShutdownTellsTheOwner) {
  Cluster cluster(1);
  const auto client = Client::Connect(cluster.remote, 1);
  client->Shutdown();
  // The owner is told once the reply has gone out, so perhaps a moment after the client has it.
  pollfd stop{cluster.servers[0]->stop_fd(), POLLIN, 0};
  ASSERT_EQ(poll(&stop, 1, 60'000), 1);
  uint64_t count = 0;
  EXPECT_EQ(read(cluster.servers[0]->stop_fd(), &count, sizeof count), static_cast<ssize_t>(sizeof count));
}

TEST(ServerTest, OutsideLoopbackNeedsAToken) {
  ServerOptions options;
  options.host = "0.0.0.0";
  EXPECT_THROW(Server{options}, SpecError);
  options.token = "secret";
  EXPECT_THROW(Server{options}, SpecError);  // too short to encrypt with
  options.token = "a secret of some length";
  EXPECT_TRUE(Server{options}.encrypted());
  options.tls = TlsMode::kOff;
  EXPECT_FALSE(Server{options}.encrypted());
}

TEST(ServerTest, RowsOfServersAreOfTheirTablesDtype) {
  ServerOptions options;
  options.storage.weights_only = true;
  options.storage.row_precision = "int8";
  EXPECT_EQ(MessageOf<SpecError>([&] { Server server(options); }),
            "storage: 'row_precision' is for tables of one process, and servers' rows are of the dtype of "
            "their tables");
}

// The version of each frame of a stream.
std::vector<int> VersionsOf(const std::string& stream) {
  std::vector<int> versions;
  for (size_t at = 0; at < stream.size();) {
    HeaderBytes bytes{};
    std::memcpy(bytes.data(), stream.data() + at, bytes.size());
    const FrameHeader header = DecodeHeader(bytes, kMaxBody);
    versions.push_back(header.version);
    at += kHeaderBytes + header.length;
  }
  return versions;
}

TEST(ServerTest, AClientIsAnsweredInItsVersion) {
  const Cluster cluster(1);
  const uint16_t port = cluster.servers[0]->port();
  const auto frame = [](uint16_t version, Op op, const std::string& body) {
    const HeaderBytes header = EncodeHeader({op, 1, body.size(), version});
    return std::string(header.begin(), header.end()) + body;
  };
  const auto hello = [&](uint16_t version) { return frame(5, Op::kHello, EncodeHello({version, "", ""})); };
  // One of the version before; the error ends the connection.
  std::string replies = Talk(port, hello(5) + frame(5, Op::kCheckpoints, "") + frame(5, Op::kPull, "x"));
  EXPECT_EQ(VersionsOf(replies), (std::vector<int>{5, 5, 5}));
  EXPECT_NE(replies.find("\"version\":5"), std::string::npos) << replies;
  replies = Talk(port, hello(6) + frame(6, Op::kCheckpoints, "") + frame(6, Op::kPull, "x"));
  EXPECT_EQ(VersionsOf(replies), (std::vector<int>{5, 6, 6}));
  EXPECT_NE(replies.find("\"version\":6"), std::string::npos) << replies;
  // Of one that is newer, the newest that this side speaks.
  EXPECT_NE(Talk(port, hello(7)).find("\"version\":6"), std::string::npos);
  EXPECT_NE(Talk(port, hello(4)).find("hello: version 4 is below 5"), std::string::npos);
  EXPECT_EQ(VersionsOf(Talk(port, frame(9, Op::kHello, ""))), std::vector<int>{5})
      << "what every client reads";
}

TEST(ServerTest, BadFramesEndTheirConnectionOnly) {
  Cluster cluster(1);
  const uint16_t port = cluster.servers[0]->port();
  const std::string hello = Frame(Op::kHello, EncodeHello({kProtocolVersion, "", ""}));
  std::mt19937_64 random(11);
  std::string garbage(5000, '\0');
  for (char& c : garbage) c = static_cast<char>(random());

  EXPECT_EQ(Talk(port, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), "");
  EXPECT_EQ(Talk(port, garbage), "");
  EXPECT_EQ(Talk(port, ""), "");
  EXPECT_EQ(Talk(port, hello.substr(0, 10)), "");
  EXPECT_NE(Talk(port, Frame(Op::kStats, "")).find("the first request must be a hello"), std::string::npos);
  EXPECT_NE(Talk(port, Frame(Op::kHello, "", kMaxHelloBody + 1)).find("at most 4096"), std::string::npos);
  EXPECT_NE(Talk(port, Frame(Op::kHello, "x")).find("hello: version needs 2 bytes"), std::string::npos);
  std::string other_version = hello;
  other_version[4] = 7;
  EXPECT_NE(Talk(port, other_version).find("protocol version 7"), std::string::npos);
  EXPECT_NE(Talk(port, hello + Frame(Op::kPull, garbage)).find("batch:"), std::string::npos);
  EXPECT_NE(Talk(port, hello + Frame(Op::kPush, "", kMaxBody + 1)).find("at most"), std::string::npos);
  EXPECT_NE(Talk(port, hello + Frame(Op::kHello, "")).find("not expected"), std::string::npos);
  EXPECT_NE(Talk(port, hello + Frame(Op::kSave, "{\"directory\": \"relative\"}")).find("absolute"),
            std::string::npos);
  EXPECT_NE(Talk(port, hello + Frame(Op::kCreateTable, "{")).find("JSON"), std::string::npos);
  Talk(port, hello + Frame(Op::kPush, garbage, 1000000));  // ends in the middle of the body

  const nlohmann::json stats = cluster.servers[0]->Stats();
  const nlohmann::json& refused = stats["connections"]["refused"];
  EXPECT_EQ(refused["foreign"], 2);
  EXPECT_EQ(refused["version"], 1);
  EXPECT_EQ(refused["malformed"], 7);
  EXPECT_EQ(refused["cut"], 2);
  EXPECT_TRUE(stats["tables"].empty());
  const auto client = Client::Connect(cluster.remote, 1);
  EXPECT_FALSE(Train(client.get(), 1).empty());
}

TEST(ServerTest, KeyOfAnotherServerChangesNothing) {
  Cluster cluster(1);
  ThreadPool pool(1);
  Store store(Storage::Open({}), {0, 2}, &pool);
  const uint32_t id = store.CreateTable(Spec("t", 1, "sgd"));
  std::vector<Key> keys;
  for (Key key = 0; keys.size() < 2; ++key) {
    if (server_of(key, 2, false) == keys.size()) keys.push_back(key);  // one of ours, one that is not
  }
  const std::vector<float> gradients(2, 1.0F);
  const uint32_t other = store.CreateTable(Spec("other", 1, "sgd"));
  EXPECT_THROW(store.Push({{other, keys.data(), 1, gradients.data(), 0.1},
                           {id, keys.data(), 2, gradients.data(), 0.1}}),
               ProtocolError);
  EXPECT_EQ(store.Stats()["tables"][0]["version"], 0);
  EXPECT_EQ(store.Stats()["tables"][1]["version"], 0);
}

TEST(TableFileNameTest, NamesAreSafeAndDistinct) {
  EXPECT_EQ(TableFileName("emb-1_a", {0, 3}), "server-0-of-3.emb-1_a.oet");
  EXPECT_EQ(TableFileName("../a/b.c", {1, 2}), "server-1-of-2.%2E%2E%2Fa%2Fb%2Ec.oet");
}

}  // namespace
}  // namespace oe::server_test
