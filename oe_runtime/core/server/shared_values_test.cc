// Shared values over connections: what a client reads, what it may write, and what goes with a connection.
#include "oe_runtime/core/server/shared_values.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "oe_runtime/core/client/client.h"
#include "oe_runtime/core/server/test_cluster.h"
#include "oe_runtime/core/wire/errors.h"

namespace oe::shared_values_test {
namespace {

SharedReply Read(Client* client, const std::string& name) {
  return client->ExchangeShared({name, false, 0, {}});
}

SharedReply Write(Client* client, const std::string& name, uint64_t replaces, const std::string& value) {
  return client->ExchangeShared(
      {name, true, replaces, {reinterpret_cast<const uint8_t*>(value.data()), value.size()}});
}

// Another job's clients on the same servers are not counted.
std::unique_ptr<Client> Connect(RemoteOptions options, const std::string& job = "train") {
  options.job = job;
  return Client::Connect(options, 1);
}

// Waits until the members are as many; a connection ends some time after its client has closed it.
SharedReply AwaitMembers(Client* client, const std::string& name, size_t count) {
  SharedReply reply = Read(client, name);
  for (int i = 0; i < 6000 && reply.members.size() != count; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    reply = Read(client, name);
  }
  return reply;
}

TEST(SharedValuesTest, AWriteReplacesTheVersionThatItNames) {
  Cluster cluster(2);
  const auto one = Connect(cluster.remote);
  const auto two = Connect(cluster.remote);
  EXPECT_EQ(Read(one.get(), "queue").version, 0U);
  const SharedReply first = Write(one.get(), "queue", 0, "a");
  EXPECT_TRUE(first.written);
  const SharedReply late = Write(two.get(), "queue", 0, "b");
  EXPECT_FALSE(late.written);
  EXPECT_EQ(late.version, first.version);
  EXPECT_EQ(*late.value, "a");
  EXPECT_TRUE(Write(two.get(), "queue", late.version, "b").written);
  EXPECT_FALSE(Write(one.get(), "queue", first.version, "c").written);
  EXPECT_EQ(*Read(one.get(), "queue").value, "b");
  EXPECT_EQ(Read(one.get(), "other").version, 0U);
  EXPECT_EQ(Read(Connect(cluster.remote, "another").get(), "queue").version, 0U);
  EXPECT_TRUE(Write(one.get(), "queue", Read(one.get(), "queue").version, "").written);
  EXPECT_EQ(Read(two.get(), "queue").version, 0U);
}

TEST(SharedValuesTest, MembersAreTheConnectionsThatAreThere) {
  Cluster cluster(1);
  const auto one = Connect(cluster.remote);
  auto two = Connect(cluster.remote);
  const SharedReply mine = Write(one.get(), "queue", 0, "a");
  EXPECT_EQ(mine.members, std::vector<uint64_t>{mine.client});
  const SharedReply others = Read(two.get(), "queue");
  EXPECT_EQ(others.members, (std::vector<uint64_t>{mine.client, others.client}));
  two.reset();
  EXPECT_EQ(AwaitMembers(one.get(), "queue", 1).members, std::vector<uint64_t>{mine.client});
}

TEST(SharedValuesTest, ValuesEndWithTheLastMember) {
  Cluster cluster(1);
  const auto spectator = Connect(cluster.remote);
  spectator->Stats();  // is no member
  auto one = Connect(cluster.remote);
  const SharedReply written = Write(one.get(), "queue", 0, "a");
  one.reset();
  AwaitLess(*cluster.servers.front(), "/connections/open", 1);
  const auto two = Connect(cluster.remote);
  EXPECT_EQ(Read(two.get(), "queue").version, 0U);
  EXPECT_GT(Write(two.get(), "queue", 0, "b").version, written.version);  // no version comes twice
}

TEST(SharedValuesTest, WritersOfOneValueLoseNothing) {
  Cluster cluster(1);
  constexpr int kEach = 100;
  std::vector<std::thread> writers;
  for (int i = 0; i < 4; ++i) {
    writers.emplace_back([&cluster] {
      const auto client = Connect(cluster.remote);
      SharedReply seen = Read(client.get(), "count");
      for (int done = 0; done < kEach;) {
        const int count = seen.value == nullptr ? 0 : std::stoi(*seen.value);
        const SharedReply reply = Write(client.get(), "count", seen.version, std::to_string(count + 1));
        done += reply.written ? 1 : 0;
        seen = reply.written ? Read(client.get(), "count") : reply;
      }
      while (std::stoi(*Read(client.get(), "count").value) < 4 * kEach) std::this_thread::yield();
    });
  }
  for (std::thread& writer : writers) writer.join();
}

TEST(SharedValuesTest, TheirNumberAndMemoryAreBounded) {
  Budget memory(1000);
  SharedValues values(&memory);
  const std::string bytes(600, 'x');
  const auto write = [&](const std::string& name, uint64_t version, size_t size) {
    return values.Exchange(1, {name, true, version, {reinterpret_cast<const uint8_t*>(bytes.data()), size}});
  };
  const uint64_t version = write("a", 0, 600).version;
  EXPECT_THROW(write("b", 0, 600), Error);
  EXPECT_EQ(values.Bytes("b"), 0U);
  EXPECT_TRUE(write("a", version, 300).written);
  EXPECT_EQ(memory.used(), 300U);
  values.End(1);
  EXPECT_EQ(memory.used(), 0U);
  Budget plenty(1 << 20);
  SharedValues many(&plenty);
  for (size_t i = 0; i < SharedValues::kMostNames; ++i) {
    many.Exchange(1, {std::to_string(i), true, 0, {reinterpret_cast<const uint8_t*>("x"), 1}});
  }
  EXPECT_THROW(many.Exchange(1, {"more", true, 0, {reinterpret_cast<const uint8_t*>("x"), 1}}), SpecError);
}

TEST(SharedValuesTest, WhatIsServedLastsAsTheTablesAndMakesNoMembers) {
  Cluster cluster(2);
  auto worker = Connect(cluster.remote);
  const SharedReply member = Write(worker.get(), "queue", 0, "a");
  auto publisher = Connect(cluster.remote);
  const SharedReply published = Write(publisher.get(), "served/weights", 0, "w");
  EXPECT_TRUE(published.written);
  EXPECT_TRUE(published.members.empty());
  publisher.reset();
  RemoteOptions options = cluster.remote;
  options.read_only = true;
  auto reader = Connect(options);
  const SharedReply found = Read(reader.get(), "served/weights");
  EXPECT_EQ(found.version, published.version);
  EXPECT_EQ(*found.value, "w");
  EXPECT_EQ(Read(worker.get(), "queue").members, std::vector<uint64_t>{member.client});
  reader.reset();
  worker.reset();
  AwaitLess(*cluster.servers.front(), "/connections/open", 0);
  const auto next = Connect(cluster.remote);
  EXPECT_EQ(*Read(next.get(), "served/weights").value, "w");
  (void)next->Drop({}, std::nullopt, true);
  EXPECT_EQ(Read(next.get(), "served/weights").version, 0U);
}

TEST(SharedValuesTest, ClientsAreRefused) {
  Cluster cluster(1);
  const auto client = Connect(cluster.remote);
  EXPECT_THROW(Write(client.get(), "queue", 0, std::string(kMaxSharedValue + 1, 'x')), SpecError);
  EXPECT_THROW(Read(client.get(), std::string(65, 'n')), SpecError);
  RemoteOptions reader = cluster.remote;
  reader.read_only = true;
  EXPECT_THROW(Read(Connect(reader).get(), "queue"), SpecError);
  EXPECT_THROW(Write(Connect(reader).get(), "served/weights", 0, "a"), SpecError);
  const std::string hello = Frame(Op::kHello, EncodeHello({kProtocolVersion, "", "", ""}));
  const std::string huge = Frame(Op::kSharedValue, "", MaxRequest(Op::kSharedValue) + 1);
  EXPECT_NE(Talk(cluster.servers.front()->port(), hello + huge).find("bytes for operation 27"),
            std::string::npos);
  EXPECT_NE(Talk(cluster.servers.front()->port(), Frame(Op::kSharedValue, "x")).find("must be a hello"),
            std::string::npos);
}

// A client of the first of two servers alone.
TEST(SharedValuesTest, AClientOfTheFirstServersSaysHowManyThereAre) {
  Cluster cluster(2);
  RemoteOptions first = cluster.remote;
  first.endpoints.pop_back();
  EXPECT_THROW(Connect(first), SpecError);
  first.of = 2;
  const auto one = Connect(first);
  const auto all = Connect(cluster.remote);
  EXPECT_TRUE(Write(one.get(), "queue", 0, "a").written);
  EXPECT_EQ(*Read(all.get(), "queue").value, "a");
}

}  // namespace
}  // namespace oe::shared_values_test
