// Processes that push to a pool or a log are killed at any moment; the next one finds every row, and what an
// admission filter counted of every key, as it was at the newest checkpoint.

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdio>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/storage/pool.h"
#include "oe_runtime/core/table/table.h"

namespace oe::kill_test {
namespace {

constexpr uint32_t kDim = 16;
constexpr Key kKeys = 4000;
constexpr size_t kBatch = 200;
constexpr int kKills = 15;
constexpr uint64_t kFilterFreq =
    8;  // times that a key is pushed before it has a row; its first update is then

// What both processes see.
struct Progress {
  std::atomic<uint64_t> called{0};   // the last checkpoint that was asked for
  std::atomic<uint64_t> durable{0};  // the last that was durable for sure
};

std::vector<Key> Batch(uint64_t step) {
  std::vector<Key> keys(kBatch);
  for (size_t i = 0; i < kBatch; ++i) keys[i] = (step * 137 + i * 11) % kKeys;  // 11 has no factor of kKeys
  return keys;
}

std::unique_ptr<Table> Open(const std::string& directory, const std::string& type,
                            const std::string& filter) {
  TableSpec spec;
  spec.name = "t";
  spec.dim = kDim;
  spec.optimizer.name = "sgd";
  spec.initializer = {"zeros", {}, 0};
  spec.admission.name = filter;
  if (!filter.empty()) spec.admission.params["filter_freq"] = kFilterFreq;
  if (filter == "cbf") {
    spec.admission.params.insert({{"max_element_size", 1e5}, {"false_positive_probability", 1e-6}});
  }
  StorageSpec storage{type, directory, 0, true, 2};
  if (type == "dram_pmem") storage.cache_bytes = kKeys * kDim * sizeof(float);
  if (type == "dram_ssd") storage.cache_bytes = kKeys * kDim * sizeof(float) / 2;
  return Table::Create(spec, storage);
}

// Every row counts the pushes to its key. Ends when it is killed.
[[noreturn]] void PushForever(const std::string& directory, const std::string& type,
                              const std::string& filter, Progress* progress) {
  const auto table = Open(directory, type, filter);
  std::vector<float> rows(kBatch * kDim);
  const std::vector<float> grads(kBatch * kDim, -1.0F);
  while (true) {
    const uint64_t step = table->version() + 1;
    const std::vector<Key> keys = Batch(step);
    table->Pull(keys.data(), keys.size(), rows.data());
    table->Push(keys.data(), keys.size(), grads.data(), 1.0);
    if (step % 5 != 0) continue;
    progress->called = step;
    table->Checkpoint(step);
    const auto kept = table->Checkpoints();  // without waiting: some are under way
    if (!kept.empty()) progress->durable = kept.back().id;
  }
}

class KillTest : public testing::TestWithParam<const char*> {};

TEST_P(KillTest, EveryRowIsAsItWasAtTheNewestCheckpoint) {
  constexpr std::string_view kSsd = "dram_ssd";
  const std::string parameter = GetParam();
  const bool ssd = parameter.compare(0, kSsd.size(), kSsd) == 0;
  const std::string filter = ssd ? parameter.substr(std::min(kSsd.size() + 1, parameter.size())) : parameter;
  const TestDirectory directory;
  void* memory = ::mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* progress = new (memory) Progress;
  const uint64_t seed = std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  std::vector<float> expected(kKeys, 0.0F);
  uint64_t counted = 0;
  std::vector<Key> all(kKeys);
  for (Key key = 0; key < kKeys; ++key) all[key] = key;
  for (int kill = 0; kill < kKills; ++kill) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    // Processes with a cache, which some shards get, and without one take turns on the same pool.
    const std::string type = ssd ? "dram_ssd" : kill % 2 == 0 ? "dram_pmem" : "pmem_libpmem";
    if (child == 0) {
      // In a thread of its own: io_uring's queue of this one is the parent's.
      std::thread([&] { PushForever(directory.path(), type, filter, progress); }).join();
    }
    // In its start or recovery, or around a checkpoint that is about to become durable.
    if (kill % 3 != 0) {
      const uint64_t wanted = progress->durable + 5 * (1 + random() % 4);
      while (progress->durable < wanted && ::waitpid(child, nullptr, WNOHANG) == 0) ::usleep(100);
    }
    ::usleep(static_cast<useconds_t>(random() % 10000));
    ASSERT_EQ(::kill(child, SIGKILL), 0);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "it ended by itself";

    const auto table = Open(directory.path(), ssd ? "dram_ssd" : "pmem_libpmem", filter);
    const auto kept = table->Checkpoints();
    const uint64_t id = kept.empty() ? 0 : kept.back().id;
    ASSERT_GE(id, progress->durable.load());
    ASSERT_LE(id, progress->called.load());
    ASSERT_EQ(table->version(), id);
    for (; counted < id; ++counted) {
      for (const Key key : Batch(counted + 1)) ++expected[key];
    }
    std::vector<float> rows(kKeys * kDim);
    table->Pull(all.data(), all.size(), rows.data());
    for (Key key = 0; key < kKeys; ++key) {
      const float before = filter.empty() ? 0.0F : kFilterFreq - 1;
      const float value = std::max(0.0F, expected[key] - before);
      for (uint32_t d = 0; d < kDim; ++d) ASSERT_EQ(rows[key * kDim + d], value) << "key " << key;
    }
  }
  std::printf("%d kills, %llu pushes survived\n", kKills, static_cast<unsigned long long>(counted));
  EXPECT_GT(counted, 0U);
  ::munmap(memory, sizeof(Progress));
}

INSTANTIATE_TEST_SUITE_P(Filters, KillTest,
                         testing::Values("", "counter", "cbf", "dram_ssd", "dram_ssd_counter"),
                         [](const auto& filter) {
                           return std::string(*filter.param == '\0' ? "none" : filter.param);
                         });

}  // namespace
}  // namespace oe::kill_test
