// Rows on a drive that servers read before they are pulled.

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/server/test_cluster.h"
#include "oe_runtime/core/wire/messages.h"

namespace oe::read_ahead_test {
namespace {

constexpr size_t kKeys = 30000;
constexpr uint64_t kCache = uint64_t{1536} << 10;

class ReadAheadTest : public testing::Test {
 protected:
  // One server with all keys, of which its cache holds a small part.
  explicit ReadAheadTest(const std::string& storage = "dram_ssd") : cluster_(1, "", "", Options(storage)) {
    client_ = Client::Connect(cluster_.remote, 1);
    table_ = client_->CreateTable(Spec("t", 16, "adagrad"));
    std::vector<float> rows(kKeys * 16);
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i);
    std::vector<Key> keys(kKeys);
    for (Key key = 0; key < kKeys; ++key) keys[key] = key;
    (void)client_->Assign(table_, keys.data(), kKeys, rows.data(), nullptr);
    if (storage == "dram") return;
    client_->Checkpoint(1, true);
    client_->Refresh(Plan(0, 1).get());  // after which the server makes the cache as small as it is to be
    EXPECT_LE(AwaitLess(*cluster_.servers[0], "/tables/0/cache/bytes", kCache), kCache);
  }

  ServerOptions Options(const std::string& storage) const {
    ServerOptions options;
    options.storage = StorageSpec{storage, storage == "dram" ? "" : directory_.path()};
    if (storage != "dram") options.storage.cache_bytes = kCache;
    return options;
  }

  std::shared_ptr<PulledBatch> Plan(Key first, size_t n) const {
    std::vector<Key> ids(n);
    for (size_t i = 0; i < n; ++i) ids[i] = first + 37 * i;
    return client_->Plan({{ids.data(), ids.size()}}, {{table_, 0}});
  }

  uint64_t Count(const char* pointer) const {
    return cluster_.servers[0]->Stats().at(nlohmann::json::json_pointer(pointer)).get<uint64_t>();
  }
  uint64_t Reads() const { return Count("/tables/0/drive/reads"); }

  // Once `least` rows and then no more are read.
  uint64_t SettledReads(uint64_t least) const {
    uint64_t reads = AwaitStat(*cluster_.servers[0], "/tables/0/drive/reads", least);
    for (int same = 0; same < 20; ++same) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      const uint64_t now = Reads();
      if (now != reads) same = 0;
      reads = now;
    }
    return reads;
  }

  TestDirectory directory_;
  TestDirectory saves_;
  Cluster cluster_;
  std::unique_ptr<Client> client_;
  uint32_t table_ = 0;
};

TEST_F(ReadAheadTest, APullFindsWhatWasAnnounced) {
  ASSERT_TRUE(client_->reads_ahead());
  // Two lookups in pulls of their own, as of trained and of frozen tables, are one batch.
  const auto batch = Plan(1, 100);
  const auto more = Plan(3, 100);
  const uint64_t before = Reads();
  client_->ReadAhead({batch, more});
  const uint64_t reads = SettledReads(before + 1);
  EXPECT_GT(reads, before + 60);
  client_->Refresh(batch.get());
  client_->Refresh(more.get());
  // But for some that were in the cache at first, of which each row was marked as used.
  EXPECT_LT(Reads() - reads, (reads - before) / 4);
  for (size_t i = 0; i < 100; ++i) {
    const auto row = [&](const PulledBatch& of) {
      return of.rows[0].as<float>() + static_cast<size_t>(of.plan.groups[0].inverse[i]) * 16;
    };
    EXPECT_EQ(row(*batch)[3], static_cast<float>((1 + 37 * i) * 16 + 3));
    EXPECT_EQ(row(*more)[3], static_cast<float>((3 + 37 * i) * 16 + 3));
  }
}

TEST_F(ReadAheadTest, ManyThatNobodyPullsHarmNothing) {
  const auto other = Client::Connect(cluster_.remote, 1);
  ASSERT_EQ(other->CreateTable(Spec("t", 16, "adagrad")), table_);
  for (Key first = 0; first < 200; ++first) {
    client_->ReadAhead({Plan(first, 500)});
    std::vector<Key> ids = {first, first + 1000, first + 2000};
    other->ReadAhead({other->Plan({{ids.data(), ids.size()}}, {{table_, 0}})});
    if (first % 50 == 0) (void)client_->Save(saves_.path());
  }
  const auto batch = Plan(0, 800);
  client_->Refresh(batch.get());
  client_->ReadAhead({Plan(3, 800)});
  client_->Recover(1);
  client_->ReadAhead({Plan(3, 800)});
  client_->Drop({"t"}, std::nullopt, true);
  EXPECT_THROW(client_->ReadAhead({batch}), SpecError);
  EXPECT_THROW(Plan(0, 1), SpecError);
}

TEST_F(ReadAheadTest, AServerThatEndsDoesNotWaitForIt) {
  client_->ReadAhead({Plan(0, 800)});
  cluster_.servers[0]->Stop();
}

TEST_F(ReadAheadTest, ForeignBatchesAndBodiesAreRefused) {
  const auto other = Client::Connect(cluster_.remote, 1);
  EXPECT_THROW(other->ReadAhead({Plan(0, 1)}), SpecError);
  const std::string hello = Frame(Op::kHello, EncodeHello({kProtocolVersion, "", "", ""}));
  Buffer body;
  const Key key = 1;
  EncodeBatch({{0, 0, 0.0, BatchEntry::kInline}}, {{&key, 1}}, &body);
  std::string text(body.as<char>(), body.size());
  const auto replies = [&](const std::string& request) {
    return Talk(cluster_.servers[0]->port(), hello + Frame(Op::kReadAhead, request));
  };
  EXPECT_NE(replies(text + "more").find("4 bytes too many"), std::string::npos);
  text[8] = 9;  // a table that there is not
  EXPECT_NE(replies(text).find("table"), std::string::npos);
  text[8] = 0;
  text[12] = 9;  // a block that there is not
  EXPECT_NE(replies(text).find("block"), std::string::npos);
  const auto batch = Plan(5, 100);
  client_->Refresh(batch.get());
}

class ReadAheadDramTest : public ReadAheadTest {
 protected:
  ReadAheadDramTest() : ReadAheadTest("dram") {}
};

TEST_F(ReadAheadDramTest, ServersWithoutADriveDoNot) {
  EXPECT_FALSE(client_->reads_ahead());
  const auto batch = Plan(0, 10);
  client_->ReadAhead({batch});
  client_->Refresh(batch.get());
}

}  // namespace
}  // namespace oe::read_ahead_test
