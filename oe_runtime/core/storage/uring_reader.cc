#include "oe_runtime/core/storage/uring_reader.h"

#include "oe_runtime/core/common/error.h"

#ifdef OE_LIBURING
#include <liburing.h>
#include <sched.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <fstream>
#include <vector>
#endif

namespace oe {

#ifndef OE_LIBURING

UringReader::UringReader(const StripedFiles* files, uint32_t depth, ReadCounts* counts)
    : files_(files), depth_(depth), counts_(counts), why_not_("this build has no liburing") {}

bool UringReader::is_built() { return false; }

std::unique_ptr<ReadQueue> UringReader::NewQueue() { throw StorageError(why_not_); }

#else

namespace {

// Of Linux 6.0 and 6.1; liburing's header may be older than the kernel.
constexpr unsigned kSingleIssuer = 1U << 12;
constexpr unsigned kDeferTaskrun = 1U << 13;

std::string WhyNoRing(int error) {
  if (error == ENOSYS) return "the kernel has no io_uring, or seccomp hides it";
  if (error == EPERM || error == EACCES) {
    std::ifstream setting("/proc/sys/kernel/io_uring_disabled");
    std::string value;
    if (setting >> value && value != "0") return "kernel.io_uring_disabled is " + value;
    return "seccomp or a security module forbids io_uring";
  }
  if (error == ENOMEM)
    return "io_uring gets no memory; the limit of locked memory (ulimit -l) may be too small";
  return std::string("io_uring fails: ") + std::strerror(error);
}

}  // namespace

// An io_uring of one thread, the one that enables it.
class UringReader::Ring {
 public:
  explicit Ring(uint32_t depth) {
    // Completions are handled when this thread asks for them, not by interrupting it.
    for (const unsigned flags : {kSingleIssuer | kDeferTaskrun, 0U}) {
      struct io_uring_params params{};
      params.flags = flags | IORING_SETUP_R_DISABLED;
      error_ = -::io_uring_queue_init_params(depth, &ring_, &params);
      if (error_ != 0 && error_ != EINVAL) return;
      if (error_ != 0) continue;
      made_ = true;
      // Plain reads are as old as this feature, Linux 5.6.
      if ((params.features & IORING_FEAT_RW_CUR_POS) == 0) error_ = ENOSYS;
      return;
    }
  }
  ~Ring() {
    if (made_) ::io_uring_queue_exit(&ring_);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  int error() const { return error_; }
  struct io_uring* get() { return &ring_; }

  int Enable() { return -::io_uring_enable_rings(&ring_); }

  // One round trip, which seccomp may forbid while it allows the setup.
  int TryOnce() {
    struct io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);
    ::io_uring_prep_nop(entry);
    const int submitted = ::io_uring_submit_and_wait(&ring_, 1);
    if (submitted < 0) return -submitted;
    struct io_uring_cqe* done = nullptr;
    const int error = -::io_uring_wait_cqe(&ring_, &done);
    if (error == 0) ::io_uring_cqe_seen(&ring_, done);
    return error;
  }

  bool RegisterBuffers(const BlockBuffer& buffers) {
    const struct iovec vector{buffers.data(), buffers.size()};
    return ::io_uring_register_buffers(&ring_, &vector, 1) == 0;
  }

 private:
  struct io_uring ring_{};
  int error_ = 0;
  bool made_ = false;
};

class UringReader::Queue final : public ReadQueue {
 public:
  explicit Queue(const UringReader* reader)
      : files_(*reader->files_),
        counts_(reader->counts_),
        ring_(reader->depth_),
        buffers_(size_t{reader->depth_} * kBlockBytes),
        operations_(reader->depth_) {
    if (ring_.error() != 0) throw StorageError("cannot make a queue of reads", ring_.error());
    std::vector<int> descriptors;
    for (size_t file = 0; file < files_.count(); ++file) descriptors.push_back(files_.descriptor(file));
    const int error = -::io_uring_register_files(ring_.get(), descriptors.data(),
                                                 static_cast<unsigned>(descriptors.size()));
    if (error != 0) throw StorageError("cannot register the storage files for io_uring", error);
    registered_ = ring_.RegisterBuffers(buffers_);
    free_.reserve(operations_.size());
    for (size_t at = operations_.size(); at > 0; --at) free_.push_back(&operations_[at - 1]);
  }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  ~Queue() override {
    try {
      Queue::Wait(kEverything);
    } catch (const StorageError&) {  // NOLINT(bugprone-empty-catch): the ring's end cancels its reads
    }
  }

