#include "oe_runtime/core/policy/admission.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <string>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

constexpr uint32_t kMostCount = kNoRow - 1;
constexpr size_t kEntryBytes = sizeof(Key) + sizeof(uint32_t);
constexpr size_t kEntries = 4096;  // written and read at a time

StorageError NoMemory(const std::string& what) {
  return StorageError("no memory for " + what + "; use more servers, or a smaller cbf");
}

// The block of a key, among `blocks` in the order that chooses servers.
uint64_t BlockOf(uint64_t hash, uint64_t blocks) {
  return (uint64_t{static_cast<uint32_t>(hash)} * blocks) >> 32;
}

}  // namespace

std::unique_ptr<AdmissionFilter> AdmissionFilter::Create(const AdmissionSpec& spec, uint32_t parts,
                                                         ShardInfo shard) {
  try {
    if (spec.name == "cbf") return std::make_unique<BloomFilter>(spec, parts, shard);
    return std::make_unique<CounterFilter>(spec, parts);
  } catch (const std::bad_alloc&) {
    throw NoMemory("the admission filter");
  }
}

CounterFilter::CounterFilter(const AdmissionSpec& spec, uint32_t parts)
    : AdmissionFilter(spec), sizes_(parts) {
  for (uint32_t i = 0; i < parts; ++i) counts_.push_back(NewHashIndex());
}

uint32_t CounterFilter::Count(uint32_t part, Key key, uint32_t times) {
  Index& counts = *counts_[part];
  uint32_t count = kNoRow;
  counts.Find(&key, 1, &count);
  if (count != kNoRow) {
    count += std::min(times, kMostCount - count);
    counts.Set(key, count);
    return count;
  }
  try {
    counts.Reserve(key);
  } catch (const std::bad_alloc&) {
    throw NoMemory("the admission filter's count of another key");
  }
  count = std::min(times, kMostCount);
  counts.Add(key, count);
  ++sizes_[part];
  return count;
}

void CounterFilter::Forget(uint32_t part, Key key) noexcept {
  uint32_t count = kNoRow;
  counts_[part]->Find(&key, 1, &count);
  if (count == kNoRow) return;
  counts_[part]->Erase(key);
  --sizes_[part];
}

uint64_t CounterFilter::WrittenBytes() const noexcept {
  uint64_t size = 0;
  for (const uint64_t of_part : sizes_) size += of_part;
  return size * kEntryBytes;
}

void CounterFilter::Write(const Sink& sink) const {
  std::array<Key, kEntries> keys{};
  std::array<uint32_t, kEntries> found{};
  std::vector<char> bytes(kEntries * kEntryBytes);
  for (const auto& counts : counts_) {
    uint64_t position = 0;
    while (const size_t n = counts->Scan(&position, kEntries, keys.data(), found.data())) {
      for (size_t i = 0; i < n; ++i) {
        std::memcpy(&bytes[i * kEntryBytes], &keys[i], sizeof(Key));
        std::memcpy(&bytes[i * kEntryBytes + sizeof(Key)], &found[i], sizeof(uint32_t));
      }
      sink(bytes.data(), n * kEntryBytes);
    }
  }
}

bool CounterFilter::Add(const Source& source, uint64_t bytes, const PartOf& part_of) {
  if (bytes % kEntryBytes != 0) return false;
  std::vector<char> block(kEntries * kEntryBytes);
  for (uint64_t left = bytes / kEntryBytes; left > 0;) {
    const size_t n = std::min<uint64_t>(left, kEntries);
    source(block.data(), n * kEntryBytes);
    for (size_t i = 0; i < n; ++i) {
      Key key = 0;
      uint32_t count = 0;
      std::memcpy(&key, &block[i * kEntryBytes], sizeof(key));
      std::memcpy(&count, &block[i * kEntryBytes + sizeof(key)], sizeof(count));
      const uint32_t part = part_of(key);
      if (part < counts_.size()) (void)Count(part, key, count);
    }
    left -= n;
  }
  return true;
}

BloomFilter::BloomFilter(const AdmissionSpec& spec, uint32_t parts, ShardInfo shard)
    : AdmissionFilter(spec), parts_(parts) {
  const double p = spec.params.at("false_positive_probability");
  const double cells =
      std::ceil(spec.params.at("max_element_size") * -std::log(p) / (std::log(2.0) * std::log(2.0)));
  hashes_ = static_cast<uint32_t>(std::ceil(-std::log2(p)));
  blocks_ = static_cast<uint64_t>(std::ceil(cells / static_cast<double>(parts * kBlock)));
  if (blocks_ > std::numeric_limits<uint32_t>::max()) throw std::bad_alloc();
  // The least and the largest low half of a hash for which server_of_hash says this server.
  const auto least = [&](uint64_t server) { return ((server << 32) + shard.servers - 1) / shard.servers; };
  first_ = BlockOf(least(shard.server), blocks_);
  here_ = BlockOf(least(uint64_t{shard.server} + 1) - 1, blocks_) - first_ + 1;
  cells_.resize(parts * here_ * kBlock);
}

uint32_t BloomFilter::Count(uint32_t part, Key key, uint32_t times) {
  const uint64_t hash = Mix64(key);
  uint8_t* block = Block(part, BlockOf(hash, blocks_));
  uint64_t mixed = hash;
  uint64_t bits = 0;
  uint32_t least = std::numeric_limits<uint8_t>::max();
  for (uint32_t i = 0; i < hashes_; ++i) {
    if (i % 5 == 0) {  // five times the 12 bits of a cell's number
      mixed = Mix64(mixed + 0x9E3779B97F4A7C15ULL);
      bits = mixed;
    }
    uint8_t& cell = block[bits % kBlock];
    bits /= kBlock;
    cell = static_cast<uint8_t>(cell + std::min<uint32_t>(times, std::numeric_limits<uint8_t>::max() - cell));
    least = std::min<uint32_t>(least, cell);
  }
  return least;
}

uint64_t BloomFilter::WrittenBytes() const noexcept { return 2 * sizeof(uint64_t) + cells_.size(); }

void BloomFilter::Write(const Sink& sink) const {
  sink(&first_, sizeof(first_));
  sink(&here_, sizeof(here_));
  sink(cells_.data(), cells_.size());
}

bool BloomFilter::Add(const Source& source, uint64_t bytes, const PartOf& /*part_of*/) {
  uint64_t first = 0;
  uint64_t here = 0;
  if (bytes < sizeof(first) + sizeof(here)) return false;
  source(&first, sizeof(first));
  source(&here, sizeof(here));
  if (first > blocks_ || here > blocks_ - first ||
      bytes - sizeof(first) - sizeof(here) != parts_ * here * kBlock) {
    return false;
  }
  std::array<uint8_t, kBlock> theirs{};
  for (uint32_t part = 0; part < parts_; ++part) {
    for (uint64_t block = first; block < first + here; ++block) {
      source(theirs.data(), kBlock);
      if (block < first_ || block >= first_ + here_) continue;
      uint8_t* ours = Block(part, block);
      for (uint64_t i = 0; i < kBlock; ++i) {
        ours[i] = static_cast<uint8_t>(
            std::min<uint32_t>(std::numeric_limits<uint8_t>::max(), uint32_t{ours[i]} + theirs[i]));
      }
    }
  }
  return true;
}

}  // namespace oe
