// A push that is in some tables or servers only is not made durable.

#include <gtest/gtest.h>

#include <array>
#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/write.hpp>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "oe_runtime/core/client/client.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/server/service.h"
#include "oe_runtime/core/server/test_cluster.h"

namespace oe::torn_test {
namespace {

constexpr uint32_t kDim = 64;
constexpr size_t kKeys = 100;
constexpr uint64_t kRoom = uint64_t{1536} << 10;  // bytes, of a server that has no room for a row of `Huge`

TableSpec Wide() { return Spec("wide", kDim, "sgd"); }
TableSpec Huge() {
  TableSpec spec = Spec("huge", 65536, "adam");
  spec.dtype = "float64";
  return spec;
}

// Two servers with pools, of which the first has no room for a row of one table.
class TornTest : public testing::Test {
 protected:
  explicit TornTest(uint64_t room_of_second = 0) {
    for (uint32_t i = 0; i < 2; ++i) {
      ServerOptions options;
      options.shard = {i, 2};
      options.threads = 2;
      options.storage = {"pmem_libpmem", directory_.path() + "/" + std::to_string(i),
                         i == 0 ? kRoom : room_of_second, false, 3};
      servers_.push_back(std::make_unique<Server>(options));
      remote_.endpoints.push_back("127.0.0.1:" + std::to_string(servers_.back()->port()));
    }
    remote_.timeout = 60;
    saved_ = directory_.path() + "/saved";
    std::filesystem::create_directory(saved_);
  }

  std::unique_ptr<Client> Connect(uint32_t rank = 0, uint32_t of = 1) const {
    RemoteOptions options = remote_;
    options.worker.rank = rank;
    options.worker.of = of;
    auto client = Client::Connect(options, 1);
    (void)client->CreateTable(Wide());
    (void)client->CreateTable(Huge());
    return client;
  }

  static std::vector<Key> Ids() {
    std::vector<Key> ids(kKeys);
    std::iota(ids.begin(), ids.end(), 0);
    return ids;
  }

  static std::shared_ptr<PulledBatch> Pull(Client* client) {
    const std::vector<Key> ids = Ids();
    return client->Pull({{ids.data(), kKeys}}, {{0, 0}});
  }

  static void Push(Client* client, PulledBatch* pulled) {
    const std::vector<float> gradients(kKeys * kDim, 1);
    client->Push(*pulled, {{gradients.data(), kKeys, kDim}}, {1.0});
  }
  static void Push(Client* client) { Push(client, Pull(client).get()); }

  // What only the second server has room for.
  static void PushHuge(Client* client) {
    const std::vector<Key> ids = {1, 2, 3, 4, 5, 6, 7, 8};
    const std::vector<double> gradients(ids.size() * Huge().dim, 1);
    const auto pulled = client->Pull({{ids.data(), ids.size()}}, {{1, 0}});
    client->Push(*pulled, {{gradients.data(), ids.size(), Huge().dim}}, {1.0});
  }

  static std::vector<float> Rows(Client* client) {
    std::vector<float> rows(kKeys * kDim);
    client->PullRows(0, Ids().data(), kKeys, rows.data());
    return rows;
  }

  void ExpectTorn(Client* client) const {
    EXPECT_THROW(Push(client), TornError);
    EXPECT_THROW(client->Save(saved_), TornError);
    EXPECT_THROW(client->Checkpoint(7, true), TornError);
    EXPECT_THROW(client->Evict(), TornError);
    (void)Rows(client);
  }

  // All that a client sends to push to one server.
  static std::string PushTo(uint32_t server) {
    Key key = 0;
    while (server_of(key, 2, false) != server) ++key;
    Buffer head;
    EncodeBatch({{0, 0, 1.0}}, {{&key, 1}}, &head);
    const std::vector<float> gradient(kDim, 1);
    std::string push(head.as<char>(), head.size());
    push.append(reinterpret_cast<const char*>(gradient.data()), kDim * sizeof(float));
    const std::string spec = nlohmann::json(Complete(Wide())).dump();
    return Frame(Op::kHello, EncodeHello({kProtocolVersion, "", ""})) + Frame(Op::kCreateTable, spec) +
           Frame(Op::kPush, push);
  }

  // As a client that ends after it has sent its push to the first server.
  void PushToOne() const {
    const std::string reply = Talk(servers_[0]->port(), PushTo(0));
    ASSERT_EQ(reply[reply.size() - kHeaderBytes + 6], static_cast<char>(Op::kPush)) << reply;
  }

