#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/fair_shared_mutex.h"
#include "oe_runtime/core/common/prefetch.h"
#include "oe_runtime/core/common/shard.h"
#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/storage/cache_memory.h"
#include "oe_runtime/core/storage/change_log.h"
#include "oe_runtime/core/storage/damage.h"
#include "oe_runtime/core/storage/row_log.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {

class LogReads;

// The bit of a row's number that says that it is of a copy in DRAM (row_cache.h).
constexpr uint32_t kCopyBit = 1U << 31;
constexpr uint64_t kMostRowsOfAStore = kCopyBit - 1;

// How rows of one size lie in blocks of 2^shift rows.
struct RowLayout {
  size_t row_bytes = 0;     // what a row holds
  size_t stride = 0;        // from a row to the next one of its line
  size_t gap = 0;           // unused bytes at the end of a line
  uint32_t reciprocal = 0;  // ceil(2^32 / rows in a line), to divide by; 0 without lines
  uint32_t shift = 0;
  size_t block_bytes = 0;

  // One after the other, in blocks of about `block_bytes`.
  static RowLayout Dense(size_t row_bytes, size_t block_bytes);
  // So that persistent memory, which reads and writes lines of 256 bytes, touches as few of them as possible:
  // larger rows begin with a line, smaller ones do not straddle two.
  static RowLayout InLines(size_t row_bytes, size_t block_bytes);
  // That of a pool of `format` (pool_format.h): in lines; since format 3, one after the other where lines
  // would waste a quarter or more (format 2: more), as with rows of 192 bytes, of which a line holds one.
  static RowLayout InPool(uint64_t format, size_t row_bytes, size_t block_bytes);

  uint32_t block_rows() const { return 1U << shift; }
  size_t Offset(uint32_t row_of_block) const noexcept {
    const size_t line = (uint64_t{row_of_block} * reciprocal) >> 32;
    return row_of_block * stride + line * gap;
  }
};

// Rows of one internal shard of a table, without headers, known by numbers, with the index of their keys;
// tables use both by a RowMap. A row stays where it is, so that pointers to it stay good until it is erased,
// but where moves() says otherwise. What a medium asks for beyond that is done here, for some keys at once,
// so that nobody needs to know which kind of store it has. The caller holds mutex(), shared to read and
// exclusive to change, unless a comment says otherwise.
class RowStore {
 public:
  explicit RowStore(const RowLayout& layout) : layout_(layout), mask_(layout.block_rows() - 1) {}
  virtual ~RowStore() = default;
  RowStore(const RowStore&) = delete;
  RowStore& operator=(const RowStore&) = delete;

  FairSharedMutex& mutex() noexcept { return mutex_; }
  Index& index() const noexcept { return *index_; }
  // The index of the rows from now on; nullptr: none are used now. Returns the one before. Takes mutex().
  std::unique_ptr<Index> UseIndex(std::unique_ptr<Index> index) noexcept;
  // What happened since the last save of the table.
  ChangeLog& changes() noexcept { return changes_; }
  const ChangeLog& changes() const noexcept { return changes_; }

  // Makes room for one more row; throws StorageError when the storage is full. Add() then does not throw.
  virtual void Reserve() = 0;
  // The number of a new row for `key`, contents undefined. Reserve() must have come before.
  virtual uint32_t Add(Key key) noexcept = 0;
  // Makes Erase() of that row not throw; throws StorageError when the storage has no room for what must be
  // written down of it.
  virtual void ReserveErase(uint32_t /*number*/) {}
  // Forgets the row of `key`. ReserveErase() must have come just before.
  virtual void Erase(Key key, uint32_t number) noexcept = 0;
  // Rows there are.
  virtual uint64_t size() const noexcept = 0;
  // Room in a log for so many appends, before a call that changes rows and without mutex(): two for each row.
  virtual RowLog::Room RoomFor(uint64_t /*appends*/, RowLog::Need /*need*/) { return {}; }
  // Whether anything changed since the last checkpoint, or since there is none.
  virtual bool changed() const noexcept { return true; }

