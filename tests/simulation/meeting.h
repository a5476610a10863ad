// What workers agree on, in place of TensorFlow's collectives.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace sim {

// Of the workers of one generation. A loss that one reports reaches all at the next meeting.
class Meeting {
 public:
  explicit Meeting(uint32_t workers) : workers_(workers) {}

  struct Outcome {
    bool lost = false;
    uint64_t value = 0;  // worker 0's
  };
  // Returns when all workers have called it.
  Outcome Meet(uint32_t rank, bool lost, uint64_t value) {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t mine = rounds_;
    next_.lost = next_.lost || lost;
    if (rank == 0) next_.value = value;
    if (++here_ == workers_) {
      outcome_ = next_;
      next_ = {};
      here_ = 0;
      ++rounds_;
      all_here_.notify_all();
    } else {
      all_here_.wait(lock, [&] { return rounds_ > mine; });
    }
    return outcome_;  // nobody can begin another round before all have this one's
  }

 private:
  const uint32_t workers_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  uint32_t here_ = 0;
  uint64_t rounds_ = 0;
  Outcome next_;
  Outcome outcome_;
};

}  // namespace sim
