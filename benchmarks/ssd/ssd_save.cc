// How fast a table whose rows are on a drive is saved to a file.
//   ssd_save DIRECTORY CACHE_BYTES ROWS DIM
// Makes all rows in DIRECTORY/rows, has a checkpoint of them, saves them twice to DIRECTORY/saved, and prints
// for each: the seconds, MB of rows per second, processor seconds, and reads and MB from the drive.

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/storage/log_pool.h"
#include "oe_runtime/core/table/table.h"

namespace {

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
  if (argc != 5) return 2;
  const std::string directory = argv[1];
  oe::StorageSpec storage;
  storage.type = "dram_ssd";
  storage.path = directory + "/rows";
  storage.cache_bytes = std::strtoull(argv[2], nullptr, 10);
  const uint64_t rows = std::strtoull(argv[3], nullptr, 10);
  oe::TableSpec spec;
  spec.name = "saved";
  spec.dim = static_cast<uint32_t>(std::strtoul(argv[4], nullptr, 10));
  spec.optimizer.name = "adagrad";
  const auto table = oe::Table::Create(spec, storage);
  constexpr size_t kAtOnce = 65536;
  const std::vector<float> grads(kAtOnce * spec.dim, 0.01F);
  std::vector<oe::Key> keys;
  for (oe::Key key = 0; key < rows;) {
    keys.clear();
    for (; keys.size() < kAtOnce && key < rows; ++key) keys.push_back(key * 0x9E3779B1 % rows);
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    table->Push(keys.data(), keys.size(), grads.data(), 0.01);
  }
  table->Checkpoint(1);
  table->WaitDurable();
  for (int turn = 0; turn < 2; ++turn) {
    const auto before = table->drive()->device;
    const double processor = ProcessorSeconds();
    const auto start = std::chrono::steady_clock::now();
    const oe::TableFileInfo info = table->Save(directory + "/saved");
    const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const auto after = table->drive()->device;
    std::printf("%.2f s  %.0f MB/s of rows  %.2f processor s  %lu reads  %.0f MB read\n", took,
                static_cast<double>(info.bytes) / 1e6 / took, ProcessorSeconds() - processor,
                static_cast<unsigned long>(after.reads - before.reads),
                static_cast<double>(after.read_bytes - before.read_bytes) / 1e6);
    (void)std::fflush(stdout);
  }
  (void)::unlink((directory + "/saved").c_str());
  return 0;
}
