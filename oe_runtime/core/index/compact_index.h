#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "oe_runtime/core/index/hash_index.h"
#include "oe_runtime/core/index/index.h"

namespace oe {

// At most 12 bytes per key from 65,536 keys on, 12.1 where keys come and go; below, it is a HashIndex. All
// keys share the top four bits of their hash, the internal shard. An Add() is of the last Reserve()d key.
//
// - An entry keeps only those bits of the hash that do not follow from where it lies: Mix64 is a bijection,
//   and the key is computed back (quotienting: Cleary, 1984; Knuth, volume 3, 6.4, exercise 13). With the row
//   that is 10 bytes, and six entries fill a bucket of one cache line.
// - A key may lie in its home bucket or in an alternate one, and entries are moved between theirs to make
//   room (cuckoo hashing by partial keys: Fan et al., 2014). So nearly all entries of a segment are used.
// - A segment grows from 16 to 32 blocks of 128 buckets, one by one. A new block takes entries from one other
//   block only (linear hashing: Litwin, 1980). Beyond 32, the segment is split by the next bit of the hash,
//   to which a directory of prefixes leads, as in HashIndex.
// - Keys that were made to meet, so that a segment with room for others has none for them, go to a HashIndex.
//   So keys that are taken in one order are taken in any, as a recovery needs it.
//
// The low 12 bits of a hash are its home address: block, then bucket. Block 16 + i is block i until it is
// there, so the highest bit of an address does not follow from where an entry lies. An entry keeps that bit,
// the 46 bits of the hash above, and whether it lies at its alternate address. Home and alternate address
// differ by bits that are computed from the kept ones, so that each leads to the other.
class CompactIndex final : public Index {
 public:
  explicit CompactIndex(uint32_t internal_shard);
  ~CompactIndex() override;
  CompactIndex(const CompactIndex&) = delete;
  CompactIndex& operator=(const CompactIndex&) = delete;

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
  // The most buckets that one Reserve() has read and written, but for the one that turned the index from a
  // HashIndex.
  uint64_t longest_reserve() const noexcept { return longest_reserve_; }

 private:
  static constexpr uint32_t kEntries = 6;
  static constexpr uint32_t kBlockShift = 7;
  static constexpr uint32_t kBuckets = 1U << kBlockShift;
  static constexpr uint32_t kFewestBlocks = 16;
  static constexpr uint32_t kMostBlocks = 2 * kFewestBlocks;
  static constexpr uint64_t kSegmentEntries = uint64_t{kMostBlocks} * kBuckets * kEntries;
  static constexpr uint64_t kSegmentPositions = kSegmentEntries + kEntries;  // as HashIndex
  static constexpr double kFull = 0.97;   // of the entries of a segment, when it grows
  static constexpr double kDense = 0.85;  // the least; random keys find room up to 0.93 at least
  static constexpr uint64_t kOfFurther = uint64_t{1} << 63;  // of a scan's positions
  static constexpr uint32_t kMostDepth = 21;                 // as HashIndex
  static constexpr size_t kMostSteps = 64;
  static constexpr uint64_t kTriedAgain =
      4096;  // keys after which a move that found no memory is tried again

  // Of a hash.
  static constexpr uint32_t kAddressBits = 11;  // those of an address that follow from the bucket
  static constexpr uint32_t kAddressMask = (1U << kAddressBits) - 1;
  static constexpr uint32_t kRestBits = 47;
  static constexpr uint64_t kRestMask = (uint64_t{1} << kRestBits) - 1;
  static constexpr uint32_t kTopShift = kAddressBits + kRestBits;
  static constexpr uint32_t kShardBits = 4;
  static constexpr uint32_t kLeastDepth = 64 - kTopShift - kShardBits;

  // The word of an entry is the rest of its hash, and this if it lies at its alternate address.
  static constexpr uint64_t kAlternate = uint64_t{1} << kRestBits;

