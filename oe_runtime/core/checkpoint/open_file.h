#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/file.h"

namespace oe {

// A file of a checkpoint, to read. Throws CheckpointError naming it for one that cannot be read, and for a
// pipe or a device in its place, for which it does not wait.
inline File OpenToRead(const std::string& path) {
  File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status{};
  if (!file.ok() && errno == EWOULDBLOCK && ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode)) {
    file = File(::open(path.c_str(), O_RDONLY | O_CLOEXEC));  // somebody has a lease: NFS, Samba
  }
  if (!file.ok() || ::fstat(file.get(), &status) != 0) {
    throw CheckpointError("cannot read " + path + ": " + std::strerror(errno));
  }
  if (!S_ISREG(status.st_mode)) throw CheckpointError("cannot read " + path + ": it is not a regular file");
  return file;
}

}  // namespace oe
