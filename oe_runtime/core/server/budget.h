// So much of something for all connections of a server: requests at once, bytes that clients share or that
// are held for workers. Who asks for more than is free waits in line, and meanwhile reads nothing from its
// peer. Frames have memory_budget.h.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
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
  using Grant = std::function<void(Share)>;

  explicit Budget(uint64_t limit) : limit_(limit) {}
  Budget(const Budget&) = delete;
  Budget& operator=(const Budget&) = delete;

  // A share of `amount` when there is so much and nobody waits; otherwise none, and `later` is called once
  // others have given enough back, on the thread of the last of them. One that asks for more than the whole
  // budget gets all of it, alone.
  std::optional<Share> Ask(uint64_t amount, Grant later);

  // The same without a line to wait in.
  std::optional<Share> Try(uint64_t amount);

  // Forgets those who wait.
  void Clear();

  uint64_t used() const;
  uint64_t waiting() const;

 private:
  struct Waiter {
    uint64_t amount;
    Grant grant;
  };
  bool Fits(uint64_t amount) const { return amount <= limit_ - used_; }
  void GiveBack(uint64_t amount);

  const uint64_t limit_;
  mutable std::mutex mutex_;
  uint64_t used_ = 0;
  std::deque<Waiter> waiters_;
};

}  // namespace oe
