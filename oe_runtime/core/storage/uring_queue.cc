#include "oe_runtime/core/storage/uring_queue.h"

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
#include <exception>
#include <fstream>
#include <vector>

#include "oe_runtime/core/common/error.h"
#endif

namespace oe {

#ifndef OE_LIBURING

bool HasLiburing() { return false; }

std::string UringSupport(bool* /*registers_buffers*/) { return "this build has no liburing"; }

std::unique_ptr<ReadQueue> NewUringQueue(int /*file*/, ReadCounts* /*counts*/, std::string* why_not) {
  *why_not = UringSupport(nullptr);
  return nullptr;
}

#else

namespace {

// Of Linux 6.0 and 6.1; liburing's header may be older than the kernel.
constexpr unsigned kSingleIssuer = 1U << 12;
constexpr unsigned kDeferTaskrun = 1U << 13;

static_assert((kReadDepth & (kReadDepth - 1)) == 0, "a ring has a power of two of entries");

class UringQueue;

// What the kernel is asked to do for one read, or for what is left of it.
struct Operation {
  UringQueue* queue = nullptr;
  BlockRead* read = nullptr;
  uint64_t ticket = 0;
  uint64_t offset = 0;
  std::byte* into = nullptr;
  uint32_t left = 0;
  ReadShape shape = ReadShape::kRefused;
};

class ThreadRing {
 public:
  // Null, and the errno, without one.
  static ThreadRing* OfThisThread(int* error) {
    static thread_local std::unique_ptr<ThreadRing> ring;
    *error = 0;
    if (ring == nullptr) {
      auto made = std::make_unique<ThreadRing>();
      *error = made->error_;
      if (*error != 0) return nullptr;
      ring = std::move(made);
    }
    return ring.get();
  }

  ThreadRing() : buffers_(size_t{kReadDepth} * kBlockBytes), operations_(kReadDepth) {
    // Completions are handled when this thread asks for them, not by interrupting it.
    for (const unsigned flags : {kSingleIssuer | kDeferTaskrun, 0U}) {
      struct io_uring_params params{};
      params.flags = flags;
      error_ = -::io_uring_queue_init_params(kReadDepth, &ring_, &params);
      if (error_ == EINVAL) continue;
      if (error_ != 0) return;
      made_ = true;
      // Plain reads are as old as this feature, Linux 5.6.
      error_ = (params.features & IORING_FEAT_RW_CUR_POS) == 0 ? ENOSYS : TryOnce();
      break;
    }
    if (error_ != 0) return;
    const struct iovec vector{buffers_.data(), buffers_.size()};
    registered_ = ::io_uring_register_buffers(&ring_, &vector, 1) == 0;
    free_.reserve(operations_.size());
    again_.reserve(operations_.size());
    for (size_t at = operations_.size(); at > 0; --at) free_.push_back(&operations_[at - 1]);
  }
  ~ThreadRing() {
    if (made_) ::io_uring_queue_exit(&ring_);
  }
  ThreadRing(const ThreadRing&) = delete;
  ThreadRing& operator=(const ThreadRing&) = delete;

  bool registers_buffers() const { return registered_; }

  // Null when all are in use.
  Operation* Take() {
    if (free_.empty()) return nullptr;
    Operation* operation = free_.back();
    free_.pop_back();
    return operation;
  }
  std::byte* BufferOf(const Operation* operation) const {
    return buffers_.data() + static_cast<size_t>(operation - operations_.data()) * kBlockBytes;
  }

  // The kernel gets it with the next Enter().
  void Prepare(Operation* operation);

  // Hands over what is prepared, and returns when at least `wanted` reads of the thread are done, or earlier.
  void Enter(size_t wanted) {
    for (Operation* operation : again_) Prepare(operation);
    again_.clear();
    wanted = std::min(wanted, in_flight_);
    while (wanted > 0 || ::io_uring_sq_ready(&ring_) > 0) {
      const int result = wanted > 0 ? ::io_uring_submit_and_wait(&ring_, static_cast<unsigned>(wanted))
                                    : ::io_uring_submit(&ring_);
      if (result == -EAGAIN || result == -EBUSY) {
        ::sched_yield();  // short of memory, or of room for completions
      } else if (result < 0 && result != -EINTR) {
        throw StorageError("io_uring fails", -result);
      }
      if (wanted > 0) return;  // the caller reaps, and comes again
    }
  }

