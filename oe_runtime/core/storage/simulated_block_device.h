#pragma once

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/storage/block_device.h"
#include "oe_runtime/core/storage/block_reads.h"

namespace oe {

// For tests only. A drive with a power switch and faults. What is written is read at once, and stays in the
// drive's volatile cache until a flush. A power cut keeps any sectors of the writes since, in any order.
// Reads happen at any time between Submit() and Wait(). Without hooks thread-safe; a run repeats only with
// one thread.
class SimulatedBlockDevice final : public BlockDevice {
 public:
  struct Crash {};  // no std::exception: the code under test must not catch it

  // What a write is torn into: 512 or kBlockBytes.
  explicit SimulatedBlockDevice(uint64_t seed, size_t sector_bytes = 512)
      : random_(seed), sector_bytes_(sector_bytes) {}

  // Called at every write, flush, grow, discard and submission, before it.
  std::function<void()> on_step;
  uint64_t capacity = UINT64_MAX;

  // One step: here the power may go.
  void Step() {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (crashed_) throw Crash{};  // NOLINT(bugprone-std-exception-baseclass)
    if (steps_left_ == 0) {
      crashed_ = true;
      throw Crash{};  // NOLINT(bugprone-std-exception-baseclass)
    }
    --steps_left_;
    if (on_step) on_step();
  }
  // The Step() after `steps` more throws Crash, and nothing is written any more.
  void CrashAfter(uint64_t steps) { steps_left_ = steps; }
  uint64_t steps_left() const { return steps_left_; }

  // What the next process finds. A process that was killed leaves all that it wrote. Faults and failed
  // flushes end; blocks that are bad stay bad.
  void Restart(bool power_cut) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (power_cut) {
      KeepSome();
      unflushed_.clear();
      seen_ = durable_;
    }
    flush_errno_ = 0;
    writes_until_error_ = flushes_until_error_ = UINT64_MAX;
    crashed_ = false;
    steps_left_ = UINT64_MAX;
  }

