// Tables in DRAM, in a pool, and in a pool with a cache of a part of the rows in DRAM, side by side: batches
// of 4096 x 26 ids, of which 85.7 % fall on 0.05 % of the rows and 95.7 % on 1 % (the production trace in
// "OpenEmbedding: A Distributed Parameter Server for Deep Learning Recommendation Models using Persistent
// Memory", ICDE 2023), made unique, as a server gets them.
//   cache_bench DIRECTORY [rows=1000000] [dim=64] [cached rows in percent=2] [threads=1] [checkpoint every
//   N=0]
// Every batch goes to each table in turn, so that whatever else the machine does falls on all. The upkeep of
// the cache, which a server does when the reply is under way, has a column of its own. PMEM_IS_PMEM_FORCE=1
// with a directory in memory (/dev/shm) has libpmem flush with CLWB, as on persistent memory, instead of
// msync. It is not persistent memory and as fast as DRAM: what this shows is what the cache itself costs, and
// how much of the traffic it keeps from the pool.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "oe_runtime/core/server/thread_pool.h"
#include "oe_runtime/core/table/table.h"

namespace {

using oe::Key;
using Clock = std::chrono::steady_clock;

constexpr size_t kIds = size_t{4096} * 26;
constexpr int kWarmup = 150;
constexpr int kBatches = 300;

class Batches {
 public:
  explicit Batches(uint64_t rows) : rows_(rows), hot_(rows / 2000 + 1), warm_(rows / 100 + 1) {}

  std::vector<Key> Next() {
    std::vector<Key> keys(kIds);
    for (Key& key : keys) {
      const uint64_t kind = random_() % 1000;
      uint64_t rank = 0;
      if (kind < 857) {
        rank = random_() % hot_;
      } else if (kind < 957) {
        rank = hot_ + random_() % (warm_ - hot_);
      } else {
        rank = warm_ + random_() % (rows_ - warm_);
      }
      key = oe::Mix64(rank);
    }
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    std::shuffle(keys.begin(), keys.end(), random_);
    return keys;
  }

 private:
  const uint64_t rows_;
  const uint64_t hot_;
  const uint64_t warm_;
  std::mt19937_64 random_{7};
};

struct Subject {
  oe::StorageSpec storage;
  std::unique_ptr<oe::Table> table;
  // Nanoseconds a key, of each batch.
  std::vector<double> pull;
  std::vector<double> upkeep;
  std::vector<double> push;
};

// The lower quartile: what else the machine does makes batches slower, never faster.
double Usual(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 4];
}

template <typename Work>
double Nanoseconds(const Work& work) {
  const auto start = Clock::now();
  work();
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count();
}

