// Reads rows of 512 bytes at random from a file of blocks, in batches as a table's misses come.
//
//   ssd_device FILE fill GIB                       makes the file, of random bytes
//   ssd_device FILE io_uring|preads SECONDS BATCHES_IN_FLIGHT READS_PER_BATCH
//
// Prints: reads, seconds, seconds of processor time (all threads, look-up of the block and copy of the row
// included). With one batch in flight each batch is begun when the one before is done.

#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/storage/block_device.h"

namespace oe {
namespace {

constexpr uint32_t kRowBytes = 512;

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double ProcessorSeconds() {
  struct rusage usage{};
  (void)::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

void Fill(BlockDevice* device, uint64_t mib) {
  device->Grow(mib << 20);
  const BlockBuffer blocks(size_t{8} << 20);
  std::mt19937_64 random(1);
  for (uint64_t at = 0; at < device->size(); at += blocks.size()) {
    for (size_t word = 0; word < blocks.size(); word += sizeof(uint64_t)) {
      const uint64_t value = random();
      std::memcpy(blocks.data() + word, &value, sizeof(value));
    }
    device->Write(at, blocks.data(), blocks.size());
  }
  device->Flush();
}

struct Batch {
  std::vector<std::byte> rows;
  std::vector<BlockRead> reads;
  uint64_t ticket = 0;
};

void Read(BlockDevice* device, double seconds, size_t in_flight, size_t reads_per_batch) {
  const uint64_t blocks = device->size() / kBlockBytes;
  if (blocks == 0) throw StorageError("the file is empty; fill it first");
  std::mt19937_64 random(std::random_device{}());
  std::vector<Batch> batches(in_flight);
  for (Batch& batch : batches) {
    batch.rows.resize(reads_per_batch * kRowBytes);
    batch.reads.resize(reads_per_batch);
  }
  const auto queue = device->NewQueue();
  uint64_t done = 0;
  const double processor = ProcessorSeconds();
  const Clock::time_point begin = Clock::now();
  for (size_t at = 0;; at = (at + 1) % in_flight) {
    Batch& batch = batches[at];
    if (batch.ticket != 0) {
      queue->Wait(batch.ticket);
      done += reads_per_batch;
      for (const BlockRead& read : batch.reads) {
        if (read.error != 0) throw StorageError("a read failed", read.error);
      }
      if (SecondsSince(begin) >= seconds) break;
    }
    for (size_t read = 0; read < reads_per_batch; ++read) {
      const uint64_t row = random() % (kBlockBytes / kRowBytes);
      batch.reads[read] = {random() % blocks * kBlockBytes + row * kRowBytes, &batch.rows[read * kRowBytes],
                           kRowBytes};
    }
    batch.ticket = queue->Submit(batch.reads.data(), reads_per_batch);
  }
  // Those still in flight are not counted; they have cost processor time, so the result is no better than it
  // is.
  std::printf("%llu %.6f %.6f\n", static_cast<unsigned long long>(done), SecondsSince(begin),
              ProcessorSeconds() - processor);
}

int Main(int count, char** words) {
  if (count != 4 && count != 6) {
    std::fprintf(
        stderr,
        "ssd_device FILE fill MIB | FILE io_uring|preads SECONDS BATCHES_IN_FLIGHT READS_PER_BATCH\n");
    return 2;
  }
  const std::string what = words[2];
  const auto device = OpenBlockDevice(words[1], what == "preads" ? ReadMethod::kPreads : ReadMethod::kBest);
  if (what == "fill") {
    Fill(device.get(), std::strtoull(words[3], nullptr, 10));
    return 0;
  }
  if (device->description() != what) throw StorageError("no " + what + " here: " + device->description());
  Read(device.get(), std::strtod(words[3], nullptr), std::strtoull(words[4], nullptr, 10),
       std::strtoull(words[5], nullptr, 10));
  return 0;
}

}  // namespace
}  // namespace oe

int main(int count, char** words) {
  try {
    return oe::Main(count, words);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ssd_device: %s\n", error.what());
    return 1;
  }
}
