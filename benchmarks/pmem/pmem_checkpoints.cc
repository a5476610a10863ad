// What checkpoints cost: turns of so many batches, with a checkpoint at their beginning and without (with,
// without, bare, bare, without, with, …), of one table, since two tables alike lie in memory that is not
// equally fast. Each checkpoint is durable before the next turn, and what else the machine does falls on both
// kinds. Rows that the turn after a checkpoint has not written are copied in the next one: with 10^6 rows and
// 1,000 batches, one in a hundred; fewer rows and batches in proportion are as many.
//   pmem_checkpoints DIRECTORY STORAGE ROWS DIM THREADS DIMMS EVERY SECONDS
// A step is as in pmem_tiers.cc. The client's part is the same with and without: it is timed before, in
// processor time, and its median is part of every step. Times of the table are told twice: as they passed,
// and as processor time of all threads, that which makes checkpoints durable included, which other processes
// disturb least. What is charged for DIMMS is what checkpoints flush (model.h); 0 is without the model.
// What memory alone costs is a third kind of turn, without a checkpoint, in which each push is followed by
// bare copies of as many rows as it would copy after one: from rows that were just read, as the push has
// them, to others one after the other, fetched ahead. Prints lines of Markdown tables.

#include <sys/mman.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <unordered_set>
#include <vector>

#include "benchmarks/pmem/model.h"
#include "benchmarks/pmem/turns.h"
#include "benchmarks/pmem/workload.h"
#include "oe_runtime/core/common/thread_pool.h"

namespace {

using oe::Key;

// Turns of one kind; milliseconds a batch, but for pulls.
struct Kind {
  std::vector<double> pulls;
  double longest = 0;            // pull
  double longest_processor = 0;  // what the calling thread computed in it
  std::vector<double> turns;
  std::vector<double> processor;
};

// Milliseconds of the longest Checkpoint() and until one was durable.
struct Durability {
  double call = 0;
  double durable = 0;
};

// The client's part of a step in milliseconds of processor time, the median of some.
double ClientTime(oe::Workload* workload, oe::ClientPart* client) {
  std::vector<double> times;
  for (int i = 0; i < 100; ++i) {
    const std::vector<Key> ids = workload->Next();
    const double before = oe::ProcessorTime(CLOCK_THREAD_CPUTIME_ID);
    client->Unique(ids);
    (void)client->RowsToGradients();
    times.push_back(oe::ProcessorTime(CLOCK_THREAD_CPUTIME_ID) - before);
  }
  return oe::Quantile(times, 0.5);
}

// How many rows each batch of a turn is the first to write.
std::vector<size_t> NewRows(uint64_t rows, int batches, oe::ClientPart* client) {
  oe::Workload workload(rows);
  std::unordered_set<Key> seen;
  std::vector<size_t> counts;
  for (int i = 0; i < batches; ++i) {
    const size_t before = seen.size();
    const std::vector<Key>& keys = client->Unique(workload.Next());
    seen.insert(keys.begin(), keys.end());
    counts.push_back(seen.size() - before);
  }
  return counts;
}

// Memory for as many rows twice, and copies between the halves.
class BareCopies {
 public:
  BareCopies(uint64_t rows, size_t row_bytes) : rows_(rows), row_bytes_(row_bytes) {
    void* memory =
        ::mmap(nullptr, 2 * rows * row_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    (void)::madvise(memory, 2 * rows * row_bytes, MADV_HUGEPAGE);
    from_ = static_cast<std::byte*>(memory);
    std::memset(from_, 1, 2 * rows * row_bytes);
  }
  BareCopies(const BareCopies&) = delete;
  BareCopies& operator=(const BareCopies&) = delete;
  ~BareCopies() { (void)::munmap(from_, 2 * rows_ * row_bytes_); }

  // What the push has read anyway.
  void Read(const std::vector<Key>& keys, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      for (size_t at = 0; at < row_bytes_; at += 64) read_ += std::to_integer<uint64_t>(From(keys[i])[at]);
    }
  }
  void Copy(const std::vector<Key>& keys, size_t n, oe::ThreadPool* pool) {
    constexpr size_t kPieces = 16;
    const size_t first = next_;
    next_ = (next_ + n) % rows_;
    pool->ParallelFor(kPieces, [&](size_t piece) {
      for (size_t i = n * piece / kPieces; i < n * (piece + 1) / kPieces; ++i) {
        oe::PrefetchRow(To(first + i + 8), row_bytes_);
        std::memcpy(To(first + i), From(keys[i]), row_bytes_);
      }
    });
  }

 private:
  std::byte* From(Key key) const { return from_ + key % rows_ * row_bytes_; }
  std::byte* To(size_t at) const { return from_ + (rows_ + at % rows_) * row_bytes_; }

