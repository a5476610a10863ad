#include "oe_runtime/core/index/compact_index.h"

#include <algorithm>
#include <new>
#include <utility>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "oe_runtime/core/common/prefetch.h"
#include "oe_runtime/core/index/block_pool.h"

namespace oe {
namespace {

constexpr size_t kCompactSegmentAhead = 16;  // lookups whose segments are on their way
constexpr size_t kHomeAhead = 32;            // whose home buckets are, after that
constexpr size_t kOtherAhead = 32;           // whose alternate buckets are, of keys that are not at home

}  // namespace

CompactIndex::CompactIndex(uint32_t internal_shard)
    : shard_(internal_shard), small_(std::make_unique<HashIndex>()) {
  static_assert(sizeof(Bucket) == 64 && sizeof(Bucket) << kBlockShift == BlockPool::kBlockBytes);
}

CompactIndex::~CompactIndex() { Clear(); }

void CompactIndex::Clear() noexcept {
  for (const Segment& segment : segments_) FreeBlocks(segment);
  segments_.clear();
  directory_.clear();
  further_.reset();
  further_size_ = 0;
  depth_ = 0;
}

// Buckets.

// The entries with this word, a bit each.
uint32_t CompactIndex::Bucket::Equal(uint64_t wanted) const noexcept {
  uint32_t equal = 0;
#ifdef __AVX2__
  // All at once. The last two of the eight lows are rows, and the last two of the eight highs are none.
  static_assert(offsetof(Bucket, low) == 0 && offsetof(Bucket, high) == 48);
  const auto* words = reinterpret_cast<const __m256i*>(this);
  const __m256i lows =
      _mm256_cmpeq_epi32(_mm256_load_si256(words), _mm256_set1_epi32(static_cast<int>(wanted)));
  const __m128i highs = _mm_cmpeq_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(this) + 3),
                                        _mm_set1_epi16(static_cast<int16_t>(wanted >> 32)));
  equal = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(lows))) &
          static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(highs, highs)));
#else
  for (uint32_t entry = 0; entry < kEntries; ++entry) {
    equal |= static_cast<uint32_t>(word(entry) == wanted) << entry;
  }
#endif
  return equal & ((1U << used) - 1);
}

// The row of a word, or kNoRow. Without a branch, as HashIndex::Misses.
uint32_t CompactIndex::Bucket::RowOf(uint64_t wanted) const noexcept {
  const uint32_t equal = Equal(wanted);
  const uint32_t absent = equal == 0 ? 1 : 0;
  return rows[static_cast<uint32_t>(__builtin_ctz(equal | 1U << (kEntries - 1)))] | (0 - absent);
}

void CompactIndex::Bucket::Put(uint64_t word, uint32_t row) noexcept {
  low[used] = static_cast<uint32_t>(word);
  high[used] = static_cast<uint16_t>(word >> 32);
  rows[used] = row;
  ++used;
}

void CompactIndex::Bucket::Remove(uint32_t entry) noexcept {
  --used;
  low[entry] = low[used];
  high[entry] = high[used];
  rows[entry] = rows[used];
}

// Addresses.

// The bits in which the two addresses of a key differ: some of those that name a bucket of every segment, so
// that the buckets differ, and perhaps the one that names the half.
uint32_t CompactIndex::StepOf(uint64_t rest) noexcept {
  const uint64_t mixed = rest * 0xD6E8FEB86659FD93ULL;
  const auto within = static_cast<uint32_t>((mixed >> 32) * kAddressMask >> 32);
  return (within + 1) | (static_cast<uint32_t>(mixed >> (31 - kAddressBits)) & (1U << kAddressBits));
}

