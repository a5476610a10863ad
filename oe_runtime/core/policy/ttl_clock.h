#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

namespace oe {

// The time by which rows age (ttl): the machine's clock, of which jumps make no row old. Thread-safe.
//
// Where that clock goes ahead by more than kJump beyond what the monotonic one says, or a table is loaded
// whose newest row is older than kGap, somebody has set a clock, or the machine was away: rows then count as
// pushed at that moment, so that what ttl evicts, it evicts at most one ttl too late. Stamps from the future
// are set to the present when a sweep sees them. Where a clock was set before the rows were loaded, their
// stamps have a hole that is longer than kGap and their lifetime: older rows count as pushed at its end.
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
  // Others, for tests.
  void Use(Seconds wall, Seconds steady);

  Reading Read();
  // Rows that live for `lifetime` seconds were loaded, of which some were pushed then.
  void Loaded(std::vector<uint32_t> pushed, uint32_t lifetime);
  // How often rows were made to count as pushed now.
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
