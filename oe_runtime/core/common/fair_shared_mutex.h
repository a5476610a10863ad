#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

namespace oe {

// A shared mutex, first come, first served: a writer waits only for the readers before it, and readers only
// for the writers before them. With std::shared_mutex, glibc lets readers that come later overtake a writer
// for as long as one of them is there. A reader may also wait without a thread. A thread may
// release a lock that another one took.
//
// Not recursive, not even for readers. Take several in one order. A lock without waiters
// is one atomic operation.
class FairSharedMutex {
 public:
  FairSharedMutex() = default;
  FairSharedMutex(const FairSharedMutex&) = delete;
  FairSharedMutex& operator=(const FairSharedMutex&) = delete;

  void lock() {
    uint32_t free = 0;
    if (!state_.compare_exchange_strong(free, kWriter, std::memory_order_acquire)) WaitToWrite();
  }
  bool try_lock() {
    uint32_t free = 0;
    return state_.compare_exchange_strong(free, kWriter, std::memory_order_acquire);
  }
  void unlock() {
    if ((state_.fetch_and(~kWriter, std::memory_order_acq_rel) & kWaiters) != 0) Advance();
  }

  void lock_shared() {
    if (!Enter()) (void)WaitToRead(nullptr);
  }
  bool try_lock_shared() {
    if (Enter()) return true;
    Retreat();
    return false;
  }
  // True: the caller holds the lock shared. Otherwise `granted` is called when it does, on the thread that
  // gave the lock back last; it must be quick and must not use this mutex.
  bool lock_shared_or(std::function<void()> granted) { return Enter() || WaitToRead(std::move(granted)); }
  void unlock_shared() {
    const uint32_t before = state_.fetch_sub(1, std::memory_order_acq_rel);
    if ((before & kWaiters) != 0 && (before & kReaders) == 1) Advance();
  }

 private:
  static constexpr uint32_t kWriter = 1U << 31;   // a writer has it
  static constexpr uint32_t kWaiters = 1U << 30;  // the queue is not empty
  static constexpr uint32_t kReaders = kWaiters - 1;

  // A thread that waits.
  struct Sleeper {
    std::condition_variable woken;
    bool has = false;
  };
  struct Waiter {
    bool writes = false;
    Sleeper* sleeper = nullptr;
    std::function<void()> granted;  // of a reader without a thread
  };

  // A reader counts itself first. If it may not be here, WaitToRead() or Retreat() takes that back.
  bool Enter() { return (state_.fetch_add(1, std::memory_order_acquire) & (kWriter | kWaiters)) == 0; }
  void Retreat();
  bool WaitToRead(std::function<void()> granted);
  void WaitToWrite();
  void Advance();
  void Grant(std::vector<std::function<void()>>* granted);

  std::atomic<uint32_t> state_{0};
  std::mutex mutex_;  // of what follows
  std::deque<Waiter> queue_;
};

}  // namespace oe
