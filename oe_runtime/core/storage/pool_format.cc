#include "oe_runtime/core/storage/pool_format.h"

#include <xxhash.h>

#include <cctype>
#include <cstdio>
#include <cstring>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {
namespace {

constexpr size_t kCopyWords = kPoolPage / sizeof(uint64_t);
constexpr size_t kFixedWords = 4;
constexpr size_t kKeptWords = sizeof(KeptCheckpoint) / sizeof(uint64_t);
// A pool that is led keeps one more than its leader.
constexpr size_t kMostInCopy = kMostKeptCheckpoints + 1;
static_assert(kFixedWords + kKeptWords * kMostInCopy <= kCopyWords, "a copy is a page");

uint64_t SuperChecksum(const SuperHeader& header, const char* text) {
  const uint64_t seed =
      XXH3_64bits(&header.format, offsetof(SuperHeader, checksum) - offsetof(SuperHeader, format));
  return XXH3_64bits_withSeed(text, header.text_size, seed);
}

uint64_t SegmentChecksum(const SegmentHeader& header) {
  return XXH3_64bits(&header.format, offsetof(SegmentHeader, checksum) - offsetof(SegmentHeader, format));
}

// Everything but the magic, then the magic.
void WriteWithMagicLast(std::byte* data, const void* header, size_t header_bytes, size_t bytes,
                        Flusher* flusher) {
  constexpr size_t kMagicBytes = sizeof(uint64_t);
  std::memcpy(data + kMagicBytes, static_cast<const std::byte*>(header) + kMagicBytes,
              header_bytes - kMagicBytes);
  flusher->Flush(data, bytes);
  flusher->Fence();
  uint64_t magic = 0;
  std::memcpy(&magic, header, sizeof(magic));
  flusher->Store(reinterpret_cast<uint64_t*>(data), magic);
  flusher->Flush(data, kMagicBytes);
  flusher->Fence();
}

[[noreturn]] void Damaged(const Region& region, const std::string& what) {
  throw StorageError(region.path + " is damaged: " + what +
                     "; move the pool away, or start fresh (--storage-fresh), and restore from a checkpoint");
}

// Whether the magic is there; false for a region that was never finished.
bool CheckMagic(const Region& region, const std::array<char, 8>& wanted, size_t least) {
  std::array<char, 8> magic{};
  if (region.size < sizeof(magic)) return false;
  std::memcpy(magic.data(), region.data, magic.size());
  if (magic == std::array<char, 8>{}) return false;
  if (magic != wanted) Damaged(region, "'magic' is wrong: it does not begin as a pool file does");
  if (region.size < least) {
    Damaged(region, "it is truncated: 'bytes' are " + std::to_string(region.size) +
                        ", and its header alone has " + std::to_string(least));
  }
  return true;
}

void CheckFormat(const Region& region, uint64_t format) {
  if (format >= kOldestPoolFormat && format <= kPoolFormat) return;
  throw StorageError(region.path + ": 'format' is " + std::to_string(format) + ", but this version reads " +
                     std::to_string(kOldestPoolFormat) + " to " + std::to_string(kPoolFormat) +
                     "; use the version that wrote it, or start fresh (--storage-fresh)");
}

}  // namespace

std::vector<uint64_t> EncodeSuperCopy(const SuperCopy& copy) {
  std::vector<uint64_t> words = {0, copy.sequence, copy.segments, copy.kept.size()};
  for (const KeptCheckpoint& kept : copy.kept) {
    words.insert(words.end(), {kept.epoch, kept.id, kept.version, kept.rows, kept.digest});
  }
  words[0] = XXH3_64bits(words.data() + 1, (words.size() - 1) * sizeof(uint64_t));
  return words;
}

bool DecodeSuperCopy(const std::byte* data, SuperCopy* copy) {
  std::array<uint64_t, kCopyWords> words{};
  std::memcpy(words.data(), data, kPoolPage);
  if (words[3] > kMostInCopy) return false;
  const size_t end = kFixedWords + kKeptWords * words[3];
  if (words[0] != XXH3_64bits(words.data() + 1, (end - 1) * sizeof(uint64_t))) return false;
  copy->sequence = words[1];
  copy->segments = words[2];
  copy->kept.clear();
  for (size_t at = kFixedWords; at < end; at += kKeptWords) {
    copy->kept.push_back({words[at], words[at + 1], words[at + 2], words[at + 3], words[at + 4]});
  }
  return true;
}

void WriteSuperHeader(std::byte* data, uint32_t format, uint64_t uuid, const std::string& text,
                      Flusher* flusher) {
  if (sizeof(SuperHeader) + text.size() > kSuperTextBytes) {
    throw SpecError("the description of a table has " + std::to_string(text.size()) +
                    " bytes, too many for a pool; give it a shorter name");
  }
  SuperHeader header{kSuperMagic, format, static_cast<uint32_t>(text.size()), uuid, 0};
  header.checksum = SuperChecksum(header, text.data());
  std::memcpy(data + sizeof(header), text.data(), text.size());
  WriteWithMagicLast(data, &header, sizeof(header), sizeof(header) + text.size(), flusher);
}

