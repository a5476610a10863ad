#include "oe_runtime/core/storage/block_device.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <utility>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/file.h"
#include "oe_runtime/core/storage/block_reads.h"
#include "oe_runtime/core/storage/pread_queue.h"
#include "oe_runtime/core/storage/uring_queue.h"

namespace oe {
namespace {

namespace fs = std::filesystem;

bool IsFull(int error) { return error == ENOSPC || error == EDQUOT; }

[[noreturn]] void ThrowFor(const std::string& what, int error) {
  if (IsFull(error)) throw StorageFull(what, error);
  throw StorageError(what, error);
}

void SyncDirectoryOf(const std::string& path) {
  fs::path directory = fs::path(path).parent_path();
  if (directory.empty()) directory = ".";
  const File opened(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!opened.ok() || ::fsync(opened.get()) != 0) {
    throw StorageError("cannot sync the storage directory " + directory.string(), errno);
  }
}

uint64_t SizeOf(const File& file, const std::string& path) {
  struct stat there{};
  if (::fstat(file.get(), &there) != 0) throw StorageError("cannot read the size of " + path, errno);
  if (!S_ISREG(there.st_mode)) throw StorageError(path + " is not an ordinary file; give another path");
  return static_cast<uint64_t>(there.st_size);
}

// Whether blocks can be read without the page cache. Some file systems refuse only the read, not the open.
bool CanReadDirectly(const File& file, uint64_t size) {
  const BlockBuffer block(kBlockBytes);
  if (size < kBlockBytes) {
    std::memset(block.data(), 0, kBlockBytes);
    const bool written =
        ::pwrite(file.get(), block.data(), kBlockBytes, 0) == static_cast<ssize_t>(kBlockBytes);
    const int error = errno;
    if (::ftruncate(file.get(), static_cast<off_t>(size)) != 0) return false;
    return written || IsFull(error);
  }
  return ::pread(file.get(), block.data(), kBlockBytes, 0) >= 0 || errno != EINVAL;
}

struct Opened {
  File file;
  bool direct = false;
};

Opened OpenFile(const std::string& path) {
  constexpr int kFlags = O_RDWR | O_CLOEXEC | O_NOFOLLOW;
  Opened opened{File(::open(path.c_str(), kFlags)), false};
  if (!opened.file.ok() && errno == ENOENT) {
    opened.file = File(::open(path.c_str(), kFlags | O_CREAT | O_EXCL, 0600));
    if (opened.file.ok()) SyncDirectoryOf(path);
  }
  if (!opened.file.ok()) throw StorageError("cannot open the storage file " + path, errno);
  const uint64_t size = SizeOf(opened.file, path);
  File direct(::open(path.c_str(), kFlags | O_DIRECT));
  if (direct.ok() && CanReadDirectly(direct, size)) return {std::move(direct), true};
  // A read of one row must not bring in what lies around it.
  (void)::posix_fadvise(opened.file.get(), 0, 0, POSIX_FADV_RANDOM);
  return opened;
}

class FileDevice final : public BlockDevice {
 public:
  FileDevice(const std::string& path, ReadMethod method, Opened opened)
      : path_(path),
        file_(std::move(opened.file)),
        direct_(opened.direct),
        size_(SizeOf(file_, path) / kBlockBytes * kBlockBytes),
        wants_uring_(method == ReadMethod::kBest && direct_),
        preads_(PreadPool::Shared()) {
    if (wants_uring_) why_preads_ = UringSupport(&registers_buffers_);
    uring_works_ = wants_uring_ && why_preads_.empty();
  }

  std::unique_ptr<ReadQueue> NewQueue() override {
    if (!uring_works_) return preads_->NewQueue(file_.get(), &reads_);
    std::string why_not;
    std::unique_ptr<ReadQueue> queue = NewUringQueue(file_.get(), &reads_, &why_not);
    if (queue != nullptr) return queue;
    {
      const std::lock_guard<std::mutex> lock(why_mutex_);
      why_preads_ = why_not;
    }
    return preads_->NewQueue(file_.get(), &reads_);
  }

  void Write(uint64_t offset, const std::byte* data, size_t bytes) override {
    RequireBlocks(offset, bytes);
    RequireFlushed();
    if (bytes > size() || offset > size() - bytes) throw StorageError("a write past the end of " + path_);
    BlockBuffer copy;
    if (reinterpret_cast<uintptr_t>(data) % kBlockBytes != 0) {
      copy = BlockBuffer(bytes);
      std::memcpy(copy.data(), data, bytes);
      data = copy.data();
    }
    writes_.fetch_add(1, std::memory_order_relaxed);
    while (bytes > 0) {
      const ssize_t put = ::pwrite(file_.get(), data, bytes, static_cast<off_t>(offset));
      if (put < 0 && errno == EINTR) continue;
      if (put <= 0) ThrowFor("cannot write to the storage file " + path_, put < 0 ? errno : EIO);
      written_.fetch_add(static_cast<uint64_t>(put), std::memory_order_relaxed);
      data += put;
      offset += static_cast<uint64_t>(put);
      bytes -= static_cast<size_t>(put);
    }
  }

  void Flush() override {
    RequireFlushed();
    flushes_.fetch_add(1, std::memory_order_relaxed);
    if (::fdatasync(file_.get()) == 0) return;
    flush_error_.store(errno);
    RequireFlushed();
  }