// The address where an entry that lies in the bucket of `address` may lie too.
uint32_t CompactIndex::OtherAddress(uint32_t address, uint64_t word) noexcept {
  const uint64_t rest = word & kRestMask;
  const uint32_t step = StepOf(rest);
  const auto home_half = static_cast<uint32_t>(rest & 1) << kAddressBits;
  const uint32_t half = (word & kAlternate) != 0 ? home_half : home_half ^ (step & ~kAddressMask);
  return ((address ^ step) & kAddressMask) | half;
}

// Whether the entry lies at an address of the upper 16 blocks, be that there or not.
bool CompactIndex::IsInUpperHalf(uint64_t word) noexcept {
  const uint64_t rest = word & kRestMask;
  const bool at_home = (rest & 1) != 0;
  return (word & kAlternate) == 0 ? at_home : at_home != (StepOf(rest) > kAddressMask);
}

uint64_t CompactIndex::HashOf(const Segment& segment, uint32_t address, uint64_t word) noexcept {
  const uint64_t rest = word & kRestMask;
  const uint32_t home = (word & kAlternate) == 0 ? address : address ^ StepOf(rest);
  return uint64_t{segment.top} << kTopShift | rest << kAddressBits | (home & kAddressMask);
}

// Lookups.

void CompactIndex::Find(const Key* keys, size_t n, uint32_t* rows) const noexcept {
  if (small_) return small_->Find(keys, n, rows);
  if (n == 1) {
    *rows = FindOne(Mix64(*keys));
    if (*rows == kNoRow && further_size_ > 0) further_->Find(keys, 1, rows);
    return;
  }
  constexpr size_t kLookups = 128;
  static_assert(kLookups >= kCompactSegmentAhead + kHomeAhead + kOtherAhead + 1);
  struct Lookup {
    uint64_t hash;
    const Segment* segment;
    const Bucket* bucket;
    uint32_t at_home;  // all bits or none
  };
  std::array<Lookup, kLookups> lookups;  // NOLINT(cppcoreguidelines-pro-type-member-init)
  const size_t fetch = std::min(n, kCompactSegmentAhead);
  const size_t home = fetch + std::min(n, kHomeAhead);
  const size_t other = home + std::min(n, kOtherAhead);
  // Four steps of each lookup, and between them those of others, so that memory is never idle. No step
  // branches on what it finds: which keys are at home cannot be foreseen. A lookup with i < 0 wraps around.
  for (size_t turn = 0; turn < n + other; ++turn) {
    if (const size_t i = turn - other; i < n) {
      const Lookup& lookup = lookups[i % kLookups];
      rows[i] &= lookup.bucket->RowOf(RestOf(lookup.hash) | kAlternate) | lookup.at_home;
    }
    if (const size_t i = turn - home; i < n) {
      Lookup& lookup = lookups[i % kLookups];
      const uint64_t rest = RestOf(lookup.hash);
      const uint32_t row = lookup.bucket->RowOf(rest);
      rows[i] = row;
      lookup.at_home = static_cast<uint32_t>(row == kNoRow) - 1;
      lookup.bucket = &BucketAt(*lookup.segment, HomeOf(lookup.hash) ^ (StepOf(rest) & ~lookup.at_home));
      Prefetch(lookup.bucket);
    }
    if (const size_t i = turn - fetch; i < n) {
      Lookup& lookup = lookups[i % kLookups];
      lookup.bucket = &BucketAt(*lookup.segment, HomeOf(lookup.hash));
      Prefetch(lookup.bucket);
    }
    if (turn < n) {
      const uint64_t hash = Mix64(keys[turn]);
      const Segment* segment = &segments_[SegmentOf(hash)];
      Prefetch(static_cast<const void*>(&segment->blocks[HomeOf(hash) >> kBlockShift]));
      lookups[turn % kLookups] = {hash, segment, nullptr, 0};
    }
  }
  for (size_t i = 0; further_size_ > 0 && i < n; ++i) {
    if (rows[i] == kNoRow) further_->Find(&keys[i], 1, &rows[i]);
  }
}

