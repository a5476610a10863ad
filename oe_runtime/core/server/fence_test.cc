// What was sent before a client went back to a checkpoint, and is served after it.
#include "oe_runtime/core/server/fence.h"

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstring>
#include <future>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/server/service.h"
#include "oe_runtime/core/server/test_cluster.h"

namespace oe::fence_test {
namespace {

const std::string kRefused =
    "another client has put a checkpoint back since this one pulled; pull again before tables are changed";

// A server's job with one table in pools, and connections to it.
class FenceTest : public testing::Test {
 protected:
  FenceTest() { table_ = job_->store.CreateTable(Spec("wide", 1, "sgd")); }

  static void Ask(Session* session, Op op, const std::string& text) {
    Buffer body(text.size());
    std::memcpy(body.data(), text.data(), text.size());
    Buffer reply;
    Serve(session, op, &body, &reply);
  }

  // Of three keys: a pull, or the push of a gradient.
  void Batch(Session* session, Op op) const {
    Buffer head;
    EncodeBatch({{table_, 0, 0.5}}, {{kKeys.data(), kKeys.size()}}, &head);
    std::string text(head.as<char>(), head.size());
    const std::array<float, 3> gradients = {1, 2, 3};
    if (op == Op::kPush) text.append(reinterpret_cast<const char*>(gradients.data()), sizeof gradients);
    Ask(session, op, text);
  }

  nlohmann::json Table() const { return job_->store.Stats()["tables"][0]; }

  static Session Connect(Job* job, uint64_t number) {
    Session session{job};
    session.client = number;
    session.seen = job->fence.seen();
    return session;
  }