  // Lets the kernel bring completions, without waiting.
  void Nudge() {
    (void)::syscall(__NR_io_uring_enter, ring_.ring_fd, 0, 0, IORING_ENTER_GETEVENTS, nullptr, 0);
  }

  // Finishes the reads that are done, of any queue.
  void Reap();

  // After an error of Enter(): the kernel does not get the reads of this queue that it does not have yet.
  // Returns when it has done the others, whose memory is then free.
  void Abandon(const UringQueue* queue) noexcept;

 private:
  // One round trip, which seccomp may forbid while it allows the setup.
  int TryOnce() {
    ::io_uring_prep_nop(::io_uring_get_sqe(&ring_));
    const int submitted = ::io_uring_submit_and_wait(&ring_, 1);
    if (submitted < 0) return -submitted;
    struct io_uring_cqe* done = nullptr;
    const int error = -::io_uring_wait_cqe(&ring_, &done);
    if (error == 0) ::io_uring_cqe_seen(&ring_, done);
    return error;
  }

  void Finish(Operation* operation, int result);
  void Free(Operation* operation) {
    operation->queue = nullptr;
    free_.push_back(operation);  // it has room for all
  }

  const BlockBuffer buffers_;  // one block for each operation
  std::vector<Operation> operations_;
  std::vector<Operation*> free_;
  std::vector<Operation*> again_;  // of which the kernel has done a part
  size_t in_flight_ = 0;
  struct io_uring ring_{};
  int error_ = 0;
  bool made_ = false;
  bool registered_ = false;
};

class UringQueue final : public ReadQueue {
 public:
  UringQueue(ThreadRing* ring, int file, ReadCounts* counts) : ring_(*ring), file_(file), counts_(*counts) {}
  UringQueue(const UringQueue&) = delete;
  UringQueue& operator=(const UringQueue&) = delete;
  ~UringQueue() override {
    try {
      UringQueue::Wait(kEverything);
    } catch (const std::exception&) {  // the kernel takes no reads any more
      ring_.Abandon(this);
    }
  }

  uint64_t Submit(BlockRead* reads, size_t count) override {
    open_.push_back({reads, count, 0, count});
    ++last_;
    Begin();
    ring_.Enter(0);
    return last_;
  }

  void Wait(uint64_t ticket) override {
    for (;;) {
      ring_.Reap();
      Begin();
      Close();
      if (open_.empty() || last_ - open_.size() >= ticket) break;
      // Few system calls, and still most of the depth in use.
      const bool more = open_.back().next < open_.back().count;
      ring_.Enter(more ? kReadDepth / kWakeups : open_.front().left);
    }
    Count();
  }

  bool Poll() override {
    ring_.Nudge();
    ring_.Reap();
    Begin();
    ring_.Enter(0);
    Close();
    if (!open_.empty()) return false;
    Count();
    return true;
  }

  int file() const { return file_; }