  uint64_t size() const override { return size_.load(std::memory_order_acquire); }

  void Grow(uint64_t bytes) override {
    const std::lock_guard<std::mutex> lock(grow_mutex_);
    RequireFlushed();
    const uint64_t before = size();
    if (bytes <= before) return;
    const uint64_t after = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
    const int error = Reserve(file_.get(), after);
    if (error != 0) {
      (void)::ftruncate(file_.get(), static_cast<off_t>(before));
      ThrowFor("cannot get " + std::to_string(after - before) + " bytes for the storage file " + path_,
               error);
    }
    size_.store(after, std::memory_order_release);
  }

  void Discard(uint64_t offset, uint64_t bytes) override {
    RequireBlocks(offset, bytes);
    const uint64_t end = std::min(offset + bytes, size());
    if (offset >= end) return;
    // What cannot be punched is kept: nobody reads it.
    (void)::fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                      static_cast<off_t>(end - offset));
  }

  void RequirePresent() const override {
    struct stat open{};
    struct stat there{};
    if (::fstat(file_.get(), &open) != 0)
      throw StorageError("cannot look at the storage file " + path_, errno);
    const bool found = ::stat(path_.c_str(), &there) == 0;
    if (found && there.st_dev == open.st_dev && there.st_ino == open.st_ino) return;
    if (!found && errno != ENOENT && errno != ENOTDIR) {
      throw StorageError("cannot look at the storage file " + path_, errno);
    }
    throw StorageError("the storage file " + path_ + (found ? " is another file now" : " is gone") +
                       ", and what its table holds ends with this process; save the tables to files, then "
                       "start fresh (--storage-fresh) and restore from these");
  }

  std::string description() const override {
    if (!direct_) return "preads through the page cache: no direct I/O for " + path_;
    if (!wants_uring_) return "preads";
    const std::lock_guard<std::mutex> lock(why_mutex_);
    if (!uring_works_) return "preads: " + why_preads_;
    if (!why_preads_.empty()) return "io_uring, some threads preads: " + why_preads_;
    if (registers_buffers_) return "io_uring";
    return "io_uring without registered buffers: the limit of locked memory (ulimit -l) is too small";
  }

  BlockDeviceStats stats() const override {
    BlockDeviceStats stats;
    stats.reads = reads_.reads.load(std::memory_order_relaxed);
    stats.read_bytes = reads_.bytes.load(std::memory_order_relaxed);
    stats.read_errors = reads_.errors.load(std::memory_order_relaxed);
    stats.writes = writes_.load(std::memory_order_relaxed);
    stats.written_bytes = written_.load(std::memory_order_relaxed);
    stats.flushes = flushes_.load(std::memory_order_relaxed);
    return stats;
  }

 private:
  static void RequireBlocks(uint64_t offset, uint64_t bytes) {
    if (offset % kBlockBytes != 0 || bytes % kBlockBytes != 0) {
      throw StorageError("a write or discard of a part of a block", EINVAL);
    }
  }

  void RequireFlushed() const {
    const int error = flush_error_.load();
    if (error == 0) return;
    throw StorageError(
        "a flush of the storage device of " + path_ +
            " failed, and what it holds since the last checkpoint is unknown; check the device, then "
            "start again with recovery",
        error);
  }

  // Gives a file its size and its blocks, so that a full device is an error now. 0, or the errno.
  static int Reserve(int descriptor, uint64_t bytes) {
    int result = 0;
    do {
      result = ::fallocate(descriptor, 0, 0, static_cast<off_t>(bytes));
    } while (result != 0 && errno == EINTR);
    if (result != 0 && errno == EOPNOTSUPP) result = ::ftruncate(descriptor, static_cast<off_t>(bytes));
    return result == 0 ? 0 : errno;
  }

  const std::string path_;
  const File file_;
  const bool direct_;  // without the page cache
  std::atomic<uint64_t> size_;
  std::mutex grow_mutex_;
  std::atomic<int> flush_error_{0};
  ReadCounts reads_;
  std::atomic<uint64_t> writes_{0};
  std::atomic<uint64_t> written_{0};
  std::atomic<uint64_t> flushes_{0};
  const bool wants_uring_;
  bool uring_works_ = false;
  bool registers_buffers_ = false;
  mutable std::mutex why_mutex_;
  std::string why_preads_;
  const std::shared_ptr<PreadPool> preads_;
};

}  // namespace

uint32_t BlockChecksum(const std::byte* block) {
  const auto sum = static_cast<uint32_t>(XXH3_64bits(block, kBlockBytes));
  return sum == 0 ? 1 : sum;
}

void ReadAgain(ReadQueue* queue, BlockRead* reads, size_t count) {
  constexpr int kMostTimes = 2;
  const auto failed = [](const BlockRead& read) { return read.error != 0 && read.error != EINVAL; };
  for (int time = 0; time < kMostTimes && std::any_of(reads, reads + count, failed); ++time) {
    for (size_t i = 0; i < count; ++i) {
      if (failed(reads[i])) queue->Submit(&reads[i], 1);
    }
    queue->Wait();
  }
}

std::unique_ptr<BlockDevice> OpenBlockDevice(const std::string& path, ReadMethod method) {
  return std::make_unique<FileDevice>(path, method, OpenFile(path));
}

}  // namespace oe
