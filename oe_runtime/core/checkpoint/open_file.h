#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
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

[[noreturn]] inline void Damaged(const std::string& file, const std::string& what) {
  throw CheckpointError(file + " is damaged: " + what + "; restore from another checkpoint");
}

// Reads `size` bytes from `offset` on. Throws CheckpointError naming the file, also if it has fewer.
inline void ReadAt(const File& file, const std::string& name, uint64_t offset, void* into, size_t size) {
  auto* to = static_cast<char*>(into);
  while (size > 0) {
    const ssize_t got = ::pread(file.get(), to, size, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw CheckpointError("cannot read " + name + ": " + std::strerror(errno));
    if (got == 0) Damaged(name, "it ends too early");
    to += got;
    offset += static_cast<uint64_t>(got);
    size -= static_cast<size_t>(got);
  }
}

}  // namespace oe
