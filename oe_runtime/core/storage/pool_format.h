#pragma once

// What lies on the medium. Little-endian.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "oe_runtime/core/common/shard.h"
#include "oe_runtime/core/storage/medium.h"

namespace oe {

// The formats differ in which rows lie in lines of 256 bytes (RowLayout::InPool). A pool keeps the format
// that it was made with, so pools of earlier versions are opened, and go on as they are.
constexpr uint32_t kPoolFormat = 3;
constexpr uint32_t kOldestPoolFormat = 1;
constexpr size_t kPoolPage = 4096;

// The region oe-<uuid>-super.pool:
//
//   0      SuperHeader, then its text: JSON, the identity of the pool
//   16384  two SuperCopies of 4096 bytes; copy sequence % 2 is written while the other one stays
constexpr std::array<char, 8> kSuperMagic = {'O', 'E', 'P', 'O', 'O', 'L', '\n', '\0'};
constexpr size_t kSuperTextBytes = 4 * kPoolPage;
constexpr size_t kSuperBytes = kSuperTextBytes + 2 * kPoolPage;

struct SuperHeader {
  std::array<char, 8> magic;  // stored last: without it the region was never finished
  uint32_t format;
  uint32_t text_size;
  uint64_t uuid;
  uint64_t checksum;  // XXH3-64 of format, text_size, uuid and the text
};

// A checkpoint in the superblock: five words.
struct KeptCheckpoint {
  uint64_t epoch = 0;
  uint64_t id = 0;
  uint64_t version = 0;
  uint64_t rows = 0;
  uint64_t digest = 0;  // the sum of SlotDigest() over the slots of its rows
};

// A copy of the superblock, in words: XXH3-64 of all words after it, sequence, segments that there are at
// least, number of checkpoints, the checkpoints (oldest first).
struct SuperCopy {
  uint64_t sequence = 0;
  uint64_t segments = 0;
  std::vector<KeptCheckpoint> kept;
};

std::vector<uint64_t> EncodeSuperCopy(const SuperCopy& copy);
// False for one that was never finished or is damaged.
bool DecodeSuperCopy(const std::byte* data, SuperCopy* copy);

// Writes header and text; the magic, which makes them count, only when everything else is durable.
void WriteSuperHeader(std::byte* data, uint32_t format, uint64_t uuid, const std::string& text,
                      Flusher* flusher);
// Whether the region was finished. Throws StorageError (naming `path`) for one that was and is damaged now.
bool ReadSuperHeader(const Region& region, uint64_t* uuid, std::string* text, uint32_t* format = nullptr);

// The first page of oe-<uuid>-<number>.pool. Metadata of all slots follows it, then, at `rows_offset`, the
// rows.
constexpr std::array<char, 8> kSegmentMagic = {'O', 'E', 'S', 'L', 'O', 'T', 'S', '\n'};
struct SegmentHeader {
  std::array<char, 8> magic;  // stored last
  uint64_t format;
  uint64_t uuid;
  uint64_t number;
  uint64_t bytes;  // of the region
  uint64_t row_bytes;
  uint64_t block_rows;
  uint64_t block_bytes;
  uint64_t blocks;
  uint64_t rows_offset;
  uint64_t checksum;  // XXH3-64 of all between the magic and this
};

// The header for as many blocks as fit into `bytes`; none fit if blocks is 0.
SegmentHeader MakeSegmentHeader(uint64_t format, uint64_t uuid, uint64_t number, uint64_t bytes,
                                uint64_t row_bytes, uint64_t block_rows, uint64_t block_bytes);
// Bytes of a region with `blocks` blocks, a multiple of 4096.
uint64_t SegmentBytes(uint64_t blocks, uint64_t block_rows, uint64_t block_bytes);
void WriteSegmentHeader(std::byte* data, const SegmentHeader& header, Flusher* flusher);
// Whether the region was finished. Throws as ReadSuperHeader, also for a truncated one.
bool ReadSegmentHeader(const Region& region, SegmentHeader* header);

// A slot's state: epoch << 32 | tombstone << 63 | 32 bits of XXH3-64 over the row, seeded with key and epoch.
// A tombstone has no row. Never 0, as epochs count from 1.
constexpr uint64_t kTombstone = uint64_t{1} << 63;
constexpr uint64_t kLastEpoch = (uint64_t{1} << 31) - 1;
uint64_t SlotState(uint64_t epoch, Key key, const std::byte* row, size_t row_bytes);
uint64_t TombstoneState(uint64_t epoch, Key key);
inline bool IsTombstone(uint64_t state) { return (state & kTombstone) != 0; }
inline uint64_t EpochOf(uint64_t state) { return (state & ~kTombstone) >> 32; }
// Whether a slot with state `left` is a newer one of its key than that with `right`. In an epoch in which a
// key was erased and added again, the row is newer than the tombstone.
inline bool Newer(uint64_t left, uint64_t right) {
  if (EpochOf(left) != EpochOf(right)) return EpochOf(left) > EpochOf(right);
  return !IsTombstone(left) && IsTombstone(right);
}
inline uint64_t SlotDigest(Key key, uint64_t state) { return Mix64(Mix64(key) ^ state); }

// "oe-0123456789abcdef-super.pool", "oe-0123456789abcdef-000007.pool".
std::string SuperName(uint64_t uuid);
std::string SegmentName(uint64_t uuid, uint64_t number);
// Whether `name` is one of these (or "oe-rows-….pool", of the first versions); the uuid and whether it is
// that of a superblock.
bool IsPoolName(const std::string& name);
bool ParsePoolName(const std::string& name, uint64_t* uuid, bool* super);
// Removes the regions of the pools that `is_wanted` says, whose uuid is nullopt for those of the first
// versions. Superblocks go first, since segments without theirs are nobody's: a pool is whole or not there.
// Throws StorageError.
void RemovePools(Medium* medium, const std::function<bool(std::optional<uint64_t> uuid)>& is_wanted);

}  // namespace oe
