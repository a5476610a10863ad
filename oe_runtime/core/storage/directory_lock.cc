#include "oe_runtime/core/storage/directory_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>

#include "oe_runtime/core/common/error.h"

namespace oe {

DirectoryLock::DirectoryLock(const std::string& directory) : path_(directory + "/oe.lock") {
  while (true) {
    file_ = File(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
    if (!file_.ok()) {
      throw StorageError(
          "cannot write in the storage directory " + directory + "; give one that this user may write in",
          errno);
    }
    if (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) throw StorageError("cannot lock " + path_, errno);
      std::array<char, 32> pid{};
      const ssize_t size = ::pread(file_.get(), pid.data(), pid.size() - 1, 0);
      const long holder = size > 0 ? std::strtol(pid.data(), nullptr, 10) : 0;
      throw StorageError("the storage directory " + directory + " is in use by " +
                         (holder > 0 ? "process " + std::to_string(holder) : "another process") +
                         "; stop it or give another directory");
    }
    // A holder that left may have removed the file between our open and our lock: then it locks nothing.
    struct stat ours{};
    struct stat there{};
    if (::fstat(file_.get(), &ours) == 0 && ::stat(path_.c_str(), &there) == 0 &&
        ours.st_ino == there.st_ino && ours.st_dev == there.st_dev) {
      break;
    }
  }
  // For the message above only; where the disk is full, it says "another process".
  const std::string pid = std::to_string(::getpid()) + "\n";
  const bool empty = ::ftruncate(file_.get(), 0) == 0;
  (void)(empty && ::pwrite(file_.get(), pid.data(), pid.size(), 0) > 0);
}

DirectoryLock::~DirectoryLock() { (void)::unlink(path_.c_str()); }

}  // namespace oe
