// Requests that wait at the same time are computed together, by the thread of one of them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

namespace oe {

class BatchQueue {
 public:
  using Clock = std::chrono::steady_clock;

  // A request; `Compute` is called with those that share a kind.
  struct Item {
    size_t examples = 0;
    std::vector<int64_t> kind;

   private:
    friend class BatchQueue;
    Clock::time_point until;
    std::condition_variable changed;
    bool is_taken = false, is_done = false;
  };
  using Compute = std::function<void(const std::vector<Item*>&)>;

  // At most `examples` are computed together, and so many batches at a time. A request waits for others while
  // there are fewer and it has waited less than `timeout`, and in any case while all batches are taken.
  BatchQueue(size_t examples, Clock::duration timeout, size_t batches)
      : most_(examples), timeout_(timeout), batches_(batches) {}

  size_t most() const { return most_; }
  // Returns when a call of `compute`, of this thread or another, had the item; which may have thrown.
  void Run(Item* own, const Compute& compute);

 private:
  std::vector<Item*> Take();
  void WakeFirst() {
    if (!waiting_.empty()) waiting_.front()->changed.notify_one();
  }

  const size_t most_;
  const Clock::duration timeout_;
  const size_t batches_;
  std::mutex mutex_;
  std::deque<Item*> waiting_;
  size_t examples_ = 0;   // of those
  size_t computing_ = 0;  // batches
};

}  // namespace oe
