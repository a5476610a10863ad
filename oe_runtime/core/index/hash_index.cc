#include "oe_runtime/core/index/hash_index.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "oe_runtime/core/common/prefetch.h"
#include "oe_runtime/core/index/block_pool.h"

namespace oe {
namespace {

constexpr size_t kAhead = 32;         // lookups whose buckets are on their way
constexpr size_t kSegmentAhead = 16;  // whose segments are, before that
constexpr size_t kLeft = 64;          // that are done together, of keys that are not in their first buckets

}  // namespace

HashIndex::HashIndex() : directory_(1, 0), segments_(1, NewSegment(0, 0, 0)) {
  static_assert(sizeof(Bucket) << kBlockShift == BlockPool::kBlockBytes);
}

HashIndex::~HashIndex() {
  for (const Segment& segment : segments_) FreeBlocks(segment);
}

HashIndex::Bucket* HashIndex::NewBlock(uint32_t shift) {
  if (shift == kBlockShift) return static_cast<Bucket*>(BlockPool::Get().Take());
  const size_t bytes = sizeof(Bucket) << shift;
  void* memory = std::aligned_alloc(sizeof(Bucket), bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return static_cast<Bucket*>(std::memset(memory, 0, bytes));
}

void HashIndex::FreeBlocks(const Segment& segment) noexcept {
  for (uint32_t i = 0; i < Blocks(segment); ++i) {
    if (segment.shift == kBlockShift) {
      BlockPool::Get().Give(segment.blocks[i]);
    } else {
      std::free(segment.blocks[i]);
    }
  }
}

HashIndex::Segment HashIndex::NewSegment(uint64_t size, uint32_t depth, uint32_t shift) {
  Segment segment{0, 0, static_cast<uint16_t>(depth), static_cast<uint16_t>(shift), {}};
  try {
    do {
      segment.blocks[Blocks(segment)] = NewBlock(shift);
      segment.buckets += uint32_t{1} << shift;
    } while (Full(size, segment.buckets) && Blocks(segment) < kMostBlocks);
  } catch (...) {
    FreeBlocks(segment);
    throw;
  }
  return segment;
}

// The top four bits of the hash chose the internal shard, so they are the same for all keys here.
size_t HashIndex::Prefix(uint64_t hash, uint32_t depth) noexcept {
  return depth == 0 ? 0 : hash << 4 >> (64 - depth);
}

// The keys of a segment share the upper bits of the hash, and those of a server have a part of the values of
// the lower half; the product's upper half takes something from every bit. Another factor for each size,
// because keys that come in the order of a larger segment's buckets would else meet in the first of a smaller
// one's.
uint32_t HashIndex::Home(uint64_t hash, uint32_t buckets) noexcept {
  const uint64_t factor = 0x9E3779B97F4A7C15ULL * (2 * uint64_t{buckets} + 1);
  return static_cast<uint32_t>(((hash * factor) >> 32) * buckets >> 32);
}

void HashIndex::Find(const Key* keys, size_t n, uint32_t* rows) const noexcept {
  struct Step {
    uint64_t hash;
    const Segment* segment;
  };
  std::array<Step, kSegmentAhead> steps;      // NOLINT(cppcoreguidelines-pro-type-member-init)
  std::array<const Bucket*, kAhead> buckets;  // NOLINT(cppcoreguidelines-pro-type-member-init)
  std::array<uint32_t, kLeft> left;           // NOLINT(cppcoreguidelines-pro-type-member-init)
  size_t count = 0;
  const auto fetch_segment = [&](size_t i) {
    const uint64_t hash = Mix64(keys[i]);
    const Segment* segment = &segments_[SegmentOf(hash)];
    Prefetch(segment);
    steps[i % kSegmentAhead] = {hash, segment};
  };
  const auto fetch = [&](size_t i) {
    const auto [hash, segment] = steps[i % kSegmentAhead];
    const Bucket* bucket = &BucketAt(*segment, Home(hash, segment->buckets));
    Prefetch(bucket);
    buckets[i % kAhead] = bucket;
  };
  const auto look = [&](size_t i) {
    left[count] = static_cast<uint32_t>(i);
    count += Misses(*buckets[i % kAhead], keys[i], &rows[i]) ? 1 : 0;
    if (count < kLeft) return;
    FindFurther(keys, left.data(), count, rows);
    count = 0;
  };
  // A bucket is fetched for each that is looked at, so that memory is never idle, and what says where it lies
  // before that: the segments of a large index are not in the processor's caches either.
  size_t i = 0;
  for (; i < std::min(n, kSegmentAhead); ++i) fetch_segment(i);
  for (; i < std::min(n, kSegmentAhead + kAhead); ++i) {
    fetch(i - kSegmentAhead);
    fetch_segment(i);
  }
  for (; i < n; ++i) {
    look(i - kSegmentAhead - kAhead);
    fetch(i - kSegmentAhead);
    fetch_segment(i);
  }
  for (i = n - std::min(n, kSegmentAhead); i < n; ++i) {
    if (i >= kAhead) look(i - kAhead);
    fetch(i);
  }
  for (i = n - std::min(n, kAhead); i < n; ++i) look(i);
  FindFurther(keys, left.data(), count, rows);
}

// The keys[at[i]], i < n <= kLeft, which are not in their first buckets and may lie further on.
void HashIndex::FindFurther(const Key* keys, const uint32_t* at, size_t n, uint32_t* rows) const noexcept {
  std::array<std::pair<const Segment*, uint32_t>, kLeft> places;
  for (size_t i = 0; i < n; ++i) {
    const uint64_t hash = Mix64(keys[at[i]]);
    const Segment& segment = segments_[SegmentOf(hash)];
    places[i] = {&segment, Next(segment, Home(hash, segment.buckets))};
    Prefetch(&BucketAt(segment, places[i].second));
  }
  for (size_t i = 0; i < n; ++i) {
    auto [segment, position] = places[i];
    while (Misses(BucketAt(*segment, position), keys[at[i]], &rows[at[i]])) {
      position = Next(*segment, position);
    }
  }
}

// Looks for the key in a bucket. *row is kNoRow if it is not there; true if it may lie further on.
bool HashIndex::Misses(const Bucket& bucket, Key key, uint32_t* row) noexcept {
  // Nothing branches here: which entry it is, or whether it is any, cannot be foreseen, and a wrong guess
  // that is noticed when the bucket arrives would throw away what was done for those behind.
  uint32_t equal = 0;
  uint32_t compared = 0;
#ifdef __AVX2__
  // Four entries at once: of what a lookup computes, comparing them one by one was more than half.
  const __m256i four = _mm256_load_si256(reinterpret_cast<const __m256i*>(bucket.keys.data()));
  const __m256i same = _mm256_cmpeq_epi64(four, _mm256_set1_epi64x(static_cast<int64_t>(key)));
  equal = static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(same)));
  compared = 4;
#endif
  for (uint32_t entry = compared; entry < kEntries; ++entry) {
    equal |= static_cast<uint32_t>(bucket.keys[entry] == key) << entry;
  }
  equal &= (1U << bucket.used) - 1;
  const uint32_t entry = static_cast<uint32_t>(__builtin_ctz(equal | 1U << (kEntries - 1)));
  const uint32_t absent = equal == 0 ? 1 : 0;
  *row = bucket.rows[entry] | (0 - absent);  // kNoRow has all bits
  return (absent & (bucket.overflowed != 0 ? 1U : 0U)) != 0;
}

