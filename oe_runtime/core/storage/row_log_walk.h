#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_set>
#include <vector>

#include "oe_runtime/core/storage/block_buffer.h"
#include "oe_runtime/core/storage/block_device.h"
#include "oe_runtime/core/storage/row_log_format.h"

namespace oe {

class RowLog;

// What a segment has on the device at one time.
struct SegmentExtent {
  uint32_t segment = 0;
  uint32_t blocks = 0;  // with chunks
  uint64_t uuid = 0;    // of the log, and
  uint64_t use = 0;     // of the segment: what its chunks say
};

// The chunks of one segment in memory, one after the other.
class SegmentChunks {
 public:
  // The blocks of the extent, of which the `bad` ones could not be read; nullopt: all could. Both the log and
  // `data` must outlive this object.
  SegmentChunks(const RowLog& log, const SegmentExtent& extent, std::byte* data,
                std::optional<std::vector<bool>> bad);

  // Goes to the first chunk, or to the next. A header with one bit that flipped is corrected in `data`. False
  // after the last one, and at a header that is damaged, cannot be read or is of another use, as the drive
  // has it where it lost a write: then passed() is less than the blocks of the extent.
  bool Next();
  // Blocks of the chunks so far.
  uint32_t passed() const { return passed_; }
  const SegmentExtent& extent() const { return extent_; }

  const Chunk& chunk() const { return chunk_; }
  uint32_t slot(size_t row) const;
  // Where a row of the chunk is; nullptr if its block cannot be read or has another checksum. Quick for the
  // rows of one block in turn.
  const std::byte* row(size_t row);

 private:
  bool IsBad(uint32_t block) const { return bad_ && (*bad_)[block]; }
  uint32_t HeaderBlocks(const std::byte* header) const;
  bool Decode(std::byte* header);

  const RowLog& log_;
  const SegmentExtent extent_;
  std::byte* const data_;
  const std::optional<std::vector<bool>> bad_;
  Chunk chunk_;
  uint32_t passed_ = 0;
  uint32_t checked_ = UINT32_MAX;  // the first block of the row that was asked for last, in the chunk,
  bool intact_ = false;            // and whether it is as it was written
};

// Reads a log in the order in which it lies on the device, a segment with one read; while the rows of one are
// used, the next one is read. It shows rows of the segments as they were when each was read: who moves
// or supersedes rows meanwhile must look at them again.
class RowLogWalk {
 public:
  // From segment `first` on, which may be beyond the last one, at most so many that have rows. The log must
  // outlive the walk.
  explicit RowLogWalk(const RowLog* log, uint32_t first = 0, uint32_t most_segments = UINT32_MAX);

  // Goes to the next chunk; false after the last one.
  bool Next();
  // The numbers in the chunk of the rows that are live: those of the table, and versions that checkpoints
  // need.
  const std::vector<uint32_t>& live() const { return live_; }
  SegmentChunks& chunks() { return *chunks_; }
  // The segment of the next chunk, unless this one has more.
  uint32_t next_segment() const { return next_segment_; }
  uint64_t read_bytes() const { return read_bytes_; }

  // After the last chunk of a segment: where the next one should be, if its header is damaged or cannot be
  // read.
  std::optional<uint64_t> BrokeOff() const;

  // Says that a row of this chunk cannot be read.
  void LeaveOut(uint32_t slot) { left_out_.insert(slot); }
  // Whether the walk has been at a slot; not at those in chunks that are not on the device yet, behind a
  // header that is damaged or of another use, or left out.
  bool HasPassed(uint32_t slot) const;

 private:
  // A segment that is read, or is being read.
  struct Reading {
    SegmentExtent extent;  // without blocks: there is none
    BlockBuffer buffer;
    BlockRead read;
  };
  void Begin(Reading* reading);
  bool NextSegment();

  const RowLog* const log_;
  std::array<Reading, 2> readings_;
  const std::unique_ptr<ReadQueue> queue_;  // after the memory that it reads into
  size_t turn_ = 0;                         // of readings_, which chunks_ is of
  uint32_t begin_segment_ = 0;              // that the next Begin() looks at
  uint32_t left_segments_ = 0;              // that it may read still
  uint32_t next_segment_ = 0;
  uint64_t read_bytes_ = 0;
  std::unique_ptr<SegmentChunks> chunks_;
  std::vector<uint32_t> live_;
  std::vector<uint16_t> passed_;  // blocks of each segment
  std::unordered_set<uint32_t> left_out_;
};

}  // namespace oe
