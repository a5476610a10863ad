#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/storage/block_device.h"
#include "oe_runtime/core/storage/damage.h"
#include "oe_runtime/core/storage/epoch_marks.h"
#include "oe_runtime/core/storage/retired_slots.h"
#include "oe_runtime/core/storage/row_log_format.h"
#include "oe_runtime/core/storage/row_log_walk.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {

// The end of the messages about a log that is full, by its storage's size or by its file system.
inline constexpr const char* kMakeRoom =
    "; raise the storage size of the servers, free space on the drive, or use more servers";

struct RowLogSpec {
  std::string table;     // its name, for messages
  std::string where;     // the files, for messages
  std::string identity;  // whose rows they are; the owner compares it (RowLog::identity)
  size_t row_bytes = 0;
  uint32_t window = 2;              // checkpoints that are kept
  uint64_t max_bytes = UINT64_MAX;  // of the device
  // How many times the space of the rows the log takes while the device has more. The more, the less the
  // cleaner has to move.
  double spare = 1.45;
  size_t segment_bytes = size_t{4} << 20;
  size_t chunk_bytes = size_t{256} << 10;  // of one write
  size_t super_bytes = size_t{256} << 10;  // of each copy of the superblock
  // Segments that a superblock names; the rest of it is for what else it has.
  uint64_t MostSegments() const { return super_bytes * 3 / 4 / RowLogSegmentBytes(format); }
  uint64_t format = kRowLogFormat;  // of a new log; one that is opened keeps its own
  std::shared_ptr<Damage> damage;   // where Recover() reports what was damaged; nullptr: nowhere
  // The facts of a row, by which it may be evicted: words of 4 bytes in it that are in DRAM and in the
  // headers of chunks too, so that nobody reads rows for them.
  size_t facts_at = 0;  // the first of them
  uint32_t fact_words = 0;

  // Lets the cleaner move the row of a key out of `slot`: calls `move`, at most once, without a lock of the
  // log and where nobody reads or supersedes the row of this key. Its result is the new slot, to be
  // remembered in place of `slot` where that is remembered; kNoRow: nothing changed. Versions that only
  // checkpoints need come here too. Without the call, the row stays.
  std::function<void(Key key, uint32_t slot, const std::function<uint32_t()>& move)> relocate;
  // The cleaner found a row that it cannot read. May be empty.
  std::function<void(Key key, uint32_t slot)> damaged;
};

// How full a log is, in rows.
struct RowLogRoom {
  uint64_t slots = 0;     // that its segments have room for
  uint64_t free = 0;      // of these, those that are neither live nor promised
  uint64_t reserved = 0;  // that new rows leave to updates, checkpoints and cleaning
  uint64_t changed = 0;   // expected to change from one checkpoint to the next
  uint64_t headroom = 0;  // new rows that the log and its device have room for, about
};

struct RowLogStats {
  uint64_t segments = 0;
  uint64_t free_segments = 0;
  uint64_t live = 0;     // rows, with those that only checkpoints need
  uint64_t retired = 0;  // of these, the latter
  uint64_t tombstones = 0;
  uint64_t appended = 0;  // rows by the owner since this object was made,
  uint64_t moved = 0;     // and by the cleaner
  uint64_t written_bytes = 0;
  uint64_t segment_rows = 0;  // that a segment has room for
  uint64_t memory_bytes = 0;  // of DRAM for what is known of slots, versions and tombstones
};

// The rows of one table on a block device, as a log: rows are appended to segments of MiBs in chunks, one
// write each, and never changed. Who owns the log knows the slot of the newest version of each row, its place
// in the log; a cleaner moves rows out of segments that are mostly dead.
//
// As in a pool (pool.h) the table is in one open epoch, and a checkpoint is the end of one. A version of an
// earlier epoch that is superseded is retired, and dead when no kept checkpoint is from before that. A
// version of the open epoch is dead at once: until the epoch is a checkpoint, nobody needs it; then a newer
// one is there.
//
// What is in the superblock, with the extent of each segment, is all that counts after a crash. So a commit
//   1. writes all chunks that have begun     flush
//   2. writes the superblock                 flush
//   3. and only then gives segments without live rows back to be used again.
// Entries of epochs after the newest kept checkpoint may be within these extents; recovery leaves them out,
// and notes their epochs as discarded as long as there are such entries. Recovery reads the headers of chunks
// only: for each key the entry with the greatest LSN counts.
//
// A tombstone hides older entries of its key, dead ones too. From the commit on in which no kept checkpoint
// is older than it, none of them is live, so none is moved; when all segments that were in use then are free,
// nothing is left to hide. Until then the cleaner moves it; while there are more tombstones than rows, it
// also moves the rows that have lain for longest, which tombstones wait for.
//
// Thread-safe. No method may be called with a lock that `relocate` takes, but Append(), AppendTombstone(),
// Supersede() and Locate(), which do not wait for the device.
class RowLog {
 public:
  // Makes an empty log, whatever is on the device. Throws StorageError.
  static std::unique_ptr<RowLog> Create(BlockDevice* device, const RowLogSpec& spec);
  // Opens the log that is there; Recover() must follow. Changes nothing. Throws StorageError; nullptr: there
  // is none.
  static std::unique_ptr<RowLog> Open(BlockDevice* device, const RowLogSpec& spec);
  ~RowLog();
  RowLog(const RowLog&) = delete;
  RowLog& operator=(const RowLog&) = delete;

