// Pulls, pushes, saves and restores from several threads. Meant to run under ThreadSanitizer as well.

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/storage/test_storage.h"
#include "oe_runtime/core/table/table.h"

namespace oe::table_threads_test {
namespace {

constexpr uint32_t kDim = 8;
constexpr int kThreads = 4;
constexpr int kPushes = 60;
constexpr int kSharedPushes = kThreads * (kPushes / 2);
constexpr size_t kKeys = 300;

// Every task on a thread of its own.
class Threads final : public Executor {
 public:
  void ParallelFor(size_t count, const std::function<void(size_t)>& task) override {
    std::vector<std::thread> threads;
    threads.reserve(count);
    for (size_t i = 0; i < count; ++i) threads.emplace_back([&task, i] { task(i); });
    for (std::thread& thread : threads) thread.join();
  }
};

void RunThreads(const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

class TableThreadsTest : public testing::TestWithParam<const char*> {
 protected:
  std::unique_ptr<Table> NewTable() const {
    TableSpec spec;
    spec.name = "shared";
    spec.dim = kDim;
    spec.optimizer.name = "sgd";
    spec.initializer = {"zeros", {}, 0};
    return Table::Create(spec, TestStorage(GetParam(), directory_.path()));
  }

  TestDirectory directory_;
};

TEST_P(TableThreadsTest, NoUpdateIsLostAndNoRowIsTorn) {
  const auto table = NewTable();
  const std::vector<float> grads(kKeys * kDim, -1.0F);
  std::atomic<int> torn{0};
  RunThreads([&](int thread) {
    std::vector<float> out(kKeys * kDim);
    for (int step = 0; step < kPushes; ++step) {
      // Keys 0 … kKeys-1 are everybody's, the others this thread's own.
      const Key first = step % 2 == 0 ? 0 : static_cast<Key>(1000000 * (thread + 1) + step * 1000);
      std::vector<Key> keys(kKeys);
      for (size_t i = 0; i < kKeys; ++i) keys[i] = first + i;
      table->Push(keys.data(), keys.size(), grads.data(), 1.0);
      table->Pull(keys.data(), keys.size(), out.data());
      table->Upkeep();
      for (size_t i = 0; i < kKeys; ++i) {
        for (uint32_t d = 1; d < kDim; ++d) torn += out[i * kDim + d] != out[i * kDim] ? 1 : 0;
      }
    }
  });
  EXPECT_EQ(torn, 0);
  EXPECT_EQ(table->version(), static_cast<uint64_t>(kThreads * kPushes));
  EXPECT_EQ(table->rows(), kKeys * (1 + kSharedPushes));
  std::vector<Key> keys(kKeys);
  for (size_t i = 0; i < kKeys; ++i) keys[i] = i;
  std::vector<float> out(kKeys * kDim);
  table->Pull(keys.data(), keys.size(), out.data());
  for (const float value : out) ASSERT_EQ(value, static_cast<float>(kSharedPushes));
}

TEST_P(TableThreadsTest, ASaveSeesWholePushes) {
  const auto table = NewTable();
  const TestDirectory saved;
  std::vector<Key> keys(kKeys);
  for (size_t i = 0; i < kKeys; ++i) keys[i] = i;
  const std::vector<float> grads(kKeys * kDim, -1.0F);
  std::atomic<int> mixed{0};
  RunThreads([&](int thread) {
    Threads executor;
    for (int step = 0; step < 12; ++step) {
      if (thread > 0) {
        table->Push(keys.data(), keys.size(), grads.data(), 1.0, thread == 1 ? &executor : nullptr);
        std::vector<float> out(kKeys * kDim);
        table->Pull(keys.data(), keys.size(), out.data(), thread == 1 ? &executor : nullptr);
        continue;
      }
      const std::string file = saved.file("t" + std::to_string(step));
      const uint64_t version = table->Save(file).version;
      TableFileReader reader(file);
      while (const size_t n = reader.NextBlock()) {
        std::vector<float> rows(n * kDim);
        std::memcpy(rows.data(), reader.rows(), rows.size() * sizeof(float));
        for (const float weight : rows) mixed += weight != static_cast<float>(version) ? 1 : 0;
      }
      (void)table->rows();
      (void)table->bytes();
      (void)table->index_bytes();
      if (step % 4 == 3) table->Restore({file});
    }
  });
  EXPECT_EQ(mixed, 0);
}

TEST_P(TableThreadsTest, CheckpointsHoldWholePushes) {
  if (!KeepsCheckpoints(GetParam())) GTEST_SKIP() << "it keeps no checkpoints";
  const auto table = NewTable();
  std::vector<Key> keys(kKeys);
  for (size_t i = 0; i < kKeys; ++i) keys[i] = i;
  const std::vector<float> grads(kKeys * kDim, -1.0F);
  std::atomic<int> mixed{0};
  RunThreads([&](int thread) {
    Threads executor;
    std::vector<float> out(kKeys * kDim);
    for (uint64_t step = 0; step < 40; ++step) {
      if (thread == 0) {
        table->Checkpoint(step);
        (void)table->Checkpoints();
        if (step % 8 != 7) continue;
        table->WaitDurable();
        table->Recover(std::nullopt);
        continue;
      }
      table->Push(keys.data(), keys.size(), grads.data(), 1.0, thread == 1 ? &executor : nullptr);
      table->Pull(keys.data(), keys.size(), out.data(), thread == 1 ? &executor : nullptr);
      if (thread != 2) table->Upkeep();
      for (size_t i = 0; i < kKeys; ++i) {
        for (uint32_t d = 1; d < kDim; ++d) mixed += out[i * kDim + d] != out[i * kDim] ? 1 : 0;
      }
    }
  });
  EXPECT_EQ(mixed, 0);
  table->Recover(std::nullopt);
  std::vector<float> out(kKeys * kDim);
  table->Pull(keys.data(), keys.size(), out.data());
  for (const float value : out) ASSERT_EQ(value, static_cast<float>(table->version()));
}

// Whoever pulls and pushes does not wait for a processor that makes a checkpoint durable.
TEST_P(TableThreadsTest, CheckpointsBecomeDurableWhereThereIsTimeForIt) {
  if (!KeepsCheckpoints(GetParam())) GTEST_SKIP() << "it keeps no checkpoints";
  const auto table = NewTable();
  const std::vector<float> grads(kDim, 1.0F);
  const Key key = 1;
  table->Push(&key, 1, grads.data(), 1.0);
  const int own = ::getpriority(PRIO_PROCESS, 0);
  table->Checkpoint(1);
  table->WaitDurable();
  int threads = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    const auto thread = static_cast<pid_t>(std::stol(task.path().filename().string()));
    const bool behind = ::sched_getscheduler(thread) == SCHED_BATCH &&
                        ::getpriority(PRIO_PROCESS, static_cast<id_t>(thread)) == std::min(own + 10, 19);
    threads += behind ? 1 : 0;
  }
  EXPECT_EQ(threads, 1);
  EXPECT_EQ(::getpriority(PRIO_PROCESS, 0), own);
}

INSTANTIATE_TEST_SUITE_P(Kinds, TableThreadsTest, testing::ValuesIn(kStorageTypes),
                         [](const auto& kind) { return std::string(kind.param); });

}  // namespace
}  // namespace oe::table_threads_test