  const uint64_t rows_;
  const size_t row_bytes_;
  std::byte* from_ = nullptr;
  size_t next_ = 0;
  uint64_t read_ = 0;
};

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
  const std::vector<size_t> new_rows = NewRows(rows, every, &client);
  BareCopies copies(rows, size_t{2} * dim * sizeof(float));
  Durability durability;
  uint64_t id = 0;
  enum KindOf : size_t { kCheckpoint, kNone, kBare };
  std::array<Kind, 3> kinds;
  const auto turn = [&](KindOf of, int batches, bool counts) {
    Kind& kind = kinds[of];
    const bool checkpoint = of == kCheckpoint;
    std::vector<double> steps;
    double processor = -oe::ProcessorTime(CLOCK_PROCESS_CPUTIME_ID);
    oe::Clock::time_point called{};
    for (int i = 0; i < batches; ++i) {
      processor += oe::ProcessorTime(CLOCK_THREAD_CPUTIME_ID);
      const std::vector<Key>& keys = client.Unique(workload.Next());
      processor -= oe::ProcessorTime(CLOCK_THREAD_CPUTIME_ID);
      double pull = 0;
      double processor_of_pull = 0;
      steps.push_back(oe::Milliseconds([&] {
        if (i == 0 && checkpoint) {
          called = oe::Clock::now();
          const double call = oe::Milliseconds([&] { table->Checkpoint(++id); });
          if (counts) durability.call = std::max(durability.call, call);
        }
        processor_of_pull = -oe::ProcessorTime(CLOCK_THREAD_CPUTIME_ID);
        pull = oe::Milliseconds([&] { table->Pull(keys.data(), keys.size(), client.rows(), &pool); });
        processor_of_pull += oe::ProcessorTime(CLOCK_THREAD_CPUTIME_ID);
        table->Upkeep(&pool);
        table->Push(keys.data(), keys.size(), grads.data(), 0.01, &pool);
      }));
      if (of == kBare) {
        const size_t n = std::min(new_rows[static_cast<size_t>(i)], keys.size());
        processor += oe::ProcessorTime(CLOCK_THREAD_CPUTIME_ID);
        copies.Read(keys, n);
        processor -= oe::ProcessorTime(CLOCK_THREAD_CPUTIME_ID);
        steps.back() += oe::Milliseconds([&] { copies.Copy(keys, n, &pool); });
      }
      if (counts) {
        if (pull > kind.longest) kind.longest_processor = processor_of_pull;
        kind.longest = std::max(kind.longest, pull);
        kind.pulls.push_back(pull);
      }
      if (called == oe::Clock::time_point{}) continue;
      const std::vector<oe::CheckpointInfo> kept = table->Checkpoints();
      if (kept.empty() || kept.back().id != id) continue;
      const double took = std::chrono::duration<double, std::milli>(oe::Clock::now() - called).count();
      if (counts) durability.durable = std::max(durability.durable, took);
      called = {};
    }
    if (checkpoint) table->WaitDurable();
    processor += oe::ProcessorTime(CLOCK_PROCESS_CPUTIME_ID);
    if (!counts) return;
    kind.turns.push_back(oe::MeanOfMedians(steps));
    kind.processor.push_back(processor / batches);
  };
  // Until slots are used again, and the cache is full.
  for (int i = 0; i < 4; ++i) turn(kCheckpoint, every / 4, false);
  turn(kCheckpoint, every, false);
  for (int i = 0;; ++i) {
    const std::chrono::duration<double> past = oe::Clock::now() - began;
    if (i % 3 == 0 && i >= 3 && past.count() > seconds) break;
    turn(std::array{kCheckpoint, kNone, kBare, kBare, kNone, kCheckpoint}[i % 6], every, true);
  }

  const auto& [with, without, bare] = kinds;
  const double p99 = oe::Quantile(without.pulls, 0.99);
  std::printf("| `%s` | %llu | %u | %u | %s | %.2f | %.2f | **%s** | **%s** | %s | %s | %zu |", type.c_str(),
              static_cast<unsigned long long>(rows), dim, pool.threads(),
              dimms == 0 ? "none" : (std::to_string(dimms) + " DIMM").c_str(),
              client_time + oe::Quantile(without.turns, 0.5), client_time + oe::Quantile(with.turns, 0.5),
              oe::More(with.turns, without.turns, client_time).c_str(),
              oe::More(with.processor, without.processor, client_time).c_str(),
              oe::More(bare.turns, without.turns, client_time).c_str(),
              oe::More(bare.processor, without.processor, client_time).c_str(), with.turns.size());
  for (const Kind* kind : {&without, &with}) {
    std::printf(" %.2f / %.2f / %.2f / %.2f |", oe::Quantile(kind->pulls, 0.5),
                oe::Quantile(kind->pulls, 0.99), oe::Quantile(kind->pulls, 0.999),
                oe::Quantile(kind->pulls, 1));
  }
  std::printf(" **%.2f** | %.2f | %.3f | %.0f |\n", oe::Quantile(with.pulls, 1) / p99, with.longest_processor,
              durability.call, durability.durable);
  return 0;
}
