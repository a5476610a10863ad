#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "oe_runtime/core/storage/block_device.h"
#include "oe_runtime/core/storage/block_reads.h"

namespace oe {

// Threads that read with pread, for devices without io_uring. They start with the first reads.
class PreadPool {
 public:
  // The one of all devices that are open now.
  static std::shared_ptr<PreadPool> Shared();

  PreadPool() = default;
  ~PreadPool();
  PreadPool(const PreadPool&) = delete;
  PreadPool& operator=(const PreadPool&) = delete;

  // The file and counts outlive the queue.
  std::unique_ptr<ReadQueue> NewQueue(int file, ReadCounts* counts);

 private:
  static constexpr uint32_t kMostThreads = 32;

  class Queue;
  struct Submission;

  void Add(const std::shared_ptr<Submission>& submission);
  void Work();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Submission>> submissions_;  // those with reads that nobody has begun
  uint32_t idle_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace oe
