#pragma once

#include <string>

#include "oe_runtime/core/common/file.h"

namespace oe {

// The lock of a storage directory: a file with flock, which the system drops when its holder dies.
class DirectoryLock {
 public:
  // Throws StorageError naming the process that holds it.
  explicit DirectoryLock(const std::string& directory);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  const std::string path_;
  File file_;
};

}  // namespace oe