  const RowLogSpec& spec() const { return spec_; }
  // That of the log, which may be of another process.
  const std::string& identity() const { return super_.identity; }

  // Room for appends. While it lives, that many Append() and AppendTombstone() find a place.
  class Room {
   public:
    Room() = default;
    Room(Room&& other) noexcept : log_(std::exchange(other.log_, nullptr)), rows_(other.rows_) {}
    Room& operator=(Room&& other) noexcept {
      std::swap(log_, other.log_);
      std::swap(rows_, other.rows_);
      return *this;
    }
    ~Room() {
      if (log_ != nullptr) log_->GiveRoom(rows_);
    }

   private:
    friend class RowLog;
    Room(RowLog* log, uint64_t rows) : log_(log), rows_(rows) {}
    RowLog* log_ = nullptr;
    uint64_t rows_ = 0;
  };
  // What the room is for. New rows are refused first, then updates; what writes back rows that the table has
  // already is refused only where cleaning gives no room at all.
  enum class Need : uint8_t { kNewRows, kUpdates, kWriteBack };
  // Grows the log, writes chunks and cleans until there is room. Throws StorageFull, and StorageError once
  // the device has failed.
  Room Reserve(uint64_t rows, Need need);
  // Returns when somebody gives room back; false: nobody has any. For a thread that has none.
  bool AwaitRoom();
  // So many more rows (or, negative, fewer) are to be written back some time: their room is not given away.
  // Recover() forgets them.
  void Claim(int64_t rows) noexcept { claimed_ += static_cast<uint64_t>(rows); }

  // The open epoch. CloseEpoch() begins the next one and returns the one that it ends; the caller excludes
  // appends and supersedes meanwhile. Throws StorageError after the last one.
  uint64_t epoch() const noexcept { return epoch_.load(std::memory_order_relaxed); }
  uint64_t CloseEpoch();

  // Appends a version of a row, of the open epoch or of one that is closed and not committed: its slot. With
  // Room. kNoRow: there is none after all.
  uint32_t Append(Key key, uint64_t epoch, const std::byte* row) noexcept;
  // Says that the key, which has entries, is gone. False: no room after all.
  bool AppendTombstone(Key key, uint64_t epoch) noexcept;
  // The version in that slot is no longer part of the table: before the open epoch is committed, a newer one
  // or a tombstone is appended.
  void Supersede(uint32_t slot) noexcept;

  // Where rows are read. Chunks that are not written yet are copied from at once, and *copied is then true;
  // otherwise `reads`, of reads_per_row(), are filled. The caller keeps the slot from being superseded or
  // moved until they are done.
  size_t reads_per_row() const { return row_blocks_; }
  // After a read of the device that failed with `error`, as BlockRead::error. Returns if some of its blocks
  // are bad; throws StorageError if it is gone, or the read could not be made: then nothing is known of the
  // blocks.
  void RequireBadBlocks(int error) const;
  // Throws StorageError: that cannot be read, and is not given up.
  [[noreturn]] void RefuseUnread(const std::string& what, int error) const;
  void Locate(const uint32_t* slots, size_t n, std::byte* const* into, BlockRead* reads,
              uint8_t* copied) const;
  // Copies the facts of the rows in n slots, fact_words of each, as they were written.
  void CopyFacts(const uint32_t* slots, size_t n, uint32_t* into) const;
  // What a RowLogWalk reads now.
  uint64_t used_bytes() const;

  // Writes chunks that are full. Others are written by commits.
  void WriteChunks();
  // Whether Tend() has something to do: full chunks to write, or few free segments.
  bool WantsTending() const;
  // Does it. Throws StorageError.
  void Tend();

