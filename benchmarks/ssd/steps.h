// What the programs behind step.py share: the batches, and how a step is measured.

#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <random>
#include <string>
#include <vector>

namespace steps {

constexpr size_t kIdsPerBatch = size_t{4096} * 26;

// Ids as those of benchmarks/engine, made unique: 0.05 % of the rows take 85.7 % of the ids, and 1 %
// take 95.7 %. They are scattered over the keys as hashed ids are.
inline std::vector<uint64_t> Batch(uint64_t rows, std::mt19937_64* random) {
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  std::vector<uint64_t> batch;
  for (size_t i = 0; i < kIdsPerBatch; ++i) {
    const double kind = uniform(*random);
    const uint64_t reach = kind < 0.857 ? rows / 2000 : kind < 0.957 ? rows / 100 : rows;
    batch.push_back((*random)() % reach * 0x9E3779B1 % rows);
  }
  std::sort(batch.begin(), batch.end());
  batch.erase(std::unique(batch.begin(), batch.end()), batch.end());
  std::shuffle(batch.begin(), batch.end(), *random);
  return batch;
}

inline double ProcessorSeconds() {
  rusage used{};
  (void)::getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

// Totals since the start.
struct Counts {
  uint64_t misses = 0;         // rows that were not cached
  uint64_t read_bytes = 0;     // from the drive
  uint64_t written_bytes = 0;  // to it
};

// The bytes that this process has read from drives and written to them, says the kernel.
inline Counts DriveBytes() {
  Counts now;
  std::ifstream file("/proc/self/io");
  std::string name;
  for (uint64_t value = 0; file >> name >> value;) {
    if (name == "read_bytes:") now.read_bytes = value;
    if (name == "write_bytes:") now.written_bytes = value;
  }
  return now;
}

// Prints a line. Then runs as many steps as each line of the input says, and prints: the median milliseconds
// of a step, and its processor milliseconds, misses, bytes read and bytes written. `step(batch)` is timed,
// `after()` is not, but its processor time counts; `counts()` returns Counts.
template <typename Step, typename After, typename CountsNow>
void Serve(uint64_t rows, Step step, After after, CountsNow counts) {
  std::cout << "ready" << std::endl;  // NOLINT(performance-avoid-endl): it is waited for
  std::mt19937_64 random(7);
  for (size_t count = 0; std::cin >> count;) {
    std::vector<double> took;
    std::vector<std::vector<uint64_t>> batches;
    for (size_t i = 0; i < count; ++i) batches.push_back(Batch(rows, &random));
    const Counts before = counts();
    const double processor = ProcessorSeconds();
    for (const std::vector<uint64_t>& batch : batches) {
      const auto start = std::chrono::steady_clock::now();
      step(batch);
      took.push_back(
          std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
      after();
    }
    const double processor_ms = (ProcessorSeconds() - processor) * 1e3;
    const Counts now = counts();
    std::sort(took.begin(), took.end());
    const auto per_step = [count](double total) { return total / static_cast<double>(count); };
    const auto difference = [&](uint64_t Counts::* field) {
      return per_step(static_cast<double>(now.*field - before.*field));
    };
    std::cout << took[count / 2] << ' ' << per_step(processor_ms) << ' ' << difference(&Counts::misses) << ' '
              << difference(&Counts::read_bytes) << ' ' << difference(&Counts::written_bytes)
              << std::endl;  // NOLINT(performance-avoid-endl)
  }
}

}  // namespace steps
