// Reads the rows of pools again in the background, so that a damaged one is found before it is needed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "oe_runtime/core/server/jobs.h"

namespace oe {

class Scrubber {
 public:
  // Reads at most about `bytes_per_second`, in a thread that comes after all others; 0: none. `jobs` must
  // outlive the scrubber.
  Scrubber(Jobs* jobs, uint64_t bytes_per_second);
  ~Scrubber() { Stop(); }
  Scrubber(const Scrubber&) = delete;
  Scrubber& operator=(const Scrubber&) = delete;

  void Stop();

 private:
  void Run();
  bool WaitFor(double seconds);

  Jobs* const jobs_;
  const uint64_t bytes_per_second_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace oe