void Fill(oe::Table* table, uint64_t rows, oe::Executor* executor) {
  std::vector<float> grads(kIds * table->spec().dim, 0.01F);
  std::vector<Key> keys;
  for (uint64_t rank = 0; rank < rows;) {
    keys.clear();
    for (; keys.size() < kIds && rank < rows; ++rank) keys.push_back(oe::Mix64(rank));
    table->Push(keys.data(), keys.size(), grads.data(), 0.01, executor);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr,
                 "cache_bench DIRECTORY [rows] [dim] [cached percent] [threads] [checkpoint every]\n");
    return 2;
  }
  const std::string directory = argv[1];
  const uint64_t rows = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1000000;
  const auto dim = static_cast<uint32_t>(argc > 3 ? std::strtoul(argv[3], nullptr, 10) : 64);
  const double percent = argc > 4 ? std::strtod(argv[4], nullptr) : 2;
  const auto threads = static_cast<unsigned>(argc > 5 ? std::strtoul(argv[5], nullptr, 10) : 1);
  const int every = argc > 6 ? static_cast<int>(std::strtol(argv[6], nullptr, 10)) : 0;
  if (rows < 1000) {
    std::fprintf(stderr, "cache_bench: at least 1000 rows\n");
    return 2;
  }
  oe::ThreadPool pool(threads);

  std::array<Subject, 3> subjects;
  subjects[1].storage = {"pmem_libpmem", directory + "/pool", 0};
  subjects[2].storage = {"dram_pmem", directory + "/cached", 0};
  // Of weights and accumulators, which is what a row is.
  const double row_bytes = 2.0 * dim * sizeof(float);
  subjects[2].storage.cache_bytes =
      static_cast<uint64_t>(percent / 100 * static_cast<double>(rows) * row_bytes);
  for (Subject& subject : subjects) {
    oe::TableSpec spec;
    spec.name = "bench";
    spec.dim = dim;
    subject.table = oe::Table::Create(spec, subject.storage);
    Fill(subject.table.get(), rows, &pool);
  }

  Batches batches(rows);
  std::vector<float> values(kIds * dim);
  const std::vector<float> grads(kIds * dim, 0.01F);
  size_t keys = 0;
  oe::CacheStats before;
  for (int i = 0; i < kWarmup + kBatches; ++i) {
    const std::vector<Key> batch = batches.Next();
    if (i == kWarmup) before = subjects[2].table->cache();
    if (i >= kWarmup) keys += batch.size();
    for (size_t turn = 0; turn < subjects.size(); ++turn) {
      Subject& subject = subjects[(turn + static_cast<size_t>(i)) % subjects.size()];
      oe::Table& table = *subject.table;
      if (every > 0 && i % every == 0 && subject.storage.type != "dram") {
        table.Checkpoint(static_cast<uint64_t>(i) + 1);
      }
      const auto size = static_cast<double>(batch.size());
      const double pull =
          Nanoseconds([&] { table.Pull(batch.data(), batch.size(), values.data(), &pool); }) / size;
      const double upkeep = Nanoseconds([&] { table.Upkeep(&pool); }) / size;
      const double push =
          Nanoseconds([&] { table.Push(batch.data(), batch.size(), grads.data(), 0.01, &pool); }) / size;
      if (i < kWarmup) continue;
      subject.pull.push_back(pull);
      subject.upkeep.push_back(upkeep);
      subject.push.push_back(push);
    }
  }

  std::printf(
      "%llu rows, dim %u, adagrad, %u threads, %zu unique keys a batch, cache %s (%.1f %% of the rows)",
      static_cast<unsigned long long>(rows), dim, threads, keys / kBatches,
      oe::BytesText(subjects[2].storage.cache_bytes).c_str(), percent);
  std::printf(every > 0 ? ", a checkpoint every %d batches\n" : "\n", every);
  std::printf(
      "Mkeys/s by the lower quartile     of dram                  of dram   ns/key  pull + push  with "
      "upkeep\n");
  std::printf(
      "storage          pull                     push               upkeep      of dram      of dram\n");
  const auto step = [](const Subject& subject) { return Usual(subject.pull) + Usual(subject.push); };
  for (const Subject& subject : subjects) {
    std::printf("%-13s %8.2f %10.2f %11.2f %10.2f %8.1f %12.2f %12.2f\n", subject.storage.type.c_str(),
                1e3 / Usual(subject.pull), Usual(subjects[0].pull) / Usual(subject.pull),
                1e3 / Usual(subject.push), Usual(subjects[0].push) / Usual(subject.push),
                Usual(subject.upkeep), step(subjects[0]) / step(subject),
                step(subjects[0]) / (step(subject) + Usual(subject.upkeep)));
  }
  const oe::CacheStats after = subjects[2].table->cache();
  const double hits = static_cast<double>(after.hits - before.hits);
  std::printf(
      "cache: %s held, %llu rows, %.1f %% of unique keys hit, %llu evictions, %llu write-backs a batch\n",
      oe::BytesText(after.bytes).c_str(), static_cast<unsigned long long>(after.rows),
      100 * hits / (hits + static_cast<double>(after.misses - before.misses)),
      static_cast<unsigned long long>((after.evictions - before.evictions) / kBatches),
      static_cast<unsigned long long>((after.write_backs - before.write_backs) / kBatches));
  return 0;
}
