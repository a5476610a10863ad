// Memory for the frames of all connections of a server. A connection that asks for more than is free waits in
// line, and meanwhile reads nothing from its peer.
//
// A frame is charged as its bytes arrive, so that several frames can each hold a part and need more. One
// share at a time may therefore go beyond the limit, the oldest of those that wait: it is served and gives
// all back, and then the next. Peers that hold memory and do not go on thus slow the others down, but cannot
// stop them. Of several jobs that wait, none gets more than half of the memory.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

namespace oe {

class MemoryBudget {
 public:
  // Memory that is charged to one frame; given back when it ends.
  class Share {
   public:
    Share() = default;
    Share(Share&& other) noexcept { *this = std::move(other); }
    Share& operator=(Share&& other) noexcept {
      std::swap(budget_, other.budget_);
      std::swap(owner_, other.owner_);
      std::swap(amount_, other.amount_);
      std::swap(beyond_, other.beyond_);
      return *this;
    }
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;
    ~Share() { Release(); }

    uint64_t amount() const { return amount_; }
    // Takes over what `more`, of the same budget and owner, has.
    void Add(Share more);
    void Release() noexcept;

   private:
    friend class MemoryBudget;
    Share(MemoryBudget* budget, const void* owner, uint64_t amount, bool beyond)
        : budget_(budget), owner_(owner), amount_(amount), beyond_(beyond) {}

    MemoryBudget* budget_ = nullptr;
    const void* owner_ = nullptr;
    uint64_t amount_ = 0;
    bool beyond_ = false;  // the one that may go beyond the limit
  };
  using Grant = std::function<void(Share)>;

  explicit MemoryBudget(uint64_t limit) : limit_(limit) {}
  MemoryBudget(const MemoryBudget&) = delete;
  MemoryBudget& operator=(const MemoryBudget&) = delete;

  // `amount` more for a frame that has `held` so far, of a job `owner`. None when it has to wait; then
  // `later` is called with it, on the thread that gives memory back. Frames that hold some already come
  // first.
  std::optional<Share> Ask(const void* owner, uint64_t amount, const Share& held, Grant later);

  // The same, if at most half of the memory is in use with it and no request waits.
  std::optional<Share> TryIdle(const void* owner, uint64_t amount);

  // Forgets those who wait.
  void Clear();

  uint64_t used() const;
  uint64_t waiting() const;
  // Whether more than half of the memory is in use.
  bool tight() const;

 private:
  struct Waiter {
    const void* owner;
    uint64_t amount;
    bool holds;
    Grant grant;
  };
  bool Fits(uint64_t amount) const { return used_ <= limit_ && amount <= limit_ - used_; }
  Share Take(const void* owner, uint64_t amount, bool beyond);
  std::list<Waiter>::iterator Next();
  void GiveBack(const void* owner, uint64_t amount, bool beyond) noexcept;

  const uint64_t limit_;
  mutable std::mutex mutex_;
  uint64_t used_ = 0;
  bool beyond_ = false;                   // whether some share may go beyond the limit; so if anybody waits
  std::map<const void*, uint64_t> jobs_;  // what each has
  std::list<Waiter> waiters_;
};

}  // namespace oe
