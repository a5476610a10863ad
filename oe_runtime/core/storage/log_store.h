#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "oe_runtime/core/common/fair_shared_mutex.h"
#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/storage/cache_memory.h"
#include "oe_runtime/core/storage/damage.h"
#include "oe_runtime/core/storage/row_cache.h"
#include "oe_runtime/core/storage/row_log.h"
#include "oe_runtime/core/storage/row_store.h"

namespace oe {

class LogStore;

// Rows of one table that are read from its log together: those that a request did not find in DRAM.
class LogReads {
 public:
  // `row`, unless nullptr, gets where the content of the slot lies, within the life of this object, or
  // nullptr if it is damaged.
  void Add(const LogStore* store, Key key, uint32_t slot, const std::byte** row = nullptr);
  // Reads all: Start() returns at once, Finish() when all are done; the same thread calls both. The slots
  // must not move meanwhile, nor be superseded. Throws StorageError if the drive does not give back a row,
  // also when it is read again, or if more rows are damaged than the table may lose (Damage::RequireFew).
  void Run() {
    Start();
    Finish();
  }
  void Start();
  void Finish() {
    Wait();
    Require();
  }
  // The halves of Finish(): until the first returns, entries have no errors; the second throws.
  void Wait();
  void Require() const;
  // What `row` points to until Wait().
  static const std::byte* Pending() { return &kPending; }

  struct Entry {
    Key key = 0;
    uint32_t slot = 0;
    const std::byte** row = nullptr;
    int error = 0;  // as BlockRead::error
  };
  const std::vector<Entry>& entries() const { return entries_; }
  const std::byte* content(size_t entry) const { return rows_.get() + entry * row_bytes_; }

 private:
  static constexpr std::byte kPending{};

  const LogStore* store_ = nullptr;  // of the first row
  size_t row_bytes_ = 0;
  std::vector<Entry> entries_;
  std::unique_ptr<std::byte[]> rows_;
  std::vector<BlockRead> reads_;
  std::vector<uint8_t> copied_;       // whether an entry was still in the memory of the log
  std::unique_ptr<ReadQueue> queue_;  // after what it reads into
};

// The rows of one internal shard of a table in a log (row_log.h). Rows live in frames in DRAM while they are
// used. CLOCK with counts of reads (GCLOCK) puts them out, and those that changed are then appended to the
// log, or when a checkpoint needs them. The index leads to the frame of a row that has one (kCopyBit), or
// else to its slot in the log.
//
// Callers hold mutex(): shared to read, exclusive to change. What appends to the log needs RowLog::Room too,
// which they ask for before they take the lock.
class LogStore final : public RowStore {
 public:
  // All must outlive the store.
  LogStore(RowLog* log, BlockDevice* device, CacheMemory* memory, Damage* damage);
  ~LogStore() override;

  FairSharedMutex& mutex() noexcept { return mutex_; }
  RowLog* log() const noexcept { return log_; }
  BlockDevice* device() const noexcept { return device_; }
  // The index of the rows, or nullptr: none are moved now. Returns the one before. Takes mutex().
  Index* UseIndex(Index* index);
  // No longer this one.
  void ForgetIndex(const Index* index);

  void Reserve() override;
  // The row is pinned.
  uint32_t Add(Key key) noexcept override;
  void ReserveErase(uint32_t /*number*/) override {}
  void Erase(Key key, uint32_t number) noexcept override;
  uint64_t size() const noexcept override { return size_; }
  LogStore* log_store() noexcept override { return this; }

  // What the index says of n keys becomes frames that may be written, pinned until Unpin(): a pinned row
  // stays in its frame. kNoRow stays; rows that cannot be read get it, and `damaged(i)` is called for them.
  // Throws StorageFull and std::bad_alloc; then what is not kNoRow is pinned.
  void MakeWritable(const Key* keys, size_t n, uint32_t* numbers, const std::function<void(size_t)>& damaged);
  void Pin(uint32_t number) noexcept { ++frames_[number % kCopyBit].pins; }
  void Unpin(uint32_t number) noexcept { --frames_[number % kCopyBit].pins; }

