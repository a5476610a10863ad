// What checkpoints cost: turns of so many batches, with a checkpoint at their beginning and without (with,
// without, without, with, …), of one table, since two tables alike lie in memory that is not equally fast.
// Each checkpoint is durable before the next turn, and what else the machine does falls on both kinds. Rows
// that the turn after a checkpoint has not written are copied in the next one: with 10^6 rows and 1,000
// batches, one in a hundred; fewer rows and batches in proportion are as many.
//   pmem_checkpoints DIRECTORY STORAGE ROWS DIM THREADS DIMMS EVERY SECONDS
// A step is as in pmem_tiers.cc. The client's part is the same with and without: it is timed before, in
// processor time, and its median is part of every step. Times of the table are told twice: as they passed,
// and as processor time of all threads, that which makes checkpoints durable included, which other processes
// disturb least. What is charged for DIMMS is what checkpoints flush (model.h); 0 is without the model.
// Prints lines of Markdown tables.

#include <array>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/pmem/model.h"
#include "benchmarks/pmem/workload.h"
#include "oe_runtime/core/server/thread_pool.h"

namespace {

using oe::Key;

// Turns of one kind; milliseconds a batch, but for pulls.
struct Kind {
  std::vector<double> pulls;
  std::vector<double> turns;
  std::vector<double> processor;
};

// Milliseconds of the longest Checkpoint() and until one was durable.
struct Durability {
  double call = 0;
  double durable = 0;
};

// Milliseconds of this thread or of all.
double ProcessorTime(clockid_t of) {
  timespec time{};
  clock_gettime(of, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
}

// Of every ten: what copies rows after a checkpoint, or is flushed beside, takes longer than that; what the
// machine does else hits one or two.
double MeanOfMedians(const std::vector<double>& steps) {
  constexpr size_t kTogether = 10;
  double sum = 0;
  size_t count = 0;
  for (size_t at = 0; at + kTogether <= steps.size(); at += kTogether) {
    const auto begin = steps.begin() + static_cast<ptrdiff_t>(at);
    sum += oe::Quantile({begin, begin + kTogether}, 0.5);
    ++count;
  }
  return sum / static_cast<double>(count);
}

// "+0.80 % (+0.50 to +1.10)": how much more the first of each pair are with `both` added to each; the median
// and an interval that has it with a probability of at least 95 %, or all if there are fewer than six pairs.
std::string More(const std::vector<double>& with, const std::vector<double>& without, double both) {
  std::vector<double> ratios;
  for (size_t i = 0; i < with.size(); ++i) {
    ratios.push_back(100 * ((both + with[i]) / (both + without[i]) - 1));
  }
  std::sort(ratios.begin(), ratios.end());
  // How many are left out at each end: those below the median are as many as heads of so many coins.
  const size_t n = ratios.size();
  size_t out = 0;
  double chance = std::pow(0.5, n);
  for (double below = chance; 2 * below <= 0.05; below += chance) {
    ++out;
    chance *= static_cast<double>(n - out + 1) / static_cast<double>(out);
  }
  const size_t first = out > 0 ? out - 1 : 0;
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%+.2f %% (%+.2f to %+.2f)", oe::Quantile(ratios, 0.5),
                ratios[first], ratios[n - 1 - first]);
  return text.data();
}

// The client's part of a step in milliseconds of processor time, the median of some.
double ClientTime(oe::Workload* workload, oe::ClientPart* client) {
  std::vector<double> times;
  for (int i = 0; i < 100; ++i) {
    const std::vector<Key> ids = workload->Next();
    const double before = ProcessorTime(CLOCK_THREAD_CPUTIME_ID);
    client->Unique(ids);
    (void)client->RowsToGradients();
    times.push_back(ProcessorTime(CLOCK_THREAD_CPUTIME_ID) - before);
  }
  return oe::Quantile(times, 0.5);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 9) {
    std::fprintf(stderr, "pmem_checkpoints DIRECTORY STORAGE ROWS DIM THREADS DIMMS EVERY SECONDS\n");
    return 2;
  }
  const std::string directory = argv[1];
  const std::string type = argv[2];
  const uint64_t rows = std::strtoull(argv[3], nullptr, 10);
  const auto dim = static_cast<uint32_t>(std::strtoul(argv[4], nullptr, 10));
  oe::ThreadPool pool(static_cast<unsigned>(std::strtoul(argv[5], nullptr, 10)));
  const auto dimms = static_cast<unsigned>(std::strtoul(argv[6], nullptr, 10));
  oe::PmemModel model(dimms);
  const int every = std::atoi(argv[7]);
  const double seconds = std::strtod(argv[8], nullptr);
  const auto began = oe::Clock::now();

