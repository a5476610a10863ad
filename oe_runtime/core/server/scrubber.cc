#include "oe_runtime/core/server/scrubber.h"

#include <chrono>
#include <cstdio>
#include <exception>
#include <utility>

#include "oe_runtime/core/common/come_after_others.h"

namespace oe {
namespace {

constexpr double kSecondsAtOnce = 0.01;  // that are read without a pause
constexpr double kSecondsToRetry = 0.001;

}  // namespace

Scrubber::Scrubber(Pass pass, uint64_t bytes_per_second, double seconds_between_passes)
    : pass_(std::move(pass)),
      bytes_per_second_(bytes_per_second),
      seconds_between_passes_(seconds_between_passes) {
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

// `owed` are the seconds that the bytes read may take, beyond those that it waited.
void Scrubber::RunPass(double* owed) {
  try {
    pass_([&](uint64_t bytes) {
      if (bytes == 0) return WaitFor(kSecondsToRetry);  // the table is saved or restored
      *owed += static_cast<double>(bytes) / static_cast<double>(bytes_per_second_);
      return *owed < kSecondsAtOnce || WaitFor(std::exchange(*owed, 0));
    });
    failure_.clear();
  } catch (const std::exception& problem) {
    if (failure_ == problem.what()) return;
    failure_ = problem.what();
    std::fprintf(stderr, "server: cannot check the rows of all tables: %s; trying again\n", problem.what());
  }
}

void Scrubber::Run() {
  ComeAfterOthers();
  double owed = 0;
  do {
    RunPass(&owed);
  } while (WaitFor(seconds_between_passes_));
}

}  // namespace oe