bool ReadSuperHeader(const Region& region, uint64_t* uuid, std::string* text, uint32_t* format) {
  if (!CheckMagic(region, kSuperMagic, sizeof(SuperHeader))) return false;
  SuperHeader header{};
  std::memcpy(&header, region.data, sizeof(header));
  CheckFormat(region, header.format);
  if (region.size != kSuperBytes) {
    Damaged(region, "it is truncated: 'bytes' are " + std::to_string(region.size) + " instead of " +
                        std::to_string(kSuperBytes));
  }
  const char* begin = reinterpret_cast<const char*>(region.data) + sizeof(header);
  if (header.text_size > kSuperTextBytes - sizeof(header) ||
      header.checksum != SuperChecksum(header, begin)) {
    Damaged(region, "the 'checksum' of its header is wrong");
  }
  *uuid = header.uuid;
  if (format != nullptr) *format = header.format;
  text->assign(begin, header.text_size);
  return true;
}

uint64_t SegmentBytes(uint64_t blocks, uint64_t block_rows, uint64_t block_bytes) {
  constexpr uint64_t kAlignment = 256;
  const uint64_t rows_offset = RoundUp(kPoolPage + blocks * block_rows * 16, kAlignment);
  return RoundUp(rows_offset + blocks * block_bytes, kPoolPage);
}

SegmentHeader MakeSegmentHeader(uint64_t format, uint64_t uuid, uint64_t number, uint64_t bytes,
                                uint64_t row_bytes, uint64_t block_rows, uint64_t block_bytes) {
  SegmentHeader header{};
  header.magic = kSegmentMagic;
  header.format = format;
  header.uuid = uuid;
  header.number = number;
  header.bytes = bytes;
  header.row_bytes = row_bytes;
  header.block_rows = block_rows;
  header.block_bytes = block_bytes;
  header.blocks = (bytes - kPoolPage) / (block_rows * 16 + block_bytes);
  if (header.blocks > 0 && SegmentBytes(header.blocks, block_rows, block_bytes) > bytes) --header.blocks;
  header.rows_offset = RoundUp(kPoolPage + header.blocks * block_rows * 16, 256);
  header.checksum = SegmentChecksum(header);
  return header;
}

void WriteSegmentHeader(std::byte* data, const SegmentHeader& header, Flusher* flusher) {
  WriteWithMagicLast(data, &header, sizeof(header), sizeof(header), flusher);
}

bool ReadSegmentHeader(const Region& region, SegmentHeader* header) {
  if (!CheckMagic(region, kSegmentMagic, kPoolPage)) return false;
  std::memcpy(header, region.data, sizeof(*header));
  CheckFormat(region, header->format);
  if (header->checksum != SegmentChecksum(*header)) Damaged(region, "the 'checksum' of its header is wrong");
  if (header->bytes != region.size) {
    Damaged(region, "it is truncated: 'bytes' are " + std::to_string(region.size) + " instead of " +
                        std::to_string(header->bytes));
  }
  return true;
}

uint64_t SlotState(uint64_t epoch, Key key, const std::byte* row, size_t row_bytes) {
  const uint64_t check = XXH3_64bits_withSeed(row, row_bytes, Mix64(key) + epoch);
  return epoch << 32 | static_cast<uint32_t>(check);
}

uint64_t TombstoneState(uint64_t epoch, Key key) { return SlotState(epoch, key, nullptr, 0) | kTombstone; }

std::string SuperName(uint64_t uuid) {
  std::array<char, 64> name{};
  (void)std::snprintf(name.data(), name.size(), "oe-%016llx-super.pool",
                      static_cast<unsigned long long>(uuid));
  return name.data();
}

std::string SegmentName(uint64_t uuid, uint64_t number) {
  std::array<char, 64> name{};
  (void)std::snprintf(name.data(), name.size(), "oe-%016llx-%06llu.pool",
                      static_cast<unsigned long long>(uuid), static_cast<unsigned long long>(number));
  return name.data();
}

bool IsPoolName(const std::string& name) {
  uint64_t uuid = 0;
  bool super = false;
  return ParsePoolName(name, &uuid, &super) ||
         (name.size() > 13 && name.compare(0, 8, "oe-rows-") == 0 && name.substr(name.size() - 5) == ".pool");
}

bool ParsePoolName(const std::string& name, uint64_t* uuid, bool* super) {
  constexpr size_t kUuidAt = 3;
  constexpr size_t kUuidEnd = kUuidAt + 16;
  if (name.size() < kUuidEnd + 11 || name.compare(0, kUuidAt, "oe-") != 0 || name[kUuidEnd] != '-')
    return false;
  if (name.substr(name.size() - 5) != ".pool") return false;
  uint64_t value = 0;
  for (size_t i = kUuidAt; i < kUuidEnd; ++i) {
    const char c = name[i];
    if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) return false;
    value = value << 4 | static_cast<uint64_t>(c <= '9' ? c - '0' : c - 'a' + 10);
  }
  const std::string rest = name.substr(kUuidEnd + 1, name.size() - 5 - kUuidEnd - 1);
  *uuid = value;
  *super = rest == "super";
  if (*super) return true;
  for (const char c : rest) {
    if (c < '0' || c > '9') return false;
  }
  return true;
}

void RemovePools(Medium* medium, const std::function<bool(std::optional<uint64_t> uuid)>& is_wanted) {
  const std::vector<std::string> names = medium->List();
  for (const bool supers : {true, false}) {
    for (const std::string& name : names) {
      uint64_t uuid = 0;
      bool super = false;
      const bool has_uuid = ParsePoolName(name, &uuid, &super);
      if (super == supers && is_wanted(has_uuid ? std::optional(uuid) : std::nullopt)) medium->Remove(name);
    }
  }
}

}  // namespace oe
