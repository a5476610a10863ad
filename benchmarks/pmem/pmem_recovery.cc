// What it takes to be back after a restart: recovery of a table from its pool beside loading an exported
// checkpoint of the same rows, and the DRAM that a table with its rows in a pool needs.
//   pmem_recovery DIRECTORY ROWS DIM ROUNDS
// The pool and the file are in memory or in the page cache; each round does both, and each child of this
// process only one. Prints a Markdown table.

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/pmem/workload.h"
#include "oe_runtime/core/checkpoint/table_file.h"

namespace {

using oe::Key;

// Of DRAM that is this process's own: mapped pools do not count.
double OwnBytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("RssAnon:", 0) == 0) return std::strtod(line.c_str() + 8, nullptr) * 1024;
  }
  return 0;
}

struct Result {
  double seconds = 0;
  uint64_t rows = 0;
  double own_bytes = 0;
  double index_bytes = 0;
  double cache_bytes = 0;
};

// What `work` returns in a process of its own, which has none of this one's memory in use.
Result InChild(const std::function<Result()>& work) {
  std::array<int, 2> ends{};
  if (::pipe(ends.data()) != 0) std::abort();
  const pid_t child = ::fork();
  if (child == 0) {
    const Result result = work();
    if (::write(ends[1], &result, sizeof(result)) != sizeof(result)) std::abort();
    ::_exit(0);
  }
  (void)::close(ends[1]);
  Result result;
  const bool whole = ::read(ends[0], &result, sizeof(result)) == sizeof(result);
  (void)::close(ends[0]);
  (void)::waitpid(child, nullptr, 0);
  if (!whole) {
    std::fprintf(stderr, "pmem_recovery: a process ended early\n");
    std::exit(1);
  }
  return result;
}

Result Measured(oe::Table* table, double seconds, double before) {
  Result result;
  result.seconds = seconds;
  result.rows = table->rows();
  result.own_bytes = OwnBytes() - before;
  result.index_bytes = static_cast<double>(table->index_bytes());
  result.cache_bytes = static_cast<double>(table->cache().bytes);
  return result;
}

void Line(const char* what, std::vector<Result> results, double of_file) {
  std::sort(results.begin(), results.end(),
            [](const Result& left, const Result& right) { return left.seconds < right.seconds; });
  const Result& usual = results[results.size() / 2];
  const auto rows = static_cast<double>(usual.rows);
  std::printf("| %s | %.2f | %.2f | **%.1f ×** | %.1f | %.1f | %.1f |\n", what, usual.seconds,
              rows / usual.seconds / 1e6, of_file / usual.seconds, usual.own_bytes / rows,
              usual.index_bytes / rows, usual.cache_bytes / rows);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "pmem_recovery DIRECTORY ROWS DIM ROUNDS\n");
    return 2;
  }
  const std::string directory = argv[1];
  const uint64_t rows = std::strtoull(argv[2], nullptr, 10);
  const auto dim = static_cast<uint32_t>(std::strtoul(argv[3], nullptr, 10));
  const int rounds = std::atoi(argv[4]);
  const std::string file = directory + "/table.oet";
  const oe::TableSpec spec = oe::AdagradTable(dim);
  const uint64_t cache_bytes = rows / 50 * 2 * dim * sizeof(float);
  const auto storage = [&](const char* type, bool recover) {
    const bool cached = type == std::string("dram_pmem");
    return oe::StorageSpec{type, directory + "/pool", 0, recover, 2, cached ? cache_bytes : 0};
  };

  (void)InChild([&] {
    const auto table = oe::Table::Create(spec, storage("pmem_libpmem", false));
    const std::vector<float> grads(oe::kIds * dim, 0.01F);
    oe::ForAllRows(rows, [&](const std::vector<Key>& keys) {
      table->Push(keys.data(), keys.size(), grads.data(), 0.01);
    });
    table->Checkpoint(1);
    table->WaitDurable();
    (void)table->Save(file);
    return Result{};
  });
  std::vector<Result> pool;
  std::vector<Result> loaded;
  for (int round = 0; round < rounds; ++round) {
    pool.push_back(InChild([&] {
      const double before = OwnBytes();
      std::unique_ptr<oe::Table> table;
      const double time =
          oe::Milliseconds([&] { table = oe::Table::Create(spec, storage("dram_pmem", true)); });
      return Measured(table.get(), time / 1e3, before);
    }));
    loaded.push_back(InChild([&] {
      const double before = OwnBytes();
      const auto table = oe::Table::Create(spec, oe::StorageSpec{});
      const double time = oe::Milliseconds([&] { table->Restore({file}); });
      return Measured(table.get(), time / 1e3, before);
    }));
  }
  // After an epoch in which every row was written, and with a full cache.
  const Result used = InChild([&] {
    const double before = OwnBytes();
    const auto table = oe::Table::Create(spec, storage("dram_pmem", true));
    std::vector<float> values(oe::kIds * dim, 0.01F);
    oe::Workload workload(rows);
    for (int i = 0; i < 100; ++i) {
      const std::vector<Key> ids = workload.Next();
      table->Pull(ids.data(), ids.size(), values.data());
      table->Upkeep();
    }
    std::fill(values.begin(), values.end(), 0.01F);
    oe::ForAllRows(rows, [&](const std::vector<Key>& keys) {
      table->Push(keys.data(), keys.size(), values.data(), 0.01);
    });
    table->Checkpoint(2);
    table->WaitDurable();
    return Measured(table.get(), 0, before);
  });

  std::vector<double> times;
  for (const Result& result : loaded) times.push_back(result.seconds);
  const double of_file = oe::Quantile(times, 0.5);
  Line("recovery of the pool, `dram_pmem`", pool, of_file);
  Line("loading the checkpoint into `dram`", loaded, of_file);
  const auto all = static_cast<double>(used.rows);
  std::printf("| `dram_pmem` later, every row written since | | | | %.1f | %.1f | %.1f |\n",
              used.own_bytes / all, used.index_bytes / all, used.cache_bytes / all);
  std::filesystem::remove(file);
  return 0;
}
