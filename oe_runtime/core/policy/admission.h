#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/shard.h"
#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/policy/policy_spec.h"

namespace oe {

// How often the keys without a row of one server's part of a table were pushed. It has as many parts as the
// table has internal shards; those are independent of each other, each like a container. Counts are in DRAM,
// or with the rows in a pool (table/pooled_filter.h).
class AdmissionFilter {
 public:
  using Sink = std::function<void(const void* data, size_t size)>;
  using Source = std::function<void(void* data, size_t size)>;
  // The part that a key belongs to; `parts` for a key of another server.
  using PartOf = std::function<uint32_t(Key)>;

  // In DRAM, for a complete spec with a name. Throws StorageError when there is no memory for it.
  static std::unique_ptr<AdmissionFilter> Create(const AdmissionSpec& spec, uint32_t parts, ShardInfo shard);

  virtual ~AdmissionFilter() = default;
  AdmissionFilter(const AdmissionFilter&) = delete;
  AdmissionFilter& operator=(const AdmissionFilter&) = delete;

  // Counts `times` more for a key of that part; how often it was counted now, or (cbf) at least. Throws
  // StorageError when there is no memory.
  virtual uint32_t Count(uint32_t part, Key key, uint32_t times) = 0;
  // The key has a row now. A counter forgets it; what a Bloom filter counted stays. Throws StorageError when
  // a pool has no room to write that down.
  virtual void Forget(uint32_t part, Key key) = 0;
  // Ends a period of a part: forgets, among about `most` keys from *position on (0 at first), those that were
  // counted last before the period began; false when there are no more, and the next period begins. A Bloom
  // filter forgets nothing. Throws StorageError.
  virtual bool Sweep(uint32_t part, uint64_t* position, size_t most) = 0;
  // Periods of a part that have ended, by sweeps and for want of room.
  virtual uint64_t periods(uint32_t /*part*/) const noexcept { return 0; }
  uint32_t filter_freq() const { return filter_freq_; }
  // Keys whose counts went without a row, since the filter was made.
  virtual uint64_t forgotten(uint32_t part) const noexcept = 0;

  virtual uint64_t bytes(uint32_t part) const noexcept = 0;  // of DRAM

  // The counts as bytes, and how many.
  virtual uint64_t WrittenBytes() const noexcept = 0;
  virtual void Write(const Sink& sink) const = 0;
  // Adds the counts that a filter of the same spec and parts wrote, of any server of any number of them, if
  // they are for keys here. False for bytes that are not such a filter's. Throws StorageError.
  virtual bool Add(const Source& source, uint64_t bytes, const PartOf& part_of) = 0;

 protected:
  explicit AdmissionFilter(const AdmissionSpec& spec)
      : filter_freq_(static_cast<uint32_t>(spec.params.at("filter_freq"))) {}

 private:
  const uint32_t filter_freq_;
};

// What a filter throws where DRAM has no more.
StorageError NoMemory(const std::string& what);

// An exact count per key, of at most `max_keys` keys. A bit of each count says in which of two periods its
// key was counted last: keys of this period have the bit of the part, so that a new period changes no count.
class CounterFilter : public AdmissionFilter {
 public:
  uint32_t Count(uint32_t part, Key key, uint32_t times) final;
  void Forget(uint32_t part, Key key) final;
  bool Sweep(uint32_t part, uint64_t* position, size_t most) final;
  uint64_t periods(uint32_t part) const noexcept final { return parts_[part].periods; }
  uint64_t forgotten(uint32_t part) const noexcept final { return parts_[part].forgotten; }
  uint64_t WrittenBytes() const noexcept final;
  void Write(const Sink& sink) const final;
  bool Add(const Source& source, uint64_t bytes, const PartOf& part_of) final;

 protected:
  CounterFilter(const AdmissionSpec& spec, uint32_t parts, ShardInfo shard);

  // A word per key, never kNoRow, which stands for none. Get() is for what Put() or Erase() changes next.
  // They throw StorageError.
  virtual uint32_t Get(uint32_t part, Key key) = 0;
  virtual void Put(uint32_t part, Key key, uint32_t word, bool added) = 0;
  virtual void Erase(uint32_t part, Key key) = 0;
  virtual uint64_t keys(uint32_t part) const noexcept = 0;
  // As Index::Scan, of words.
  virtual size_t Scan(uint32_t part, uint64_t* position, size_t max, Key* keys,
                      uint32_t* words) const noexcept = 0;

 private:
  static constexpr uint32_t kPeriod = uint32_t{1} << 31;
  static constexpr uint32_t kMostCount = kPeriod - 2;  // with the bit, the word is still not kNoRow
  struct Part {
    uint32_t period = 0;  // kPeriod or 0
    uint64_t periods = 0;
    uint64_t hand = 0;  // where the search for a key to forget goes on
    uint64_t forgotten = 0;
  };

  void MakeRoom(uint32_t part);
  static void EndPeriod(Part* part) {
    part->period ^= kPeriod;
    ++part->periods;
  }

  const uint64_t most_keys_;  // of a part
  std::vector<Part> parts_;
};

// A counting Bloom filter: a key has k = ceil(-log2 p) cells of a byte, of which the least is at least its
// count; it is more with probability p when max_element_size keys have been counted. There are
// m = max_element_size · -ln p / ln² 2 cells (Bloom 1970; as DeepRec's CBFFilter), in blocks of kBlock of
// which a key has one. Blocks are in the order of the keys' hashes that chooses servers, so each server has
// the blocks of its keys only, together m bytes and a few blocks: those in which the keys of one server end
// and the next one's begin are on both. When servers become more or fewer, cells are the largest of those of
// all of them: never less than a key was counted, nor more than if there had been one server. (A sum would
// count twice what both took over from the servers before.)
class BloomFilter : public AdmissionFilter {
 public:
  static constexpr uint64_t kBlock = 4096;

  uint32_t Count(uint32_t part, Key key, uint32_t times) final;
  void Forget(uint32_t /*part*/, Key /*key*/) final {}
  bool Sweep(uint32_t /*part*/, uint64_t* /*position*/, size_t /*most*/) final { return false; }
  uint64_t forgotten(uint32_t /*part*/) const noexcept final { return 0; }
  uint64_t WrittenBytes() const noexcept final;
  void Write(const Sink& sink) const final;
  bool Add(const Source& source, uint64_t bytes, const PartOf& part_of) final;

 protected:
  BloomFilter(const AdmissionSpec& spec, uint32_t parts, ShardInfo shard);

  // The cells of the block number `block` of those that are here: to be written, and to be read, where
  // nullptr stands for zeros. The first throws StorageError.
  virtual uint8_t* Writable(uint32_t part, uint64_t block) = 0;
  virtual const uint8_t* Find(uint32_t part, uint64_t block) const noexcept = 0;

  uint32_t parts() const noexcept { return parts_; }
  uint64_t here() const noexcept { return here_; }

 private:
  const uint32_t parts_;
  uint32_t hashes_ = 0;
  uint64_t blocks_ = 0;  // of a part, on all servers
  uint64_t first_ = 0;   // here
  uint64_t here_ = 0;    // how many
};

}  // namespace oe