void HashIndex::Insert(Segment* segment, Key key, uint32_t row) noexcept {
  uint32_t position = Home(Mix64(key), segment->buckets);
  Bucket* bucket = &BucketAt(*segment, position);
  while (bucket->used == kEntries) {
    ++bucket->overflowed;
    position = Next(*segment, position);
    bucket = &BucketAt(*segment, position);
  }
  bucket->keys[bucket->used] = key;
  bucket->rows[bucket->used] = row;
  ++bucket->used;
  ++segment->size;
}

void HashIndex::Reserve(Key key) {
  const uint64_t hash = Mix64(key);
  rewritten_ = 0;
  for (size_t number = SegmentOf(hash); Full(segments_[number].size, segments_[number].buckets);
       number = SegmentOf(hash)) {
    const Segment& segment = segments_[number];
    if (Blocks(segment) == kMostBlocks && segment.shift == kBlockShift) {
      Split(hash);
    } else {
      Enlarge(number);
    }
    longest_reserve_ = std::max(longest_reserve_, rewritten_);
  }
}

void HashIndex::Move(const Segment& from, Segment* to, bool split) noexcept {
  for (uint32_t position = 0; position < from.buckets; ++position) {
    const Bucket& bucket = BucketAt(from, position);
    for (uint32_t entry = 0; entry < bucket.used; ++entry) {
      const Key key = bucket.keys[entry];
      const size_t side = split ? Prefix(Mix64(key), from.depth + 1U) & 1 : 0;
      Insert(&to[side], key, bucket.rows[entry]);
    }
  }
  rewritten_ += from.buckets + to[0].buckets + (split ? to[1].buckets : 0);
  FreeBlocks(from);
}

