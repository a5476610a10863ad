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
constexpr size_t kSample = 16;     // counts of which the first is forgotten

// The block of a key, among `blocks` in the order that chooses servers.
uint64_t BlockOf(uint64_t hash, uint64_t blocks) {
  return (uint64_t{static_cast<uint32_t>(hash)} * blocks) >> 32;
}

// 16 to 24 bytes a key.
class DramCounter final : public CounterFilter {
 public:
  DramCounter(const AdmissionSpec& spec, uint32_t parts, ShardInfo shard)
      : CounterFilter(spec, parts, shard), keys_(parts) {
    for (uint32_t i = 0; i < parts; ++i) words_.push_back(NewHashIndex());
  }

  uint64_t bytes(uint32_t part) const noexcept override { return words_[part]->bytes(); }

 protected:
  uint32_t Get(uint32_t part, Key key) override {
    uint32_t word = kNoRow;
    words_[part]->Find(&key, 1, &word);
    return word;
  }
  void Put(uint32_t part, Key key, uint32_t word, bool added) override {
    Index& words = *words_[part];
    if (!added) return words.Set(key, word);
    try {
      words.Reserve(key);
    } catch (const std::bad_alloc&) {
      throw NoMemory("the admission filter's count of another key");
    }
    words.Add(key, word);
    ++keys_[part];
  }
  void Erase(uint32_t part, Key key) override {
    words_[part]->Erase(key);
    --keys_[part];
  }
  uint64_t keys(uint32_t part) const noexcept override { return keys_[part]; }
  size_t Scan(uint32_t part, uint64_t* position, size_t max, Key* keys,
              uint32_t* words) const noexcept override {
    return words_[part]->Scan(position, max, keys, words);
  }

 private:
  std::vector<std::unique_ptr<Index>> words_;  // by part; the "row" of a key is its word
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
    return std::make_unique<DramCounter>(spec, parts, shard);
  } catch (const std::bad_alloc&) {
    throw NoMemory("the admission filter");
  }
}

CounterFilter::CounterFilter(const AdmissionSpec& spec, uint32_t parts, ShardInfo shard)
    : AdmissionFilter(spec),
      most_keys_(1 + (MostKeys(spec) - 1) / (uint64_t{parts} * shard.servers)),
      parts_(parts) {}

uint32_t CounterFilter::Count(uint32_t part, Key key, uint32_t times) {
  const uint32_t word = Get(part, key);
  const bool added = word == kNoRow;
  if (added && keys(part) >= most_keys_) MakeRoom(part);
  const uint32_t before = added ? 0 : word & ~kPeriod;
  const uint32_t count = before + std::min(times, kMostCount - before);
  Put(part, key, count | parts_[part].period, added);
  return count;
}

void CounterFilter::Forget(uint32_t part, Key key) {
  if (Get(part, key) != kNoRow) Erase(part, key);
}

// Forgets one of the next few keys: rather one that was not counted in this period, then one with a low
// count. A period ends when the hand has been around.
void CounterFilter::MakeRoom(uint32_t number) {
  Part& part = parts_[number];
  std::array<Key, kSample> keys{};
  std::array<uint32_t, kSample> words{};
  size_t found = Scan(number, &part.hand, kSample, keys.data(), words.data());
  if (found == 0) {
    part.hand = 0;
    EndPeriod(&part);
    found = Scan(number, &part.hand, kSample, keys.data(), words.data());
  }
  if (found == 0) return;
  // Keys of this period have the bit, all others do not.
  const auto worth = [&](uint32_t word) { return word ^ part.period ^ kPeriod; };
  size_t first = 0;
  for (size_t i = 1; i < found; ++i) {
    if (worth(words[i]) < worth(words[first])) first = i;
  }
  Erase(number, keys[first]);
  ++part.forgotten;
}

bool CounterFilter::Sweep(uint32_t number, uint64_t* position, size_t most) {
  Part& part = parts_[number];
  std::array<Key, kSample> keys{};
  std::array<uint32_t, kSample> words{};
  for (size_t seen = 0; seen < most;) {
    const uint64_t start = *position;
    const size_t found = Scan(number, position, kSample, keys.data(), words.data());
    if (found == 0) {
      EndPeriod(&part);
      return false;
    }
    seen += found;
    for (size_t i = 0; i < found; ++i) {
      if ((words[i] & kPeriod) == part.period) continue;
      Erase(number, keys[i]);
      ++part.forgotten;
      *position = start;  // the place of an erased key may have another one now
    }
  }
  return true;
}

uint64_t CounterFilter::WrittenBytes() const noexcept {
  uint64_t size = 0;
  for (uint32_t part = 0; part < parts_.size(); ++part) size += keys(part);
  return size * kEntryBytes;
}

void CounterFilter::Write(const Sink& sink) const {
  std::array<Key, kEntries> keys{};
  std::array<uint32_t, kEntries> found{};
  std::vector<char> bytes(kEntries * kEntryBytes);
  for (uint32_t part = 0; part < parts_.size(); ++part) {
    uint64_t position = 0;
    while (const size_t n = Scan(part, &position, kEntries, keys.data(), found.data())) {
      for (size_t i = 0; i < n; ++i) {
        found[i] &= ~kPeriod;
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
      if (part < parts_.size()) (void)Count(part, key, count);
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
