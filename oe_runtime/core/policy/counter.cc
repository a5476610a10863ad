// counter {filter_freq, max_keys}: exact counts.
#include <algorithm>
#include <array>
#include <cstring>
#include <new>

#include "oe_runtime/core/policy/admission_registry.h"

namespace oe {
namespace {

constexpr double kMostKeys = 1e8;  // 2 GB of counts, and as much again in a pool
constexpr size_t kEntryBytes = sizeof(Key) + sizeof(uint32_t);
constexpr size_t kEntries = 4096;  // written and read at a time
constexpr size_t kSample = 16;     // counts of which the first is forgotten
constexpr size_t kSwept = 64;      // counts that a sweep looks at together

AdmissionSpec CompleteCounter(const AdmissionSpec& spec, bool /*hash*/) {
  const CheckedParams checked("'admission' " + spec.name, spec.params,
                              {{"default_value", 0.0}, {"max_keys", kMostKeys}}, {"filter_freq"});
  checked.Whole("filter_freq", 1, CheckedParams::kMostSteps - 1);
  checked.Whole("max_keys", 1, CheckedParams::kMostRows);
  AdmissionSpec complete = {spec.name, checked.params()};
  // The default is not written down, so that what earlier versions saved has the same specification.
  if (complete.params.at("max_keys") == kMostKeys) complete.params.erase("max_keys");
  return complete;
}

// Of a complete specification: max_keys.
uint64_t MostKeys(const AdmissionSpec& spec) {
  const auto found = spec.params.find("max_keys");
  return static_cast<uint64_t>(found == spec.params.end() ? kMostKeys : found->second);
}

// A word per key in DRAM, which takes 16 to 24 bytes. Here and in PooledWords no word is kNoRow, which stands
// for none. Get() is for what Put() or Erase() changes next. They throw StorageError.
class DramWords {
 public:
  explicit DramWords(uint32_t parts) : keys_(parts) {
    for (uint32_t i = 0; i < parts; ++i) words_.push_back(NewHashIndex());
  }

  uint32_t parts() const noexcept { return static_cast<uint32_t>(keys_.size()); }
  uint64_t bytes(uint32_t part) const noexcept { return words_[part]->bytes(); }
  uint64_t keys(uint32_t part) const noexcept { return keys_[part]; }
  uint32_t Get(uint32_t part, Key key) {
    uint32_t word = kNoRow;
    words_[part]->Find(&key, 1, &word);
    return word;
  }
  void Put(uint32_t part, Key key, uint32_t word, bool added) {
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
  void Erase(uint32_t part, Key key) {
    words_[part]->Erase(key);
    --keys_[part];
  }
  // As Index::Scan, of words.
  size_t Scan(uint32_t part, uint64_t* position, size_t max, Key* keys, uint32_t* words) const noexcept {
    return words_[part]->Scan(position, max, keys, words);
  }
  size_t Scan(uint32_t part, const Index::Range& range, uint64_t* position, size_t max, Key* keys,
              uint32_t* words) const noexcept {
    return words_[part]->Scan(range, position, max, keys, words);
  }

 private:
  std::vector<std::unique_ptr<Index>> words_;  // by part; the "row" of a key is its word
  std::vector<uint64_t> keys_;
};

class PooledWords {
 public:
  explicit PooledWords(AdmissionEntry::Maps maps) : maps_(std::move(maps)) {}

  uint32_t parts() const noexcept { return static_cast<uint32_t>(maps_.size()); }
  uint64_t bytes(uint32_t part) const noexcept { return maps_[part]->index_bytes(); }
  uint64_t keys(uint32_t part) const noexcept { return maps_[part]->size(); }
  // Of a count that is damaged there is none: what is written next has a right checksum.
  uint32_t Get(uint32_t part, Key key) {
    uint32_t number = kNoRow;
    maps_[part]->FindWritable(&key, 1, &number);
    uint32_t word = kNoRow;
    if (number != kNoRow) std::memcpy(&word, maps_[part]->row(number), sizeof(word));
    return word;
  }
  void Put(uint32_t part, Key key, uint32_t word, bool /*added*/) {
    std::memcpy(WritableRow(maps_[part].get(), key, sizeof(word)), &word, sizeof(word));
  }
  void Erase(uint32_t part, Key key) { (void)maps_[part]->Erase(key); }
  size_t Scan(uint32_t part, uint64_t* position, size_t max, Key* keys, uint32_t* words) const noexcept {
    return Read(*maps_[part], maps_[part]->Scan(position, max, keys, words), words);
  }
  size_t Scan(uint32_t part, const Index::Range& range, uint64_t* position, size_t max, Key* keys,
              uint32_t* words) const noexcept {
    return Read(*maps_[part], maps_[part]->Scan(range, position, max, keys, words), words);
  }

 private:
  // Turns the numbers of rows into their words.
  static size_t Read(const RowMap& map, size_t found, uint32_t* words) noexcept {
    for (size_t i = 0; i < found; ++i) Prefetch(map.row(words[i]));
    for (size_t i = 0; i < found; ++i) std::memcpy(&words[i], map.row(words[i]), sizeof(uint32_t));
    return found;
  }

  AdmissionEntry::Maps maps_;
};

// An exact count per key, of at most `max_keys` keys. A bit of each count says in which of two periods its
// key was counted last: keys of this period have the bit of the part, so that a new period changes no count.
template <typename Words>
class CounterFilter final : public AdmissionFilter {
 public:
  CounterFilter(const AdmissionSpec& spec, ShardInfo shard, Words words)
      : AdmissionFilter(spec),
        most_keys_(1 + (MostKeys(spec) - 1) / (uint64_t{words.parts()} * shard.servers)),
        parts_(words.parts()),
        words_(std::move(words)) {}

