#pragma once

// What the log of rows (row_log.h) has on its device. Little-endian.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "oe_runtime/core/common/shard.h"
#include "oe_runtime/core/storage/block_buffer.h"
#include "oe_runtime/core/storage/pool_format.h"

namespace oe {

// 2: the superblock has the use of each segment. A log of format 1 keeps it.
constexpr uint64_t kRowLogFormat = 2;

// "oe-0123456789abcdef.log", the file of a log.
bool IsRowLogName(const std::string& name);

// The order of the entries of a key: its epoch, then the number of the entry among all of the log. Entries
// that are moved keep theirs.
constexpr uint32_t kLsnNumberBits = 39;
constexpr uint64_t kLastLsnEpoch = (uint64_t{1} << (63 - kLsnNumberBits)) - 1;
inline uint64_t MakeLsn(uint64_t epoch, uint64_t number) { return epoch << kLsnNumberBits | number; }
inline uint64_t LsnEpoch(uint64_t lsn) { return lsn >> kLsnNumberBits; }

// Epochs whose entries never happened: a crash or a recovery to an older checkpoint cut them off.
struct EpochRange {
  uint64_t first = 0;
  uint64_t last = 0;
};

// The superblock. Two copies lie at the beginning of the device, each in `super_bytes` of RowLogSpec; the one
// with the greater sequence counts, and the other one is written next.
struct RowLogSuper {
  uint64_t format = kRowLogFormat;
  uint64_t sequence = 0;
  uint64_t uuid = 0;
  uint64_t segment_bytes = 0;
  uint64_t row_bytes = 0;
  uint64_t epoch = 1;  // that was open; entries may have it
  uint64_t use = 0;    // the greatest ChunkHeader::use
  std::vector<KeptCheckpoint> kept;
  std::vector<EpochRange> discarded;  // in order
  // Blocks of each segment that have chunks, all of them durable; 0: the segment is free. What else lies in a
  // segment is of another time.
  std::vector<uint16_t> extents;
  // The lowest bits of the use of each of these: chunks of another one are of a write that the drive lost, or
  // of an older copy of the file. Empty in format 1.
  std::vector<uint16_t> uses;
  std::string identity;
};

// Bytes of a superblock per segment.
constexpr size_t RowLogSegmentBytes(uint64_t format) { return (format < 2 ? 1 : 2) * sizeof(uint16_t); }

// Whole blocks. Throws StorageError for more than `most` bytes.
BlockBuffer EncodeRowLogSuper(const RowLogSuper& super, size_t most);
// How many bytes a copy has that begins with this block; 0 if it is none.
uint64_t RowLogSuperBytes(const std::byte* block, size_t most);
// False for a copy that was never finished or is damaged.
bool DecodeRowLogSuper(const std::byte* data, size_t bytes, RowLogSuper* super);
// Corrects a copy of a superblock, or the header of a chunk, in which one bit flipped, and tells how many
// bytes it has; 0 if more is wrong, or if it is so long that the search would take many seconds. Of `bytes`
// that begin with it.
size_t RepairRowLogSuper(std::byte* data, size_t bytes);
size_t RepairChunk(std::byte* header, size_t bytes);

struct LogEntry {
  Key key = 0;
  uint64_t lsn = 0;
};
static_assert(sizeof(LogEntry) == 16, "it lies on the device");

// A chunk is what one write appends to a segment: a header with its entries, then the blocks of the rows in
// the same order. A row does not straddle blocks, unless it is larger than one: then it has whole blocks.
// Tombstones, entries without rows, say that a key was erased.
struct Chunk {
  uint64_t uuid = 0;
  uint64_t use = 0;    // how many times segments had been taken into use, at that time
  uint32_t place = 0;  // of its first block in the segment
  uint32_t header_blocks = 0;
  uint32_t blocks = 0;  // with those of the header
  std::vector<LogEntry> rows;
  std::vector<LogEntry> tombstones;
  std::vector<uint32_t> sums;   // BlockChecksum() of each block of rows
  uint32_t fact_words = 0;      // RowLogSpec::fact_words
  std::vector<uint32_t> facts;  // so many of each row
};

// Blocks of a header with that many entries, blocks of rows and words of facts.
uint32_t ChunkHeaderBlocks(uint64_t entries, uint64_t row_blocks, uint64_t facts);
// Writes all header_blocks.
void EncodeChunk(const Chunk& chunk, std::byte* header);
// How many blocks the header has that begins with this block; 0 if it is none.
uint32_t ChunkHeaderBlocks(const std::byte* block);
// False for a header that is damaged.
bool DecodeChunk(const std::byte* header, Chunk* chunk);

}  // namespace oe
