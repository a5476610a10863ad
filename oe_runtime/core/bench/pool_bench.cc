// Tables in pools: what recovery and checkpoints cost.
//   pool_bench DIRECTORY [rows=1000000] [dim=16]
// PMEM_IS_PMEM_FORCE=1 with a directory in memory (/dev/shm) has libpmem flush with CLWB, as on persistent
// memory, instead of msync.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/table/table.h"

namespace {

using oe::Key;
using Clock = std::chrono::steady_clock;

constexpr size_t kBatch = size_t{4096} * 4;
constexpr int kBatches = 2000;

double Since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

oe::TableSpec Spec(uint32_t dim) {
  oe::TableSpec spec;
  spec.name = "bench";
  spec.dim = dim;
  return spec;
}

oe::StorageSpec Pool(const std::string& directory, bool recover) {
  oe::StorageSpec storage;
  storage.type = "pmem_libpmem";
  storage.path = directory;
  storage.recover = recover;
  return storage;
}

void Fill(oe::Table* table, uint64_t rows) {
  std::vector<float> grads(kBatch * table->spec().dim, 0.01F);
  std::vector<Key> keys;
  for (Key key = 0; key < rows;) {
    keys.clear();
    for (; keys.size() < kBatch && key < rows; ++key) keys.push_back(key);
    table->Push(keys.data(), keys.size(), grads.data(), 0.01);
  }
}

void Line(const char* what, double seconds, uint64_t rows) {
  std::printf("%-44s %8.3f s %8.2f Mrows/s\n", what, seconds, static_cast<double>(rows) / seconds / 1e6);
  (void)std::fflush(stdout);
}

void Recovery(const std::string& directory, uint64_t rows, uint32_t dim) {
  const std::string file = directory + ".oet";
  {
    const auto table = oe::Table::Create(Spec(dim), Pool(directory, false));
    Fill(table.get(), rows);
    auto start = Clock::now();
    table->Checkpoint(1);
    std::printf("Checkpoint() of all rows returns after %.1f us\n", Since(start) * 1e6);
    table->WaitDurable();
    Line("until it is durable", Since(start), rows);
    start = Clock::now();
    (void)table->Save(file);
    Line("Save() to a table file", Since(start), rows);
  }
  {
    const auto start = Clock::now();
    const auto table = oe::Table::Create(Spec(dim), Pool(directory, true));
    Line("recovery of the pool", Since(start), table->rows());
  }
  {
    const auto start = Clock::now();
    const auto table = oe::Table::Create(Spec(dim), oe::StorageSpec{});
    table->Restore({file});
    Line("Restore() of the table file into dram", Since(start), table->rows());
  }
  {
    const auto table = oe::Table::Create(Spec(dim), Pool(directory, false));
    const auto start = Clock::now();
    table->Restore({file});
    Line("Restore() of the table file into a pool", Since(start), table->rows());
  }
  std::filesystem::remove(file);
}

// One thread pushes batches of which half fall on 1/2000 of the rows, another one pulls.
void Checkpoints(const std::string& directory, uint64_t rows, uint32_t dim, int every) {
  const auto table = oe::Table::Create(Spec(dim), Pool(directory, false));
  Fill(table.get(), rows);
  table->Checkpoint(1);
  table->WaitDurable();
  std::atomic<bool> stop{false};
  std::vector<double> pulls;
  std::thread puller([&] {
    std::mt19937_64 random(3);
    std::vector<Key> keys(256);
    std::vector<float> out(keys.size() * dim);
    while (!stop) {
      for (Key& key : keys) key = random() % rows;
      const auto start = Clock::now();
      table->Pull(keys.data(), keys.size(), out.data());
      pulls.push_back(Since(start));
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  std::mt19937_64 random(5);
  std::vector<std::vector<Key>> batches(64);
  size_t keys = 0;
  for (auto& batch : batches) {
    for (size_t i = 0; i < kBatch; ++i) batch.push_back(random() % (i % 2 == 0 ? rows : rows / 2000 + 1));
    std::sort(batch.begin(), batch.end());
    batch.erase(std::unique(batch.begin(), batch.end()), batch.end());
    std::shuffle(batch.begin(), batch.end(), random);
  }
  const std::vector<float> grads(kBatch * dim, 0.01F);
  double longest_call = 0;
  const auto start = Clock::now();
  for (int i = 1; i <= kBatches; ++i) {
    const auto& batch = batches[static_cast<size_t>(i) % batches.size()];
    table->Push(batch.data(), batch.size(), grads.data(), 0.01);
    keys += batch.size();
    if (every == 0 || i % every != 0) continue;
    const auto called = Clock::now();
    table->Checkpoint(static_cast<uint64_t>(i) + 1);
    longest_call = std::max(longest_call, Since(called));
  }
  const double seconds = Since(start);
  stop = true;
  puller.join();
  std::sort(pulls.begin(), pulls.end());
  std::printf(
      "checkpoint every %5d batches: %7.2f Mkeys/s pushed; longest Checkpoint() %7.1f us; pulls of 256: "
      "median %6.1f, p99 %7.1f, longest %8.1f us; pool %s\n",
      every, static_cast<double>(keys) / seconds / 1e6, longest_call * 1e6, pulls[pulls.size() / 2] * 1e6,
      pulls[pulls.size() * 99 / 100] * 1e6, pulls.back() * 1e6, oe::BytesText(table->bytes()).c_str());
  (void)std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "pool_bench DIRECTORY [rows] [dim]\n");
    return 2;
  }
  const std::string directory = argv[1];
  const uint64_t rows = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1000000;
  const auto dim = static_cast<uint32_t>(argc > 3 ? std::strtoul(argv[3], nullptr, 10) : 16);
  std::printf("%llu rows, dim %u, adagrad, batches of about %zu keys\n",
              static_cast<unsigned long long>(rows), dim, kBatch);
  Recovery(directory, rows, dim);
  for (const int every : {0, 1000, 100, 10, 0}) Checkpoints(directory, rows, dim, every);
  return 0;
}
