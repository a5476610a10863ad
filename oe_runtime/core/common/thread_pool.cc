#include "oe_runtime/core/common/thread_pool.h"

#include <algorithm>
#include <utility>

namespace oe {

struct ThreadPool::Job {
  Job(size_t n, const std::function<void(size_t)>& f) : count(n), body(f) {}

  const size_t count;
  const std::function<void(size_t)>&
      body;  // lives in ParallelFor, which returns after the last index is done
  std::atomic<size_t> next{0};

  std::mutex mutex;
  std::condition_variable all_done;
  size_t done = 0;
  size_t failed_index = 0;
  std::exception_ptr error;
};

ThreadPool::ThreadPool(unsigned threads) {
  if (threads == 0) threads = std::max(1U, std::thread::hardware_concurrency());
  helpers_.reserve(threads - 1);
  for (unsigned i = 1; i < threads; ++i) helpers_.emplace_back([this] { Help(); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void ThreadPool::WorkOn(Job* job) {
  size_t finished = 0;
  for (;;) {
    const size_t index = job->next.fetch_add(1, std::memory_order_relaxed);
    if (index >= job->count) break;
    try {
      job->body(index);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(job->mutex);
      if (!job->error || index < job->failed_index) {
        job->error = std::current_exception();
        job->failed_index = index;
      }
    }
    ++finished;
  }
  if (finished == 0) return;
  const std::lock_guard<std::mutex> lock(job->mutex);
  job->done += finished;
  if (job->done == job->count) job->all_done.notify_all();
}

void ThreadPool::Help() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
    if (stop_) return;
    const std::shared_ptr<Job> job = jobs_.front();
    if (job->next.load(std::memory_order_relaxed) >= job->count) {
      jobs_.pop_front();
      continue;
    }
    lock.unlock();
    WorkOn(job.get());
    lock.lock();
  }
}

void ThreadPool::ParallelFor(size_t count, const std::function<void(size_t)>& body) {
  if (count == 0) return;
  if (count == 1 || helpers_.empty()) {
    std::exception_ptr error;
    for (size_t i = 0; i < count; ++i) {
      try {
        body(i);
      } catch (...) {
        if (!error) error = std::current_exception();
      }
    }
    if (error) std::rethrow_exception(error);
    return;
  }
  const auto job = std::make_shared<Job>(count, body);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(job);
  }
  for (size_t i = 0; i < std::min(count - 1, helpers_.size()); ++i) wake_.notify_one();
  WorkOn(job.get());
  std::unique_lock<std::mutex> lock(job->mutex);
  job->all_done.wait(lock, [&] { return job->done == job->count; });
  // Out of the job, which a helper may be the last to let go of: the error is the caller's alone, who may
  // still be reading it then.
  if (job->error) std::rethrow_exception(std::exchange(job->error, nullptr));
}

}  // namespace oe
