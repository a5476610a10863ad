// Persistent memory by the published figures, over a pool that lies in ordinary memory.
//
// Figures of Intel Optane DC (100 series), per DIMM: random reads take 305 ns, 6.6 GB/s reading, 2.3 GB/s
// writing, in lines of 256 B (Izraelevitz et al., "Basic Performance Measurements of the Intel Optane DC
// Persistent Memory Module", 2019; Yang et al., "An Empirical Guide to the Behavior and Use of Scalable
// Persistent Memory", FAST 2020). Interleaved DIMMs add up.
//
//   reads    A thread has 10 cache lines of 64 B on their way (line fill buffers of a Skylake or Cascade Lake
//            core), so r rows of l lines that are fetched ahead cost a thread
//            max(305 ns, r · l · 4 / 10 · 305 ns): 2.1 GB/s a thread, and 17 to 19 threads for the 39.4 GB/s
//            of six DIMMs, as measured there. One row alone costs at least 305 ns.
//   writes   go on by themselves until the 16 KiB that a DIMM buffers are behind, then the thread waits for
//            the device. Lines that are still in that buffer are combined. A fence waits for all of them and
//            costs 94 ns.
//   device   Reads and writes share the time of the DIMMs: 256 B / 6.6 GB/s a line read, 256 B / 2.3 GB/s a
//            line written, in the order in which they come, whatever thread they are from.
//
// What is charged is spent in busy waiting, on top of what the same access really takes in DRAM. Every row
// that a pull reads outside of the runtime's cache is charged, as if none of it were in the processor's
// caches, and so is what the push of the same batch reads more of it. Rows that a push wrote are charged as
// written by the push and again when a checkpoint flushes them.
#pragma once

#include <x86intrin.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "oe_runtime/core/storage/cache_memory.h"
#include "oe_runtime/core/storage/medium.h"
#include "oe_runtime/core/storage/pool.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {

// Thread-safe. Times in nanoseconds.
class PmemModel {
 public:
  static constexpr size_t kLine = 256;
  static constexpr double kReadLatency = 305;
  static constexpr double kFence = 94;
  static constexpr double kLinesOnTheirWay = 2.5;  // 10 of 64 bytes
  static constexpr double kReadBytes = 6.6;        // a nanosecond and DIMM
  static constexpr double kWriteBytes = 2.3;
  static constexpr double kBufferBytes = 16 << 10;

  // Without DIMMs, nothing is charged.
  explicit PmemModel(unsigned dimms) : dimms_(dimms) {
    const auto start = std::chrono::steady_clock::now();
    const uint64_t ticks = __rdtsc();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
    ticks_a_ns_ = static_cast<double>(__rdtsc() - ticks) / time.count();
    first_tick_ = ticks;
  }

  bool on() const { return dimms_ > 0; }
  static size_t Lines(size_t bytes) { return (bytes + kLine - 1) / kLine; }

  // Reads `lines` that are independent of each other, shared out among `threads`, of which the caller is one.
  void Read(size_t lines, unsigned threads = 1) {
    if (!on() || lines == 0) return;
    const double begin = Now();
    const double each = static_cast<double>(lines) / threads * kReadLatency / kLinesOnTheirWay;
    WaitUntil(std::max(begin + std::max(kReadLatency, each), Use(lines, kReadBytes)));
  }

  // Stores that will be written back at some time.
  void Write(size_t lines) {
    if (!on() || lines == 0) return;
    WaitUntil(Use(lines, kWriteBytes) - kBufferBytes / kWriteBytes);
  }

  void Fence() {
    if (on()) WaitUntil(std::max(Now(), free_.load(std::memory_order_relaxed)) + kFence);
  }

 private:
  double Now() const { return static_cast<double>(__rdtsc() - first_tick_) / ticks_a_ns_; }

  // The device is busy for that long more; until when it then is.
  double Use(size_t lines, double bytes_a_ns) {
    const double time = static_cast<double>(lines * kLine) / (bytes_a_ns * dimms_);
    double free = free_.load(std::memory_order_relaxed);
    double end = 0;
    do {
      end = std::max(free, Now()) + time;
    } while (!free_.compare_exchange_weak(free, end, std::memory_order_relaxed));
    return end;
  }

