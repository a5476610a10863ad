#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

namespace oe {

// The time by which rows age (ttl): the machine's clock, whose jumps make no row old. Thread-safe.
//
// A clock was set, or the machine was off, if the clock gets ahead of the monotonic one by more than kJump,
// or if the newest row of a table that is loaded is older than kGap. Rows then count as pushed at that
// moment, so that ttl evicts them at most one ttl too late. A sweep sets stamps from the future to the
// present. If a clock was set before the rows were loaded, their stamps have a hole that is longer than kGap
// and their lifetime: rows before it count as pushed at its end.
class TtlClock {
 public:
  static constexpr uint32_t kJump = 3600;           // seconds
  static constexpr uint32_t kGap = 30 * 24 * 3600;  // seconds
  using Seconds = std::function<int64_t()>;

  struct Reading {
    uint32_t now = 0;    // Unix seconds
    uint32_t floor = 0;  // no row counts as pushed before it
  };

  // The machine's clocks: Unix time, and one that nobody sets and that goes on while the machine sleeps.
  TtlClock();
  // Other clocks, for tests.
  void Use(Seconds wall, Seconds steady);

  Reading Read();
  // Rows that live for `lifetime` seconds were loaded; `pushed` is when some of them were pushed.
  void Loaded(std::vector<uint32_t> pushed, uint32_t lifetime);
  // How many jumps there were.
  uint64_t jumps();

 private:
  void Look();

  std::mutex mutex_;
  Seconds wall_;
  Seconds steady_;
  bool looked_ = false;
  int64_t last_wall_ = 0;
  int64_t last_steady_ = 0;
  Reading reading_;
  uint64_t jumps_ = 0;
};

}  // namespace oe