  uint64_t Submit(BlockRead* reads, size_t count) override {
    if (!enabled_) {
      const int error = ring_.Enable();
      if (error != 0) throw StorageError("cannot begin reads with io_uring", error);
      enabled_ = true;
    }
    open_.push_back({reads, count, 0, count});
    ++last_;
    Begin();
    Enter(0);
    return last_;
  }

  void Wait(uint64_t ticket) override {
    for (;;) {
      Reap();
      while (!open_.empty() && open_.front().left == 0) open_.pop_front();
      if (open_.empty() || last_ - open_.size() >= ticket) break;
      Begin();
      // Few system calls, and still most of the depth in use.
      const size_t wanted =
          Unbegun() ? std::max<size_t>(1, operations_.size() / kWakeups) : open_.front().left;
      Enter(std::min(wanted, in_flight_));
    }
    Count();
  }

  bool Poll() override {
    if (enabled_) {
      (void)::syscall(__NR_io_uring_enter, ring_.get()->ring_fd, 0, 0, IORING_ENTER_GETEVENTS, nullptr, 0);
      Reap();
      while (!open_.empty() && open_.front().left == 0) open_.pop_front();
      Begin();
      Enter(0);
    }
    if (!open_.empty()) return false;
    Count();
    return true;
  }

 private:
  // A waiting thread wakes when this part of the depth is done.
  static constexpr size_t kWakeups = 8;

  struct Submission {
    BlockRead* reads;
    size_t count;
    size_t next;  // which is not begun
    size_t left;  // that are not done
  };

  // What the kernel is asked to do for one read, or for what is left of it.
  struct Operation {
    BlockRead* read = nullptr;
    uint64_t ticket = 0;
    uint64_t offset = 0;
    std::byte* into = nullptr;
    uint32_t left = 0;
    bool in_place = false;
  };

  bool Unbegun() const { return open_.back().next < open_.back().count; }

  Submission& Of(uint64_t ticket) { return open_[ticket - (last_ - open_.size() + 1)]; }

  // Takes as many reads as there are operations.
  void Begin() {
    for (Operation* operation : again_) Prepare(operation);
    again_.clear();
    for (size_t at = 0; at < open_.size() && !free_.empty(); ++at) {
      Submission& submission = open_[at];
      while (submission.next < submission.count && !free_.empty()) {
        BlockRead* read = &submission.reads[submission.next++];
        const ReadShape shape = ShapeOf(*read);
        if (shape == ReadShape::kRefused) {
          read->error = EINVAL;
          --submission.left;
          ++stats_.reads;
          ++stats_.read_errors;
          continue;
        }
        Operation* operation = free_.back();
        free_.pop_back();
        operation->read = read;
        operation->ticket = last_ - open_.size() + 1 + at;
        operation->in_place = shape == ReadShape::kBlocks;
        operation->offset = read->offset / kBlockBytes * kBlockBytes;
        operation->into = operation->in_place ? read->into : BufferOf(operation);
        operation->left = operation->in_place ? read->bytes : kBlockBytes;
        stats_.read_bytes += operation->left;
        Prepare(operation);
      }
    }
  }

  std::byte* BufferOf(const Operation* operation) const {
    return buffers_.data() + static_cast<size_t>(operation - operations_.data()) * kBlockBytes;
  }