// What the pipeline would only delay.
uint32_t CompactIndex::FindOne(uint64_t hash) const noexcept {
  const Segment& segment = segments_[SegmentOf(hash)];
  const uint64_t rest = RestOf(hash);
  const Bucket& other = BucketAt(segment, HomeOf(hash) ^ StepOf(rest));
  Prefetch(&other);
  const uint32_t row = BucketAt(segment, HomeOf(hash)).RowOf(rest);
  return row != kNoRow ? row : other.RowOf(rest | kAlternate);
}

CompactIndex::Bucket* CompactIndex::Locate(uint64_t hash, uint32_t* entry) const noexcept {
  const Segment& segment = segments_[SegmentOf(hash)];
  const uint64_t rest = RestOf(hash);
  Bucket* bucket = &BucketAt(segment, HomeOf(hash));
  uint32_t equal = bucket->Equal(rest);
  if (equal == 0) {
    bucket = &BucketAt(segment, HomeOf(hash) ^ StepOf(rest));
    equal = bucket->Equal(rest | kAlternate);
    if (equal == 0) return nullptr;
  }
  *entry = static_cast<uint32_t>(__builtin_ctz(equal));
  return bucket;
}

void CompactIndex::Set(Key key, uint32_t row) noexcept {
  if (small_) return small_->Set(key, row);
  uint32_t entry = 0;
  Bucket* bucket = Locate(Mix64(key), &entry);
  if (bucket == nullptr) return further_->Set(key, row);
  bucket->rows[entry] = row;
}

void CompactIndex::Erase(Key key) noexcept {
  if (small_) {
    --small_size_;
    return small_->Erase(key);
  }
  const uint64_t hash = Mix64(key);
  uint32_t entry = 0;
  Bucket* bucket = Locate(hash, &entry);
  if (bucket == nullptr) {
    --further_size_;
    return further_->Erase(key);
  }
  bucket->Remove(entry);
  --segments_[SegmentOf(hash)].size;
}

// Growth.

CompactIndex::Segment CompactIndex::NewSegment(uint32_t blocks, uint32_t depth, uint32_t top) {
  Segment segment{{}, 0, 0, depth, top};
  try {
    for (; segment.count < blocks; ++segment.count) {
      segment.blocks[segment.count] = static_cast<Bucket*>(BlockPool::Get().Take());
    }
  } catch (...) {
    FreeBlocks(segment);
    throw;
  }
  for (uint32_t i = segment.count; i < kMostBlocks; ++i)
    segment.blocks[i] = segment.blocks[i - kFewestBlocks];
  return segment;
}

void CompactIndex::FreeBlocks(const Segment& segment) noexcept {
  for (uint32_t i = 0; i < segment.count; ++i) BlockPool::Get().Give(segment.blocks[i]);
}

// Whether one of the two buckets of a key has a free entry now. If both were full, the shortest series of
// moves of entries to their other buckets that ends in a bucket with a free entry is looked for, and made.
bool CompactIndex::MakeRoom(const Segment& segment, uint64_t hash) noexcept {
  struct Step {
    Bucket* bucket;
    uint32_t address;
    uint16_t parent;  // the step whose bucket has an entry that may move to this one; itself: none has
    uint16_t entry;
  };
  std::array<Step, kMostSteps> steps;  // NOLINT(cppcoreguidelines-pro-type-member-init)
  uint16_t size = 0;
  for (const uint32_t address : {HomeOf(hash), HomeOf(hash) ^ StepOf(RestOf(hash))}) {
    steps[size] = {&BucketAt(segment, address), address, size, 0};
    ++touched_;
    if (!steps[size++].bucket->full()) return true;
  }
  const auto is_on_path = [&steps](uint16_t at, const Bucket* bucket) {
    for (; steps[at].bucket != bucket; at = steps[at].parent) {
      if (steps[at].parent == at) return false;
    }
    return true;
  };
  for (uint16_t at = 0; at < size; ++at) {
    for (uint16_t entry = 0; entry < kEntries; ++entry) {
      const uint32_t address = OtherAddress(steps[at].address, steps[at].bucket->word(entry));
      Bucket* bucket = &BucketAt(segment, address);
      ++touched_;
      if (bucket->full()) {
        if (size < kMostSteps && !is_on_path(at, bucket)) steps[size++] = {bucket, address, at, entry};
        continue;
      }
      for (Step step{bucket, address, at, entry};; step = steps[step.parent]) {
        Bucket* const from = steps[step.parent].bucket;
        step.bucket->Put(from->word(step.entry) ^ kAlternate, from->rows[step.entry]);
        from->Remove(step.entry);
        if (steps[step.parent].parent == step.parent) return true;
      }
    }
  }
  return false;
}

