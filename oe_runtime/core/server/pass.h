// The locks that a request needs shared, so that nothing it does can make its thread wait for long: not a
// save of a table, not a restore. A request that finds one of them taken goes on when it gets it, without a
// thread or a serving slot meanwhile.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "oe_runtime/core/common/fair_shared_mutex.h"

namespace oe {

// Locks are taken in one order: that of the job's fence, then those of the tables by their ids. Those that
// are there stay while the next is waited for. Not thread-safe; may be passed from thread to thread.
class Pass {
 public:
  using Granted = std::function<void()>;

  Pass() = default;  // of a thread that may wait
  // `when_granted` makes the function that is called, on any thread, when the awaited lock is granted. Then
  // Resume() must follow.
  explicit Pass(std::function<Granted()> when_granted) : when_granted_(std::move(when_granted)) {}
  // Takes free locks only; Take() fails for others.
  static Pass Impatient() {
    Pass pass;
    pass.impatient_ = true;
    return pass;
  }
  Pass(Pass&& other) noexcept { *this = std::move(other); }
  Pass& operator=(Pass&& other) noexcept {
    std::swap(when_granted_, other.when_granted_);
    std::swap(impatient_, other.impatient_);
    std::swap(held_, other.held_);
    std::swap(taken_, other.taken_);
    std::swap(awaited_, other.awaited_);
    return *this;
  }
  Pass(const Pass&) = delete;
  Pass& operator=(const Pass&) = delete;
  ~Pass() { Release(); }

  // False if the lock is not granted yet: the caller returns and begins again after Resume(), with the same
  // locks in the same order.
  bool Take(std::shared_ptr<FairSharedMutex> mutex) {
    if (taken_ < held_.size()) {  // before it had to wait
      ++taken_;
      return true;
    }
    if (!mutex->try_lock_shared()) {
      if (impatient_) return false;
      if (when_granted_ == nullptr) {
        mutex->lock_shared();
      } else {
        awaited_ = mutex;
        if (!mutex->lock_shared_or(when_granted_())) return false;
        awaited_ = nullptr;
      }
    }
    held_.push_back(std::move(mutex));
    ++taken_;
    return true;
  }

  void Resume() {
    held_.push_back(std::exchange(awaited_, nullptr));
    taken_ = 0;
  }

  // Gives all of them back.
  void Release() noexcept {
    for (const auto& mutex : held_) mutex->unlock_shared();
    held_.clear();
    taken_ = 0;
  }

 private:
  std::function<Granted()> when_granted_;
  bool impatient_ = false;
  std::vector<std::shared_ptr<FairSharedMutex>> held_;  // which keep what they are a part of
  size_t taken_ = 0;                                    // of these, since the request began anew
  std::shared_ptr<FairSharedMutex> awaited_;
};

}  // namespace oe