  void WaitUntil(double time) const {
    while (Now() < time) _mm_pause();
  }

  const unsigned dimms_;
  double ticks_a_ns_ = 1;
  uint64_t first_tick_ = 0;
  std::atomic<double> free_{0};  // when the device has done all that it was asked for
};

// Charges what checkpoints flush: the row or metadata is read (its checksum, or a state) and written.
class ModelledFlusher final : public Flusher {
 public:
  ModelledFlusher(PmemModel* model, std::unique_ptr<Flusher> flusher)
      : model_(model), flusher_(std::move(flusher)) {}

  void Flush(const void* data, size_t size) override {
    flusher_->Flush(data, size);
    const auto first = reinterpret_cast<uintptr_t>(data) / PmemModel::kLine;
    const auto last = (reinterpret_cast<uintptr_t>(data) + size - 1) / PmemModel::kLine;
    size_t lines = 0;
    for (uintptr_t line = first; line <= last; ++line) {
      uintptr_t& place = buffered_[line % buffered_.size()];
      lines += place == line ? 0 : 1;
      place = line;
    }
    // A row that is flushed was read for its checksum, one after the other and fetched ahead.
    if (lines > 0) reads_ += lines;
    if (reads_ >= kReadsAtOnce) {
      model_->Read(reads_);
      reads_ = 0;
    }
    model_->Write(lines);
  }
  void Fence() override {
    flusher_->Fence();
    model_->Read(std::exchange(reads_, 0));
    model_->Fence();
    buffered_ = {};
  }

 private:
  static constexpr size_t kReadsAtOnce = 16;

  PmemModel* const model_;
  const std::unique_ptr<Flusher> flusher_;
  std::array<uintptr_t, static_cast<size_t>(PmemModel::kBufferBytes) / PmemModel::kLine> buffered_{};
  size_t reads_ = 0;
};

class ModelledMedium final : public Medium {
 public:
  ModelledMedium(PmemModel* model, Medium* medium) : model_(model), medium_(medium) {}

  Region Create(const std::string& name, size_t least, size_t wanted, const std::string& owner) override {
    return medium_->Create(name, least, wanted, owner);
  }
  size_t SizeOf(const std::string& name) const override { return medium_->SizeOf(name); }
  Region Open(const std::string& name) override { return medium_->Open(name); }
  void Close(const Region& region) noexcept override { medium_->Close(region); }
  void RequirePresent(const Region& region) const override { medium_->RequirePresent(region); }
  void Remove(const std::string& name) override { medium_->Remove(name); }
  std::vector<std::string> List() const override { return medium_->List(); }
  std::string PathOf(const std::string& name) const override { return medium_->PathOf(name); }
  uint64_t Room() const noexcept override { return medium_->Room(); }
  std::unique_ptr<Flusher> NewFlusher() override {
    if (!model_->on()) return medium_->NewFlusher();
    return std::make_unique<ModelledFlusher>(model_, medium_->NewFlusher());
  }

 private:
  PmemModel* const model_;
  Medium* const medium_;
};

// The storage of the runtime with the model below its pools: pmem_libpmem, or with `cache_bytes` dram_pmem.
class ModelledStorage final : public Storage {
 public:
  ModelledStorage(PmemModel* model, const std::string& directory, uint64_t cache_bytes)
      : Storage({cache_bytes > 0 ? "dram_pmem" : "pmem_libpmem", directory, 0, false, 2, cache_bytes}),
        pools_(Storage::Open({"pmem_libpmem", directory})),
        medium_(model, dynamic_cast<Medium*>(pools_.get())),
        cache_(cache_bytes == 0 ? nullptr : std::make_unique<CacheMemory>(cache_bytes)) {}

  std::unique_ptr<Pool> NewPool(const PoolSpec& wanted, bool /*fresh*/, bool* opened) override {
    *opened = false;
    PoolSpec pool = wanted;
    pool.window = spec().kept_checkpoints;
    pool.cache = cache_.get();
    return Pool::Create(&medium_, pool);
  }
  bool is_pmem() const override { return pools_->is_pmem(); }

 private:
  const std::shared_ptr<Storage> pools_;
  ModelledMedium medium_;
  const std::unique_ptr<CacheMemory> cache_;
};

}  // namespace oe