  // Makes what was appended durable and, with `checkpoint`, that too: all rows of its epoch have been
  // appended. The oldest kept one is dropped. Throws StorageError; then nobody knows what is durable, and
  // each later commit throws.
  void Commit(const std::optional<KeptCheckpoint>& checkpoint);
  // Moves the rows of a few segments and commits; false: there is none that would give room.
  bool Clean();

  // Durable checkpoints that are kept, oldest first.
  std::vector<KeptCheckpoint> kept() const;
  // Why there are no more commits; empty: there are.
  std::string failure() const;

  // Goes back to the kept checkpoint `id`, or without one to the newest, or to an empty log if there is none.
  // The slots of all rows are added to the index of their key, empty at first. Later checkpoints are gone.
  // The caller excludes everything else. Throws StorageError for an id that is not kept and for a log that is
  // damaged; on the device nothing has changed then, and Recover() must be called again. Interrupted
  // anywhere, it can be repeated. `before` is called when all was read and is intact; if it throws, nothing
  // has changed on the device.
  KeptCheckpoint Recover(std::optional<uint64_t> id, const std::function<Index*(Key)>& index_of,
                         const std::function<void()>& before = {});
  // Whose rows are on the device and which checkpoints; nullopt: there is no log. Throws StorageError for one
  // that cannot be read.
  static std::optional<RowLogSuper> Peek(BlockDevice* device, const RowLogSpec& spec);
  // What KeptCheckpoint::digest is the sum of, over the keys that have rows.
  static uint64_t KeyDigest(Key key) { return Mix64(key); }

  RowLogStats stats() const;
  // With `left` bytes by which the device may grow.
  RowLogRoom room(uint64_t left) const;

 private:
  friend class RowLogWalk;
  friend class SegmentChunks;

  enum class State : uint8_t { kFree, kOpen, kFull, kCleaning, kFreeing, kBad };
  struct Segment {
    uint64_t use = 0;
    uint32_t live = 0;
    uint32_t tombstones = 0;  // that are needed
    uint32_t blocks = 0;      // that have chunks, or will have
    uint32_t unwritten = 0;   // chunks
    State state = State::kFree;
  };
  // A chunk that is not on the device yet.
  struct Pending {
    uint32_t segment = 0;
    uint32_t row_blocks = 0;  // that it has room for
    Chunk chunk;
    BlockBuffer buffer;
    uint64_t ticket = 0;  // 0: open
    bool writing = false;
  };
  // Appends of one kind; they have segments of their own. Numbers in streams_.
  static constexpr size_t kOwner = 0;
  static constexpr size_t kCleaner = 1;
  struct Stream {
    uint32_t segment = kNoRow;
    std::unique_ptr<Pending> open;
  };
  struct Tombstone {
    uint32_t segment = 0;
    uint64_t epoch = 0;
    uint64_t barrier = UINT64_MAX;  // it is needed as long as there are segments whose use is not above
  };
  struct Scan;

  RowLog(BlockDevice* device, const RowLogSpec& spec);
  void SetLayout();
  uint32_t HeaderFor(uint32_t row_blocks) const;
  uint32_t RowBlocksFor(uint32_t left) const;

  uint64_t OffsetOf(uint64_t block) const { return 2 * spec_.super_bytes + block * kBlockBytes; }
  uint32_t FirstBlock(uint32_t segment) const { return segment * segment_blocks_; }
  // Of a row, by its number in a chunk of which the rows begin at block `first`.
  uint32_t SlotAt(uint32_t first, size_t row) const {
    const auto number = static_cast<uint32_t>(row);
    return (first + number / block_rows_ * row_blocks_) * block_rows_ + number % block_rows_;
  }
  size_t RowsIn(uint32_t row_blocks) const { return size_t{row_blocks / row_blocks_} * block_rows_; }
  uint32_t BlockOf(uint32_t slot) const { return slot / block_rows_; }
  uint32_t SegmentOf(uint32_t slot) const { return BlockOf(slot) / segment_blocks_; }
  [[noreturn]] void Damaged(const std::string& what) const;

  // With mutex_.
  void RequireHealthy() const;
  void AddSegments(uint64_t count);
  Pending* OpenChunk(Stream* stream, bool row);
  void Seal(Stream* stream);
  uint32_t AppendTo(Stream* stream, Key key, uint64_t lsn, const std::byte* row);
  bool AppendTombstoneTo(Stream* stream, Key key, uint64_t lsn, Tombstone tombstone);
  bool IsLive(uint32_t slot) const { return (live_[slot / 64] >> slot % 64 & 1) != 0; }
  SegmentExtent Written(uint32_t segment) const;
  void SetLive(uint32_t slot);
  void Kill(uint32_t slot);
  uint64_t MostSegments() const;
  uint64_t TargetSegments() const;
  bool HasRoom(uint64_t rows) const;
  bool IsLow() const;
  uint64_t MostRows(uint64_t most, Need need) const;
  bool MayTake(uint64_t rows, Need need) const;
  uint64_t RowsWanted() const { return rows_live_ + reserved_ + claimed_; }
  uint64_t RowsToMove(const Segment& segment) const;
  uint32_t HoldsTombstones() const;
  void Reset();

