#include "oe_runtime/core/storage/row_log_format.h"

#include <xxhash.h>

#include <array>
#include <cstring>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {
namespace {

constexpr uint64_t kLogMagic = 0x0A4752534C454F01;    // "\1OELSRG\n"
constexpr uint64_t kChunkMagic = 0x0A4B4E4843454F01;  // "\1OECHNK\n"
constexpr uint32_t kMostBlocks = 1U << 16;
constexpr uint32_t kMostFactWords = 16;
constexpr uint64_t kFirstFormat = 1;
// Of what has a checksum: bytes that are hashed at most to find the bit that flipped, some seconds.
constexpr uint64_t kMostHashed = uint64_t{1} << 36;

struct SuperFront {
  uint64_t magic;
  uint64_t checksum;  // XXH3-64 of all after it
  uint64_t bytes;     // of this and all that follows
  uint64_t format;
  uint64_t sequence;
  uint64_t uuid;
  uint64_t segment_bytes;
  uint64_t row_bytes;
  uint64_t epoch;
  uint64_t use;
  uint64_t kept;
  uint64_t discarded;
  uint64_t extents;
  uint64_t identity;
};

struct ChunkFront {
  uint64_t magic;
  uint64_t checksum;  // XXH3-64 of the header after it
  uint64_t uuid;
  uint64_t use;
  uint32_t place;
  uint32_t header_blocks;
  uint32_t blocks;
  uint32_t rows;
  uint32_t tombstones;
  uint32_t fact_words;
};

uint64_t Checksum(const std::byte* data, size_t bytes) {
  constexpr size_t kSkipped = 2 * sizeof(uint64_t);
  return XXH3_64bits(data + kSkipped, bytes - kSkipped);
}

// Tries each bit. `size_of` says from the Front at the beginning how many bytes there are, 0: it is none.
template <typename Front, typename SizeOf>
size_t RepairFlip(std::byte* data, size_t most, const SizeOf& size_of) {
  const auto is_right = [&](size_t bytes) {
    if (bytes < sizeof(Front) || bytes > most) return false;
    Front front{};
    std::memcpy(&front, data, sizeof(front));
    return front.checksum == Checksum(data, bytes);
  };
  const auto flip = [&](size_t bit) { data[bit / 8] ^= std::byte{1} << static_cast<int>(bit % 8); };
  for (size_t bit = 0; bit < sizeof(Front) * 8; ++bit) {
    flip(bit);
    if (const size_t bytes = size_of(); is_right(bytes)) return bytes;
    flip(bit);
  }
  const size_t bytes = size_of();
  if (bytes > most || bytes * bytes * 8 > kMostHashed) return 0;
  for (size_t bit = sizeof(Front) * 8; bit < bytes * 8; ++bit) {
    flip(bit);
    if (is_right(bytes)) return bytes;
    flip(bit);
  }
  return 0;
}

template <typename T>
void Put(const std::vector<T>& values, std::byte** to) {
  if (!values.empty()) std::memcpy(*to, values.data(), values.size() * sizeof(T));
  *to += values.size() * sizeof(T);
}

template <typename T>
void Get(const std::byte** from, size_t count, std::vector<T>* values) {
  values->resize(count);
  if (count > 0) std::memcpy(values->data(), *from, count * sizeof(T));
  *from += count * sizeof(T);
}

}  // namespace

bool IsRowLogName(const std::string& name) {
  return name.size() == 23 && name.compare(0, 3, "oe-") == 0 && name.compare(19, 4, ".log") == 0 &&
         name.find_first_not_of("0123456789abcdef", 3) == 19;
}

BlockBuffer EncodeRowLogSuper(const RowLogSuper& super, size_t most) {
  const size_t bytes = sizeof(SuperFront) + super.kept.size() * sizeof(KeptCheckpoint) +
                       super.discarded.size() * sizeof(EpochRange) +
                       super.extents.size() * RowLogSegmentBytes(super.format) + super.identity.size();
  if (bytes > most) {
    throw StorageError("the superblock of a log of " + std::to_string(super.extents.size()) +
                       " segments and " + std::to_string(super.discarded.size()) + " recoveries needs " +
                       BytesText(bytes) + " but has room for " + BytesText(most) +
                       "; save the table to a file, start fresh (--storage-fresh) and restore it");
  }
  BlockBuffer buffer(bytes);
  std::memset(buffer.data(), 0, buffer.size());
  SuperFront front{kLogMagic,
                   0,
                   bytes,
                   super.format,
                   super.sequence,
                   super.uuid,
                   super.segment_bytes,
                   super.row_bytes,
                   super.epoch,
                   super.use,
                   super.kept.size(),
                   super.discarded.size(),
                   super.extents.size(),
                   super.identity.size()};
  std::memcpy(buffer.data(), &front, sizeof(front));
  std::byte* to = buffer.data() + sizeof(front);
  Put(super.kept, &to);
  Put(super.discarded, &to);
  Put(super.extents, &to);
  if (super.format > kFirstFormat) {
    std::vector<uint16_t> uses = super.uses;
    uses.resize(super.extents.size());
    Put(uses, &to);
  }
  if (!super.identity.empty()) std::memcpy(to, super.identity.data(), super.identity.size());
  front.checksum = Checksum(buffer.data(), bytes);
  std::memcpy(buffer.data(), &front, sizeof(front));
  return buffer;
}

