// Reads the rows of pools again in the background, so that a damaged one is found before it is needed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace oe {

class Scrubber {
 public:
  // One pass over all tables, as Jobs::Scrub.
  using Pass = std::function<void(const std::function<bool(uint64_t bytes)>& pace)>;

  // Reads at most about `bytes_per_second`, in a thread that comes after all others; 0: none. A pass that
  // throws is said on stderr, once for each reason in a row, and the next one begins as if it had ended.
  // What `pass` uses must outlive the scrubber.
  Scrubber(Pass pass, uint64_t bytes_per_second, double seconds_between_passes = 5);
  ~Scrubber() { Stop(); }
  Scrubber(const Scrubber&) = delete;
  Scrubber& operator=(const Scrubber&) = delete;

  void Stop();

 private:
  void Run();
  void RunPass(double* owed);
  bool WaitFor(double seconds);

  const Pass pass_;
  const uint64_t bytes_per_second_;
  const double seconds_between_passes_;
  std::string failure_;  // of the last pass; empty: it ended
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace oe