// A block more; eight small blocks, which only the first segment has, become fewer larger ones.
void HashIndex::Enlarge(size_t number) {
  const Segment& from = segments_[number];
  Segment to = NewSegment(from.size, from.depth, from.shift + (Blocks(from) == kMostBlocks ? 1U : 0U));
  Move(from, &to, false);
  segments_[number] = to;
}

void HashIndex::Split(uint64_t hash) {
  const size_t number = SegmentOf(hash);
  const Segment from = segments_[number];
  if (from.depth == kMostDepth) throw std::bad_alloc();
  std::array<uint64_t, 2> sizes{};
  for (uint32_t position = 0; position < from.buckets; ++position) {
    const Bucket& bucket = BucketAt(from, position);
    for (uint32_t entry = 0; entry < bucket.used; ++entry) {
      ++sizes[Prefix(Mix64(bucket.keys[entry]), from.depth + 1U) & 1];
    }
  }
  if (from.depth == depth_) {
    std::vector<uint32_t> directory(directory_.size() * 2);
    for (size_t i = 0; i < directory.size(); ++i) directory[i] = directory_[i / 2];
    directory_.swap(directory);
    ++depth_;
  }
  if (segments_.size() == segments_.capacity()) segments_.reserve(segments_.size() * 2);
  std::array<Segment, 2> to{NewSegment(sizes[0], from.depth + 1U, kBlockShift), {}};
  try {
    to[1] = NewSegment(sizes[1], from.depth + 1U, kBlockShift);
  } catch (...) {
    FreeBlocks(to[0]);
    throw;
  }
  // Of the entries of the directory with the prefix of `from`, the second half is the new segment's.
  const size_t entries = size_t{1} << (depth_ - from.depth);
  const auto begin = directory_.begin() + static_cast<std::ptrdiff_t>(Prefix(hash, from.depth) * entries);
  std::fill_n(begin + static_cast<std::ptrdiff_t>(entries / 2), entries / 2,
              static_cast<uint32_t>(segments_.size()));
  Move(from, to.data(), true);
  segments_[number] = to[0];
  segments_.push_back(to[1]);
}

void HashIndex::Add(Key key, uint32_t row) noexcept { Insert(&segments_[SegmentOf(Mix64(key))], key, row); }

HashIndex::Bucket* HashIndex::Locate(Key key, Segment** segment, uint32_t* position,
                                     uint32_t* entry) noexcept {
  const uint64_t hash = Mix64(key);
  *segment = &segments_[SegmentOf(hash)];
  for (*position = Home(hash, (*segment)->buckets);; *position = Next(**segment, *position)) {
    Bucket& bucket = BucketAt(**segment, *position);
    for (*entry = 0; *entry < bucket.used; ++*entry) {
      if (bucket.keys[*entry] == key) return &bucket;
    }
  }
}

void HashIndex::Set(Key key, uint32_t row) noexcept {
  Segment* segment = nullptr;
  uint32_t position = 0;
  uint32_t entry = 0;
  Locate(key, &segment, &position, &entry)->rows[entry] = row;
}

void HashIndex::Erase(Key key) noexcept {
  Segment* segment = nullptr;
  uint32_t hole = 0;
  uint32_t entry = 0;
  Bucket* bucket = Locate(key, &segment, &hole, &entry);
  const auto come_back = [segment](uint32_t from, uint32_t to) {
    for (; from != to; from = Next(*segment, from)) --BucketAt(*segment, from).overflowed;
  };
  const auto distance = [segment](uint32_t from, uint32_t to) {
    return to >= from ? to - from : to + segment->buckets - from;
  };
  come_back(Home(Mix64(key), segment->buckets), hole);
  --segment->size;
  // A key that had to go on takes the place, and another one its: else, as keys come and go in tables that
  // evict, they would lie ever further from where they belong.
  while (bucket->overflowed > 0) {
    uint32_t from = hole;
    uint32_t at = kEntries;
    while (at == kEntries) {
      from = Next(*segment, from);
      const Bucket& further = BucketAt(*segment, from);
      for (uint32_t i = 0; i < further.used && at == kEntries; ++i) {
        const uint32_t home = Home(Mix64(further.keys[i]), segment->buckets);
        if (distance(home, from) >= distance(hole, from)) at = i;
      }
    }
    Bucket& further = BucketAt(*segment, from);
    bucket->keys[entry] = further.keys[at];
    bucket->rows[entry] = further.rows[at];
    come_back(hole, from);
    bucket = &further;
    hole = from;
    entry = at;
  }
  --bucket->used;
  bucket->keys[entry] = bucket->keys[bucket->used];
  bucket->rows[entry] = bucket->rows[bucket->used];
}

