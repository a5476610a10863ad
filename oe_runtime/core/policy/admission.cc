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

StorageError NoMemory(const std::string& what) {
  return StorageError("no memory for " + what +
                      "; use more servers, or a cbf with a smaller 'max_element_size'");
}

namespace {

constexpr size_t kEntryBytes = sizeof(Key) + sizeof(uint32_t);
constexpr size_t kEntries = 4096;  // written and read at a time

// The block of a key, among `blocks` in the order that chooses servers.
uint64_t BlockOf(uint64_t hash, uint64_t blocks) {
  return (uint64_t{static_cast<uint32_t>(hash)} * blocks) >> 32;
}

// 16 to 24 bytes a key.
class DramCounter final : public CounterFilter {
 public:
  DramCounter(const AdmissionSpec& spec, uint32_t parts) : CounterFilter(spec, parts), keys_(parts) {
    for (uint32_t i = 0; i < parts; ++i) counts_.push_back(NewHashIndex());
  }

  uint32_t Count(uint32_t part, Key key, uint32_t times) override {
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
    ++keys_[part];
    return count;
  }
  void Forget(uint32_t part, Key key) override {
    uint32_t count = kNoRow;
    counts_[part]->Find(&key, 1, &count);
    if (count == kNoRow) return;
    counts_[part]->Erase(key);
    --keys_[part];
  }
  uint64_t bytes(uint32_t part) const noexcept override { return counts_[part]->bytes(); }

 protected:
  uint64_t keys(uint32_t part) const noexcept override { return keys_[part]; }
  size_t Scan(uint32_t part, uint64_t* position, size_t max, Key* keys,
              uint32_t* counts) const noexcept override {
    return counts_[part]->Scan(position, max, keys, counts);
  }

 private:
  std::vector<std::unique_ptr<Index>> counts_;  // by part; the "row" of a key is its count
  std::vector<uint64_t> keys_;
};

class DramBloom final : public BloomFilter {
 public:
  DramBloom(const AdmissionSpec& spec, uint32_t parts, ShardInfo shard)
      : BloomFilter(spec, parts, shard), cells_(parts * here() * kBlock) {}

  uint64_t bytes(uint32_t /*part*/) const noexcept override { return cells_.size() / parts(); }

 protected:
  uint8_t* Writable(uint32_t part, uint64_t block) override {
    return &cells_[(part * here() + block) * kBlock];
  }
  const uint8_t* Find(uint32_t part, uint64_t block) const noexcept override {
    return &cells_[(part * here() + block) * kBlock];
  }

 private:
  std::vector<uint8_t> cells_;
};

}  // namespace

std::unique_ptr<AdmissionFilter> AdmissionFilter::Create(const AdmissionSpec& spec, uint32_t parts,
                                                         ShardInfo shard) {
  try {
    if (spec.name == "cbf") return std::make_unique<DramBloom>(spec, parts, shard);
    return std::make_unique<DramCounter>(spec, parts);
  } catch (const std::bad_alloc&) {
    throw NoMemory("the admission filter");
  }
}

uint64_t CounterFilter::WrittenBytes() const noexcept {
  uint64_t size = 0;
  for (uint32_t part = 0; part < parts_; ++part) size += keys(part);
  return size * kEntryBytes;
}

void CounterFilter::Write(const Sink& sink) const {
  std::array<Key, kEntries> keys{};
  std::array<uint32_t, kEntries> found{};
  std::vector<char> bytes(kEntries * kEntryBytes);
  for (uint32_t part = 0; part < parts_; ++part) {
    uint64_t position = 0;
    while (const size_t n = Scan(part, &position, kEntries, keys.data(), found.data())) {
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
      if (part < parts_) (void)Count(part, key, count);
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
}

uint32_t BloomFilter::Count(uint32_t part, Key key, uint32_t times) {
  const uint64_t hash = Mix64(key);
  uint8_t* block = Writable(part, BlockOf(hash, blocks_) - first_);
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

uint64_t BloomFilter::WrittenBytes() const noexcept { return 2 * sizeof(uint64_t) + parts_ * here_ * kBlock; }

void BloomFilter::Write(const Sink& sink) const {
  sink(&first_, sizeof(first_));
  sink(&here_, sizeof(here_));
  static constexpr std::array<uint8_t, kBlock> kZeros{};
  for (uint32_t part = 0; part < parts_; ++part) {
    for (uint64_t block = 0; block < here_; ++block) {
      const uint8_t* cells = Find(part, block);
      sink(cells == nullptr ? kZeros.data() : cells, kBlock);
    }
  }
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
      if (std::all_of(theirs.begin(), theirs.end(), [](uint8_t cell) { return cell == 0; })) continue;
      uint8_t* ours = Writable(part, block - first_);
      for (uint64_t i = 0; i < kBlock; ++i) ours[i] = std::max(ours[i], theirs[i]);
    }
  }
  return true;
}

}  // namespace oe