  void Prepare(Operation* operation) {
    const StripedFiles::Piece piece = files_.Locate(operation->offset);
    const auto bytes = static_cast<unsigned>(std::min<uint64_t>(operation->left, piece.bytes));
    struct io_uring_sqe* entry = ::io_uring_get_sqe(ring_.get());  // there are as many as operations
    const int file = static_cast<int>(piece.file);
    if (registered_ && !operation->in_place) {
      ::io_uring_prep_read_fixed(entry, file, operation->into, bytes, piece.offset, 0);
    } else {
      ::io_uring_prep_read(entry, file, operation->into, bytes, piece.offset);
    }
    entry->flags |= IOSQE_FIXED_FILE;
    ::io_uring_sqe_set_data(entry, operation);
    ++in_flight_;
  }

  // Hands the prepared reads to the kernel, and waits until `wanted` in all are done.
  void Enter(size_t wanted) {
    while (wanted > 0 || ::io_uring_sq_ready(ring_.get()) > 0) {
      const int result = wanted > 0 ? ::io_uring_submit_and_wait(ring_.get(), static_cast<unsigned>(wanted))
                                    : ::io_uring_submit(ring_.get());
      if (result >= 0) {
        if (::io_uring_sq_ready(ring_.get()) == 0) return;
      } else if (result == -EAGAIN || result == -EBUSY) {
        // Short of memory, or of room for completions.
        ::sched_yield();
      } else if (result != -EINTR) {
        throw StorageError("io_uring fails", -result);
      }
      if (wanted > 0) return;  // the caller reaps, and comes again
    }
  }

  void Reap() {
    std::array<struct io_uring_cqe*, 64> done{};
    for (;;) {
      const unsigned count = ::io_uring_peek_batch_cqe(ring_.get(), done.data(), done.size());
      for (unsigned at = 0; at < count; ++at) {
        auto* operation = static_cast<Operation*>(::io_uring_cqe_get_data(done[at]));
        const int result = done[at]->res;
        --in_flight_;
        Finish(operation, result);
      }
      ::io_uring_cq_advance(ring_.get(), count);
      if (count < done.size()) return;
    }
  }

  void Finish(Operation* operation, int result) {
    BlockRead* read = operation->read;
    if (result == -EAGAIN || result == -EINTR) return again_.push_back(operation);
    if (result > 0 && static_cast<uint32_t>(result) < operation->left) {
      operation->left -= static_cast<uint32_t>(result);
      operation->into += result;
      operation->offset += static_cast<uint32_t>(result);
      return again_.push_back(operation);
    }
    read->error = result > 0 ? 0 : result == 0 ? ENODATA : -result;
    if (read->error == 0 && !operation->in_place) {
      std::memcpy(read->into, BufferOf(operation) + read->offset % kBlockBytes, read->bytes);
    }
    ++stats_.reads;
    stats_.read_errors += read->error == 0 ? 0 : 1;
    --Of(operation->ticket).left;
    free_.push_back(operation);
  }

  void Count() {
    counts_->Add(stats_);
    stats_ = {};
  }

  const StripedFiles& files_;
  ReadCounts* const counts_;
  Ring ring_;
  const BlockBuffer buffers_;  // one block for each operation
  bool registered_ = false;
  bool enabled_ = false;
  std::vector<Operation> operations_;
  std::vector<Operation*> free_;
  std::vector<Operation*> again_;  // that the kernel has done a part of
  size_t in_flight_ = 0;
  std::deque<Submission> open_;  // the last ones of all submissions
  uint64_t last_ = 0;
  BlockDeviceStats stats_;  // that counts_ does not have yet
};

UringReader::UringReader(const StripedFiles* files, uint32_t depth, ReadCounts* counts)
    : files_(files), depth_(depth), counts_(counts) {
  Ring ring(depth);
  int error = ring.error();
  if (error == 0) {
    const BlockBuffer buffers(size_t{depth} * kBlockBytes);
    registers_buffers_ = ring.RegisterBuffers(buffers);
    error = ring.Enable();
    if (error == 0) error = ring.TryOnce();
  }
  if (error == EMFILE || error == ENFILE) throw StorageError("cannot make a queue of reads", error);
  if (error != 0) why_not_ = WhyNoRing(error);
}

bool UringReader::is_built() { return true; }

std::unique_ptr<ReadQueue> UringReader::NewQueue() { return std::make_unique<Queue>(this); }

#endif

}  // namespace oe