size_t HashIndex::Scan(uint64_t* position, size_t max, Key* keys, uint32_t* rows) const noexcept {
  size_t found = 0;
  while (found < max && *position < segments_.size() * kSegmentPositions) {
    const Segment& segment = segments_[*position / kSegmentPositions];
    const uint64_t of_segment = *position % kSegmentPositions;
    const auto number = static_cast<uint32_t>(of_segment / kEntries);
    if (number >= segment.buckets) {
      *position += kSegmentPositions - of_segment;
      continue;
    }
    const Bucket& bucket = BucketAt(segment, number);
    const auto entry = static_cast<uint32_t>(of_segment % kEntries);
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

// The directory is in the order of places: a range is a few of its entries, and of the segments that it cuts,
// some of the keys. A position counts from the first of those entries.
size_t HashIndex::Scan(const Range& range, uint64_t* position, size_t max, Key* keys,
                       uint32_t* rows) const noexcept {
  const auto entry_of = [this](uint64_t place) { return depth_ == 0 ? 0 : place >> (64 - depth_); };
  const uint64_t begin = entry_of(range.first);
  const uint64_t end = entry_of(range.last) + 1;
  size_t found = 0;
  while (found < max) {
    const uint64_t at = begin + *position / kSegmentPositions;
    if (at >= end) break;
    const Segment& segment = segments_[directory_[at]];
    const uint64_t of_segment = *position % kSegmentPositions;
    const auto number = static_cast<uint32_t>(of_segment / kEntries);
    if (number >= segment.buckets) {
      // Past all entries of the directory that lead to this segment.
      const uint64_t next = (at >> (depth_ - segment.depth)) + 1;
      *position = ((next << (depth_ - segment.depth)) - begin) * kSegmentPositions;
      continue;
    }
    const Bucket& bucket = BucketAt(segment, number);
    const auto entry = static_cast<uint32_t>(of_segment % kEntries);
    if (entry >= bucket.used) {
      *position += kEntries - entry;
      continue;
    }
    ++*position;
    const uint64_t place = ScanPlace(bucket.keys[entry]);
    if (place < range.first || place > range.last) continue;
    keys[found] = bucket.keys[entry];
    rows[found] = bucket.rows[entry];
    ++found;
  }
  return found;
}

uint64_t HashIndex::bytes() const noexcept {
  uint64_t bytes = directory_.capacity() * sizeof(uint32_t) + segments_.capacity() * sizeof(Segment);
  for (const Segment& segment : segments_) bytes += segment.buckets * sizeof(Bucket);
  return bytes;
}

double HashIndex::AverageProbes() const noexcept {
  uint64_t probes = 0;
  uint64_t size = 0;
  for (const Segment& segment : segments_) {
    size += segment.size;
    probes += segment.size;
    for (uint32_t i = 0; i < segment.buckets; ++i) probes += BucketAt(segment, i).overflowed;
  }
  return size == 0 ? 0 : static_cast<double>(probes) / static_cast<double>(size);
}

double HashIndex::AverageAbsentProbes() const noexcept {
  uint64_t probes = 0;
  uint64_t homes = 0;
  for (const Segment& segment : segments_) {
    homes += segment.buckets;
    for (uint32_t i = 0; i < segment.buckets; ++i) {
      for (uint32_t at = i; BucketAt(segment, at).overflowed > 0; at = Next(segment, at)) ++probes;
    }
  }
  return 1 + static_cast<double>(probes) / static_cast<double>(homes);
}

std::unique_ptr<Index> NewHashIndex() { return std::make_unique<HashIndex>(); }

}  // namespace oe
