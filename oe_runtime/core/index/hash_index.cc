#include "oe_runtime/core/index/hash_index.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace oe {
namespace {

constexpr uint64_t kFirstBuckets = 4;
constexpr size_t kAhead = 32;  // lookups in flight
constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

void HashIndex::Free::operator()(Bucket* buckets) const noexcept { std::free(buckets); }

HashIndex::Buckets HashIndex::Allocate(uint64_t count) {
  const size_t bytes = count * sizeof(Bucket);
  const bool large = bytes >= kHugePage;
  const size_t alignment = large ? kHugePage : sizeof(Bucket);
  const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded);
  if (memory == nullptr) throw std::bad_alloc();
  if (large) (void)::madvise(memory, rounded, MADV_HUGEPAGE);  // best effort: fewer TLB misses
  std::memset(memory, 0, bytes);
  return Buckets(static_cast<Bucket*>(memory));
}

HashIndex::HashIndex() : buckets_(kFirstBuckets), table_(Allocate(kFirstBuckets)) {}

// The top four bits of the hash chose the internal shard, so they are the same for all keys here.
uint64_t HashIndex::BucketOf(Key key, uint64_t count) noexcept {
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>((static_cast<Wide>(Mix64(key) << 4) * count) >> 64);
}

void HashIndex::Find(const Key* keys, size_t n, uint32_t* rows) const noexcept {
  std::array<uint64_t, kAhead> at{};
  const Bucket* table = table_.get();
  for (size_t begin = 0; begin < n; begin += kAhead) {
    const size_t size = std::min(kAhead, n - begin);
    for (size_t i = 0; i < size; ++i) {
      at[i] = BucketOf(keys[begin + i], buckets_);
      __builtin_prefetch(&table[at[i]]);
    }
    for (size_t i = 0; i < size; ++i) {
      const Key key = keys[begin + i];
      uint64_t position = at[i];
      uint32_t row = kNoRow;
      while (true) {
        const Bucket& bucket = table[position];
        // All entries at once: which of them it is cannot be foreseen, so a loop would stop on a wrong guess.
        uint32_t equal = 0;
        for (uint32_t entry = 0; entry < kEntries; ++entry) {
          equal |= static_cast<uint32_t>(bucket.keys[entry] == key) << entry;
        }
        equal &= (1U << bucket.used) - 1;
        if (equal != 0) {
          row = bucket.rows[static_cast<uint32_t>(__builtin_ctz(equal))];
          break;
        }
        if (bucket.overflowed == 0) break;
        if (++position == buckets_) position = 0;
      }
      rows[begin + i] = row;
    }
  }
}

void HashIndex::Insert(Bucket* table, uint64_t count, Key key, uint32_t row) noexcept {
  uint64_t position = BucketOf(key, count);
  while (table[position].used == kEntries) {
    if (table[position].overflowed != kManyOverflowed) ++table[position].overflowed;
    if (++position == count) position = 0;
  }
  Bucket& bucket = table[position];
  bucket.keys[bucket.used] = key;
  bucket.rows[bucket.used] = row;
  ++bucket.used;
}

void HashIndex::Reserve(uint64_t more) {
  const uint64_t wanted = size_ + more;
  if (wanted <= buckets_ * (kEntries - 1)) return;
  const uint64_t larger = std::max(buckets_ + buckets_ / 2, wanted / (kEntries - 1) + 1);
  Buckets table = Allocate(larger);
  for (uint64_t i = 0; i < buckets_; ++i) {
    const Bucket& bucket = table_[i];
    for (uint32_t entry = 0; entry < bucket.used; ++entry) {
      Insert(table.get(), larger, bucket.keys[entry], bucket.rows[entry]);
    }
  }
  table_ = std::move(table);
  buckets_ = larger;
}

void HashIndex::Add(Key key, uint32_t row) noexcept {
  Insert(table_.get(), buckets_, key, row);
  ++size_;
}

