#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "oe_runtime/core/storage/block_device.h"
#include "oe_runtime/core/storage/read_counts.h"
#include "oe_runtime/core/storage/striped_files.h"

namespace oe {

// Queues that read with io_uring, for files without the page cache.
class UringReader {
 public:
  // Asks the kernel whether it serves this process; why_not() says what is in the way.
  UringReader(const StripedFiles* files, uint32_t depth, ReadCounts* counts);

  static bool is_built();  // with liburing
  bool works() const { return why_not_.empty(); }
  const std::string& why_not() const { return why_not_; }
  // Whether the buffers of queues are registered. RLIMIT_MEMLOCK may forbid it: the kernel then pins them for
  // each read anew.
  bool registers_buffers() const { return registers_buffers_; }

  // Throws StorageError.
  std::unique_ptr<ReadQueue> NewQueue();

 private:
  class Ring;
  class Queue;

  const StripedFiles* const files_;
  const uint32_t depth_;
  ReadCounts* const counts_;
  std::string why_not_;
  bool registers_buffers_ = false;
};

}  // namespace oe
