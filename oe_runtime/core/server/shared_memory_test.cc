// Clients on a server's host: what lies in memory that both see, and when it does not.
#include "oe_runtime/core/wire/shared_memory.h"

#include <gtest/gtest.h>

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/write.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/server/raw_socket.h"
#include "oe_runtime/core/server/test_cluster.h"

namespace oe::shared_memory_test {
namespace {

constexpr size_t kIds = 20000;

// Three steps with tables of several dims and types, of which all but the counts of keys are large enough to
// be shared; the rows at the end.
std::vector<std::vector<double>> TrainLarge(Client* client) {
  std::vector<TableSpec> specs = {Spec("a", 8, "adam"), Spec("b", 8, "ftrl"), Spec("c", 4, "sgd"),
                                  Spec("d", 8, "adagrad")};
  specs[1].dtype = "bfloat16";
  specs[2].dtype = "float64";
  specs[3].admission = {"counter", {{"filter_freq", 2}}};
  std::vector<std::pair<uint32_t, uint32_t>> lookups;
  for (const TableSpec& spec : specs) lookups.emplace_back(client->CreateTable(spec), 0);
  std::mt19937_64 random(3);
  std::shared_ptr<PulledBatch> pulled;
  std::shared_ptr<PulledBatch> before;
  for (int step = 0; step < 4; ++step) {
    std::vector<Key> ids(kIds);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = step < 3 ? random() % (2 * kIds) : i;
    before = pulled;  // keeps its memory while the next is pulled
    pulled = client->Pull({{ids.data(), ids.size()}}, lookups);
    if (step == 3) break;
    std::vector<GradientView> views;
    std::vector<std::vector<double>> of_doubles;
    std::vector<std::vector<float>> of_floats;
    of_doubles.reserve(2);
    of_floats.reserve(2);
    for (const PlannedGroup& group : pulled->plan.groups) {
      const size_t n = group.inverse.size() * group.dim;
      std::vector<double> gradients(n);
      for (double& x : gradients) x = static_cast<double>(random() % 1000) / 500.0 - 1.0;
      if (group.is_float64) {
        of_doubles.push_back(gradients);
      } else {
        of_floats.emplace_back(gradients.begin(), gradients.end());
      }
      const void* data = group.is_float64 ? static_cast<const void*>(of_doubles.back().data())
                                          : static_cast<const void*>(of_floats.back().data());
      views.push_back({data, group.inverse.size(), group.dim});
    }
    client->Push(*pulled, views, {0.05});
  }
  std::vector<std::vector<double>> rows;
  for (size_t g = 0; g < pulled->plan.groups.size(); ++g) {
    const PlannedGroup& group = pulled->plan.groups[g];
    const size_t n = group.rows * group.dim;
    const Buffer& of_group = pulled->rows[g];
    if (group.is_float64) {
      rows.emplace_back(of_group.as<double>(), of_group.as<double>() + n);
    } else {
      rows.emplace_back(of_group.as<float>(), of_group.as<float>() + n);
    }
  }
  return rows;
}

nlohmann::json Connections(const Cluster& cluster) { return cluster.servers[0]->Stats()["connections"]; }

uint64_t Traffic(const Cluster& cluster) {
  const nlohmann::json traffic = cluster.servers[0]->Stats()["traffic"];
  return traffic["bytes_in"].get<uint64_t>() + traffic["bytes_out"].get<uint64_t>();
}

TEST(SharedMemoryServerTest, TheSameRows) {
  for (const uint32_t count : {1U, 3U}) {
    const auto local = Client::InProcess({}, count, 2);
    const auto wanted = TrainLarge(local.get());
    Cluster sharing(count);
    {
      const auto client = Client::Connect(sharing.remote, 2);
      EXPECT_EQ(TrainLarge(client.get()), wanted);
      EXPECT_EQ(Connections(sharing)["sharing_memory"], 1);
      EXPECT_GT(Connections(sharing)["shared_bytes"].get<uint64_t>(), kIds * 8 * sizeof(float));
    }
    EXPECT_EQ(AwaitLess(*sharing.servers[0], "/connections/shared_bytes", 0), 0U);
    EXPECT_EQ(AwaitLess(*sharing.servers[0], "/connections/sharing_memory", 0), 0U);

    Cluster sending(count);
    sending.remote.share_memory = false;
    const auto client = Client::Connect(sending.remote, 2);
    EXPECT_EQ(TrainLarge(client.get()), wanted);
    EXPECT_EQ(Connections(sending)["sharing_memory"], 0);
    EXPECT_LT(Traffic(sharing) * 2, Traffic(sending));
  }
}

// Rows by key, one after the other and as columns of a wider array; in memory of this test, and in memory
// that the client shares: all are the same, and where memory is shared hardly anything is sent.
TEST(SharedMemoryServerTest, RowsByKey) {
  constexpr size_t kDim = 8;
  constexpr size_t kWidth = 4 * kDim;  // weights, Adam's state, and what nobody may touch
  std::vector<Key> keys(kIds);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i * 7919;
  for (const uint32_t count : {1U, 3U}) {
    for (const bool shares : {true, false}) {
      SCOPED_TRACE(std::to_string(count) + (shares ? " shares" : " sends"));
      Cluster cluster(count);
      cluster.remote.share_memory = shares;
      const auto client = Client::Connect(cluster.remote, 2);
      const uint32_t table = client->CreateTable(Spec("t", kDim, "adam"));
      Buffer buffer = client->NewBuffer(kIds * kWidth * sizeof(float));
      std::vector<float> own(kIds * kWidth);
      float value = 0;
      for (float* wide : {own.data(), buffer.as<float>()}) {
        for (const bool dense : {false, true}) {
          const RowStrides strides = dense ? RowStrides{} : RowStrides{4 * kWidth, 4 * kWidth};
          float* const states = wide + (dense ? kIds * kDim : kDim);
          for (size_t i = 0; i < kIds * kWidth; ++i) wide[i] = ++value;
          const std::vector<float> wanted(wide, wide + kIds * kWidth);
          (void)client->Assign(table, keys.data(), kIds, wide, states, strides);
          for (size_t i = 0; i < kIds; ++i) {  // all but what nobody may touch
            const auto clear = [&](float* values, size_t n, size_t step) {
              std::fill_n(values + i * (dense ? n : step), n, -1.0F);
            };
            clear(wide, kDim, kWidth);
            clear(states, 2 * kDim, kWidth);
          }
          std::vector<uint8_t> found(kIds);
          client->ReadRows(table, keys.data(), kIds, wide, states, found.data(), strides);
          EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), wide)) << "dense: " << dense;
          EXPECT_EQ(std::count(found.begin(), found.end(), 1), static_cast<std::ptrdiff_t>(kIds));
          std::vector<float> pulled(kIds * kDim);
          client->PullRows(table, keys.data(), kIds, pulled.data());
          EXPECT_EQ(pulled[kDim], wanted[dense ? kDim : kWidth]);
        }
      }
      EXPECT_EQ(Connections(cluster)["sharing_memory"], shares ? 1 : 0);
      if (count > 1) continue;
      const uint64_t values = 8 * kIds * 3 * kDim * sizeof(float);
      if (shares) {
        EXPECT_LT(Traffic(cluster), values / 2);  // with the pulls, and keys
      } else {
        EXPECT_GT(Traffic(cluster), values);
      }
    }
  }
}

