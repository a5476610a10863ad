#include "oe_runtime/core/server/slots.h"

namespace oe {

std::optional<Slots::Share> Slots::Ask(Owner* owner, Grant later) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // A free slot and somebody who waits: then these have as many as they may.
  if (!closed_ && HasFor(*owner)) {
    ++used_;
    ++owner->used_;
    return Share(this, owner);
  }
  if (!closed_) waiters_.push_back({owner, std::move(later)});
  return std::nullopt;
}

void Slots::GiveBack(Owner* owner) {
  Grant grant;
  Owner* next = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    --used_;
    --owner->used_;
    for (auto waiter = waiters_.begin(); waiter != waiters_.end(); ++waiter) {
      if (!HasFor(*waiter->owner)) continue;
      ++used_;
      ++waiter->owner->used_;
      next = waiter->owner;
      grant = std::move(waiter->grant);
      waiters_.erase(waiter);
      break;
    }
  }
  if (grant) grant(Share(this, next));
}

void Slots::Close() {
  std::deque<Waiter> forgotten;
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  forgotten.swap(waiters_);
}

unsigned Slots::used() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

uint64_t Slots::waiting() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return waiters_.size();
}

}  // namespace oe
