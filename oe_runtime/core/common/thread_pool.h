// A fixed set of threads over which one request's independent pieces are spread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "oe_runtime/core/common/executor.h"

namespace oe {

class ThreadPool : public Executor {
 public:
  // `threads` counts the caller of ParallelFor, so 1 starts none. 0 means one per core.
  explicit ThreadPool(unsigned threads);
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  unsigned threads() const { return static_cast<unsigned>(helpers_.size()) + 1; }

  // Calls body(0) .. body(count - 1), each once, in any order, and returns when all have returned. The caller
  // works too, so a pool that is busy with other requests only makes it slower. If some throw, all others
  // still run, and the exception of the lowest index is thrown. May be called from several threads at once,
  // and from within a body.
  void ParallelFor(size_t count, const std::function<void(size_t)>& body) override;

 private:
  struct Job;
  static void WorkOn(Job* job);
  void Help();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> jobs_;  // those which may still have indexes to hand out
  bool stop_ = false;
  std::vector<std::thread> helpers_;
};

}  // namespace oe