// Connections that must be encrypted share nothing, nor does a client that wants them to be.
TEST(SharedMemoryServerTest, NotWhereEncryptionIsDemanded) {
  const auto local = Client::InProcess({}, 1, 2);
  const auto wanted = TrainLarge(local.get());
  ServerOptions options;
  options.tls = TlsMode::kOn;
  Cluster cluster(1, "0123456789abcdef", "", options);
  EXPECT_EQ(TrainLarge(Client::Connect(cluster.remote, 2).get()), wanted);
  EXPECT_EQ(Connections(cluster)["sharing_memory"], 0);
  EXPECT_EQ(Connections(cluster)["shared_bytes"], 0);
}

// A server without room for it says no, and rows go over the socket; what it had taken before it keeps.
TEST(SharedMemoryServerTest, NotBeyondTheBudget) {
  const auto local = Client::InProcess({}, 1, 2);
  const auto wanted = TrainLarge(local.get());
  ServerOptions options;
  options.limits.bytes = uint64_t{24} << 20;
  Cluster cluster(1, "", "", options);
  const auto first = Client::Connect(cluster.remote, 2);
  EXPECT_EQ(TrainLarge(first.get()), wanted);
  EXPECT_EQ(Connections(cluster)["sharing_memory"], 1);
  RemoteOptions other = cluster.remote;
  other.job = "other";
  const auto second = Client::Connect(other, 2);
  EXPECT_EQ(TrainLarge(second.get()), wanted);
  EXPECT_EQ(Connections(cluster)["sharing_memory"], 1);
  // More of the first than the server takes.
  const uint32_t table = first->CreateTable(Spec("a", 8, "adam"));
  std::vector<Key> ids(700000);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = i;
  const auto many = first->Pull({{ids.data(), ids.size()}}, {{table, 0}});
  const auto few = first->Pull({{ids.data(), kIds}}, {{table, 0}});
  for (size_t i = 0; i < kIds * 8; ++i) {
    ASSERT_EQ(many->rows[0].as<float>()[i], few->rows[0].as<float>()[i]);
  }
  EXPECT_LE(Connections(cluster)["shared_bytes"].get<uint64_t>(), options.limits.bytes);
}