  static constexpr size_t kMostKeys = 64;
  // Before the rows of n <= kMostKeys are written: numbers[i], which the index has of keys[i], becomes that
  // of a row that may be written until the next checkpoint, or an Upkeep() between, which moves() shows;
  // kNoRow for those that are damaged. Rows of a log stay pinned until Unpin(). Throws StorageError; then
  // some have other numbers.
  virtual void MakeWritable(const Key* /*keys*/, size_t /*n*/, uint32_t* /*numbers*/) {}
  // Changes when rows have other numbers than before.
  virtual uint64_t moves() const noexcept { return 0; }
  // The numbers that the rows of keys[n] have now, which were made writable; kNoRow stays.
  virtual void FindAgain(const Key* /*keys*/, size_t /*n*/, uint32_t* /*numbers*/) noexcept {}
  // To be held, beside mutex(), to write to rows.
  virtual std::unique_lock<std::mutex> LockCopies() { return {}; }
  // Whether rows are in DRAM only while they are used, and so are pinned: then a call that changes rows needs
  // RoomFor(), and unpins the rows that it found.
  virtual bool pins() const noexcept { return false; }
  virtual void Pin(uint32_t /*number*/) noexcept {}
  // Of rows, or kNoRow, which they are afterwards.
  virtual void Unpin(uint32_t* /*numbers*/, size_t /*n*/) noexcept {}

  // Whether reads are counted, so that each key is to be looked up as often as it is asked for.
  virtual bool counts_reads() const noexcept { return false; }
  static constexpr size_t kMostReads = 512;
  // Notes the reads of n <= kMostReads keys. With mutex() shared.
  virtual void NoteReads(const Key* /*keys*/, const uint32_t* /*numbers*/, size_t /*n*/) const noexcept {}
  // rows[i] = the row of keys[i], nullptr for kNoRow. Rows that are not in DRAM come with `reads`, which must
  // not be nullptr where rows are pinned.
  virtual void Rows(const Key* keys, const uint32_t* numbers, size_t n, const std::byte** rows,
                    LogReads* reads) const;
  // For a read that is still to come: adds the rows to `reads` that are not in DRAM; the others stay there
  // for now. Of at most MostReadAhead() rows.
  virtual void ReadAhead(const Key* /*keys*/, const uint32_t* /*numbers*/, size_t /*n*/,
                         LogReads* /*reads*/) const {}
  virtual size_t MostReadAhead() const noexcept { return 0; }
  // Takes a row that was read from `slot` into DRAM, if that is still where it is; `ahead`: of ReadAhead().
  virtual void Install(Key /*key*/, uint32_t /*slot*/, const std::byte* /*row*/, bool /*ahead*/) noexcept {}
  // Copies `words` words at byte `at` of each row to facts[i * stride].
  virtual void CopyFacts(const uint32_t* numbers, size_t n, size_t at, size_t words, uint32_t* facts,
                         size_t stride) const;
  // Lets a cache take in what was read, and put out others. Takes mutex().
  virtual void Upkeep() noexcept {}
  virtual CacheStats cache_stats() const noexcept { return {}; }
  // The log of the rows, to be read in order; nullptr: there is none.
  virtual RowLog* log() const noexcept { return nullptr; }

  // Notes that rows were changed, for HasChanged().
  void NoteChanged(const Key* keys, const uint32_t* numbers, size_t n) noexcept {
    if (changes_.known()) Changed(keys, numbers, n);
  }
  // Whether the row was changed since the last save of the table.
  virtual bool HasChanged(Key /*key*/, uint32_t number) const noexcept {
    return changes_.Has(PlaceOf(number));
  }
  // The number that a row keeps when it is taken into a cache or put out.
  virtual uint32_t PlaceOf(uint32_t number) const noexcept { return number; }

