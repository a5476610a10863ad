// What checkpoints cost a user's step: a client pulls and pushes the batches of workload.h at a server of
// this process over loopback, in turns of so many batches with a checkpoint at their beginning and without
// (with, without, without, with, …), as pmem_checkpoints.cc does without the wire.
//   pmem_loopback DIRECTORY STORAGE ROWS DIM THREADS EVERY SECONDS
// THREADS each has the client and has the server. Prints lines of Markdown tables.

#include <array>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "benchmarks/pmem/turns.h"
#include "oe_runtime/core/client/client.h"
#include "oe_runtime/core/server/server.h"

namespace {

struct Kind {
  std::vector<double> turns;  // milliseconds a batch
  std::vector<double> processor;
  std::vector<double> pulls;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) {
    std::fprintf(stderr, "pmem_loopback DIRECTORY STORAGE ROWS DIM THREADS EVERY SECONDS\n");
    return 2;
  }
  const uint64_t rows = std::strtoull(argv[3], nullptr, 10);
  const auto dim = static_cast<uint32_t>(std::strtoul(argv[4], nullptr, 10));
  const auto threads = static_cast<unsigned>(std::strtoul(argv[5], nullptr, 10));
  const int every = std::atoi(argv[6]);
  const double seconds = std::strtod(argv[7], nullptr);
  const auto began = oe::Clock::now();

  oe::ServerOptions options;
  options.storage.type = argv[2];
  options.storage.path = argv[1];
  if (options.storage.type == "dram_pmem") options.storage.cache_bytes = rows / 50 * 2 * dim * sizeof(float);
  options.threads = threads;
  const oe::Server server(options);
  oe::RemoteOptions remote;
  remote.endpoints.push_back("127.0.0.1:" + std::to_string(server.port()));
  const std::unique_ptr<oe::Client> client = oe::Client::Connect(remote, threads);
  const uint32_t table = client->CreateTable(oe::AdagradTable(dim));
  const std::vector<float> grads(oe::kIds * dim, 0.01F);
  oe::Workload workload(rows);
  double pull = 0;
  const auto step = [&](const std::vector<oe::Key>& ids) {
    std::shared_ptr<oe::PulledBatch> batch;
    pull = oe::Milliseconds([&] { batch = client->Pull({{ids.data(), ids.size()}}, {{table, 0}}); });
    client->Push(*batch, {{grads.data(), ids.size(), dim}}, {0.01});
  };
  oe::ForAllRows(rows, step);

  uint64_t id = 0;
  std::array<Kind, 2> kinds;
  const auto turn = [&](bool checkpoint, int batches, bool counts) {
    std::vector<double> steps;
    Kind& kind = kinds[checkpoint ? 0 : 1];
    const double before = oe::ProcessorTime(CLOCK_PROCESS_CPUTIME_ID);
    for (int i = 0; i < batches; ++i) {
      const std::vector<oe::Key> ids = workload.Next();
      steps.push_back(oe::Milliseconds([&] {
        if (i == 0 && checkpoint) client->Checkpoint(++id, false);
        step(ids);
      }));
      if (counts) kind.pulls.push_back(pull);
    }
    while (checkpoint && (client->Checkpoints().empty() || client->Checkpoints().back() != id)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (!counts) return;
    kind.turns.push_back(oe::MeanOfMedians(steps));
    kind.processor.push_back((oe::ProcessorTime(CLOCK_PROCESS_CPUTIME_ID) - before) / batches);
  };
  for (int i = 0; i < 4; ++i) turn(true, every / 4, false);
  turn(true, every, false);
  for (int i = 0;; ++i) {
    const std::chrono::duration<double> past = oe::Clock::now() - began;
    if (i % 2 == 0 && i >= 2 && past.count() > seconds) break;
    turn((i + 1) / 2 % 2 == 0, every, true);
  }

  const auto& [with, without] = kinds;
  std::printf("| `%s` | %llu | %u | %u | %.2f | %.2f | **%s** | **%s** | %zu |", argv[2],
              static_cast<unsigned long long>(rows), dim, threads, oe::Quantile(without.turns, 0.5),
              oe::Quantile(with.turns, 0.5), oe::More(with.turns, without.turns, 0).c_str(),
              oe::More(with.processor, without.processor, 0).c_str(), with.turns.size());
  for (const Kind* kind : {&without, &with}) {
    std::printf(" %.2f / %.2f / %.2f |", oe::Quantile(kind->pulls, 0.5), oe::Quantile(kind->pulls, 0.99),
                oe::Quantile(kind->pulls, 1));
  }
  std::printf(" **%.2f** |\n", oe::Quantile(with.pulls, 1) / oe::Quantile(without.pulls, 0.99));
  return 0;
}