  // Notes a read; whether it is the first of a row that was read ahead, so that it would have missed it.
  // Shared is enough.
  bool NoteRead(uint32_t number) const noexcept;
  // The row is going to be read. Shared is enough.
  void Keep(uint32_t number) const noexcept;
  void NoteReads(uint64_t hits, uint64_t misses) const noexcept {
    hits_.fetch_add(hits, std::memory_order_relaxed);
    misses_.fetch_add(misses, std::memory_order_relaxed);
  }
  // The most rows of a request that is still to come for which it may be read ahead: more would push out rows
  // of the requests before it, which are still needed.
  size_t MostReadAhead() const noexcept;
  // Takes a row that was read from `slot` into a frame, if that is still where it is.
  void Install(Key key, uint32_t slot, const std::byte* row, bool ahead = false) noexcept;
  // Whether there are more frames than the cache may have. Shrink() gives some blocks of them back, with room
  // for MostShrunk() appends; false: it could not.
  bool wants_shrink() const noexcept { return beyond_blocks_ > 0 || memory_->Owes(bytes_); }
  uint64_t MostShrunk() const noexcept { return uint64_t{layout().block_rows()} * blocks_at_once_; }
  bool Shrink() noexcept;

  // For the log: takes mutex().
  void Relocate(Key key, uint32_t slot, const std::function<uint32_t()>& move);
  // Appends rows that were changed up to `epoch`, from the frame *position on, at most kAtOnce; false after
  // the last one. Takes mutex(). Throws StorageFull.
  static constexpr size_t kAtOnce = 256;
  bool WriteBack(uint64_t epoch, size_t* position);

  // Where the content of a frame is in the log; kNoRow: nowhere.
  uint32_t SlotOf(uint32_t number) const noexcept { return frames_[number % kCopyBit].slot; }
  // That cannot be read, so the content is to be written anew, as if it had changed.
  void Renew(uint32_t number) { BeginChange(number % kCopyBit); }

  void Report(Damage::Kind kind, Key key, uint32_t slot) const noexcept;
  // Before so many rows are given up.
  void RequireFewDamaged(uint64_t more) const {
    if (damage_ != nullptr) damage_->RequireFew(more, size_);
  }
  // Whether a row was changed since the last checkpoint.
  bool changed() const noexcept { return changed_; }
  void CloseEpoch() noexcept { changed_ = false; }
  // Of the keys (RowLog::KeyDigest).
  uint64_t digest() const noexcept { return digest_; }
  // After a recovery: so many rows in the log, and no frames in use.
  void SetRows(uint64_t size, uint64_t digest) noexcept;
  CacheStats stats() const noexcept;

 private:
  struct Frame {
    Key key = 0;
    uint32_t slot = kNoRow;  // in the log, of this content; kNoRow: it is here only
    uint32_t pins = 0;
    uint32_t dirty = 0;  // the epoch in which it was changed and is not in the log yet; 0: it is
    bool used = false;
    bool entries = false;  // whether the log may have entries of the key
    uint8_t reads = 0;     // after the one that brought it, less one for each time that the hand was there
  };

  static constexpr uint8_t kMostReads = 3;  // that count
  static constexpr uint8_t kPulled = 4;     // none, and the push of the pull that brought it is still to come
  static constexpr uint8_t kReadAhead = 5;  // it was read ahead, and by no pull so far
  // Frames that the hand passes at most before it takes the one of these that was read least.
  static constexpr size_t kMostPassed = 1024;
  std::byte* content(uint32_t frame) const noexcept { return row(frame | kCopyBit); }
  // Of a block, beside its rows.
  size_t FrameBytes() const noexcept { return layout().block_rows() * sizeof(Frame); }
  void EnsureFree();
  bool AddBlock(bool beyond);
  bool ShrinkByBlock() noexcept;
  bool EvictOne() noexcept;
  bool Evict(uint32_t frame) noexcept;
  bool WriteFrame(uint32_t frame) noexcept;
  RowLog::Room RoomToWriteBack();
  void BeginChange(uint32_t frame);
  void Free(uint32_t frame) noexcept;

  RowLog* const log_;
  BlockDevice* const device_;
  CacheMemory* const memory_;
  Damage* const damage_;
  const size_t row_bytes_;
  const uint32_t blocks_at_once_;
  FairSharedMutex mutex_;
  Index* index_ = nullptr;

  uint64_t size_ = 0;
  uint64_t digest_ = 0;
  bool changed_ = false;
  std::vector<Frame> frames_;
  std::vector<bool> beyond_;  // blocks that are not of the cache's memory
  std::vector<uint32_t> free_;
  uint32_t hand_ = 0;

  mutable std::atomic<uint64_t> hits_{0};
  mutable std::atomic<uint64_t> misses_{0};
  std::atomic<uint64_t> rows_{0};
  std::atomic<uint64_t> bytes_{0};
  std::atomic<uint64_t> beyond_blocks_{0};
  std::atomic<uint64_t> evictions_{0};
  std::atomic<uint64_t> write_backs_{0};
};

}  // namespace oe
