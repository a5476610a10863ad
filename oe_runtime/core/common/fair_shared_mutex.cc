#include "oe_runtime/core/common/fair_shared_mutex.h"

#include <utility>

namespace oe {

// Gives the lock to the first in the queue, if it is free for them. With mutex_.
void FairSharedMutex::Grant(std::vector<std::function<void()>>* granted) {
  while (!queue_.empty()) {
    Waiter& first = queue_.front();
    if (first.writes) {
      // Waits for the readers that are there, and for those that are about to find out that they may not be.
      uint32_t free = kWaiters;
      if (!state_.compare_exchange_strong(free, kWaiters | kWriter, std::memory_order_acq_rel)) break;
    } else {
      if ((state_.load(std::memory_order_acquire) & kWriter) != 0) break;
      state_.fetch_add(1, std::memory_order_acq_rel);
    }
    if (first.sleeper != nullptr) {
      first.sleeper->has = true;
      first.sleeper->woken.notify_one();
    } else {
      granted->push_back(std::move(first.granted));
    }
    queue_.pop_front();
  }
  if (queue_.empty()) state_.fetch_and(~kWaiters, std::memory_order_acq_rel);
}

void FairSharedMutex::Advance() {
  std::vector<std::function<void()>> granted;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Grant(&granted);
  }
  for (const auto& one : granted) one();
}

void FairSharedMutex::Retreat() {
  const uint32_t before = state_.fetch_sub(1, std::memory_order_acq_rel);
  if ((before & kWaiters) != 0 && (before & kReaders) == 1) Advance();
}

bool FairSharedMutex::WaitToRead(std::function<void()> granted_later) {
  std::vector<std::function<void()>> granted;
  Sleeper sleeper;
  const bool waits = granted_later == nullptr;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    // The writer may have gone since, and nobody else come: then it was right to count ourselves.
    if ((state_.load(std::memory_order_acquire) & (kWriter | kWaiters)) == 0) return true;
    queue_.push_back({false, waits ? &sleeper : nullptr, std::move(granted_later)});
    state_.fetch_or(kWaiters, std::memory_order_acq_rel);
    state_.fetch_sub(1, std::memory_order_acq_rel);
    Grant(&granted);
    // Others must not wait for this thread to be told.
    if (waits && granted.empty()) sleeper.woken.wait(lock, [&sleeper] { return sleeper.has; });
  }
  for (const auto& one : granted) one();
  if (!waits) return false;
  std::unique_lock<std::mutex> lock(mutex_);
  sleeper.woken.wait(lock, [&sleeper] { return sleeper.has; });
  return true;
}

void FairSharedMutex::WaitToWrite() {
  std::vector<std::function<void()>> granted;
  Sleeper sleeper;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back({true, &sleeper, nullptr});
    state_.fetch_or(kWaiters, std::memory_order_acq_rel);
    Grant(&granted);
  }
  for (const auto& one : granted) one();
  std::unique_lock<std::mutex> lock(mutex_);
  sleeper.woken.wait(lock, [&sleeper] { return sleeper.has; });
}

}  // namespace oe
