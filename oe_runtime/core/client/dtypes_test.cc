// Tables of every dtype in one batch, from ids to rows on several servers and back.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/server/jobs.h"
#include "oe_runtime/core/server/service.h"
#include "oe_runtime/core/server/test_cluster.h"

namespace oe::dtypes_test {
namespace {

constexpr uint64_t kKeys = 301;

std::vector<TableSpec> Specs() {
  std::vector<TableSpec> specs;
  for (const auto& [name, dim, dtype] :
       {std::tuple<const char*, uint32_t, const char*>{"half", 3, "bfloat16"},
        {"single", 1, "float32"},
        {"double", 3, "float64"},
        {"other half", 1, "float16"},
        {"wide double", 9, "float64"},
        {"counted", 3, "float32"}}) {
    specs.push_back(Spec(name, dim, "adam"));
    specs.back().dtype = dtype;
  }
  specs.back().admission = {"counter", {{"filter_freq", 2}}};  // pushes bring counts behind the gradients
  for (const size_t exchanged : {0, 1, 5}) specs[exchanged].exchange_dtype = "bfloat16";
  return specs;
}

// All rows of all tables, as bytes.
std::vector<std::string> Rows(Client* client) {
  std::vector<Key> keys(kKeys);
  for (size_t i = 0; i < kKeys; ++i) keys[i] = i;
  std::vector<std::string> rows;
  for (const TableSpec& spec : Specs()) {
    const uint32_t table = client->CreateTable(spec);
    std::vector<double> values(kKeys * spec.dim);
    client->PullRows(table, keys.data(), kKeys, values.data());
    rows.emplace_back(reinterpret_cast<const char*>(values.data()),
                      kKeys * spec.dim * (spec.dtype == "float64" ? 8 : 4));
  }
  return rows;
}

template <typename T>
std::vector<T> GradientsOf(const PlannedGroup& group, const Buffer& rows, std::mt19937_64* random) {
  std::vector<T> gradients;
  for (const int32_t row : group.inverse) {
    for (uint32_t d = 0; d < group.dim; ++d) {
      const T weight = rows.as<T>()[static_cast<size_t>(row) * group.dim + d];
      gradients.push_back(weight + static_cast<T>((*random)() % 1000) / 500 - 1);
    }
  }
  return gradients;
}

void TrainAll(Client* client) {
  std::vector<std::pair<uint32_t, uint32_t>> lookups;
  for (const TableSpec& spec : Specs()) lookups.emplace_back(client->CreateTable(spec), lookups.size() % 2);
  std::mt19937_64 random(3);
  for (int step = 0; step < 5; ++step) {
    std::vector<std::vector<Key>> ids(2);
    ids[0].resize(403);
    ids[1].resize(77);
    for (auto& array : ids) {
      for (Key& id : array) id = random() % kKeys;
    }
    const auto pulled =
        client->Pull({{ids[0].data(), ids[0].size()}, {ids[1].data(), ids[1].size()}}, lookups);
    const auto& groups = pulled->plan.groups;
    ASSERT_EQ(groups.size(), 4U);
    EXPECT_TRUE(groups[0].is_float64 && groups[0].dim == 3 && groups[1].is_float64 && groups[1].dim == 9);
    EXPECT_TRUE(!groups[2].is_float64 && groups[2].dim == 1 && !groups[3].is_float64 && groups[3].dim == 3);
    std::vector<std::vector<double>> doubles(2);
    std::vector<std::vector<float>> floats(2);
    std::vector<GradientView> views;
    for (size_t g = 0; g < groups.size(); ++g) {
      const void* data = nullptr;
      if (groups[g].is_float64) {
        doubles[g] = GradientsOf<double>(groups[g], pulled->rows[g], &random);
        data = doubles[g].data();
      } else {
        floats[g - 2] = GradientsOf<float>(groups[g], pulled->rows[g], &random);
        data = floats[g - 2].data();
      }
      views.push_back({data, groups[g].inverse.size(), groups[g].dim});
    }
    client->Push(*pulled, views, {0.05});
  }
}

TEST(DtypesTest, ServersGiveTheRowsOfOneProcess) {
  const auto local = Client::InProcess({}, 1, 2);
  TrainAll(local.get());
  const std::vector<std::string> wanted = Rows(local.get());
  for (const auto& [count, shares] : {std::pair{1U, true}, {3U, true}, {1U, false}, {3U, false}}) {
    const TestDirectory directory;
    const TestDirectory of_others;
    Cluster cluster(count, "", directory.path());
    cluster.remote.share_memory = shares;
    const auto client = Client::Connect(cluster.remote, 2);
    TrainAll(client.get());
    EXPECT_EQ(Rows(client.get()), wanted) << count;
    // Over the wire onto other numbers of servers.
    const std::string saved = directory.file("saved");
    std::filesystem::create_directory(saved);
    (void)client->Save(saved);
    Cluster others(4 - count, "", of_others.path());
    const auto reader = Client::Connect(others.remote, 2);
    for (const TableSpec& spec : Specs()) reader->CreateTable(spec);
    EXPECT_NE(Rows(reader.get()), wanted);
    reader->Restore(saved);
    EXPECT_EQ(Rows(reader.get()), wanted) << count;
    TrainAll(reader.get());
    TrainAll(client.get());
    EXPECT_EQ(Rows(reader.get()), Rows(client.get()));
  }
}

// A peer that orders them otherwise would have doubles read where none are; halves come behind all others.
TEST(DtypesTest, ValuesThatMakeNoSenseAreRefused) {
  ThreadPool pool(1);
  Jobs jobs(Storage::Open({}), {}, &pool, uint64_t{1} << 20);
  Job* const job = jobs.Get("");
  Store& store = job->store;
  TableSpec spec = Spec("single", 1, "sgd");
  const uint32_t single = store.CreateTable(spec);
  spec.name = "double";
  spec.dtype = "float64";
  const uint32_t wide = store.CreateTable(spec);
  Session session{job};
  const std::vector<Key> keys = {1, 2, 3};
  const auto serve = [&](Op op, const std::vector<BatchEntry>& entries, size_t rest) {
    Buffer head;
    EncodeBatch(entries, {{keys.data(), keys.size()}}, &head);
    Buffer body(head.size() + rest);
    std::memcpy(body.data(), head.data(), head.size());
    std::memset(body.data() + head.size(), 0, rest);
    Buffer reply;
    Serve(&session, op, &body, &reply);
    return reply.size();
  };
  for (const auto& pair : {std::pair{Op::kPull, 0U}, {Op::kPush, 36U}}) {
    const Op op = pair.first;
    const size_t rest = pair.second;
    EXPECT_EQ(MessageOf<ProtocolError>([&] { serve(op, {{single, 0, 0.1}, {wide, 0, 0.1}}, rest); }),
              "a batch with rows of a float64 table behind others");
    EXPECT_EQ(serve(op, {{wide, 0, 0.1}, {single, 0, 0.1}}, rest), op == Op::kPull ? 36U : 0U);
  }
  spec.name = "half";
  spec.dtype = "bfloat16";
  const uint32_t half = store.CreateTable(spec);
  const BatchEntry packed{half, 0, 0.1, BatchEntry::kHalves};
  EXPECT_EQ(serve(Op::kPull, {packed, {wide, 0, 0.1}, {single, 0, 0.1}}, 0), 42U);
  EXPECT_EQ(serve(Op::kPush, {packed, {wide, 0, 0.1}, {single, 0, 0.1, BatchEntry::kHalves}}, 36), 0U);
  EXPECT_EQ(MessageOf<ProtocolError>([&] { serve(Op::kPush, {packed}, 12); }),
            "a push with 12 bytes of gradients and counts instead of 6");
  for (const auto& [op, table] : {std::pair{Op::kPull, single}, {Op::kPull, wide}, {Op::kPush, wide}}) {
    EXPECT_EQ(MessageOf<ProtocolError>(
                  [&, &op = op, &table = table] { serve(op, {{table, 0, 0.1, BatchEntry::kHalves}}, 0); }),
              "a batch with values of two bytes each for a table that has longer ones");
  }
}

}  // namespace
}  // namespace oe::dtypes_test
