// Steps of a table: pulls and pushes of batches of skewed ids, one batch after the other (step.py).
//   ssd_step STORAGE DIRECTORY CACHE_BYTES ROWS DIM THREADS
// Makes all rows, and then serves steps (steps.h). Bytes are
// what dram_ssd counts itself, and of the others what the kernel counts.

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "benchmarks/ssd/steps.h"
#include "oe_runtime/core/common/thread_pool.h"
#include "oe_runtime/core/storage/log_pool.h"
#include "oe_runtime/core/table/table.h"

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
  std::vector<float> values(steps::kIdsPerBatch * spec.dim, 0.01F);
  std::vector<oe::Key> keys;
  for (oe::Key key = 0; key < rows;) {
    keys.clear();
    for (; keys.size() < steps::kIdsPerBatch && key < rows; ++key) keys.push_back(key);
    table->Push(keys.data(), keys.size(), values.data(), 0.01, &threads);
  }
  const auto step = [&](const std::vector<oe::Key>& batch) {
    table->Pull(batch.data(), batch.size(), values.data(), &threads);
    std::fill(values.begin(), values.end(), 0.01F);
    table->Push(batch.data(), batch.size(), values.data(), 0.01, &threads);
  };
  const auto counts = [&] {
    steps::Counts now = steps::DriveBytes();
    now.misses = table->cache().misses;
    if (const auto drive = table->drive()) {
      now.read_bytes = drive->device.read_bytes;
      now.written_bytes = drive->device.written_bytes;
    }
    return now;
  };
  steps::Serve(rows, step, [&] { table->Upkeep(&threads); }, counts);
  return 0;
}
