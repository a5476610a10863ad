// One side of kernel_tiering.py, on a node with a slower memory node: a table in memory that the kernel
// tiers, or dram_pmem with its pool in DIRECTORY.
//   kernel_tiering dram|dram_pmem DIRECTORY ROWS DIM CACHE_BYTES WARM BATCHES seen|shuffled
// Rows are created in the order in which batches bring them, so that popular rows are neighbours, or in none.
// After WARM seconds of batches it prints "begin" and waits for a line, makes BATCHES batches, prints "end"
// and what they took, and waits again: the other side reads its counters meanwhile.

#include <cstdlib>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/pmem/workload.h"
#include "oe_runtime/core/common/thread_pool.h"

namespace {

constexpr double kRate = 0.01;
constexpr size_t kAtOnce = size_t{1} << 14;  // keys
constexpr int kSeen = 10;                    // batches
constexpr uint64_t kStride = 1'000'003;      // prime, so that it comes to all rows

void Say(const std::string& what) {
  std::cout << what << std::endl;
  std::string line;
  std::getline(std::cin, line);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 9) {
    std::cerr << "kernel_tiering dram|dram_pmem DIRECTORY ROWS DIM CACHE_BYTES WARM BATCHES seen|shuffled\n";
    return 2;
  }
  const std::string type = argv[1];
  const uint64_t rows = std::strtoull(argv[3], nullptr, 10);
  const auto dim = static_cast<uint32_t>(std::strtoul(argv[4], nullptr, 10));
  const uint64_t cache = std::strtoull(argv[5], nullptr, 10);
  const double warm = std::atof(argv[6]) * 1e3;
  const int batches = std::atoi(argv[7]);

  oe::ThreadPool pool(1);
  const auto storage = type == "dram" ? oe::Storage::Open({"dram", ""})
                                      : oe::Storage::Open({type, argv[2], 0, false, 2, cache});
  const auto table = oe::Table::Create(oe::AdagradTable(dim), storage);
  // Small, since it lies beside the table in the memory that is scarce here.
  std::vector<float> grads(kAtOnce * dim, 0.01F);
  std::vector<float> out(kAtOnce * dim);
  oe::Workload workload(rows);
  const auto create = [&](const std::vector<oe::Key>& keys) {
    if (keys.size() > kAtOnce) throw std::runtime_error("more unique keys than room");
    table->Push(keys.data(), keys.size(), grads.data(), kRate, &pool);
  };
  for (int i = 0; i < kSeen && std::string(argv[8]) == "seen"; ++i) {
    const std::vector<oe::Key> ids = workload.Next();
    create(oe::FindUnique(ids.data(), ids.size()).keys);
  }
  std::vector<oe::Key> keys;
  for (uint64_t i = 0; i < rows;) {
    keys.clear();
    for (; keys.size() < kAtOnce && i < rows; ++i) keys.push_back(oe::Mix64(i * kStride % rows));
    create(keys);
  }

  std::vector<double> times;
  size_t unique = 0;
  const auto step = [&] {
    const std::vector<oe::Key> ids = workload.Next();
    const std::vector<oe::Key> batch = oe::FindUnique(ids.data(), ids.size()).keys;
    if (batch.size() > kAtOnce) throw std::runtime_error("more unique keys than room");
    unique += batch.size();
    times.push_back(oe::Milliseconds([&] {
      table->Pull(batch.data(), batch.size(), out.data(), &pool);
      table->Upkeep(&pool);
      table->Push(batch.data(), batch.size(), grads.data(), kRate, &pool);
    }));
  };
  int warmed = 0;
  for (const auto start = oe::Clock::now();; ++warmed) {
    if (std::chrono::duration<double, std::milli>(oe::Clock::now() - start).count() > warm) break;
    step();
  }
  times.clear();
  unique = 0;
  const oe::CacheStats before = table->cache();
  Say("begin " + std::to_string(warmed));
  for (int i = 0; i < batches; ++i) step();
  const oe::CacheStats after = table->cache();
  Say("end " + std::to_string(unique) + " " + std::to_string(after.misses - before.misses) + " " +
      std::to_string(oe::Quantile(times, 0.5)));
  return 0;
}
