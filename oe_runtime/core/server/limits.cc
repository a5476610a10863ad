#include "oe_runtime/core/server/limits.h"

#include <dirent.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

constexpr uint64_t kLeast = 8;  // connections without which it is no server

// For pools and table files that the threads open for a moment, the metrics page and its readers, and
// connections that are being closed.
uint64_t Reserve(unsigned threads) { return 64 + 2 * uint64_t{threads}; }

uint64_t OpenFiles() {
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(::opendir("/proc/self/fd"), closedir);
  uint64_t count = 0;
  if (listing == nullptr) return 32;
  while (readdir(listing.get()) != nullptr) ++count;  // NOLINT(concurrency-mt-unsafe): own stream
  return count;
}

}  // namespace

std::string FitOpenFiles(ServerLimits* limits, unsigned threads) {
  if (limits->arrivals == 0) limits->arrivals = std::max<uint64_t>(limits->connections / 4, 16);
  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) != 0) {
    throw Error(std::string("cannot read the limit of open files: ") + std::strerror(errno));
  }
  const uint64_t others = OpenFiles() + Reserve(threads);
  const uint64_t wanted = others + limits->connections + limits->arrivals;
  if (files.rlim_cur < wanted) {
    rlimit more = files;
    more.rlim_cur = std::min<rlim_t>(files.rlim_max, wanted);
    if (::setrlimit(RLIMIT_NOFILE, &more) == 0) files = more;
  }
  if (files.rlim_cur >= wanted) return "";
  const std::string limit = "the limit of open files (ulimit -n) is " + std::to_string(files.rlim_cur);
  if (files.rlim_cur < others + 2 * kLeast) {
    throw Error(limit + ", which leaves no room for connections; raise it to " + std::to_string(wanted));
  }
  const uint64_t room = files.rlim_cur - others;
  const uint64_t asked = limits->connections;
  limits->arrivals = std::min(limits->arrivals, std::max(room / 4, kLeast));
  limits->connections = std::min(limits->connections, room - limits->arrivals);
  return limit + ": this server takes " + std::to_string(limits->connections) + " clients instead of " +
         std::to_string(asked) + "; raise it to " + std::to_string(wanted);
}

}  // namespace oe
