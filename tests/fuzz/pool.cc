#include "oe_runtime/core/storage/pool.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/storage/simulated_medium.h"
#include "tests/fuzz/targets.h"

namespace oe {
namespace {

constexpr uint64_t kUuid = 0x0123456789abcdef;
constexpr uint32_t kShards = 2;
constexpr size_t kRowBytes = 8;
constexpr size_t kPoolBlockBytes = 256;
constexpr size_t kCopyBytes = 128;  // of each copy of the superblock: with two checkpoints
// An input is a pool without the zeros between its parts: these, and the segment from its second page on.
constexpr size_t kHeadBytes = 192;
constexpr size_t kCopiesAt = kHeadBytes;
constexpr size_t kSegmentAt = kCopiesAt + 2 * kCopyBytes;
constexpr size_t kSlotsAt = kSegmentAt + sizeof(SegmentHeader);

PoolSpec Spec() {
  PoolSpec spec;
  spec.table = "t";
  spec.identity = R"({"table":{"name":"t"}})";
  spec.row_bytes = kRowBytes;
  spec.shards = kShards;
  spec.shard_of = [](Key key) { return key < 1000 ? static_cast<uint32_t>(key % kShards) : kShards; };
  spec.block_bytes = kPoolBlockBytes;
  spec.background = false;
  return spec;
}

// What Pool makes of Spec().
std::string Identity() { return R"({"block_bytes":256,"row_bytes":8,"shards":2,"table":{"name":"t"}})"; }

void PutCopy(std::string* input, size_t number, const SuperCopy& copy) {
  const std::vector<uint64_t> words = EncodeSuperCopy(copy);
  std::memcpy(&(*input)[kCopiesAt + number * kCopyBytes], words.data(), words.size() * sizeof(uint64_t));
}

// As ReadSuperHeader, DecodeSuperCopy and ReadSegmentHeader want them: else nothing else would be tried.
void MakeChecksumsRight(std::string* input) {
  char* data = input->data();
  SuperHeader super{};
  std::memcpy(&super, data, sizeof super);
  const size_t text = std::min<size_t>(super.text_size, kHeadBytes - sizeof super);
  super.text_size = static_cast<uint32_t>(text);
  super.checksum = XXH3_64bits_withSeed(
      data + sizeof super, text,
      XXH3_64bits(&super.format, offsetof(SuperHeader, checksum) - offsetof(SuperHeader, format)));
  std::memcpy(data, &super, sizeof super);
  for (size_t copy = 0; copy < 2; ++copy) {
    std::array<uint64_t, kPoolPage / sizeof(uint64_t)> words{};
    std::memcpy(words.data(), data + kCopiesAt + copy * kCopyBytes, kCopyBytes);
    const size_t end = 4 + 5 * std::min<uint64_t>(words[3], 65);
    words[0] = XXH3_64bits(words.data() + 1, (end - 1) * sizeof(uint64_t));
    std::memcpy(data + kCopiesAt + copy * kCopyBytes, words.data(), sizeof(uint64_t));
  }
  SegmentHeader segment{};
  std::memcpy(&segment, data + kSegmentAt, sizeof segment);
  segment.checksum =
      XXH3_64bits(&segment.format, offsetof(SegmentHeader, checksum) - offsetof(SegmentHeader, format));
  std::memcpy(data + kSegmentAt, &segment, sizeof segment);
}

// Opens it, goes back to its newest checkpoint, reads every row and makes a checkpoint of it.
void Open(const std::string& input) {
  SimulatedMedium medium(1);
  const Region super = medium.Create(SuperName(kUuid), kSuperBytes, kSuperBytes, "t");
  std::memcpy(super.data, input.data(), kHeadBytes);
  for (size_t copy = 0; copy < 2; ++copy) {
    std::memcpy(super.data + kSuperTextBytes + copy * kPoolPage, &input[kCopiesAt + copy * kCopyBytes],
                kCopyBytes);
  }
  const size_t slots = input.size() - kSlotsAt;
  const size_t bytes = (kPoolPage + slots + kPoolPage - 1) / kPoolPage * kPoolPage;
  const Region segment = medium.Create(SegmentName(kUuid, 0), bytes, bytes, "t");
  std::memcpy(segment.data, &input[kSegmentAt], sizeof(SegmentHeader));
  std::memcpy(segment.data + kPoolPage, input.data() + kSlotsAt, slots);
  try {
    const auto pool = Pool::Open(&medium, kUuid, Spec());
    std::array<std::unique_ptr<Index>, kShards> indexes;
    std::vector<Index*> pointers;
    for (auto& index : indexes) {
      index = NewHashIndex();
      pointers.push_back(index.get());
    }
    const CheckpointInfo info = pool->Recover(std::nullopt, pointers);
    uint64_t rows = 0;
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      std::vector<Key> keys(pool->shard(shard)->size() + 1);
      std::vector<uint32_t> numbers(keys.size());
      uint64_t position = 0;
      numbers.resize(indexes[shard]->Scan(&position, keys.size(), keys.data(), numbers.data()));
      rows += numbers.size();
      volatile std::byte sum{};
      for (const uint32_t number : numbers) sum = sum ^ pool->shard(shard)->row(number)[kRowBytes - 1];
      pool->Verify(shard, numbers);
    }
    Require(rows == info.rows);
    pool->Checkpoint(info.id + 1, info.version);
    pool->RunPending();
  } catch (const StorageError&) {
    return;
  } catch (const SpecError&) {  // a checkpoint after the last number
    return;
  }
}

}  // namespace

