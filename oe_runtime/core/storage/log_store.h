#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "oe_runtime/core/common/fair_shared_mutex.h"
#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/storage/damage.h"
#include "oe_runtime/core/storage/frames.h"
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

  RowLog* log() const noexcept override { return log_; }
  BlockDevice* device() const noexcept { return device_; }

  void Reserve() override;
  // The row is pinned.
  uint32_t Add(Key key) noexcept override;
  void Erase(Key key, uint32_t number) noexcept override;
  uint64_t size() const noexcept override { return size_; }
  RowLog::Room RoomFor(uint64_t appends, RowLog::Need need) override { return log_->Reserve(appends, need); }

  // What the index says of n keys becomes frames, pinned until Unpin(): a pinned row stays in its frame.
  // Where it throws, what is not kNoRow is pinned.
  void MakeWritable(const Key* keys, size_t n, uint32_t* numbers) override;
  bool pins() const noexcept override { return true; }
  void Pin(uint32_t number) noexcept override { ++frames_[number % kCopyBit].pins; }
  void Unpin(uint32_t* numbers, size_t n) noexcept override;

  void NoteReads(const Key* keys, const uint32_t* numbers, size_t n) const noexcept override;
  void Rows(const Key* keys, const uint32_t* numbers, size_t n, const std::byte** rows,
            LogReads* reads) const override;
  void ReadAhead(const Key* keys, const uint32_t* numbers, size_t n, LogReads* reads) const override;
  // The most rows of a request that is still to come for which it may be read ahead: more would push out rows
  // of the requests before it, which are still needed.
  size_t MostReadAhead() const noexcept override;
  void Install(Key key, uint32_t slot, const std::byte* row, bool ahead) noexcept override;
  void CopyFacts(const uint32_t* numbers, size_t n, size_t at, size_t words, uint32_t* facts,
                 size_t stride) const override;
  // Gives frames back beyond what the cache may have, which many rows that were used at once had taken.
  void Upkeep() noexcept override;

  // For the log: takes mutex().
  void Relocate(Key key, uint32_t slot, const std::function<uint32_t()>& move);
  // Appends rows that were changed up to `epoch`, from the frame *position on, at most kAtOnce; false after
  // the last one. Takes mutex(). Throws StorageFull.
  static constexpr size_t kAtOnce = 256;
  bool WriteBack(uint64_t epoch, size_t* position);

  bool HasChanged(Key key, uint32_t /*number*/) const noexcept override { return changes_.HasKey(key); }
  void CheckRow(Key key, uint32_t number) override;
  // What is only in the log is checked when it is read.
  void Prefetch(uint32_t number) const noexcept override {
    if ((number & kCopyBit) != 0) PrefetchRow(number);
  }
  void Report(Damage::Kind kind, Key key, uint32_t slot) const noexcept override;
  void RequireFewDamaged(uint64_t more) const override {
    if (damage_ != nullptr) damage_->RequireFew(more, size_);
  }
  // Whether a row was changed since the last checkpoint.
  bool changed() const noexcept override { return changed_; }
  void CloseEpoch() noexcept { changed_ = false; }
  // Of the keys (RowLog::KeyDigest).
  uint64_t digest() const noexcept { return digest_; }
  // After a recovery: so many rows in the log, and no frames in use.
  void SetRows(uint64_t size, uint64_t digest) noexcept;
  CacheStats cache_stats() const noexcept override { return frames_.stats(); }

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
  void Changed(const Key* keys, const uint32_t* numbers, size_t n) noexcept override;
  void TakeFrames(const Key* keys, size_t n, uint32_t* numbers);
  bool NoteRead(uint32_t number) const noexcept;
  void Keep(uint32_t number) const noexcept;
  bool Shrink() noexcept;
  std::byte* content(uint32_t frame) const noexcept { return row(frame | kCopyBit); }
  void EnsureFree();
  bool EvictOne() noexcept;
  bool Evict(uint32_t frame) noexcept;
  bool WriteFrame(uint32_t frame) noexcept;
  RowLog::Room RoomToWriteBack();
  void BeginChange(uint32_t frame);

  RowLog* const log_;
  BlockDevice* const device_;
  CacheMemory* const memory_;
  Damage* const damage_;
  const size_t row_bytes_;
  Frames<Frame> frames_;
  const uint32_t blocks_at_once_;

  uint64_t size_ = 0;
  uint64_t digest_ = 0;
  bool changed_ = false;
};

}  // namespace oe
