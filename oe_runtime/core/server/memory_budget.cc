#include "oe_runtime/core/server/memory_budget.h"

#include <algorithm>

namespace oe {

void MemoryBudget::Share::Add(Share more) {
  if (more.budget_ == nullptr) return;
  budget_ = std::exchange(more.budget_, nullptr);
  owner_ = more.owner_;
  amount_ += more.amount_;
  beyond_ = beyond_ || more.beyond_;
}

void MemoryBudget::Share::Release() noexcept {
  if (budget_ == nullptr) return;
  std::exchange(budget_, nullptr)->GiveBack(owner_, std::exchange(amount_, 0), std::exchange(beyond_, false));
}

MemoryBudget::Share MemoryBudget::Take(const void* owner, uint64_t amount, bool beyond) {
  jobs_[owner] += amount;
  used_ += amount;
  return {this, owner, amount, beyond};
}

std::optional<MemoryBudget::Share> MemoryBudget::Ask(const void* owner, uint64_t amount, const Share& held,
                                                     Grant later) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (held.beyond_ || (waiters_.empty() && Fits(amount))) return Take(owner, amount, false);
  if (!beyond_) {
    beyond_ = true;
    return Take(owner, amount, true);
  }
  const bool holds = held.amount() > 0;
  const auto behind = std::find_if(waiters_.begin(), waiters_.end(),
                                   [&](const Waiter& other) { return holds && !other.holds; });
  waiters_.insert(behind, {owner, amount, holds, std::move(later)});
  return std::nullopt;
}

std::optional<MemoryBudget::Share> MemoryBudget::TryIdle(const void* owner, uint64_t amount) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!waiters_.empty() || used_ > limit_ / 2 || amount > limit_ / 2 - used_) return std::nullopt;
  return Take(owner, amount, false);
}

// The one to be granted now: the first, beyond the limit if need be; while another is beyond it, one that
// fits, whose job has not the half already that it must leave to others.
std::list<MemoryBudget::Waiter>::iterator MemoryBudget::Next() {
  if (!beyond_) return waiters_.begin();
  const bool several = std::any_of(waiters_.begin(), waiters_.end(), [this](const Waiter& waiter) {
    return waiter.owner != waiters_.front().owner;
  });
  return std::find_if(waiters_.begin(), waiters_.end(), [&](const Waiter& waiter) {
    if (!Fits(waiter.amount)) return false;
    if (!several) return true;
    const auto job = jobs_.find(waiter.owner);
    return (job == jobs_.end() ? 0 : job->second) + waiter.amount <= limit_ / 2;
  });
}

void MemoryBudget::GiveBack(const void* owner, uint64_t amount, bool beyond) noexcept {
  std::list<std::pair<Grant, Share>> granted;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    used_ -= amount;
    const auto job = jobs_.find(owner);
    job->second -= amount;
    if (job->second == 0) jobs_.erase(job);
    if (beyond) beyond_ = false;
    while (!waiters_.empty()) {
      const auto next = Next();
      if (next == waiters_.end()) break;
      const bool goes_beyond = !Fits(next->amount);
      beyond_ = beyond_ || goes_beyond;
      granted.emplace_back(std::move(next->grant), Take(next->owner, next->amount, goes_beyond));
      waiters_.erase(next);
    }
  }
  for (auto& [grant, share] : granted) grant(std::move(share));
}

void MemoryBudget::Clear() {
  std::list<Waiter> forgotten;
  const std::lock_guard<std::mutex> lock(mutex_);
  forgotten.swap(waiters_);
}

uint64_t MemoryBudget::used() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

uint64_t MemoryBudget::waiting() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return waiters_.size();
}

bool MemoryBudget::tight() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return used_ > limit_ / 2;
}

}  // namespace oe