TEST(SharedMemoryServerTest, PushesOfSeveralWorkersAreKeptByTheServer) {
  Cluster cluster(1);
  cluster.remote.worker.of = 2;
  RemoteOptions other = cluster.remote;
  other.worker.rank = 1;
  const auto first = Client::Connect(cluster.remote, 1);
  const auto second = Client::Connect(other, 1);
  TableSpec spec = Spec("t", 8, "sgd");
  spec.initializer.name = "zeros";
  (void)second->CreateTable(spec);
  const std::vector<std::pair<uint32_t, uint32_t>> lookups = {{first->CreateTable(spec), 0}};
  std::vector<Key> ids(kIds);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = i;
  const std::vector<float> ones(kIds * 8, 1.0F);
  const auto of_first = first->Pull({{ids.data(), kIds}}, lookups);
  const auto of_second = second->Pull({{ids.data(), kIds}}, lookups);
  first->Push(*of_first, {{ones.data(), kIds, 8}}, {0.5});
  second->Push(*of_second, {{ones.data(), kIds, 8}}, {0.5});
  const auto after = first->Pull({{ids.data(), kIds}}, lookups);
  EXPECT_EQ(Connections(cluster)["sharing_memory"], 2);
  for (size_t i = 0; i < kIds * 8; ++i) ASSERT_EQ(after->rows[0].as<float>()[i], -1.0F);
}

// What a client may say about places.
class PlacesTest : public ::testing::Test {
 protected:
  PlacesTest() : arena_(SharedArena::Create()), socket_(io_) {
    Client::Connect(cluster_.remote, 1)->CreateTable(Spec("narrow", 1, "sgd"));
    TableSpec wide = Spec("wide", 1, "sgd");
    wide.dtype = "float64";
    Client::Connect(cluster_.remote, 1)->CreateTable(wide);
    socket_.connect({asio::ip::address_v4::loopback(), cluster_.servers[0]->port()});
    const auto hello = nlohmann::json::parse(Ask(Op::kHello, EncodeHello({kProtocolVersion, "", ""})));
    nonce_ = ParseNonce(hello.at("nonce")).value();
  }
  std::string Ask(Op op, const std::string& body) {
    asio::write(socket_, asio::buffer(Frame(op, body)));
    return ReadReply(&socket_);
  }
  std::string Share() { return Ask(Op::kShare, EncodeShareRequest(arena_->Show(0, nonce_))); }
  static std::string Batch(uint32_t table, uint64_t place) {
    const std::vector<Key> keys = {1, 2};
    Buffer head;
    EncodeBatch({{table, 0, 0, place}}, {{keys.data(), keys.size()}}, &head);
    return {reinterpret_cast<const char*>(head.data()), head.size()};
  }

