// How one of several workers takes part in a job; it says so in its hello.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace oe {

struct WorkerSpec {
  static constexpr uint32_t kMost = 1024;

  uint32_t rank = 0;  // from 0
  uint32_t of = 1;    // 1: there are no others
  // The pushes of a batch are held until all workers' are there, and applied as one; otherwise each is
  // applied when it comes.
  bool synchronous = true;
  // Not synchronous: a pull waits until no other worker is more than this many pushes behind.
  std::optional<uint32_t> staleness;
  // When a worker's connection ends without a kLeave: the others' pushes are refused; or they go on without
  // it.
  bool stop_when_lost = true;
  double wait = 600;  // seconds that one of this worker's requests may wait for the others
  // Counts the starts of all workers together. The first worker of a higher one takes the places of an
  // earlier one's workers, also of those whose connections are still open because their host has vanished.
  uint32_t generation = 0;

  // Whether servers are told of it: there are other workers, or there were.
  bool takes_part() const { return of > 1 || generation != 0; }
};

// {"rank": 0, "of": 2, "mode": "sync" or "async", "staleness": null or a number, "on_lost": "stop" or
// "continue", "wait": 600, "generation": 3; optional, 0}
std::string ToJsonText(const WorkerSpec& spec);
// Throws SpecError naming the field that is missing, unknown or cannot be.
WorkerSpec WorkerSpecFromJsonText(const std::string& text);

}  // namespace oe