// False if neither bucket has a free entry, which MakeRoom() makes.
bool CompactIndex::Insert(Segment* segment, uint64_t hash, uint32_t row) noexcept {
  const uint64_t rest = RestOf(hash);
  Bucket& home = BucketAt(*segment, HomeOf(hash));
  Bucket& other = BucketAt(*segment, HomeOf(hash) ^ StepOf(rest));
  if (home.full() && other.full()) return false;
  if (home.full()) {
    other.Put(rest | kAlternate, row);
  } else {
    home.Put(rest, row);
  }
  ++segment->size;
  return true;
}

// A block more: it takes those entries of another one that lie at its addresses.
void CompactIndex::Grow(Segment* segment) {
  auto* block = static_cast<Bucket*>(BlockPool::Get().Take());
  Bucket* const from = segment->blocks[segment->count];
  for (uint32_t i = 0; i < kBuckets; ++i) {
    for (uint32_t entry = from[i].used; entry > 0; --entry) {
      const uint64_t word = from[i].word(entry - 1);
      if (!IsInUpperHalf(word)) continue;
      block[i].Put(word, from[i].rows[entry - 1]);
      from[i].Remove(entry - 1);
    }
  }
  segment->blocks[segment->count++] = block;
  touched_ += 2 * uint64_t{kBuckets};
}

template <typename Function>
void CompactIndex::ForEach(const Segment& segment, const Function& function) {
  for (uint32_t number = 0; number < segment.count * kBuckets; ++number) {
    const Bucket& bucket = BucketAt(segment, number);
    for (uint32_t entry = 0; entry < bucket.used; ++entry) {
      function(number, bucket.word(entry), HashOf(segment, number, bucket.word(entry)), bucket.rows[entry]);
    }
  }
}

// A segment of the entries of a full one whose next bit of the hash is `side`; there are `size` of them.
CompactIndex::Segment CompactIndex::NewHalf(const Segment& from, uint64_t side, uint64_t size) {
  const auto is_here = [&](uint64_t hash) { return (Prefix(hash, from.depth + 1) & 1) == side; };
  uint32_t blocks = kFewestBlocks;
  while (blocks < kMostBlocks && IsFull(size, blocks)) ++blocks;
  Segment to = NewSegment(blocks, from.depth + 1, from.top);
  bool fits = blocks < kMostBlocks;
  try {
    if (fits) {
      ForEach(from, [&](uint32_t /*address*/, uint64_t /*word*/, uint64_t hash, uint32_t row) {
        if (!fits || !is_here(hash)) return;
        while (!(fits = MakeRoom(to, hash)) && to.count < kMostBlocks) Grow(&to);
        if (fits) (void)Insert(&to, hash, row);
      });
    }
    if (!fits) {
      // Nearly all are on this side, or they were made to meet: they fit where they were.
      FreeBlocks(std::exchange(to, Segment{}));
      to = NewSegment(kMostBlocks, from.depth + 1, from.top);
      ForEach(from, [&](uint32_t address, uint64_t word, uint64_t hash, uint32_t row) {
        if (!is_here(hash)) return;
        BucketAt(to, address).Put(word, row);
        ++to.size;
      });
    }
  } catch (...) {
    FreeBlocks(to);
    throw;
  }
  touched_ += uint64_t{from.count + to.count} * kBuckets;
  return to;
}

