// Steps of a table: pulls and pushes of batches of skewed ids, a batch after the other (step.py).
//   ssd_step STORAGE DIRECTORY CACHE_BYTES ROWS DIM THREADS
// Makes all rows, prints a line, and for each line of its input, a number of steps, runs these and prints:
// the median milliseconds of a step, its processor milliseconds, rows read that were not cached, and bytes
// read from and written to the drive per step (of dram_ssd).

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "oe_runtime/core/common/thread_pool.h"
#include "oe_runtime/core/storage/log_pool.h"
#include "oe_runtime/core/table/table.h"

namespace {

using oe::Key;

constexpr size_t kIdsABatch = size_t{4096} * 26;

// Ids of density ~ 1 / rank, made unique, scattered over the keys as hashed ids are.
std::vector<Key> Batch(uint64_t rows, std::mt19937_64* random) {
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  std::vector<Key> batch;
  for (size_t i = 0; i < kIdsABatch; ++i) {
    const double rank = std::pow(static_cast<double>(rows), uniform(*random)) - 1;
    batch.push_back(std::min(static_cast<uint64_t>(rank), rows - 1) * 0x9E3779B1 % rows);
  }
  std::sort(batch.begin(), batch.end());
  batch.erase(std::unique(batch.begin(), batch.end()), batch.end());
  std::shuffle(batch.begin(), batch.end(), *random);
  return batch;
}

double ProcessorSeconds() {
  rusage used{};
  (void)::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  oe::StorageSpec storage;
  storage.type = argv[1];
  if (storage.type != "dram") storage.path = argv[2];
  if (storage.type == "dram_ssd" || storage.type == "dram_pmem") {
    storage.cache_bytes = std::strtoull(argv[3], nullptr, 10);
  }
  const uint64_t rows = std::strtoull(argv[4], nullptr, 10);
  oe::TableSpec spec;
  spec.name = "steps";
  spec.dim = static_cast<uint32_t>(std::strtoul(argv[5], nullptr, 10));
  spec.optimizer.name = "adagrad";
  oe::ThreadPool threads(static_cast<uint32_t>(std::strtoul(argv[6], nullptr, 10)));
  const auto table = oe::Table::Create(spec, storage);
  std::vector<float> values(kIdsABatch * spec.dim, 0.01F);
  std::vector<Key> keys;
  for (Key key = 0; key < rows;) {
    keys.clear();
    for (; keys.size() < kIdsABatch && key < rows; ++key) keys.push_back(key);
    table->Push(keys.data(), keys.size(), values.data(), 0.01, &threads);
  }
  std::cout << "ready" << std::endl;  // NOLINT(performance-avoid-endl): it is waited for
  std::mt19937_64 random(7);
  for (size_t steps = 0; std::cin >> steps;) {
    std::vector<double> took;
    const uint64_t misses = table->cache().misses;
    const auto drive = table->drive();
    const double processor = ProcessorSeconds();
    for (size_t step = 0; step < steps; ++step) {
      const std::vector<Key> batch = Batch(rows, &random);
      const auto start = std::chrono::steady_clock::now();
      table->Pull(batch.data(), batch.size(), values.data(), &threads);
      std::fill(values.begin(), values.end(), 0.01F);
      table->Push(batch.data(), batch.size(), values.data(), 0.01, &threads);
      took.push_back(
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
      table->Upkeep(&threads);
    }
    std::sort(took.begin(), took.end());
    const auto count = static_cast<double>(steps);
    const auto after = table->drive();
    std::cout << took[steps / 2] << ' ' << (ProcessorSeconds() - processor) * 1e3 / count << ' '
              << static_cast<double>(table->cache().misses - misses) / count << ' '
              << (drive ? static_cast<double>(after->device.read_bytes - drive->device.read_bytes) / count
                        : 0)
              << ' '
              << (drive
                      ? static_cast<double>(after->device.written_bytes - drive->device.written_bytes) / count
                      : 0)
              << std::endl;  // NOLINT(performance-avoid-endl)
  }
  return 0;
}
