#pragma once

#include <chrono>
#include <cstdint>

namespace oe {

// What one client, and all together, may have of a server.
struct ServerLimits {
  uint64_t connections = 1024;
  // Of the requests that are being read or served, and as many of the replies to them. Whoever does not fit
  // waits, and is not read from meanwhile. Memory that idle connections keep for their next request is
  // bounded by as much again, and so is what waits for other workers (workers.h).
  uint64_t bytes = uint64_t{4} << 30;
  // For the encryption and the hello together.
  std::chrono::milliseconds hello = std::chrono::seconds(10);
  // In which a peer must move `least_bytes` of a frame, or all of it: one that sends half a request, or does
  // not read its reply, is refused after one to two of them. A worker that is suspended (Ctrl-Z) in the
  // middle of a frame has as long. An idle connection may stay, but its memory goes.
  std::chrono::milliseconds silence = std::chrono::seconds(90);
  uint64_t least_bytes = uint64_t{64} << 10;
};

}  // namespace oe
