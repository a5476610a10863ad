#pragma once

#include <memory>
#include <string>

#include "oe_runtime/core/storage/block_device.h"
#include "oe_runtime/core/storage/block_reads.h"

namespace oe {

// Reads with io_uring, of files without the page cache. A thread has one ring, with registered buffers, for
// all its queues; it lasts as long as the thread.

// This build has liburing.
bool HasLiburing();

// Why the kernel does not serve this thread; empty: it does. Without `*registers_buffers` (RLIMIT_MEMLOCK)
// the kernel pins the buffers of each read anew. Throws StorageError if no more files can be opened.
std::string UringSupport(bool* registers_buffers);

// For this thread; the file and counts outlive it. Null, and why, if the thread gets no ring. Throws
// StorageError if no more files can be opened.
std::unique_ptr<ReadQueue> NewUringQueue(int file, ReadCounts* counts, std::string* why_not);

}  // namespace oe