// Of the segment that a hash leads to.
void CompactIndex::Split(uint64_t hash) {
  const size_t number = SegmentOf(hash);
  const Segment from = segments_[number];
  std::array<uint64_t, 2> sizes{};
  ForEach(from, [&](uint32_t /*address*/, uint64_t /*word*/, uint64_t of, uint32_t /*row*/) {
    ++sizes[Prefix(of, from.depth + 1) & 1];
  });
  if (from.depth == depth_) {
    std::vector<uint32_t> directory(directory_.size() * 2);
    for (size_t i = 0; i < directory.size(); ++i) directory[i] = directory_[i / 2];
    directory_.swap(directory);
    ++depth_;
  }
  if (segments_.size() == segments_.capacity()) segments_.reserve(segments_.size() * 2);
  const Segment first = NewHalf(from, 0, sizes[0]);
  Segment second{};
  try {
    second = NewHalf(from, 1, sizes[1]);
  } catch (...) {
    FreeBlocks(first);
    throw;
  }
  // Of the entries of the directory with the prefix of `from`, the second half is the new segment's.
  const size_t entries = size_t{1} << (depth_ - from.depth);
  const auto begin = directory_.begin() + static_cast<std::ptrdiff_t>(Prefix(hash, from.depth) * entries);
  std::fill_n(begin + static_cast<std::ptrdiff_t>(entries / 2), entries / 2,
              static_cast<uint32_t>(segments_.size()));
  segments_[number] = first;
  segments_.push_back(second);
  FreeBlocks(from);
}

void CompactIndex::ReserveInSegments(Key key) {
  const uint64_t hash = Mix64(key);
  while (true) {
    Segment& segment = segments_[SegmentOf(hash)];
    if (!IsFull(segment.size, segment.count) && MakeRoom(segment, hash)) return;
    const bool last = segment.count == kMostBlocks && segment.depth == kMostDepth;
    if (last || !IsFull(segment.size, segment.count, kDense)) {
      // Keys of a hash that is a bijection do not meet so deep, or in a segment with so few, by accident.
      if (!further_) further_ = std::make_unique<HashIndex>();
      return further_->Reserve(key);
    }
    if (segment.count < kMostBlocks) {
      Grow(&segment);
    } else {
      Split(hash);
    }
  }
}

// Of the key that was reserved last: where it was.
void CompactIndex::AddToSegments(Key key, uint32_t row) noexcept {
  const uint64_t hash = Mix64(key);
  if (Insert(&segments_[SegmentOf(hash)], hash, row)) return;
  further_->Add(key, row);
  ++further_size_;
}

// All keys go from small_ to segments. False: they stay there, because memory is short.
bool CompactIndex::MoveToSegments() noexcept {
  constexpr uint32_t kSegments = 1U << kLeastDepth;
  try {
    segments_.reserve(size_t{2} * kSegments);
    directory_.reserve(kSegments);
    for (uint32_t i = 0; i < kSegments; ++i) {
      segments_.push_back(NewSegment(kFewestBlocks, kLeastDepth, shard_ << kLeastDepth | i));
      directory_.push_back(i);
    }
    depth_ = kLeastDepth;
    std::array<Key, 256> keys{};
    std::array<uint32_t, 256> rows{};
    uint64_t position = 0;
    while (const size_t n = small_->Scan(&position, keys.size(), keys.data(), rows.data())) {
      for (size_t i = 0; i < n; ++i) {
        ReserveInSegments(keys[i]);
        AddToSegments(keys[i], rows[i]);
      }
    }
  } catch (const std::bad_alloc&) {
    Clear();
    most_small_ = std::max(most_small_, small_size_ + kTriedAgain);
    return false;
  }
  small_.reset();
  return true;
}