uint64_t RowLogSuperBytes(const std::byte* block, size_t most) {
  SuperFront front{};
  std::memcpy(&front, block, sizeof(front));
  if (front.magic != kLogMagic || front.bytes < sizeof(front) || front.bytes > most) return 0;
  return front.bytes;
}

bool DecodeRowLogSuper(const std::byte* data, size_t bytes, RowLogSuper* super) {
  SuperFront front{};
  if (bytes < sizeof(front)) return false;
  std::memcpy(&front, data, sizeof(front));
  if (front.magic != kLogMagic || front.bytes != bytes) return false;
  if (front.checksum != Checksum(data, bytes)) return false;
  if (front.format < kFirstFormat || front.format > kRowLogFormat) {
    throw StorageError("the log of rows has format " + std::to_string(front.format) +
                       ", but this version reads 1 to " + std::to_string(kRowLogFormat) +
                       "; use the version that wrote it, or start fresh (--storage-fresh)");
  }
  // The checksum is right, but what a stranger wrote must not be read past its end either.
  if (front.kept > kMostKeptCheckpoints + 1 || front.discarded > bytes || front.extents > bytes ||
      front.identity > bytes) {
    return false;
  }
  const uint64_t wanted = sizeof(front) + front.kept * sizeof(KeptCheckpoint) +
                          front.discarded * sizeof(EpochRange) +
                          front.extents * RowLogSegmentBytes(front.format) + front.identity;
  if (wanted != bytes) return false;
  super->format = front.format;
  super->sequence = front.sequence;
  super->uuid = front.uuid;
  super->segment_bytes = front.segment_bytes;
  super->row_bytes = front.row_bytes;
  super->epoch = front.epoch;
  super->use = front.use;
  const std::byte* from = data + sizeof(front);
  Get(&from, front.kept, &super->kept);
  Get(&from, front.discarded, &super->discarded);
  Get(&from, front.extents, &super->extents);
  Get(&from, front.format > kFirstFormat ? front.extents : 0, &super->uses);
  super->identity.assign(reinterpret_cast<const char*>(from), front.identity);
  return true;
}

size_t RepairRowLogSuper(std::byte* data, size_t bytes) {
  if (bytes < sizeof(SuperFront)) return 0;
  return RepairFlip<SuperFront>(data, bytes, [&] { return RowLogSuperBytes(data, bytes); });
}

size_t RepairChunk(std::byte* header, size_t bytes) {
  if (bytes < sizeof(ChunkFront)) return 0;
  return RepairFlip<ChunkFront>(header, bytes, [&] { return ChunkHeaderBlocks(header) * kBlockBytes; });
}

uint32_t ChunkHeaderBlocks(uint64_t entries, uint64_t row_blocks, uint64_t facts) {
  const uint64_t bytes =
      sizeof(ChunkFront) + entries * sizeof(LogEntry) + (row_blocks + facts) * sizeof(uint32_t);
  return static_cast<uint32_t>((bytes + kBlockBytes - 1) / kBlockBytes);
}

void EncodeChunk(const Chunk& chunk, std::byte* header) {
  const size_t bytes = chunk.header_blocks * kBlockBytes;
  std::memset(header, 0, bytes);
  ChunkFront front{kChunkMagic,
                   0,
                   chunk.uuid,
                   chunk.use,
                   chunk.place,
                   chunk.header_blocks,
                   chunk.blocks,
                   static_cast<uint32_t>(chunk.rows.size()),
                   static_cast<uint32_t>(chunk.tombstones.size()),
                   chunk.fact_words};
  std::memcpy(header, &front, sizeof(front));
  std::byte* to = header + sizeof(front);
  Put(chunk.rows, &to);
  Put(chunk.tombstones, &to);
  Put(chunk.sums, &to);
  Put(chunk.facts, &to);
  front.checksum = Checksum(header, bytes);
  std::memcpy(header, &front, sizeof(front));
}

uint32_t ChunkHeaderBlocks(const std::byte* block) {
  ChunkFront front{};
  std::memcpy(&front, block, sizeof(front));
  if (front.magic != kChunkMagic || front.blocks > kMostBlocks || front.header_blocks > front.blocks ||
      front.fact_words > kMostFactWords) {
    return 0;
  }
  const uint64_t entries = uint64_t{front.rows} + front.tombstones;
  const uint64_t facts = uint64_t{front.rows} * front.fact_words;
  if (ChunkHeaderBlocks(entries, front.blocks - front.header_blocks, facts) > front.header_blocks) return 0;
  return front.header_blocks;
}

bool DecodeChunk(const std::byte* header, Chunk* chunk) {
  const uint32_t header_blocks = ChunkHeaderBlocks(header);
  if (header_blocks == 0) return false;
  ChunkFront front{};
  std::memcpy(&front, header, sizeof(front));
  if (front.checksum != Checksum(header, header_blocks * kBlockBytes)) return false;
  chunk->uuid = front.uuid;
  chunk->use = front.use;
  chunk->place = front.place;
  chunk->header_blocks = header_blocks;
  chunk->blocks = front.blocks;
  const std::byte* from = header + sizeof(front);
  Get(&from, front.rows, &chunk->rows);
  Get(&from, front.tombstones, &chunk->tombstones);
  Get(&from, front.blocks - header_blocks, &chunk->sums);
  chunk->fact_words = front.fact_words;
  Get(&from, size_t{front.rows} * front.fact_words, &chunk->facts);
  return true;
}

}  // namespace oe