HashIndex::Bucket* HashIndex::Locate(Key key, uint32_t* entry) noexcept {
  for (uint64_t position = BucketOf(key, buckets_);; position = position + 1 == buckets_ ? 0 : position + 1) {
    Bucket& bucket = table_[position];
    for (*entry = 0; *entry < bucket.used; ++*entry) {
      if (bucket.keys[*entry] == key) return &bucket;
    }
  }
}

void HashIndex::Set(Key key, uint32_t row) noexcept {
  uint32_t entry = 0;
  Bucket* bucket = Locate(key, &entry);
  bucket->rows[entry] = row;
}

uint64_t HashIndex::Distance(uint64_t from, uint64_t to) const noexcept {
  return to >= from ? to - from : to + buckets_ - from;
}

void HashIndex::Erase(Key key) noexcept {
  uint32_t entry = 0;
  auto hole = static_cast<uint64_t>(Locate(key, &entry) - table_.get());
  const auto come_back = [this](uint64_t from, uint64_t to) {
    for (uint64_t i = from; i != to; i = i + 1 == buckets_ ? 0 : i + 1) {
      if (table_[i].overflowed != kManyOverflowed) --table_[i].overflowed;
    }
  };
  come_back(BucketOf(key, buckets_), hole);
  --size_;
  // A key that had to go on takes the place, and another one its: else, as keys come and go in tables that
  // evict, they would lie ever further from where they belong.
  while (table_[hole].overflowed > 0) {
    uint64_t from = hole;
    uint32_t at = 0;
    bool found = false;
    while (!found) {
      from = from + 1 == buckets_ ? 0 : from + 1;
      if (from == hole) break;  // only where there were too many to count
      for (at = 0; at < table_[from].used; ++at) {
        found = Distance(BucketOf(table_[from].keys[at], buckets_), from) >= Distance(hole, from);
        if (found) break;
      }
    }
    if (!found) break;
    table_[hole].keys[entry] = table_[from].keys[at];
    table_[hole].rows[entry] = table_[from].rows[at];
    come_back(hole, from);
    hole = from;
    entry = at;
  }
  Bucket& bucket = table_[hole];
  --bucket.used;
  bucket.keys[entry] = bucket.keys[bucket.used];
  bucket.rows[entry] = bucket.rows[bucket.used];
}

size_t HashIndex::Scan(uint64_t* position, size_t max, Key* keys, uint32_t* rows) const noexcept {
  size_t found = 0;
  while (found < max && *position < buckets_ * kEntries) {
    const Bucket& bucket = table_[*position / kEntries];
    const auto entry = static_cast<uint32_t>(*position % kEntries);
    if (entry >= bucket.used) {
      *position += kEntries - entry;
      continue;
    }
    keys[found] = bucket.keys[entry];
    rows[found] = bucket.rows[entry];
    ++found;
    ++*position;
  }
  return found;
}

double HashIndex::AverageProbes() const noexcept {
  uint64_t probes = 0;
  for (uint64_t i = 0; i < buckets_; ++i) {
    for (uint32_t entry = 0; entry < table_[i].used; ++entry) {
      const uint64_t home = BucketOf(table_[i].keys[entry], buckets_);
      probes += 1 + (i >= home ? i - home : i + buckets_ - home);
    }
  }
  return size_ == 0 ? 0 : static_cast<double>(probes) / static_cast<double>(size_);
}

double HashIndex::AverageProbesOfAbsent() const noexcept {
  uint64_t probes = 0;
  for (uint64_t i = 0; i < buckets_; ++i) {
    uint64_t at = i;
    for (++probes; table_[at].overflowed != 0 && probes < buckets_ * buckets_; ++probes) {
      at = at + 1 == buckets_ ? 0 : at + 1;
    }
  }
  return static_cast<double>(probes) / static_cast<double>(buckets_);
}

std::unique_ptr<Index> NewHashIndex() { return std::make_unique<HashIndex>(); }

}  // namespace oe
