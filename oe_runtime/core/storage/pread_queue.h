#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "oe_runtime/core/storage/block_device.h"
#include "oe_runtime/core/storage/read_counts.h"
#include "oe_runtime/core/storage/striped_files.h"

namespace oe {

// Threads that read with pread, each one block or run of blocks at a time: a device without io_uring. The
// threads start with the first read.
class PreadPool {
 public:
  PreadPool(const StripedFiles* files, uint32_t threads, ReadCounts* counts);
  ~PreadPool();
  PreadPool(const PreadPool&) = delete;
  PreadPool& operator=(const PreadPool&) = delete;

  std::unique_ptr<ReadQueue> NewQueue();

 private:
  class Queue;
  struct Submission;

  void Add(const std::shared_ptr<Submission>& submission);
  void Work();

  const StripedFiles* const files_;
  const uint32_t most_threads_;
  ReadCounts* const counts_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Submission>> submissions_;  // those with reads that nobody has begun
  uint32_t idle_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace oe