void CompactIndex::Reserve(Key key) {
  if (small_ && small_size_ < most_small_) {
    try {
      return small_->Reserve(key);
    } catch (const std::bad_alloc&) {
      if (!MoveToSegments()) throw;  // it refuses fewer keys that were made to meet
    }
  } else if (small_ && !MoveToSegments()) {
    return small_->Reserve(key);
  }
  touched_ = 0;
  ReserveInSegments(key);
  longest_reserve_ = std::max(longest_reserve_, touched_);
}

void CompactIndex::Add(Key key, uint32_t row) noexcept {
  if (small_) {
    ++small_size_;
    return small_->Add(key, row);
  }
  AddToSegments(key, row);
}

// The rest.

size_t CompactIndex::Scan(uint64_t* position, size_t max, Key* keys, uint32_t* rows) const noexcept {
  return Scan({}, position, max, keys, rows);
}

// As HashIndex::Scan.
size_t CompactIndex::Scan(const Range& range, uint64_t* position, size_t max, Key* keys,
                          uint32_t* rows) const noexcept {
  if (small_) return small_->Scan(range, position, max, keys, rows);
  const uint64_t begin = range.first >> (64 - depth_);
  const uint64_t end = (range.last >> (64 - depth_)) + 1;
  constexpr uint64_t kWithin = (uint64_t{1} << (kAddressBits + kShardBits)) - 1;
  size_t found = 0;
  while (found < max && *position < kOfFurther) {
    const uint64_t at = begin + *position / kSegmentPositions;
    if (at >= end) {
      *position = kOfFurther;
      break;
    }
    const Segment& segment = segments_[directory_[at]];
    const uint64_t of_segment = *position % kSegmentPositions;
    const auto number = static_cast<uint32_t>(of_segment / kEntries);
    if (number >= segment.count * kBuckets) {
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
    // Most entries are of no narrow range, as the bits that they keep say.
    const uint64_t rest = bucket.word(entry) & kRestMask;
    const uint64_t about = (uint64_t{segment.top} << kTopShift | rest << kAddressBits) << kShardBits;
    if ((about | kWithin) < range.first || about > range.last) continue;
    const uint64_t hash = HashOf(segment, number, bucket.word(entry));
    const uint64_t place = hash << kShardBits;  // ScanPlace() of the key
    if (place < range.first || place > range.last) continue;
    keys[found] = Unmix64(hash);
    rows[found] = bucket.rows[entry];
    ++found;
  }
  if (found < max && further_) {
    uint64_t of_further = *position - kOfFurther;
    found += further_->Scan(range, &of_further, max - found, keys + found, rows + found);
    *position = kOfFurther + of_further;
  }
  return found;
}

uint64_t CompactIndex::bytes() const noexcept {
  if (small_) return small_->bytes();
  uint64_t bytes = directory_.capacity() * sizeof(uint32_t) + segments_.capacity() * sizeof(Segment);
  for (const Segment& segment : segments_) bytes += segment.count * BlockPool::kBlockBytes;
  if (further_) bytes += further_->bytes();
  return bytes;
}

double CompactIndex::AverageProbes() const noexcept {
  if (small_) return small_->AverageProbes();
  uint64_t probes = 0;
  uint64_t size = 0;
  for (const Segment& segment : segments_) {
    size += segment.size;
    ForEach(segment, [&](uint32_t /*address*/, uint64_t word, uint64_t /*hash*/, uint32_t /*row*/) {
      probes += (word & kAlternate) == 0 ? 1 : 2;
    });
  }
  return size == 0 ? 0 : static_cast<double>(probes) / static_cast<double>(size);
}

std::unique_ptr<Index> NewCompactIndex(uint32_t internal_shard) {
  return std::make_unique<CompactIndex>(internal_shard);
}

}  // namespace oe