  struct alignas(64) Bucket {
    std::array<uint32_t, kEntries> low;  // of the words
    std::array<uint32_t, kEntries> rows;
    std::array<uint16_t, kEntries> high;
    uint16_t used;  // entries [0, used)
    uint16_t unused;

    uint64_t word(uint32_t entry) const noexcept { return uint64_t{high[entry]} << 32 | low[entry]; }
    bool full() const noexcept { return used == kEntries; }
    void Put(uint64_t word, uint32_t row) noexcept;
    void Remove(uint32_t entry) noexcept;
    uint32_t Equal(uint64_t wanted) const noexcept;
    uint32_t RowOf(uint64_t wanted) const noexcept;
  };

  struct alignas(64) Segment {
    std::array<Bucket*, kMostBlocks> blocks;  // the (16 + i)th is the i-th until it is there
    uint32_t count;                           // of blocks
    uint32_t size;                            // keys
    uint32_t depth;                           // bits of the hash below the shard that all keys here share
    uint32_t top;                             // the top bits of their hash, which no entry keeps
  };

  static uint64_t RestOf(uint64_t hash) noexcept { return hash >> kAddressBits & kRestMask; }
  static uint32_t HomeOf(uint64_t hash) noexcept {
    return static_cast<uint32_t>(hash & ((2U << kAddressBits) - 1));
  }
  static uint32_t StepOf(uint64_t rest) noexcept;
  static uint32_t OtherAddress(uint32_t address, uint64_t word) noexcept;
  static uint64_t HashOf(const Segment& segment, uint32_t address, uint64_t word) noexcept;
  static bool IsInUpperHalf(uint64_t word) noexcept;
  static Bucket& BucketAt(const Segment& segment, uint32_t address) noexcept {
    return segment.blocks[address >> kBlockShift][address % kBuckets];
  }

  size_t SegmentOf(uint64_t hash) const noexcept { return directory_[Prefix(hash, depth_)]; }
  static size_t Prefix(uint64_t hash, uint32_t depth) noexcept { return hash << kShardBits >> (64 - depth); }

  static Segment NewSegment(uint32_t blocks, uint32_t depth, uint32_t top);
  static void FreeBlocks(const Segment& segment) noexcept;
  static bool IsFull(uint64_t size, uint32_t blocks, double part = kFull) noexcept {
    return static_cast<double>(size) >= blocks * (part * kBuckets * kEntries);
  }
  uint32_t FindOne(uint64_t hash) const noexcept;
  bool MakeRoom(const Segment& segment, uint64_t hash) noexcept;
  static bool Insert(Segment* segment, uint64_t hash, uint32_t row) noexcept;
  void Grow(Segment* segment);
  // Calls function(address, word, hash, row) for each entry; the address is its bucket's.
  template <typename Function>
  static void ForEach(const Segment& segment, const Function& function);
  Segment NewHalf(const Segment& from, uint64_t side, uint64_t size);
  void Split(uint64_t hash);
  void ReserveInSegments(Key key);
  void AddToSegments(Key key, uint32_t row) noexcept;
  bool MoveToSegments() noexcept;
  void Clear() noexcept;
  // The entry of a key; nullptr if it is in no segment.
  Bucket* Locate(uint64_t hash, uint32_t* entry) const noexcept;

  const uint32_t shard_;
  std::unique_ptr<HashIndex> small_;  // while there are few keys
  uint64_t small_size_ = 0;
  uint64_t most_small_ = (uint64_t{1} << 16) - 1;
  uint32_t depth_ = 0;               // of the directory
  std::vector<uint32_t> directory_;  // 2^depth_ numbers of segments
  std::vector<Segment> segments_;
  std::unique_ptr<HashIndex> further_;  // keys that segments have no room for; there may never be any
  uint64_t further_size_ = 0;
  uint64_t touched_ = 0;  // buckets, in this Reserve()
  uint64_t longest_reserve_ = 0;
};

}  // namespace oe
