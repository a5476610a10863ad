// A limit on bytes that all connections of a server have together: those that clients share, and those that
// are held for workers. Requests that may wait for their share use memory_budget.h and slots.h.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

namespace oe {

class Budget {
 public:
  // A part of the budget; given back when it ends.
  class Share {
   public:
    Share() = default;
    Share(Budget* budget, uint64_t amount) : budget_(budget), amount_(amount) {}
    Share(Share&& other) noexcept
        : budget_(std::exchange(other.budget_, nullptr)), amount_(std::exchange(other.amount_, 0)) {}
    Share& operator=(Share&& other) noexcept {
      std::swap(budget_, other.budget_);
      std::swap(amount_, other.amount_);
      return *this;
    }
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;
    ~Share() { Release(); }
    void Release() {
      if (budget_ != nullptr) std::exchange(budget_, nullptr)->GiveBack(amount_);
    }

   private:
    Budget* budget_ = nullptr;
    uint64_t amount_ = 0;
  };

  explicit Budget(uint64_t limit) : limit_(limit) {}
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;

  // A share of `amount`; none if less is left.
  std::optional<Share> Try(uint64_t amount);

  uint64_t used() const;

 private:
  void GiveBack(uint64_t amount);

  const uint64_t limit_;
  mutable std::mutex mutex_;
  uint64_t used_ = 0;
};

}  // namespace oe