  void Finish(const Operation& operation, int error) {
    BlockRead* read = operation.read;
    if (error == 0) {
      const bool in_place = operation.shape == ReadShape::kBlocks;
      error = Deliver(*read, operation.shape, in_place ? read->into : ring_.BufferOf(&operation));
    }
    read->error = error;
    ++stats_.reads;
    stats_.read_errors += error == 0 ? 0 : 1;
    --open_[operation.ticket - (last_ - open_.size() + 1)].left;
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

  // Begins as many reads as there are operations.
  void Begin() {
    for (size_t at = 0; at < open_.size(); ++at) {
      Submission& submission = open_[at];
      while (submission.next < submission.count) {
        BlockRead* read = &submission.reads[submission.next];
        const ReadShape shape = ShapeOf(*read);
        if (shape == ReadShape::kRefused) {
          read->error = EINVAL;
          ++submission.next;
          --submission.left;
          ++stats_.reads;
          ++stats_.read_errors;
          continue;
        }
        Operation* operation = ring_.Take();
        if (operation == nullptr) return;
        ++submission.next;
        const bool in_place = shape == ReadShape::kBlocks;
        *operation = {this,
                      read,
                      last_ - open_.size() + 1 + at,
                      read->offset / kBlockBytes * kBlockBytes,
                      in_place ? read->into : ring_.BufferOf(operation),
                      in_place ? read->bytes : static_cast<uint32_t>(kBlockBytes),
                      shape};
        stats_.read_bytes += operation->left;
        ring_.Prepare(operation);
      }
    }
  }

  void Close() {
    while (!open_.empty() && open_.front().left == 0) open_.pop_front();
  }

  void Count() {
    counts_.Add(stats_);
    stats_ = {};
  }

  ThreadRing& ring_;
  const int file_;
  ReadCounts& counts_;
  std::deque<Submission> open_;  // the last ones of all submissions
  uint64_t last_ = 0;
  BlockDeviceStats stats_;  // that counts_ does not have yet
};

void ThreadRing::Prepare(Operation* operation) {
  struct io_uring_sqe* entry = ::io_uring_get_sqe(&ring_);  // there are as many as operations
  const int file = operation->queue->file();
  if (registered_ && operation->shape == ReadShape::kPiece) {
    ::io_uring_prep_read_fixed(entry, file, operation->into, operation->left, operation->offset, 0);
  } else {
    ::io_uring_prep_read(entry, file, operation->into, operation->left, operation->offset);
  }
  ::io_uring_sqe_set_data(entry, operation);
  ++in_flight_;
}

void ThreadRing::Reap() {
  std::array<struct io_uring_cqe*, 64> done{};
  for (;;) {
    const unsigned count = ::io_uring_peek_batch_cqe(&ring_, done.data(), done.size());
    for (unsigned at = 0; at < count; ++at) {
      --in_flight_;
      Finish(static_cast<Operation*>(::io_uring_cqe_get_data(done[at])), done[at]->res);
    }
    ::io_uring_cq_advance(&ring_, count);
    if (count < done.size()) return;
  }
}

void ThreadRing::Abandon(const UringQueue* queue) noexcept {
  for (unsigned at = *ring_.sq.khead; at != ring_.sq.sqe_tail; ++at) {
    struct io_uring_sqe* entry = &ring_.sq.sqes[at & (kReadDepth - 1)];
    // NOLINTNEXTLINE(performance-no-int-to-ptr): io_uring_sqe_set_data() put it there
    auto* operation = reinterpret_cast<Operation*>(entry->user_data);
    if (operation->queue != queue) continue;
    operation->queue = nullptr;
    ::io_uring_prep_nop(entry);
    ::io_uring_sqe_set_data(entry, operation);
  }
  const auto is_of_queue = [queue](const Operation& one) { return one.queue == queue; };
  for (;;) {
    for (Operation* operation : again_) {
      if (operation->queue == queue) Free(operation);
    }
    again_.erase(std::remove_if(again_.begin(), again_.end(),
                                [](const Operation* operation) { return operation->queue == nullptr; }),
                 again_.end());
    if (std::none_of(operations_.begin(), operations_.end(), is_of_queue)) return;
    ::sched_yield();
    Nudge();
    Reap();
  }
}

void ThreadRing::Finish(Operation* operation, int result) {
  if (operation->queue == nullptr) return Free(operation);  // abandoned
  if (result == -EAGAIN || result == -EINTR) return again_.push_back(operation);
  if (result > 0 && static_cast<uint32_t>(result) < operation->left) {
    operation->left -= static_cast<uint32_t>(result);
    operation->into += result;
    operation->offset += static_cast<uint32_t>(result);
    return again_.push_back(operation);
  }
  operation->queue->Finish(*operation, result > 0 ? 0 : result == 0 ? ENODATA : -result);
  Free(operation);
}

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

// Null, and why.
ThreadRing* RingOfThisThread(std::string* why_not) {
  int error = 0;
  ThreadRing* ring = ThreadRing::OfThisThread(&error);
  if (error == EMFILE || error == ENFILE) throw StorageError("cannot open an io_uring for reads", error);
  if (ring == nullptr) *why_not = WhyNoRing(error);
  return ring;
}

}  // namespace

bool HasLiburing() { return true; }

std::string UringSupport(bool* registers_buffers) {
  std::string why_not;
  const ThreadRing* ring = RingOfThisThread(&why_not);
  if (ring != nullptr) *registers_buffers = ring->registers_buffers();
  return why_not;
}

std::unique_ptr<ReadQueue> NewUringQueue(int file, ReadCounts* counts, std::string* why_not) {
  ThreadRing* ring = RingOfThisThread(why_not);
  if (ring == nullptr) return nullptr;
  return std::make_unique<UringQueue>(ring, file, counts);
}

#endif

}  // namespace oe
