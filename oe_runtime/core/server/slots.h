// How many requests are served at once, and how many of them may be one job's: so that no job's load stops
// another's.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace oe {

// First come, first served, but for owners that have as many as they may. Thread-safe.
class Slots {
 public:
  // Of one owner; outlives its shares.
  class Owner {
    friend class Slots;
    unsigned used_ = 0;  // with the slots' mutex
  };
  // A slot; given back when it ends.
  class Share {
   public:
    Share() = default;
    Share(Share&& other) noexcept
        : slots_(std::exchange(other.slots_, nullptr)), owner_(std::exchange(other.owner_, nullptr)) {}
    Share& operator=(Share&& other) noexcept {
      std::swap(slots_, other.slots_);
      std::swap(owner_, other.owner_);
      return *this;
    }
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;
    ~Share() { Release(); }
    void Release() {
      if (slots_ != nullptr) std::exchange(slots_, nullptr)->GiveBack(owner_);
    }

   private:
    friend class Slots;
    Share(Slots* slots, Owner* owner) : slots_(slots), owner_(owner) {}
    Slots* slots_ = nullptr;
    Owner* owner_ = nullptr;
  };
  using Grant = std::function<void(Share)>;

  Slots(unsigned limit, unsigned limit_of_owner) : limit_(limit), limit_of_owner_(limit_of_owner) {}
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  // Returns a slot if one is free for the owner and no earlier request waits. Otherwise `later` is called
  // with one, on the thread that gave it back.
  std::optional<Share> Ask(Owner* owner, Grant later);
  // Forgets the waiting requests; gives no more slots.
  void Close();

  unsigned used() const;
  uint64_t waiting() const;

 private:
  struct Waiter {
    Owner* owner;
    Grant grant;
  };
  bool HasFor(const Owner& owner) const { return used_ < limit_ && owner.used_ < limit_of_owner_; }
  void GiveBack(Owner* owner);

  const unsigned limit_;
  const unsigned limit_of_owner_;
  mutable std::mutex mutex_;
  unsigned used_ = 0;
  bool closed_ = false;
  std::deque<Waiter> waiters_;
};

}  // namespace oe
