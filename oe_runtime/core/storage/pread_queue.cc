#include "oe_runtime/core/storage/pread_queue.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

// 0, or the errno.
int ReadWhole(int file, uint64_t offset, std::byte* into, uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t got = ::pread(file, into, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) return ENODATA;
    into += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
  return 0;
}

}  // namespace

struct PreadPool::Submission {
  // A thread takes this many at once: few enough that all threads have work.
  static constexpr size_t kTaken = 4;

  int file = -1;
  ReadCounts* counts = nullptr;
  BlockRead* reads = nullptr;
  size_t count = 0;
  size_t next = 0;  // which nobody has taken; under the pool's mutex
  std::atomic<size_t> left{0};
  std::mutex mutex;
  std::condition_variable done;

  bool is_done() const { return left.load(std::memory_order_acquire) == 0; }
};

class PreadPool::Queue final : public ReadQueue {
 public:
  Queue(PreadPool* pool, int file, ReadCounts* counts) : pool_(pool), file_(file), counts_(counts) {}
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;
  ~Queue() override { Queue::Wait(kEverything); }

  uint64_t Submit(BlockRead* reads, size_t count) override {
    auto submission = std::make_shared<Submission>();
    submission->file = file_;
    submission->counts = counts_;
    submission->reads = reads;
    submission->count = count;
    submission->left = count;
    if (count > 0) pool_->Add(submission);
    open_.push_back(std::move(submission));
    return ++last_;
  }

  void Wait(uint64_t ticket) override {
    while (!open_.empty() && last_ - open_.size() < ticket) {
      Submission& first = *open_.front();
      if (!first.is_done()) {
        std::unique_lock<std::mutex> lock(first.mutex);
        first.done.wait(lock, [&first] { return first.is_done(); });
      }
      open_.pop_front();
    }
  }

  bool Poll() override {
    return std::all_of(open_.begin(), open_.end(), [](const auto& one) { return one->is_done(); });
  }

 private:
  PreadPool* const pool_;
  const int file_;
  ReadCounts* const counts_;
  std::deque<std::shared_ptr<Submission>> open_;  // the last ones of all submissions
  uint64_t last_ = 0;
};

std::shared_ptr<PreadPool> PreadPool::Shared() {
  static std::mutex mutex;
  static std::weak_ptr<PreadPool> shared;
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<PreadPool> pool = shared.lock();
  if (pool == nullptr) shared = pool = std::make_shared<PreadPool>();
  return pool;
}

PreadPool::~PreadPool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

std::unique_ptr<ReadQueue> PreadPool::NewQueue(int file, ReadCounts* counts) {
  return std::make_unique<Queue>(this, file, counts);
}

void PreadPool::Add(const std::shared_ptr<Submission>& submission) {
  const size_t wanted = (submission->count + Submission::kTaken - 1) / Submission::kTaken;
  size_t woken = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    while (threads_.size() < std::min<size_t>(kMostThreads, wanted)) {
      try {
        threads_.emplace_back([this] { Work(); });
      } catch (const std::system_error& error) {
        if (!threads_.empty()) break;  // fewer threads only take longer
        throw StorageError("cannot start a thread that reads the storage device", error.code().value());
      }
    }
    submissions_.push_back(submission);
    woken = std::min<size_t>(wanted, idle_);
  }
  for (size_t one = 0; one < woken; ++one) wake_.notify_one();
}

void PreadPool::Work() {
  BlockBuffer buffer(kBlockBytes);
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    ++idle_;
    wake_.wait(lock, [this] { return stop_ || !submissions_.empty(); });
    --idle_;
    if (submissions_.empty()) return;
    const std::shared_ptr<Submission> submission = submissions_.front();
    const size_t first = submission->next;
    const size_t last = std::min(first + Submission::kTaken, submission->count);
    submission->next = last;
    if (last == submission->count) submissions_.pop_front();
    lock.unlock();
    BlockDeviceStats stats;
    for (size_t at = first; at < last; ++at) {
      BlockRead& read = submission->reads[at];
      const ReadShape shape = ShapeOf(read);
      uint64_t bytes = 0;
      if (shape == ReadShape::kBlocks) {
        bytes = read.bytes;
        read.error = ReadWhole(submission->file, read.offset, read.into, bytes);
        if (read.error == 0) read.error = Deliver(read, shape, read.into);
      } else if (shape == ReadShape::kPiece) {
        bytes = kBlockBytes;
        const uint64_t block = read.offset / kBlockBytes * kBlockBytes;
        read.error = ReadWhole(submission->file, block, buffer.data(), bytes);
        if (read.error == 0) read.error = Deliver(read, shape, buffer.data());
      } else {
        read.error = EINVAL;
      }
      ++stats.reads;
      stats.read_bytes += bytes;
      stats.read_errors += read.error == 0 ? 0 : 1;
    }
    submission->counts->Add(stats);
    if (submission->left.fetch_sub(last - first, std::memory_order_acq_rel) == last - first) {
      const std::lock_guard<std::mutex> done_lock(submission->mutex);
      submission->done.notify_all();
    }
    lock.lock();
  }
}

}  // namespace oe
