#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace oe {

// What one client, and all together, may have of a server.
struct ServerLimits {
  uint64_t connections = 1024;  // that have said hello
  // Those that have not said hello; 0: a quarter of `connections`, 16 at least. One more closes the oldest of
  // the address that has the most of them.
  uint64_t arrivals = 0;
  // Of the requests that are being read or served, charged as they arrive, and as many of the replies to
  // them. A connection that does not fit waits, and is not read from meanwhile; one at a time may go beyond
  // it (memory_budget.h). The memory that connections keep for their next request is bounded by as much
  // again, and so is what waits for other workers (workers.h).
  uint64_t bytes = uint64_t{4} << 30;
  // For the encryption and the hello together.
  std::chrono::milliseconds hello = std::chrono::seconds(10);
  // In which a peer must move `least_bytes` of a frame, or 1/kTurnover of the memory that the frame holds
  // where that is more, or all of it: one that sends half a request, or does not read its reply, is refused
  // after it. A worker that is suspended (Ctrl-Z) in the middle of a frame has as long. While more than half
  // of the memory is in use, an eighth of that must move in each eighth of the time. An idle connection may
  // stay, but its memory goes.
  std::chrono::milliseconds silence = std::chrono::seconds(90);
  uint64_t least_bytes = uint64_t{64} << 10;
  static constexpr uint64_t kTurnover = 4;
};

// Raises the process's limit of open files (ulimit -n) as far as `limits` needs and the system allows, and
// lowers `connections` and `arrivals` to what it leaves beside the files of a server with that many threads.
// Returns what to tell the operator; empty where all fits. Throws Error when it leaves next to nothing.
std::string FitOpenFiles(ServerLimits* limits, unsigned threads);

}  // namespace oe
