#include "oe_runtime/core/server/scrubber.h"

#include <algorithm>
#include <chrono>

#include "oe_runtime/core/common/come_after_others.h"

namespace oe {
namespace {

constexpr double kSecondsBetween = 5;    // the end of one pass over all tables and the next
constexpr double kSecondsAtOnce = 0.01;  // that are read without a pause
constexpr double kSecondsToRetry = 0.001;

}  // namespace

Scrubber::Scrubber(Jobs* jobs, uint64_t bytes_per_second) : jobs_(jobs), bytes_per_second_(bytes_per_second) {
  if (bytes_per_second_ > 0) thread_ = std::thread([this] { Run(); });
}

void Scrubber::Stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// Whether to go on then.
bool Scrubber::WaitFor(double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return !changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return stop_; });
}

void Scrubber::Run() {
  ComeAfterOthers();
  double owed = 0;  // seconds that what was read may take
  do {
    jobs_->Scrub([&](uint64_t bytes) {
      if (bytes == 0) return WaitFor(kSecondsToRetry);  // the table is saved or restored
      owed += static_cast<double>(bytes) / static_cast<double>(bytes_per_second_);
      return owed < kSecondsAtOnce || WaitFor(std::exchange(owed, 0));
    });
  } while (WaitFor(kSecondsBetween));
}

}  // namespace oe
