// Millions of keys per second through one table on one thread: pulls and pushes of unique keys, as a server
// gets them.
//   table_bench [rows=1000000] [dtype=float32] [directory: also measures pmem_libpmem there]

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "oe_runtime/core/table/table.h"

namespace {

using oe::Key;

constexpr size_t kBatches = 16;
constexpr size_t kIdsABatch = size_t{4096} * 26;
constexpr double kSecondsEach = 1.0;

// Batches of 4096 x 26 skewed ids (density ~ 1 / rank) over `rows` keys, made unique.
std::vector<std::vector<Key>> MakeBatches(uint64_t rows, bool skewed) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  std::vector<std::vector<Key>> batches(kBatches);
  for (auto& batch : batches) {
    for (size_t i = 0; i < kIdsABatch; ++i) {
      const double u = uniform(random);
      const double rank = skewed ? std::pow(static_cast<double>(rows), u) - 1 : u * static_cast<double>(rows);
      batch.push_back(std::min(static_cast<uint64_t>(rank), rows - 1));
    }
    std::sort(batch.begin(), batch.end());
    batch.erase(std::unique(batch.begin(), batch.end()), batch.end());
    std::shuffle(batch.begin(), batch.end(), random);
  }
  return batches;
}

template <typename Work>
double MillionsPerSecond(const std::vector<std::vector<Key>>& batches, const Work& work) {
  using Clock = std::chrono::steady_clock;
  for (const auto& batch : batches) work(batch);
  const auto start = Clock::now();
  double seconds = 0;
  size_t keys = 0;
  while (seconds < kSecondsEach) {
    for (const auto& batch : batches) {
      work(batch);
      keys += batch.size();
    }
    seconds = std::chrono::duration<double>(Clock::now() - start).count();
  }
  return static_cast<double>(keys) / seconds / 1e6;
}

void Measure(const oe::StorageSpec& storage, const std::string& dtype, const std::string& index, uint32_t dim,
             uint64_t rows) {
  oe::TableSpec spec;
  spec.dtype = dtype;
  spec.name = "bench";
  spec.dim = dim;
  spec.index = index;
  spec.input_dim = index == "array" ? rows : 0;
  auto table = oe::Table::Create(spec, storage);
  std::vector<double> buffer(kIdsABatch * dim, 0.01);  // of any dtype
  float* const floats = reinterpret_cast<float*>(buffer.data());
  const auto fill_gradients = [&] {
    if (dtype == "float64") return std::fill(buffer.begin(), buffer.end(), 0.01);
    std::fill_n(floats, kIdsABatch * dim, 0.01F);
  };
  fill_gradients();
  void* const values = buffer.data();
  std::vector<Key> keys;
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  for (Key key = 0; key < rows;) {
    keys.clear();
    for (; keys.size() < kIdsABatch && key < rows; ++key) keys.push_back(key);
    table->Push(keys.data(), keys.size(), values, 0.01);
  }
  const double fill =
      static_cast<double>(rows) / std::chrono::duration<double>(Clock::now() - start).count() / 1e6;
  for (const bool skewed : {true, false}) {
    const auto batches = MakeBatches(rows, skewed);
    const double pull = MillionsPerSecond(
        batches, [&](const auto& batch) { table->Pull(batch.data(), batch.size(), values); });
    fill_gradients();
    const double push = MillionsPerSecond(batches, [&](const auto& batch) {
      table->CheckGradients(batch.data(), batch.size(), values);
      table->Push(batch.data(), batch.size(), values, 0.01);
    });
    std::printf("| %-12s | %-5s | %3u | %-7s | %10zu | %5zu | %6.1f | %5.1f | %5.1f | %11.1f |\n",
                storage.type.c_str(), index.c_str(), dim, skewed ? "skewed" : "uniform", batches[0].size(),
                table->row_bytes(), fill, pull, push,
                static_cast<double>(table->index_bytes()) / static_cast<double>(table->rows()));
    (void)std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t rows = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000000;
  const std::string dtype = argc > 2 ? argv[2] : "float32";
  std::printf("%llu rows of %s, adagrad, one thread; Mkeys/s\n", static_cast<unsigned long long>(rows),
              dtype.c_str());
  std::printf(
      "| storage      | index | dim | ids     | keys/batch | B/row | insert |  pull |  push | index B/key |\n"
      "|--------------|-------|----:|---------|-----------:|------:|-------:|------:|------:|------------:|"
      "\n");
  std::vector<oe::StorageSpec> storages = {{"dram", "", 0}};
  if (argc > 3) storages.push_back({"pmem_libpmem", argv[3], 0});
  for (const auto& storage : storages) {
    for (const std::string index : {"hash", "array"}) {
      for (const uint32_t dim : {1U, 9U, 64U}) Measure(storage, dtype, index, dim, rows);
    }
  }
  return 0;
}