  static std::string Rows(uint32_t table, uint64_t weights, uint64_t states, bool with_states = false) {
    const std::vector<Key> keys = {1, 2};
    Buffer head;
    EncodeRowsRequest({table, with_states, {keys.data(), keys.size()}, {}, 0, {{weights, states}}}, &head);
    return {reinterpret_cast<const char*>(head.data()), head.size()};
  }

  Cluster cluster_{1};
  std::shared_ptr<SharedArena> arena_;
  asio::io_context io_;
  asio::ip::tcp::socket socket_;
  Nonce nonce_{};
};

TEST_F(PlacesTest, PlacesAreRefusedBeforeMemoryIsShared) {
  EXPECT_NE(Ask(Op::kPull, Batch(0, 4096)).find("at place 4096 of shared memory of 0 bytes"),
            std::string::npos);
}

TEST_F(PlacesTest, PlacesBeyondTheMemoryAreRefused) {
  EXPECT_EQ(Share(), "true");
  EXPECT_EQ(Share(), "true");
  const uint64_t size = arena_->size();
  EXPECT_EQ(Ask(Op::kPull, Batch(0, size - 8)), "");
  EXPECT_EQ(Ask(Op::kPull, Batch(1, size - 16)), "");
  EXPECT_EQ(Ask(Op::kPush, Batch(1, size - 16)), "");
  EXPECT_EQ(Ask(Op::kPull, Batch(0, BatchEntry::kInline)).size(), 8U);
  EXPECT_NE(Ask(Op::kPush, Batch(1, size - 8)).find("at place"), std::string::npos);
  EXPECT_EQ(AwaitStat(*cluster_.servers[0], "/connections/refused/malformed", 1), 1U);
}

TEST_F(PlacesTest, UnalignedPlacesAreRefused) {
  EXPECT_EQ(Share(), "true");
  EXPECT_NE(Ask(Op::kPull, Batch(1, 4100)).find("at place 4100"), std::string::npos);
}

TEST_F(PlacesTest, OfRowsByKeyAreChecked) {
  EXPECT_EQ(Share(), "true");
  const uint64_t size = arena_->size();
  for (const Op op : {Op::kAssign, Op::kReadRows}) {
    const std::string done =
        op == Op::kAssign ? R"({"created":2,"evicted":0,"no_room":0})" : std::string(2, '\1');
    EXPECT_EQ(Ask(op, Rows(0, size - 8, 0)), done);
    EXPECT_EQ(Ask(op, Rows(0, size - 8, size, true)),
              op == Op::kAssign ? R"({"created":0,"evicted":0,"no_room":0})" : done);
  }
}

TEST_F(PlacesTest, OfRowsByKeyBeyondTheMemoryAreRefused) {
  EXPECT_EQ(Share(), "true");
  EXPECT_NE(Ask(Op::kReadRows, Rows(1, arena_->size() - 8, 0)).find("at place"), std::string::npos);
}

TEST_F(PlacesTest, OfStatesBeyondTheMemoryAreRefused) {
  EXPECT_EQ(Share(), "true");
  EXPECT_NE(Ask(Op::kAssign, Rows(0, 4096, ~uint64_t{0} - 3, true)).find("at place"), std::string::npos);
}

TEST_F(PlacesTest, ARequestWithPlacesHasNoValues) {
  EXPECT_EQ(Share(), "true");
  EXPECT_NE(Ask(Op::kAssign, Rows(0, 4096, 0) + "12345678").find("8 bytes of values instead of 0"),
            std::string::npos);
}

TEST_F(PlacesTest, OffsetsNearTheLargestInteger) {
  EXPECT_EQ(Share(), "true");
  EXPECT_NE(Ask(Op::kPull, Batch(0, BatchEntry::kInline - 3)).find("at place"), std::string::npos);
}

TEST_F(PlacesTest, ANonceOfAnotherConnectionIsRefused) {
  nonce_[0] ^= 1;
  EXPECT_EQ(Share(), "false");
  EXPECT_EQ(Connections(cluster_)["sharing_memory"], 0);
  EXPECT_EQ(Connections(cluster_)["shared_bytes"], 0);
}

}  // namespace
}  // namespace oe::shared_memory_test