  const uint64_t cache_bytes = type == "dram_pmem" ? rows / 50 * 2 * dim * sizeof(float) : 0;
  const auto table = oe::Table::Create(oe::AdagradTable(dim),
                                       std::make_shared<oe::ModelledStorage>(&model, directory, cache_bytes));
  const std::vector<float> grads(oe::kIds * dim, 0.01F);
  oe::ForAllRows(rows, [&](const std::vector<Key>& keys) {
    table->Push(keys.data(), keys.size(), grads.data(), 0.01, &pool);
  });

  oe::Workload workload(rows);
  oe::ClientPart client(dim);
  const double client_time = ClientTime(&workload, &client);
  Durability durability;
  uint64_t id = 0;
  std::array<Kind, 2> kinds;
  const auto turn = [&](bool checkpoint, int batches, bool counts) {
    Kind& kind = kinds[checkpoint ? 0 : 1];
    std::vector<double> steps;
    double processor = -ProcessorTime(CLOCK_PROCESS_CPUTIME_ID);
    oe::Clock::time_point called{};
    for (int i = 0; i < batches; ++i) {
      processor += ProcessorTime(CLOCK_THREAD_CPUTIME_ID);
      const std::vector<Key>& keys = client.Unique(workload.Next());
      processor -= ProcessorTime(CLOCK_THREAD_CPUTIME_ID);
      double pull = 0;
      steps.push_back(oe::Milliseconds([&] {
        if (i == 0 && checkpoint) {
          called = oe::Clock::now();
          const double call = oe::Milliseconds([&] { table->Checkpoint(++id); });
          if (counts) durability.call = std::max(durability.call, call);
        }
        pull = oe::Milliseconds([&] { table->Pull(keys.data(), keys.size(), client.rows(), &pool); });
        table->Upkeep(&pool);
        table->Push(keys.data(), keys.size(), grads.data(), 0.01, &pool);
      }));
      if (counts) kind.pulls.push_back(pull);
      if (called == oe::Clock::time_point{}) continue;
      const std::vector<oe::CheckpointInfo> kept = table->Checkpoints();
      if (kept.empty() || kept.back().id != id) continue;
      const double took = std::chrono::duration<double, std::milli>(oe::Clock::now() - called).count();
      if (counts) durability.durable = std::max(durability.durable, took);
      called = {};
    }
    if (checkpoint) table->WaitDurable();
    processor += ProcessorTime(CLOCK_PROCESS_CPUTIME_ID);
    if (!counts) return;
    kind.turns.push_back(MeanOfMedians(steps));
    kind.processor.push_back(processor / batches);
  };
  // Until slots are used again, and the cache is full.
  for (int i = 0; i < 4; ++i) turn(true, every / 4, false);
  turn(true, every, false);
  for (int i = 0;; ++i) {
    const std::chrono::duration<double> past = oe::Clock::now() - began;
    if (i % 2 == 0 && i >= 2 && past.count() > seconds) break;
    turn((i + 1) / 2 % 2 == 0, every, true);
  }

  const auto& [with, without] = kinds;
  const double p99 = oe::Quantile(without.pulls, 0.99);
  std::printf("| `%s` | %llu | %u | %u | %s | %.2f | %.2f | **%s** | **%s** | %zu |", type.c_str(),
              static_cast<unsigned long long>(rows), dim, pool.threads(),
              dimms == 0 ? "none" : (std::to_string(dimms) + " DIMM").c_str(),
              client_time + oe::Quantile(without.turns, 0.5), client_time + oe::Quantile(with.turns, 0.5),
              More(with.turns, without.turns, client_time).c_str(),
              More(with.processor, without.processor, client_time).c_str(), with.turns.size());
  for (const Kind* kind : {&without, &with}) {
    std::printf(" %.2f / %.2f / %.2f / %.2f |", oe::Quantile(kind->pulls, 0.5),
                oe::Quantile(kind->pulls, 0.99), oe::Quantile(kind->pulls, 0.999),
                oe::Quantile(kind->pulls, 1));
  }
  std::printf(" **%.2f** | %.3f | %.0f |\n", oe::Quantile(with.pulls, 1) / p99, durability.call,
              durability.durable);
  return 0;
}