  static constexpr std::array<Key, 3> kKeys = {1, 2, 3};
  const TestDirectory directory_;
  ThreadPool pool_{2};
  Jobs jobs_{Storage::Open({"pmem_libpmem", directory_.path(), 0, false, 3}), {}, &pool_, uint64_t{1} << 20};
  Job* const job_ = jobs_.Get("");
  uint32_t table_ = 0;
  Session lost_ = Connect(job_, 1);
  Session back_ = Connect(job_, 2);
};

TEST_F(FenceTest, NothingChangesTablesThatWentBackMeanwhile) {
  Ask(&lost_, Op::kCheckpoint, R"({"id": 0, "wait": true})");
  Batch(&lost_, Op::kPush);
  Ask(&lost_, Op::kCheckpoint, R"({"id": 1, "wait": true})");
  ASSERT_EQ(Table()["version"], 1);
  // Its connection breaks, it connects anew and goes back; then what it had sent before is served.
  Ask(&back_, Op::kRecover, R"({"id": 0})");
  const auto refused = [&](const std::function<void()>& change) {
    EXPECT_EQ(MessageOf<CheckpointError>(change), kRefused);
    EXPECT_EQ(Table()["version"], 0);
    EXPECT_EQ(Table()["rows"], 0);
    EXPECT_EQ(job_->store.Checkpoints(), std::vector<uint64_t>{0});
  };
  refused([&] { Batch(&lost_, Op::kPush); });
  refused([&] { Ask(&lost_, Op::kCheckpoint, R"({"id": 1, "wait": true})"); });
  refused([&] { Ask(&lost_, Op::kEvict, "{}"); });
  refused([&] { Ask(&lost_, Op::kRecover, R"({"id": 0})"); });
  refused([&] { Ask(&lost_, Op::kRestore, R"({"directories": ["/nowhere"]})"); });
  Batch(&back_, Op::kPush);
  EXPECT_EQ(Table()["version"], 1);
}

TEST_F(FenceTest, AnotherClientOfTheJobPullsAndGoesOn) {
  Ask(&lost_, Op::kCheckpoint, R"({"id": 0, "wait": true})");
  Ask(&back_, Op::kRecover, R"({"id": 0})");
  EXPECT_EQ(MessageOf<CheckpointError>([&] { Batch(&lost_, Op::kPush); }), kRefused);
  Batch(&lost_, Op::kPull);
  Batch(&lost_, Op::kPush);
  Batch(&back_, Op::kPush);
  EXPECT_EQ(Table()["version"], 2);
}

// Servers number connections in different orders, so that one would refuse what the other takes.
TEST_F(FenceTest, AClientThatConnectedLaterPullsToo) {
  Ask(&lost_, Op::kCheckpoint, R"({"id": 0, "wait": true})");
  Batch(&back_, Op::kPull);
  Ask(&lost_, Op::kRecover, R"({"id": 0})");
  EXPECT_EQ(MessageOf<CheckpointError>([&] { Batch(&back_, Op::kPush); }), kRefused);
  Session later = Connect(job_, 3);
  Batch(&later, Op::kPush);
  Batch(&back_, Op::kPull);
  Batch(&back_, Op::kPush);
  EXPECT_EQ(Table()["version"], 2);
}

TEST_F(FenceTest, AClientMayGoBackAsOftenAsItLikes) {
  Ask(&lost_, Op::kCheckpoint, R"({"id": 0, "wait": true})");
  for (int turn = 0; turn < 2; ++turn) {
    Batch(&lost_, Op::kPush);
    Ask(&lost_, Op::kRecover, R"({"id": 0})");
    EXPECT_EQ(Table()["version"], 0);
  }
}

TEST_F(FenceTest, AnotherJobsFenceIsIndependent) {
  Job* const other = jobs_.Get("other");
  (void)other->store.CreateTable(Spec("wide", 1, "sgd"));
  Session first = Connect(other, 1);
  Ask(&lost_, Op::kCheckpoint, R"({"id": 0, "wait": true})");
  Ask(&back_, Op::kRecover, R"({"id": 0})");
  Batch(&first, Op::kPush);
}

// Half of a push before and half of it after would be neither undone nor refused.
TEST(FenceMomentsTest, GoingBackWaitsForAChangeUnderWay) {
  Fence fence;
  std::promise<void> pushing;
  std::promise<void> pushed;
  bool done = false;
  auto push = std::async(std::launch::async, [&] {
    const Fence::Hold hold = fence.Change(0);
    pushing.set_value();
    pushed.get_future().wait();
    done = true;
  });
  pushing.get_future().wait();
  uint64_t seen = 0;
  auto go = std::async(std::launch::async, [&] { fence.GoBack(1, &seen, [&] { EXPECT_TRUE(done); }); });
  EXPECT_EQ(go.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  pushed.set_value();
  go.get();
  push.get();
  EXPECT_EQ(fence.seen(), 1U);
  EXPECT_EQ(seen, 1U);
  EXPECT_EQ(MessageOf<CheckpointError>([&] { (void)fence.Change(0); }), kRefused);
}

// What a client pulls meanwhile may be of before.
TEST(FenceMomentsTest, AClientThatPullsWhileTablesGoBackHasNotSeenIt) {
  Fence fence;
  uint64_t seen = 0;
  fence.GoBack(1, &seen, [&] { EXPECT_EQ(fence.seen(), 0U); });
  EXPECT_EQ(fence.seen(), 1U);
  EXPECT_THROW(fence.GoBack(1, &seen, [] { throw StorageError("after some tables"); }), StorageError);
  EXPECT_EQ(fence.seen(), 2U);
  EXPECT_EQ(seen, 2U);
}

// Its earlier connection, which broke, may still be going back when it goes back by the next one.
TEST(FenceMomentsTest, ANewerConnectionGoesBackAfterAnOlderOne) {
  Fence fence;
  uint64_t older = fence.seen();
  uint64_t newer = fence.seen();
  fence.GoBack(1, &older, [] {});
  EXPECT_NO_THROW(fence.GoBack(2, &newer, [] {}));
  EXPECT_EQ(MessageOf<CheckpointError>([&] { fence.GoBack(1, &older, [] {}); }), kRefused);
}

// Between the moment when a push may begin and its end, its worker may be started again elsewhere.
TEST_F(FenceTest, AnAsynchronousPushThatIsAppliedIsAnsweredSo) {
  WorkerSpec spec;
  spec.synchronous = false;
  job_->workers.Join(1, spec);
  std::promise<void> held;
  std::promise<void> replaced;
  auto alone = std::async(std::launch::async, [&] {
    job_->fence.Alone(0, [&] {
      held.set_value();
      replaced.get_future().wait();
    });
  });
  held.get_future().wait();
  Pass pass([&] {
    spec.generation = 1;
    job_->workers.Join(2, spec);
    replaced.set_value();
    alone.get();
    return [] {};
  });
  const std::array<float, 3> gradients = {1, 2, 3};
  Buffer body;
  Buffer reply;
  std::function<void()> rest;
  const std::vector<PushPart> parts = {{table_, kKeys.data(), kKeys.size(), gradients.data(), 0.5}};
  EXPECT_TRUE(job_->workers.Push(1, 0, parts, &body, &reply, &pass, &rest));
  EXPECT_EQ(Table()["version"], 1);
  EXPECT_EQ(job_->workers.Stats()["batches"], 1);
  EXPECT_THROW((void)job_->workers.Push(1, 0, parts, &body, &reply, &pass, &rest), WorkerLost);
  pass.Release();
  job_->workers.Leave(2);
}

// A recovery has its table alone for as long as it reads; who asks for versions waits for it, and nobody for
// that one.
TEST_F(FenceTest, ARequestForVersionsDelaysNobody) {
  Ask(&lost_, Op::kCheckpoint, R"({"id": 0, "wait": true})");
  Batch(&lost_, Op::kPush);
  Pass pull;
  ASSERT_TRUE(job_->store.LockPull({{table_, kKeys.data(), kKeys.size(), nullptr, 0, nullptr}}, &pull));
  auto recover = std::async(std::launch::async, [&] { job_->store.Recover(0); });
  EXPECT_EQ(recover.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout);
  auto versions = std::async(std::launch::async, [&] { return job_->store.Versions(); });
  EXPECT_EQ(versions.wait_for(std::chrono::milliseconds(200)), std::future_status::timeout);
  auto create = std::async(std::launch::async, [&] { job_->store.CreateTable(Spec("other", 1, "sgd")); });
  EXPECT_EQ(create.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  pull.Release();
  recover.get();
  create.get();
  EXPECT_EQ(versions.get()["tables"]["wide"][0], 0);
}

}  // namespace
}  // namespace oe::fence_test
