#include "oe_runtime/core/server/budget.h"

namespace oe {

std::optional<Budget::Share> Budget::Try(uint64_t amount) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (amount > limit_ - used_) return std::nullopt;
  used_ += amount;
  return Share(this, amount);
}

void Budget::GiveBack(uint64_t amount) {
  const std::lock_guard<std::mutex> lock(mutex_);
  used_ -= amount;
}

uint64_t Budget::used() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

}  // namespace oe