  // As a client that ends after it has sent an assignment to the first server, with the number of the change,
  // or with none, as clients of 0.2.0.
  void AssignToOne(uint64_t change) const {
    Key key = 0;
    while (server_of(key, 2, false) != 0) ++key;
    Buffer head;
    EncodeRowsRequest({0, false, {&key, 1}, {}, change}, &head);
    const std::vector<float> row(kDim, 1);
    std::string assign(head.as<char>(), head.size());
    assign.append(reinterpret_cast<const char*>(row.data()), kDim * sizeof(float));
    const std::string spec = nlohmann::json(Complete(Wide())).dump();
    const std::string reply =
        Talk(servers_[0]->port(), Frame(Op::kHello, EncodeHello({kProtocolVersion, "", ""})) +
                                      Frame(Op::kCreateTable, spec) + Frame(Op::kAssign, assign));
    ASSERT_NE(reply.find("created"), std::string::npos) << reply;
  }

  const TestDirectory directory_;
  std::vector<std::unique_ptr<Server>> servers_;
  RemoteOptions remote_;
  std::string saved_;
};

TEST_F(TornTest, AfterAPushThatOneServerRefusedOnlyGoingBackHelps) {
  const auto client = Connect();
  Push(client.get());
  client->Checkpoint(1, true);
  const std::vector<float> wanted = Rows(client.get());
  EXPECT_THROW(PushHuge(client.get()), StorageError);
  ExpectTorn(client.get());
  EXPECT_EQ(client->torn(), "") << "all servers know it";
  ExpectTorn(Connect().get());
  EXPECT_EQ(client->Checkpoints(), std::vector<uint64_t>{1});
  EXPECT_EQ(client->Recover({}), 1U);
  EXPECT_EQ(Rows(client.get()), wanted);
  Push(client.get());
  client->Checkpoint(2, true);
  client->Save(saved_);
  EXPECT_THROW(PushHuge(client.get()), StorageError);
  client->Restore(saved_);
  Push(client.get());
}

TEST_F(TornTest, APushThatEveryServerRefusesTearsNothing) {
  const auto client = Connect();
  Push(client.get());
  std::vector<float> gradients(kKeys * kDim, 1);
  gradients[5 * kDim] = std::numeric_limits<float>::infinity();
  const auto pulled = Pull(client.get());
  EXPECT_THROW(client->Push(*pulled, {{gradients.data(), kKeys, kDim}}, {1.0}), GradientError);
  gradients[5 * kDim] = 1;
  EXPECT_THROW(client->Push(*pulled, {{gradients.data(), kKeys, kDim}}, {-1.0}), SpecError);
  Push(client.get());
  client->Checkpoint(1, true);
}

TEST_F(TornTest, APushOfAClientThatEndedInTheMiddleIsNoticed) {
  const auto client = Connect();
  Push(client.get());
  client->Checkpoint(1, true);
  const std::vector<float> wanted = Rows(client.get());
  PushToOne();
  EXPECT_THROW(client->Checkpoint(2, true), TornError);
  ExpectTorn(client.get());
  client->Recover({});
  EXPECT_EQ(Rows(client.get()), wanted);
  Push(client.get());
  client->Checkpoint(2, true);
  PushToOne();
  EXPECT_THROW(client->Save(saved_), TornError);
}

// Clients of 0.2.0 send nothing to servers without keys: what they have done cannot be compared, but what
// came after the next checkpoint.
TEST_F(TornTest, AnAssignmentOfAClientThatEndedInTheMiddleIsNoticed) {
  const auto client = Connect();
  Push(client.get());
  AssignToOne(0);
  client->Save(saved_);
  client->Checkpoint(1, true);
  const std::vector<float> wanted = Rows(client.get());
  AssignToOne(7);
  EXPECT_THROW(client->Save(saved_), TornError);
  ExpectTorn(client.get());
  client->Recover({});
  EXPECT_EQ(Rows(client.get()), wanted);
  client->Save(saved_);
  AssignToOne(7);
  EXPECT_THROW(client->Checkpoint(2, true), TornError);
}

// Longer than a save waits for a push that does not come.
TEST_F(TornTest, APushThatIsStillOnItsWayTearsNothing) {
  const auto client = Connect();
  Push(client.get());
  PushToOne();
  const std::string rest = PushTo(1);
  asio::io_context io;
  asio::ip::tcp::socket socket(io);
  socket.connect({asio::ip::address_v4::loopback(), servers_[1]->port()});
  asio::write(socket, asio::buffer(rest.data(), rest.size() - 1));
  auto checkpoint = std::async(std::launch::async, [&] { client->Checkpoint(1, true); });
  EXPECT_EQ(checkpoint.wait_for(std::chrono::seconds(4)), std::future_status::timeout);
  asio::write(socket, asio::buffer(rest.data() + rest.size() - 1, 1));
  EXPECT_NO_THROW(checkpoint.get());
  Push(client.get());
}

// And each of them is in what is saved on all servers, or on none.
TEST_F(TornTest, OtherClientsPushesDoNotKeepFromSaving) {
  const auto client = Connect();
  std::atomic<bool> stop{false};
  std::vector<std::future<void>> others;
  for (int i = 0; i < 2; ++i) {
    others.push_back(std::async(std::launch::async, [&] {
      const auto other = Connect();
      while (!stop) Push(other.get());
    }));
  }
  for (int i = 1; i <= 20; ++i) {
    std::set<uint64_t> versions;
    for (const nlohmann::json& entry : client->Save(saved_)) {
      if (entry.at("table") == "wide") versions.insert(entry.at("version").get<uint64_t>());
    }
    EXPECT_EQ(versions.size(), 1U);
    EXPECT_NO_THROW(client->Checkpoint(static_cast<uint64_t>(i), true));
  }
  stop = true;
  for (auto& other : others) other.get();
  EXPECT_NO_THROW(client->Save(saved_));
  EXPECT_EQ(client->Recover({}), 20U);
  EXPECT_NO_THROW(client->Checkpoint(21, true)) << "the servers have the same pushes in their checkpoints";
  client->Restore(saved_);
}

// A half push of a client that has gone is not hidden by the pushes of others.
TEST_F(TornTest, APushOfAClientThatEndedInTheMiddleIsNoticedBesideOthers) {
  const auto client = Connect();
  const auto other = Connect();
  Push(client.get());
  PushToOne();
  std::atomic<bool> stop{false};
  auto pushes = std::async(std::launch::async, [&] {
    try {
      while (!stop) Push(other.get());
    } catch (const TornError&) {
      return;
    }
  });
  EXPECT_THROW(client->Save(saved_), TornError);
  stop = true;
  pushes.get();
}

// Whose connection is open, but who does not go on.
TEST_F(TornTest, ASaverThatStopsHoldsPushesForATimeOnly) {
  const auto client = Connect();
  const auto pulled = Pull(client.get());
  asio::io_context io;
  asio::ip::tcp::socket saver(io);
  saver.connect({asio::ip::address_v4::loopback(), servers_[0]->port()});
  const auto ask = [&](const std::string& frame) {
    asio::write(saver, asio::buffer(frame));
    std::array<char, 1000> reply{};
    const size_t size = saver.read_some(asio::buffer(reply));
    return std::string(reply.data(), size);
  };
  (void)ask(Frame(Op::kHello, EncodeHello({kProtocolVersion, "", ""})));
  const std::string opened = ask(Frame(Op::kCut, R"({"open": true})"));
  ASSERT_NE(opened.find("\"open\":true"), std::string::npos) << opened;
  auto push = std::async(std::launch::async, [&] { Push(client.get(), pulled.get()); });
  EXPECT_EQ(push.wait_for(std::chrono::milliseconds(500)), std::future_status::timeout);
  EXPECT_NO_THROW(push.get());
  const std::string late = ask(Frame(Op::kCheckpoint, R"({"id": 1, "wait": false, "cut": true})"));
  EXPECT_NE(late.find("save again"), std::string::npos) << late;
}

TEST_F(TornTest, ASaverThatEndsHoldsNoPush) {
  const auto client = Connect();
  const auto pulled = Pull(client.get());
  EXPECT_NE(Talk(servers_[0]->port(), Frame(Op::kHello, EncodeHello({kProtocolVersion, "", ""})) +
                                          Frame(Op::kCut, R"({"open": true})"))
                .find("\"open\":true"),
            std::string::npos);
  EXPECT_NO_THROW(Push(client.get(), pulled.get()));
}

TEST_F(TornTest, ABatchOfWorkersThatOneServerCouldNotApply) {
  const auto first = Connect(0, 2);
  const auto second = Connect(1, 2);
  const auto both = [&](const std::function<void(Client*)>& work) {
    auto one = std::async(std::launch::async, [&] { work(first.get()); });
    work(second.get());
    one.get();
  };
  both([](Client* client) { Push(client); });
  first->Checkpoint(1, true);
  std::atomic<int> full{0};
  both([&](Client* client) {
    try {
      PushHuge(client);  // is answered where the other worker's comes later, to the server without room
    } catch (const StorageError&) {
      ++full;
    } catch (const TornError& error) {  // the other worker told the servers before they answered this one
      EXPECT_NE(std::string(error.what()).find("is full"), std::string::npos) << error.what();
    }
  });
  EXPECT_EQ(full, 1);
  EXPECT_THROW(first->Checkpoint(2, true), Error);
  EXPECT_THROW(first->Save(saved_), Error);
  EXPECT_THROW(second->Save(saved_), Error);
  EXPECT_EQ(first->Checkpoints(), std::vector<uint64_t>{1});
  both([](Client* client) { EXPECT_EQ(client->Recover({}), 1U); });
  both([](Client* client) { Push(client); });
  first->Checkpoint(2, true);
}

TEST_F(TornTest, AClientThatConnectsAnewTellsTheServers) {
  remote_.timeout = 5;
  auto client = Connect();
  Push(client.get());
  client->Checkpoint(1, true);
  client->Tear("the last push broke off");
  ExpectTorn(client.get());
  EXPECT_THROW(Push(Connect().get()), TornError);
  client->Recover({});
  Push(client.get());
  const auto pulled = Pull(client.get());
  servers_[1]->Stop();
  EXPECT_THROW(Push(client.get(), pulled.get()), ServerLost);
  client->Close();
  EXPECT_NE(client->torn().find("a push broke off"), std::string::npos) << client->torn();
}

// No server has room for a row of one table.
class FullTest : public TornTest {
 protected:
  FullTest() : TornTest(kRoom) {}
};

TEST_F(FullTest, APushThatNoServerHasRoomForTearsNothing) {
  const auto client = Connect();
  Push(client.get());
  EXPECT_THROW(PushHuge(client.get()), StorageError);
  Push(client.get());
  EXPECT_NO_THROW(client->Checkpoint(1, true));
  EXPECT_EQ(client->Evict(), 0U);
}

// The class that the version before knows.
TEST_F(FullTest, AClientOfTheVersionBeforeReadsAStorageError) {
  Key key = 0;
  while (server_of(key, 2, false) != 0) ++key;
  Buffer head;
  EncodeBatch({{0, 0, 1.0}}, {{&key, 1}}, &head);
  const std::string push =
      std::string(head.as<char>(), head.size()) + std::string(Huge().dim * sizeof(double), '\0');
  for (const uint16_t version : {kOldestProtocol, kProtocolVersion}) {
    const std::string reply =
        Talk(servers_[0]->port(), Frame(Op::kHello, EncodeHello({version, "", "other"})) +
                                      Frame(Op::kCreateTable, nlohmann::json(Complete(Huge())).dump()) +
                                      Frame(Op::kPush, push));
    const size_t text = reply.find("is full");
    ASSERT_NE(text, std::string::npos) << reply;
    const size_t error = reply.rfind("OEP\n", text);
    EXPECT_EQ(reply[error + 6], static_cast<char>(Op::kError));
    const ErrorCode code = version == kOldestProtocol ? ErrorCode::kStorage : ErrorCode::kStorageFull;
    EXPECT_EQ(reply[error + kHeaderBytes], static_cast<char>(code)) << reply.substr(error);
  }
}

// What policies do before a row is refused tears nothing: without an eviction there would be no room again.
TEST(TornStoreTest, ATableWithPoliciesWithoutRoom) {
  const TestDirectory directory;
  const auto client = Client::InProcess({"pmem_libpmem", directory.path(), kRoom, false, 3}, 1, 1);
  TableSpec spec = Huge();
  spec.eviction = {{"global_step", {{"steps_to_live", 5}}, ""}};
  (void)client->CreateTable(spec);
  const Key key = 1;
  const std::vector<double> gradient(spec.dim, 1);
  const auto pulled = client->Pull({{&key, 1}}, {{0, 0}});
  EXPECT_THROW(client->Push(*pulled, {{gradient.data(), 1, spec.dim}}, {1.0}), StorageFull);
  EXPECT_EQ(client->Evict(), 0U);
  EXPECT_NO_THROW(client->Checkpoint(1, true));
}

TEST(TornStoreTest, InOneProcess) {
  const TestDirectory directory;
  const auto client = Client::InProcess({"pmem_libpmem", directory.path(), kRoom, false, 3}, 2, 1);
  (void)client->CreateTable(Wide());
  (void)client->CreateTable(Huge());
  const std::vector<Key> ids = {1, 2, 3, 4, 5, 6, 7, 8};
  const std::vector<float> wide(ids.size() * kDim, 1);
  const std::vector<double> huge(ids.size() * Huge().dim, 1);
  const auto push = [&](bool both) {
    std::vector<std::pair<uint32_t, uint32_t>> lookups = {{0, 0}};
    std::vector<GradientView> gradients = {{wide.data(), ids.size(), kDim}};
    if (both) lookups.push_back({1, 0});
    if (both) gradients.insert(gradients.begin(), {huge.data(), ids.size(), Huge().dim});
    client->Push(*client->Pull({{ids.data(), ids.size()}}, lookups), gradients, {1.0});
  };
  push(false);
  client->Checkpoint(1, true);
  EXPECT_THROW(push(true), StorageError);
  EXPECT_THROW(push(false), TornError);
  EXPECT_THROW(client->Checkpoint(2, true), TornError);
  EXPECT_EQ(client->Recover({}), 1U);
  push(false);
  client->Checkpoint(2, true);
}

}  // namespace
}  // namespace oe::torn_test