  // So many reads of this block fail, or until it is written anew, as a drive remaps it.
  void FailReads(uint64_t offset, int error = EIO, uint64_t times = UINT64_MAX) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    bad_blocks_[offset / kBlockBytes] = {error, times};
  }
  void RepairReads() { bad_blocks_.clear(); }
  // After `waits` more, each wait breaks off, as where the kernel takes no more reads.
  void FailWaitsAfter(uint64_t waits) { waits_until_error_ = waits; }
  // After `writes` more, each write fails with EIO. A part of its sectors may have been written.
  void FailWritesAfter(uint64_t writes) { writes_until_error_ = writes; }
  // After `flushes` more, a flush fails. What was not durable before may be lost, though reads still find it.
  void FailFlushesAfter(uint64_t flushes) { flushes_until_error_ = flushes; }

  // Flips a bit behind the program's back.
  void Flip(uint64_t offset, int bit) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    seen_.at(offset) ^= std::byte{1} << bit;
    if (offset < durable_.size()) durable_[offset] ^= std::byte{1} << bit;
  }

  // What reads find.
  std::vector<std::byte> Content(uint64_t offset, uint64_t bytes) const {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    const auto begin = seen_.begin() + static_cast<ptrdiff_t>(offset);
    return {begin, begin + static_cast<ptrdiff_t>(bytes)};
  }

  std::unique_ptr<ReadQueue> NewQueue() override { return std::make_unique<Queue>(this); }

  void Write(uint64_t offset, const std::byte* data, size_t bytes) override {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    RequireBlocks(offset, bytes);
    if (!crashed_) RequireFlushed();
    if (offset + bytes > seen_.size()) throw StorageError("a write past the end of the simulated device");
    // One that fails, or in which the process ends, leaves some of its sectors.
    const bool ends = steps_left_ == 0 && !crashed_;
    const bool fails = writes_until_error_ == 0;
    if (!ends) Step();
    if (!fails && writes_until_error_ != UINT64_MAX) --writes_until_error_;
    ++stats_.writes;
    for (uint64_t at = 0; at < bytes; at += sector_bytes_) {
      if ((fails || ends) && random_() % 2 == 0) continue;
      std::memcpy(&seen_[offset + at], data + at, sector_bytes_);
      unflushed_.push_back({offset + at, std::vector<std::byte>(data + at, data + at + sector_bytes_)});
    }
    if (ends) Step();
    if (fails) throw StorageError("cannot write to the simulated device", EIO);
    for (uint64_t at = 0; at < bytes; at += kBlockBytes) bad_blocks_.erase((offset + at) / kBlockBytes);
    stats_.written_bytes += bytes;
  }

  void Flush() override {
    Step();
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    RequireFlushed();
    ++stats_.flushes;
    if (flushes_until_error_ == 0) {
      // Linux forgets which pages were not written: no later flush makes them durable.
      KeepSome();
      unflushed_.clear();
      flush_errno_ = EIO;
      RequireFlushed();
    }
    if (flushes_until_error_ != UINT64_MAX) --flushes_until_error_;
    durable_.resize(seen_.size());
    for (const Sector& sector : unflushed_) Keep(sector);
    unflushed_.clear();
  }

  uint64_t size() const override {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    return seen_.size();
  }
  void Grow(uint64_t bytes) override {
    Step();
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    RequireFlushed();
    bytes = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    if (bytes <= seen_.size()) return;
    if (bytes > capacity) throw StorageFull("the simulated device is full");
    seen_.resize(bytes);
  }
  void Discard(uint64_t offset, uint64_t bytes) override {
    Step();
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    RequireBlocks(offset, bytes);
    const uint64_t end = std::min<uint64_t>(offset + bytes, seen_.size());
    for (uint64_t at = offset; at < end; at += sector_bytes_) {
      if (random_() % 4 == 0) continue;
      std::memset(&seen_[at], 0, sector_bytes_);
      unflushed_.push_back({at, std::vector<std::byte>(sector_bytes_)});
    }
  }

  std::string description() const override { return "simulated"; }
  BlockDeviceStats stats() const override {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    return stats_;
  }

 private:
  struct Sector {
    uint64_t offset;
    std::vector<std::byte> content;
  };

  class Queue final : public ReadQueue {
   public:
    explicit Queue(SimulatedBlockDevice* device) : device_(device) {}
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;
    ~Queue() override {
      device_ = device_->crashed_ ? nullptr : device_;
      Finish(kEverything);
    }

    uint64_t Submit(BlockRead* reads, size_t count) override {
      device_->Step();
      std::vector<BlockRead*> later;
      for (size_t at = 0; at < count; ++at) {
        // Nobody may look at them before they are done.
        if (reads[at].into != nullptr) std::memset(static_cast<void*>(reads[at].into), 0xA5, reads[at].bytes);
        if (device_->Coin()) {
          device_->Read(&reads[at]);
        } else {
          later.push_back(&reads[at]);
        }
      }
      open_.push_back(std::move(later));
      return ++last_;
    }
    void Wait(uint64_t ticket) override {
      if (device_->waits_until_error_ == 0) throw StorageError("reads of the simulated device break off");
      if (device_->waits_until_error_ != UINT64_MAX) --device_->waits_until_error_;
      Finish(ticket);
    }
    bool Poll() override {
      for (std::vector<BlockRead*>& later : open_) {
        while (!later.empty() && device_->Coin()) {
          device_->Read(later.back());
          later.pop_back();
        }
      }
      return std::all_of(open_.begin(), open_.end(), [](const auto& later) { return later.empty(); });
    }

   private:
    void Finish(uint64_t ticket) {
      while (!open_.empty() && last_ - open_.size() < ticket) {
        for (BlockRead* read : open_.front()) {
          if (device_ != nullptr) device_->Read(read);
        }
        open_.pop_front();
      }
    }

    SimulatedBlockDevice* device_;
    std::deque<std::vector<BlockRead*>> open_;
    uint64_t last_ = 0;
  };

  bool Coin() {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    return random_() % 2 == 0;
  }

  void Read(BlockRead* read) {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    ++stats_.reads;
    read->error = ErrorOf(*read);
    if (read->error == 0) {
      const ReadShape shape = ShapeOf(*read);
      if (shape == ReadShape::kBlocks) std::memcpy(read->into, &seen_[read->offset], read->bytes);
      read->error = Deliver(*read, shape, &seen_[read->offset / kBlockBytes * kBlockBytes]);
    }
    if (read->error != 0) ++stats_.read_errors;
    stats_.read_bytes += (read->bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  }

  struct BadBlock {
    int error;
    uint64_t times;  // that it fails still
  };

  int ErrorOf(const BlockRead& read) {
    if (ShapeOf(read) == ReadShape::kRefused) return EINVAL;
    if (read.offset + read.bytes > seen_.size()) return ENODATA;
    const uint64_t last = (read.offset + read.bytes - 1) / kBlockBytes;
    const auto bad = bad_blocks_.lower_bound(read.offset / kBlockBytes);
    if (bad == bad_blocks_.end() || bad->first > last) return 0;
    const int error = bad->second.error;
    if (--bad->second.times == 0) bad_blocks_.erase(bad);
    return error;
  }

  static void RequireBlocks(uint64_t offset, uint64_t bytes) {
    if (offset % kBlockBytes != 0 || bytes % kBlockBytes != 0) {
      throw StorageError("a write or discard of a part of a block", EINVAL);
    }
  }
  void RequireFlushed() const {
    if (flush_errno_ != 0) throw StorageError("a flush of the simulated device failed", flush_errno_);
  }

  void Keep(const Sector& sector) {
    if (sector.offset + sector.content.size() > durable_.size()) return;  // the file was shorter
    std::memcpy(&durable_[sector.offset], sector.content.data(), sector.content.size());
  }

  // Some of the sectors that were not flushed become durable.
  void KeepSome() {
    if (durable_.size() < seen_.size() && random_() % 2 == 0) durable_.resize(seen_.size());
    const uint64_t kind = random_() % 4;
    if (random_() % 2 == 0) std::shuffle(unflushed_.begin(), unflushed_.end(), random_);
    for (const Sector& sector : unflushed_) {
      // None, nearly all, few, or half.
      const bool keeps = kind == 0   ? false
                         : kind == 1 ? random_() % 16 != 0
                         : kind == 2 ? random_() % 16 == 0
                                     : random_() % 2 == 0;
      if (keeps) Keep(sector);
    }
  }

  mutable std::recursive_mutex mutex_;
  std::mt19937_64 random_;
  const size_t sector_bytes_;
  std::vector<std::byte> seen_;     // what reads find
  std::vector<std::byte> durable_;  // what a power cut leaves at least
  std::vector<Sector> unflushed_;   // in the order of the writes
  std::map<uint64_t, BadBlock> bad_blocks_;
  uint64_t waits_until_error_ = UINT64_MAX;
  uint64_t writes_until_error_ = UINT64_MAX;
  uint64_t flushes_until_error_ = UINT64_MAX;
  int flush_errno_ = 0;
  uint64_t steps_left_ = UINT64_MAX;
  bool crashed_ = false;
  BlockDeviceStats stats_;
};

}  // namespace oe