  // Whether rows from before a recovery have not all been checked since: who reads rows checks them first.
  // Rows of a log are checked by each read.
  virtual bool unchecked() const noexcept { return false; }
  // Whether the row that a key has is what was written.
  virtual bool Intact(Key /*key*/, uint32_t /*number*/) const noexcept { return true; }
  // A damaged row is repaired where that is possible, and otherwise quarantined: the key has no row any more.
  // Throws StorageError.
  virtual void CheckRow(Key /*key*/, uint32_t /*number*/) {}
  // Checks the rows of some keys from *position on (0 at first), which moves on, as CheckRow() does; false
  // when there are no more keys. Rows that come or go between calls may be missed. *rows are how many it was.
  // Takes mutex(). Only of a pool: rows of a log are checked segment by segment.
  virtual bool Scrub(uint64_t* /*position*/, uint64_t* /*rows*/) noexcept { return false; }
  // Throws StorageError if the table may not lose so many more damaged rows (Damage::RequireFew).
  virtual void RequireFewDamaged(uint64_t /*more*/) const {}
  // Counts and logs what was done about a damaged row.
  virtual void Report(Damage::Kind /*kind*/, Key /*key*/, uint32_t /*number*/) const noexcept {}

  // Erases the row of a key that has one, which ReserveErase() is done for.
  void Forget(Key key, uint32_t number) noexcept;
  // Runs work(), of which std::bad_alloc is the StorageError of an index without memory.
  template <typename Work>
  void OrStorageError(const Work& work) const {
    try {
      work();
    } catch (const std::bad_alloc&) {
      throw StorageError("no memory for an index of more than " + std::to_string(size()) +
                         " keys in a sixteenth of a table; use more servers");
    }
  }

  // A row that is read in a moment, and what Intact() needs of it.
  virtual void Prefetch(uint32_t number) const noexcept { PrefetchRow(number); }
  void PrefetchRow(uint32_t number) const noexcept { oe::PrefetchRow(row(number), layout_.row_bytes); }
  std::byte* row(uint32_t number) const noexcept {
    return blocks_[number / kCopyBit][number % kCopyBit >> layout_.shift] + layout_.Offset(number & mask_);
  }

 protected:
  const RowLayout& layout() const noexcept { return layout_; }
  uint32_t mask() const noexcept { return mask_; }
  size_t blocks() const noexcept { return blocks_[0].size(); }
  // Throws StorageError unless there are numbers for the rows of one more block.
  void RequireNumbers() const;
  // Makes room for one more block; may throw std::bad_alloc.
  void ReserveBlock() {
    if (blocks_[0].size() == blocks_[0].capacity()) blocks_[0].reserve(blocks_[0].size() * 2 + 1);
  }
  void AddBlock(std::byte* block) { blocks_[0].push_back(block); }
  std::vector<std::byte*>& copies() noexcept { return blocks_[1]; }
  bool has_index() const noexcept { return index_ != nullptr; }

  virtual void Changed(const Key* keys, const uint32_t* numbers, size_t n) noexcept;
  // Room for the erasure of a damaged row: as an update takes it, of which this may be a part, not as an
  // eviction.
  virtual void ReserveQuarantine() {}
  // Gives a damaged row up: its key has none any more. Throws StorageError.
  void Quarantine(Key key, uint32_t number);

  ChangeLog changes_;

 private:
  const RowLayout layout_;
  const uint32_t mask_;
  FairSharedMutex mutex_;
  std::unique_ptr<Index> index_;
  std::array<std::vector<std::byte*>, 2> blocks_;  // of rows and of copies
};

// In memory of an arena, numbered from 0 in order of allocation; numbers of erased rows come again.
class ArenaRows final : public RowStore {
 public:
  // `arena` must outlive the store.
  ArenaRows(Arena* arena, size_t row_bytes);

  void Reserve() override;
  uint32_t Add(Key key) noexcept override;
  void Erase(Key key, uint32_t number) noexcept override;
  uint64_t size() const noexcept override { return next_ - free_; }

 private:
  Arena* const arena_;
  uint64_t next_ = 0;  // numbers that were given out
  uint64_t free_ = 0;  // how many of them are free: a list in the rows themselves
  uint32_t first_free_ = 0;
};

}  // namespace oe
