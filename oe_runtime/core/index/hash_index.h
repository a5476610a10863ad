#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "oe_runtime/core/index/index.h"

namespace oe {

// Extendible hashing (Fagin et al., 1979) over segments that grow by themselves, so that no growth takes
// long: a directory of hash prefixes leads to segments of 1 to 8 blocks of buckets. A full segment gets a
// block more; beyond 8 it is split by the next bit of the hash. So 56 to 70 % of the entries are used (18 to
// 23 bytes per key) once there are a few hundred keys, and the most that one Reserve() rewrites is a segment.
// Keys may come in any order, also that of another index: the bucket within a segment comes from other bits
// than the segment.
//
// A segment is open addressing over buckets of one cache line with five entries each: most lookups touch one
// line. A full bucket sends its overflow to the next.
class HashIndex final : public Index {
 public:
  HashIndex();
  ~HashIndex() override;

  void Find(const Key* keys, size_t n, uint32_t* rows) const noexcept override;
  void Reserve(Key key) override;
  void Add(Key key, uint32_t row) noexcept override;
  void Set(Key key, uint32_t row) noexcept override;
  void Erase(Key key) noexcept override;
  size_t Scan(uint64_t* position, size_t max, Key* keys, uint32_t* rows) const noexcept override;
  size_t Scan(const Range& range, uint64_t* position, size_t max, Key* keys,
              uint32_t* rows) const noexcept override;
  uint64_t bytes() const noexcept override;

  // Buckets that a lookup of a present key reads, on average; 1 is best. Reads the whole index.
  double AverageProbes() const noexcept;
  // The same for lookups of absent keys.
  double AverageAbsentProbes() const noexcept;
  // The most buckets that one Reserve() has read and written.
  uint64_t longest_reserve() const noexcept { return longest_reserve_; }

 private:
  static constexpr uint32_t kEntries = 5;
  static constexpr double kFullEntries = 3.5;  // of a bucket, on average, when its segment grows
  static constexpr uint32_t kMostBlocks = 8;
  static constexpr uint32_t kBlockShift = 7;
  // Positions of a scan per segment: one bucket more than it may have ends it.
  static constexpr uint64_t kSegmentPositions = ((uint64_t{kMostBlocks} << kBlockShift) + 1) * kEntries;
  // 3000 keys with 25 equal bits of a hash that is a bijection are no accident.
  static constexpr uint32_t kMostDepth = 21;

  struct alignas(64) Bucket {
    std::array<Key, kEntries> keys;
    std::array<uint32_t, kEntries> rows;
    uint16_t used;        // entries [0, used) hold keys: no key value has to be reserved for "empty"
    uint16_t overflowed;  // keys that belong here or before and lie further on
  };

  struct alignas(64) Segment {
    uint32_t buckets;  // of all blocks
    uint32_t size;     // keys
    uint16_t depth;    // bits of the hash that all keys here share
    uint16_t shift;    // a block has 2^shift buckets; 2^kBlockShift once there is more than one segment
    std::array<Bucket*, kMostBlocks> blocks;
  };

  static Bucket* NewBlock(uint32_t shift);
  static void FreeBlocks(const Segment& segment) noexcept;
  // An empty segment with room for `size` keys and one more.
  static Segment NewSegment(uint64_t size, uint32_t depth, uint32_t shift);
  static uint32_t Blocks(const Segment& segment) noexcept { return segment.buckets >> segment.shift; }
  static bool Full(uint64_t size, uint32_t buckets) noexcept {
    return static_cast<double>(size) >= buckets * kFullEntries;
  }

  size_t SegmentOf(uint64_t hash) const noexcept { return directory_[Prefix(hash, depth_)]; }
  static size_t Prefix(uint64_t hash, uint32_t depth) noexcept;
  static uint32_t Home(uint64_t hash, uint32_t buckets) noexcept;
  static Bucket& BucketAt(const Segment& segment, uint32_t position) noexcept {
    return segment.blocks[position >> segment.shift][position & ((uint32_t{1} << segment.shift) - 1)];
  }
  static uint32_t Next(const Segment& segment, uint32_t position) noexcept {
    return position + 1 == segment.buckets ? 0 : position + 1;
  }

  void FindFurther(const Key* keys, const uint32_t* at, size_t n, uint32_t* rows) const noexcept;
  static bool Misses(const Bucket& bucket, Key key, uint32_t* row) noexcept;
  static void Insert(Segment* segment, Key key, uint32_t row) noexcept;
  // Inserts the entries of `from` into to[0], or into to[0] and to[1] by the first bit of their hash that
  // they need not share, and gives the blocks of `from` back.
  void Move(const Segment& from, Segment* to, bool split) noexcept;
  void Enlarge(size_t number);
  // Of the segment that a hash leads to.
  void Split(uint64_t hash);
  // The entry of a key that is present.
  Bucket* Locate(Key key, Segment** segment, uint32_t* position, uint32_t* entry) noexcept;

  uint32_t depth_ = 0;               // of the directory
  std::vector<uint32_t> directory_;  // 2^depth_ numbers of segments
  std::vector<Segment> segments_;
  uint64_t rewritten_ = 0;  // buckets, in this Reserve()
  uint64_t longest_reserve_ = 0;
};

}  // namespace oe
