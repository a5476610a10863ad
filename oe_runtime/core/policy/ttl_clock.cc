#include "oe_runtime/core/policy/ttl_clock.h"

#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <utility>

namespace oe {
namespace {

int64_t SecondsOf(clockid_t clock) {
  timespec time{};
  (void)clock_gettime(clock, &time);  // these clocks are there on every Linux
  return time.tv_sec;
}

}  // namespace

TtlClock::TtlClock()
    : wall_([] { return SecondsOf(CLOCK_REALTIME); }), steady_([] { return SecondsOf(CLOCK_BOOTTIME); }) {}

void TtlClock::Use(Seconds wall, Seconds steady) {
  const std::lock_guard<std::mutex> lock(mutex_);
  wall_ = std::move(wall);
  steady_ = std::move(steady);
  looked_ = false;
}

// Under mutex_.
void TtlClock::Look() {
  const int64_t wall = std::clamp<int64_t>(wall_(), 0, std::numeric_limits<uint32_t>::max());
  const int64_t steady = steady_();
  reading_.now = static_cast<uint32_t>(wall);
  if (looked_ && std::abs(wall - last_wall_ - (steady - last_steady_)) > kJump) {
    reading_.floor = reading_.now;
    ++jumps_;
  }
  looked_ = true;
  last_wall_ = wall;
  last_steady_ = steady;
}

TtlClock::Reading TtlClock::Read() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Look();
  return reading_;
}

void TtlClock::Loaded(std::vector<uint32_t> pushed, uint32_t lifetime) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Look();
  std::sort(pushed.begin(), pushed.end());
  pushed.erase(std::upper_bound(pushed.begin(), pushed.end(), reading_.now), pushed.end());
  if (pushed.empty()) return;
  uint32_t floor = 0;
  if (reading_.now - pushed.back() > kGap) floor = reading_.now;
  for (size_t i = pushed.size() - 1; floor == 0 && i > 0; --i) {
    if (pushed[i] - pushed[i - 1] > uint64_t{kGap} + lifetime) floor = pushed[i];
  }
  if (floor <= reading_.floor) return;
  reading_.floor = floor;
  ++jumps_;
}

uint64_t TtlClock::jumps() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return jumps_;
}

}  // namespace oe