  size_t free_segments() const;
  void GiveRoom(uint64_t rows) noexcept;
  bool WriteOne(uint64_t up_to);
  void WriteUpTo(uint64_t ticket);
  void Fail(const std::string& why);

  // With commit_mutex_.
  bool Grow(bool beyond_target);
  void CommitLocked(const std::optional<KeptCheckpoint>& checkpoint);
  RowLogSuper NextSuper(const std::optional<KeptCheckpoint>& checkpoint, std::vector<uint32_t>* freeing);
  void ForgetTombstones();
  void WriteSuper(const RowLogSuper& super);
  // What ReadSuper() found wrong with a copy: where it is, and what was done.
  struct SuperDamage {
    uint64_t offset = 0;
    Damage::Kind kind = Damage::Kind::kReplaced;
  };
  std::optional<RowLogSuper> ReadSuper(bool repair, std::vector<SuperDamage>* damaged = nullptr) const;
  void AwaitWrites();
  void ReportRepairs(const std::vector<SuperDamage>& supers, const Scan& scan) const;
  // Ahead of time only segments are cleaned that have much garbage.
  enum class Effort : uint8_t { kLittle, kMost };
  bool CleanLocked(Effort effort);
  std::vector<uint32_t> Victims(Effort effort);
  void Evacuate(uint32_t victim);
  bool MoveRows(SegmentChunks* chunks);
  uint32_t Move(uint32_t slot, const LogEntry& entry, const std::byte* row);
  void MoveTombstones(uint32_t victim, const Chunk& chunk);
  void ScanSegments(const RowLogSuper& super, Scan* scan) const;
  // Reads whole blocks; which of them cannot be read, or nullopt if all can.
  std::optional<std::vector<bool>> ReadBlocks(uint64_t offset, uint32_t blocks, std::byte* into) const;

  BlockDevice* const device_;
  RowLogSpec spec_;
  uint32_t segment_blocks_ = 0;
  uint32_t chunk_row_blocks_ = 0;  // of a whole chunk
  uint32_t block_rows_ = 0;        // rows in a block
  uint32_t row_blocks_ = 0;        // blocks of a row
  uint32_t segment_rows_ = 0;      // rows in a segment of whole chunks

  std::mutex commit_mutex_;  // before mutex_; `relocate` is called with it
  RowLogSuper super_;        // as it is on the device; read with either lock, changed with both
  bool device_full_ = false;

  mutable std::mutex mutex_;
  std::condition_variable written_;
  std::vector<Segment> segments_;
  std::vector<uint32_t> free_;
  std::vector<uint32_t> sums_;   // BlockChecksum() of each block, in use or not
  std::vector<uint64_t> live_;   // a bit per slot
  std::vector<uint32_t> facts_;  // fact_words per slot
  uint64_t rows_live_ = 0;
  EpochMarks appended_now_;  // slots of the open epoch
  RetiredSlots retired_;
  std::unordered_map<uint64_t, Tombstone> tombstones_;      // by LSN
  std::array<Stream, 2> streams_;                           // of the owner and of the cleaner
  std::map<uint32_t, Pending*> resident_;                   // by the first block of their rows
  std::map<uint64_t, std::unique_ptr<Pending>> unwritten_;  // by ticket
  uint64_t tickets_ = 0;
  uint64_t number_ = 0;                // of the last entry
  uint64_t last_use_ = 0;              // of segments
  uint64_t reserved_ = 0;              // rows
  uint64_t most_reserved_ = 0;         // at once, since the last kReserveWindow segments began,
  uint64_t most_reserved_before_ = 0;  // and while those before them did
  uint64_t changed_now_ = 0;           // rows of earlier epochs that the open one superseded
  uint64_t most_changed_ = 0;          // of an epoch; older ones count less and less
  uint64_t appended_ = 0;
  uint64_t moved_ = 0;
  uint64_t written_bytes_ = 0;
  std::string failure_;
  std::atomic<uint64_t> epoch_{1};
  std::atomic<uint64_t> claimed_{0};
  std::condition_variable given_;  // room
};

}  // namespace oe
