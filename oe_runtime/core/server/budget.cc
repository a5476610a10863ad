#include "oe_runtime/core/server/budget.h"

#include <algorithm>
#include <vector>

namespace oe {

std::optional<Budget::Share> Budget::Ask(uint64_t amount, Grant later) {
  amount = std::min(amount, limit_);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!waiters_.empty() || !Fits(amount)) {
    waiters_.push_back({amount, std::move(later)});
    return std::nullopt;
  }
  used_ += amount;
  return Share(this, amount);
}

std::optional<Budget::Share> Budget::Try(uint64_t amount) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!waiters_.empty() || !Fits(amount)) return std::nullopt;
  used_ += amount;
  return Share(this, amount);
}

void Budget::GiveBack(uint64_t amount) {
  std::vector<Waiter> granted;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    used_ -= amount;
    while (!waiters_.empty() && Fits(waiters_.front().amount)) {
      used_ += waiters_.front().amount;
      granted.push_back(std::move(waiters_.front()));
      waiters_.pop_front();
    }
  }
  for (const Waiter& waiter : granted) waiter.grant(Share(this, waiter.amount));
}

void Budget::Clear() {
  std::deque<Waiter> forgotten;
  const std::lock_guard<std::mutex> lock(mutex_);
  forgotten.swap(waiters_);
}

uint64_t Budget::used() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

uint64_t Budget::waiting() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return waiters_.size();
}

}  // namespace oe
