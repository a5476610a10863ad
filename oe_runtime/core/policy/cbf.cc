// cbf {filter_freq, max_element_size, false_positive_probability}: counts in a counting Bloom filter.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <new>

#include "oe_runtime/core/policy/admission_registry.h"

namespace oe {
namespace {

AdmissionSpec CompleteSpec(const AdmissionSpec& spec, bool hash) {
  const std::string what = "'admission' " + spec.name;
  const CheckedParams checked(what, spec.params, {{"default_value", 0.0}},
                              {"filter_freq", "max_element_size", "false_positive_probability"});
  checked.Whole("filter_freq", 1, 255);  // its cells have a byte
  checked.Whole("max_element_size", 1, CheckedParams::kMostRows);
  checked.Between("false_positive_probability", 1e-9, 0.5);
  if (!hash) {
    throw SpecError(what + " is for hash tables; an array table has no more counters than keys: use counter");
  }
  return {spec.name, checked.params()};
}

// The block of a key, among `blocks` in the order that chooses servers.
uint64_t BlockOf(uint64_t hash, uint64_t blocks) {
  return (uint64_t{static_cast<uint32_t>(hash)} * blocks) >> 32;
}

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

// A block's key: those of a part come together, so that a key says its part whatever the filter's size is.
constexpr uint32_t kPartShift = 40;

class PooledBloom final : public BloomFilter {
 public:
  PooledBloom(const AdmissionSpec& spec, ShardInfo shard, AdmissionEntry::Maps maps)
      : BloomFilter(spec, static_cast<uint32_t>(maps.size()), shard), maps_(std::move(maps)) {}

  uint64_t bytes(uint32_t part) const noexcept override { return maps_[part]->index_bytes(); }

 protected:
  uint8_t* Writable(uint32_t part, uint64_t block) override {
    return reinterpret_cast<uint8_t*>(WritableRow(maps_[part].get(), KeyOf(part, block), kBlock));
  }
  const uint8_t* Find(uint32_t part, uint64_t block) const noexcept override {
    const Key key = KeyOf(part, block);
    const std::byte* row = nullptr;
    maps_[part]->Find(&key, 1, &row);
    return reinterpret_cast<const uint8_t*>(row);
  }

 private:
  static Key KeyOf(uint32_t part, uint64_t block) { return Key{part} << kPartShift | block; }

  const AdmissionEntry::Maps maps_;
};

std::unique_ptr<AdmissionFilter> InDram(const AdmissionSpec& spec, uint32_t parts, ShardInfo shard) {
  return std::make_unique<DramBloom>(spec, parts, shard);
}

void DescribePool(uint32_t parts, const AdmissionFilter::PartOf& /*part_of*/, PoolSpec* pool) {
  pool->row_bytes = BloomFilter::kBlock;
  pool->shard_of = [parts](Key key) {
    return static_cast<uint32_t>(std::min<uint64_t>(key >> kPartShift, parts));
  };
}

std::unique_ptr<AdmissionFilter> InPool(const AdmissionSpec& spec, ShardInfo shard,
                                        AdmissionEntry::Maps maps) {
  return std::make_unique<PooledBloom>(spec, shard, std::move(maps));
}

const RegisterAdmission kCbf({"cbf", CompleteSpec, InDram, DescribePool, InPool});

}  // namespace
}  // namespace oe