void FuzzPool(const uint8_t* data, size_t size) {
  std::string input(reinterpret_cast<const char*>(data), size);
  input.resize(std::max(input.size(), kSlotsAt));
  if (input.size() > 4 * kPoolPage) return;
  Open(input);
  MakeChecksumsRight(&input);
  Open(input);
}

std::vector<std::pair<std::string, std::string>> PoolSeeds() {
  std::vector<std::pair<std::string, std::string>> seeds;
  const RowLayout layout = RowLayout::InPool(kPoolFormat, kRowBytes, kPoolBlockBytes);
  const size_t bytes = SegmentBytes(2, layout.block_rows(), layout.block_bytes);
  SimulatedMedium medium(1);
  for (const std::string name : {"empty", "rows", "tombstone"}) {
    std::string input(kSlotsAt + bytes - kPoolPage, '\0');
    const auto flusher = medium.NewFlusher();
    const Region super = medium.Create(SuperName(kUuid), kSuperBytes, kSuperBytes, "t");
    WriteSuperHeader(super.data, kPoolFormat, kUuid, Identity(), flusher.get());
    std::memcpy(input.data(), super.data, kHeadBytes);
    const SegmentHeader header = MakeSegmentHeader(kPoolFormat, kUuid, 0, bytes, layout.row_bytes,
                                                   layout.block_rows(), layout.block_bytes);
    std::memcpy(&input[kSegmentAt], &header, sizeof header);
    KeptCheckpoint first{1, 10, 3, 0, 0};
    KeptCheckpoint second{2, 20, 7, 0, 0};
    // Keys 0 and 2 in the first block, 1 in the second; in the second checkpoint, 2 is erased, or there
    // again.
    const auto put = [&](uint64_t block, uint64_t slot, uint64_t epoch, Key key, bool tombstone) {
      char* row = &input[kSlotsAt + header.rows_offset - kPoolPage + block * header.block_bytes +
                         layout.Offset(static_cast<uint32_t>(slot))];
      std::memset(row, static_cast<int>('a' + key), kRowBytes);
      const SlotMeta meta{key, tombstone
                                   ? TombstoneState(epoch, key)
                                   : SlotState(epoch, key, reinterpret_cast<std::byte*>(row), kRowBytes)};
      std::memcpy(&input[kSlotsAt + (block * header.block_rows + slot) * sizeof meta], &meta, sizeof meta);
      return tombstone ? 0 : SlotDigest(key, meta.state);
    };
    if (name != "empty") {
      const uint64_t stays = put(0, 0, 1, 0, false) + put(1, 3, 1, 1, false);
      first.digest = stays + put(0, 1, 1, 2, false);
      first.rows = 3;
      second.digest = stays + put(0, 2, 2, 2, name == "tombstone");
      second.rows = name == "tombstone" ? 2 : 3;
    }
    PutCopy(&input, 1, {1, 1, {first}});
    PutCopy(&input, 0, {2, 1, {first, second}});
    seeds.emplace_back(name, input);
    medium.Remove(SuperName(kUuid));
  }
  return seeds;
}

}  // namespace oe
