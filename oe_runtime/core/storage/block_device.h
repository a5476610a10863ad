#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "oe_runtime/core/storage/block_buffer.h"

namespace oe {

// One read, of one of two shapes:
//  - whole blocks: `offset`, `bytes` and `into` are multiples of kBlockBytes; the device writes to `into`;
//  - a piece of one block, such as a row, without any alignment: the block comes into a buffer of the queue,
//    and the piece is copied from there.
struct BlockRead {
  uint64_t offset = 0;
  std::byte* into = nullptr;
  uint32_t bytes = 0;
  // BlockChecksum() of the block, if this is a read of one block or of a piece; 0: not compared.
  uint32_t expected = 0;
  // When it is done: 0 if all bytes are there, EIO and the like for a device that fails, ENODATA past the
  // end of the device, EBADMSG for another checksum, EINVAL for another shape. A piece is copied only if it
  // is 0.
  int error = 0;
};

// Of a block of kBlockBytes; never 0.
uint32_t BlockChecksum(const std::byte* block);

// Reads of the thread that made it; cheap to make, for each request anew. Reads and writes of the same blocks
// at once have no order: the caller waits for one before it begins the other.
class ReadQueue {
 public:
  static constexpr uint64_t kEverything = UINT64_MAX;

  virtual ~ReadQueue() = default;  // waits for reads that are not done

  // Begins `count` reads, which live until they are done, and returns the ticket of this submission: 1, 2, 3
  // … Throws StorageError if the device takes no reads at all.
  virtual uint64_t Submit(BlockRead* reads, size_t count) = 0;
  // Returns when the reads of all submissions up to `ticket` are done.
  virtual void Wait(uint64_t ticket = kEverything) = 0;
  // Begins reads that exceeded the depth before. Does not wait; true if all reads are done.
  virtual bool Poll() = 0;
};

// Makes those of `count` reads again that failed, twice at most: many an error of a drive, its cable or its
// path does not come back. The queue has no other reads.
void ReadAgain(ReadQueue* queue, BlockRead* reads, size_t count);

struct BlockDeviceStats {
  uint64_t reads = 0;
  uint64_t read_bytes = 0;  // from the device: whole blocks
  uint64_t read_errors = 0;
  uint64_t writes = 0;
  uint64_t written_bytes = 0;
  uint64_t flushes = 0;
};

// Numbered bytes that outlive the process, read and written in blocks of kBlockBytes. What survives a power
// cut: all that was written before a Flush() that returned; of later writes any sectors of 512 bytes, in any
// order. Thread-safe.
class BlockDevice {
 public:
  virtual ~BlockDevice() = default;

  // For this thread, and within its life and the device's. Throws StorageError.
  virtual std::unique_ptr<ReadQueue> NewQueue() = 0;

  // Whole blocks below size(); reads that begin after its return find them. `data` that is not aligned to
  // kBlockBytes is copied first. Throws StorageError with the errno, StorageFull without room.
  virtual void Write(uint64_t offset, const std::byte* data, size_t bytes) = 0;
  // All that was written or grown before is durable at return. Throws StorageError. After a failure nobody
  // knows what is durable, so each later Write() and Flush() throws too.
  virtual void Flush() = 0;

  virtual uint64_t size() const = 0;
  // Makes size() at least `bytes`: new blocks are zeros, and their space is reserved where the file system
  // can. Throws StorageFull, and StorageError for other causes; size() is then what it was.
  virtual void Grow(uint64_t bytes) = 0;
  // The content of these whole blocks is not needed. They read as zeros or as before, and the file system may
  // have their space back: a later Write() there may throw StorageFull.
  virtual void Discard(uint64_t offset, uint64_t bytes) = 0;
  // Throws StorageError if the next process would not find the device: its file was removed, or is another
  // one now.
  virtual void RequirePresent() const {}

  // How it reads, for the log: "io_uring", or "preads: " and why not.
  virtual std::string description() const = 0;
  virtual BlockDeviceStats stats() const = 0;
};

enum class ReadMethod {
  kBest,    // io_uring where the kernel, seccomp and the file system allow it, or else preads
  kPreads,  // for tests and measurements
};

// Reads that one thread has in flight at most, all its queues together.
constexpr uint32_t kReadDepth = 128;

// A file, which is made if it is not there. Throws StorageError if it cannot be opened.
std::unique_ptr<BlockDevice> OpenBlockDevice(const std::string& path, ReadMethod method = ReadMethod::kBest);

}  // namespace oe