  uint64_t bytes(uint32_t part) const noexcept override { return words_.bytes(part); }
  uint64_t periods(uint32_t part) const noexcept override { return parts_[part].periods; }
  uint64_t forgotten(uint32_t part) const noexcept override { return parts_[part].forgotten; }

  uint32_t Count(uint32_t part, Key key, uint32_t times) override {
    const uint32_t word = words_.Get(part, key);
    const bool added = word == kNoRow;
    if (added && words_.keys(part) >= most_keys_) MakeRoom(part);
    const uint32_t before = added ? 0 : word & ~kPeriod;
    const uint32_t count = before + std::min(times, kMostCount - before);
    words_.Put(part, key, count | parts_[part].period, added);
    return count;
  }

  void Forget(uint32_t part, Key key) override {
    if (words_.Get(part, key) != kNoRow) words_.Erase(part, key);
  }

  bool Sweep(uint32_t number, const Index::Range& places, uint64_t* position, size_t most) override {
    Part& part = parts_[number];
    std::array<Key, kSwept> keys{};
    std::array<uint32_t, kSwept> words{};
    for (size_t seen = 0; seen < most;) {
      const uint64_t start = *position;
      const size_t found = words_.Scan(number, places, position, kSwept, keys.data(), words.data());
      if (found == 0) return false;
      seen += found;
      for (size_t i = 0; i < found; ++i) {
        if ((words[i] & kPeriod) == part.period) continue;
        words_.Erase(number, keys[i]);
        ++part.forgotten;
        *position = start;  // the place of an erased key may have another one now
      }
    }
    return true;
  }

  void EndPeriod(uint32_t number) noexcept override {
    Part& part = parts_[number];
    part.period ^= kPeriod;
    ++part.periods;
  }

  uint64_t WrittenBytes() const noexcept override {
    uint64_t size = 0;
    for (uint32_t part = 0; part < parts_.size(); ++part) size += words_.keys(part);
    return size * kEntryBytes;
  }

  void Write(const Sink& sink) const override {
    std::array<Key, kEntries> keys{};
    std::array<uint32_t, kEntries> found{};
    std::vector<char> bytes(kEntries * kEntryBytes);
    for (uint32_t part = 0; part < parts_.size(); ++part) {
      uint64_t position = 0;
      while (const size_t n = words_.Scan(part, &position, kEntries, keys.data(), found.data())) {
        for (size_t i = 0; i < n; ++i) {
          found[i] &= ~kPeriod;
          std::memcpy(&bytes[i * kEntryBytes], &keys[i], sizeof(Key));
          std::memcpy(&bytes[i * kEntryBytes + sizeof(Key)], &found[i], sizeof(uint32_t));
        }
        sink(bytes.data(), n * kEntryBytes);
      }
    }
  }

  bool Add(const Source& source, uint64_t bytes, const PartOf& part_of) override {
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

 private:
  static constexpr uint32_t kPeriod = uint32_t{1} << 31;
  static constexpr uint32_t kMostCount = kPeriod - 2;  // with the bit, the word is still not kNoRow
  struct Part {
    uint32_t period = 0;  // kPeriod or 0
    uint64_t periods = 0;
    uint64_t hand = 0;  // where the search for a key to forget goes on
    uint64_t forgotten = 0;
  };

  // Forgets one of the next few keys: rather one that was not counted in this period, then one with a low
  // count. A period ends when the hand has been around.
  void MakeRoom(uint32_t number) {
    Part& part = parts_[number];
    std::array<Key, kSample> keys{};
    std::array<uint32_t, kSample> words{};
    size_t found = words_.Scan(number, &part.hand, kSample, keys.data(), words.data());
    if (found == 0) {
      part.hand = 0;
      EndPeriod(number);
      found = words_.Scan(number, &part.hand, kSample, keys.data(), words.data());
    }
    if (found == 0) return;
    // Keys of this period have the bit, all others do not.
    const auto worth = [&](uint32_t word) { return word ^ part.period ^ kPeriod; };
    size_t first = 0;
    for (size_t i = 1; i < found; ++i) {
      if (worth(words[i]) < worth(words[first])) first = i;
    }
    words_.Erase(number, keys[first]);
    ++part.forgotten;
  }

  const uint64_t most_keys_;  // of a part
  std::vector<Part> parts_;
  Words words_;
};

std::unique_ptr<AdmissionFilter> CounterInDram(const AdmissionSpec& spec, uint32_t parts, ShardInfo shard) {
  return std::make_unique<CounterFilter<DramWords>>(spec, shard, DramWords(parts));
}

std::unique_ptr<AdmissionFilter> CounterInPool(const AdmissionSpec& spec, ShardInfo shard,
                                               AdmissionEntry::Maps maps) {
  return std::make_unique<CounterFilter<PooledWords>>(spec, shard, PooledWords(std::move(maps)));
}

void DescribeCounterPool(uint32_t /*parts*/, const AdmissionFilter::PartOf& part_of, PoolSpec* pool) {
  pool->row_bytes = sizeof(uint32_t);
  pool->block_bytes = size_t{4} << 10;  // 1024 counts, and with what the pool keeps of each 20 KiB
  pool->shard_of = part_of;
}

const RegisterAdmission kCounter({"counter", CompleteCounter, CounterInDram, DescribeCounterPool,
                                  CounterInPool});

}  // namespace
}  // namespace oe
