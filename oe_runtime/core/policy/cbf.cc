// cbf {filter_freq, max_element_size, false_positive_probability}: counts in a counting Bloom filter.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <new>

#include "oe_runtime/core/policy/admission_registry.h"

namespace oe {
namespace {

AdmissionSpec CompleteCbf(const AdmissionSpec& spec, bool hash) {
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

constexpr uint64_t kBlock = 4096;  // cells
// A block's key in a pool: those of a part come together, so that a key says its part whatever the filter's
// size is.
constexpr uint32_t kPartShift = 40;

// Where the cells of a filter are.
struct Geometry {
  Geometry(const AdmissionSpec& spec, uint32_t of_parts, ShardInfo shard) : parts(of_parts) {
    const double p = spec.params.at("false_positive_probability");
    const double cells =
        std::ceil(spec.params.at("max_element_size") * -std::log(p) / (std::log(2.0) * std::log(2.0)));
    hashes = static_cast<uint32_t>(std::ceil(-std::log2(p)));
    blocks = static_cast<uint64_t>(std::ceil(cells / static_cast<double>(parts * kBlock)));
    if (blocks > std::numeric_limits<uint32_t>::max()) throw std::bad_alloc();
    // The least and the largest low half of a hash for which server_of_hash says this server.
    const auto least = [&](uint64_t server) { return ((server << 32) + shard.servers - 1) / shard.servers; };
    first = BlockOf(least(shard.server), blocks);
    here = BlockOf(least(uint64_t{shard.server} + 1) - 1, blocks) - first + 1;
  }

  uint32_t parts;
  uint32_t hashes;
  uint64_t blocks;  // of a part, on all servers
  uint64_t first;   // of those that are here
  uint64_t here;    // how many
};

// The cells of the blocks that are here: to be written (which throws StorageError), and to be read, where
// nullptr stands for zeros.
class DramBlocks {
 public:
  explicit DramBlocks(const Geometry& at) : at_(at), cells_(at.parts * at.here * kBlock) {}

  uint64_t bytes(uint32_t /*part*/) const noexcept { return cells_.size() / at_.parts; }
  uint8_t* Writable(uint32_t part, uint64_t block) { return &cells_[(part * at_.here + block) * kBlock]; }
  const uint8_t* Find(uint32_t part, uint64_t block) const noexcept {
    return &cells_[(part * at_.here + block) * kBlock];
  }

 private:
  Geometry at_;
  std::vector<uint8_t> cells_;
};

class PooledBlocks {
 public:
  explicit PooledBlocks(AdmissionEntry::Maps maps) : maps_(std::move(maps)) {}

  uint64_t bytes(uint32_t part) const noexcept { return maps_[part]->index_bytes(); }
  uint8_t* Writable(uint32_t part, uint64_t block) {
    return reinterpret_cast<uint8_t*>(WritableRow(maps_[part].get(), KeyOf(part, block), kBlock));
  }
  const uint8_t* Find(uint32_t part, uint64_t block) const noexcept {
    const Key key = KeyOf(part, block);
    const std::byte* row = nullptr;
    maps_[part]->Find(&key, 1, &row);
    return reinterpret_cast<const uint8_t*>(row);
  }

 private:
  static Key KeyOf(uint32_t part, uint64_t block) { return Key{part} << kPartShift | block; }

  AdmissionEntry::Maps maps_;
};

// A counting Bloom filter: a key has k = ceil(-log2 p) cells of a byte, of which the least is at least its
// count; it is more with probability p when max_element_size keys have been counted. There are
// m = max_element_size · -ln p / ln² 2 cells (Bloom 1970; as DeepRec's CBFFilter), in blocks of kBlock of
// which a key has one. Blocks are in the order of the keys' hashes that chooses servers, so each server has
// the blocks of its keys only, together m bytes and a few blocks: those in which the keys of one server end
// and the next one's begin are on both. When servers become more or fewer, cells are the largest of those of
// all of them: never less than a key was counted, nor more than if there had been one server. (A sum would
// count twice what both took over from the servers before.)
template <typename Blocks>
class BloomFilter final : public AdmissionFilter {
 public:
  BloomFilter(const AdmissionSpec& spec, const Geometry& geometry, Blocks cells)
      : AdmissionFilter(spec), at_(geometry), cells_(std::move(cells)) {}

  void Forget(uint32_t /*part*/, Key /*key*/) override {}
  bool Sweep(uint32_t /*part*/, const Index::Range& /*places*/, uint64_t* /*position*/,
             size_t /*most*/) override {
    return false;
  }
  void EndPeriod(uint32_t /*part*/) noexcept override {}
  uint64_t forgotten(uint32_t /*part*/) const noexcept override { return 0; }
  uint64_t bytes(uint32_t part) const noexcept override { return cells_.bytes(part); }

  uint32_t Count(uint32_t part, Key key, uint32_t times) override {
    const uint64_t hash = Mix64(key);
    uint8_t* block = cells_.Writable(part, BlockOf(hash, at_.blocks) - at_.first);
    uint64_t mixed = hash;
    uint64_t bits = 0;
    uint32_t least = std::numeric_limits<uint8_t>::max();
    for (uint32_t i = 0; i < at_.hashes; ++i) {
      if (i % 5 == 0) {  // five times the 12 bits of a cell's number
        mixed = Mix64(mixed + 0x9E3779B97F4A7C15ULL);
        bits = mixed;
      }
      uint8_t& cell = block[bits % kBlock];
      bits /= kBlock;
      cell =
          static_cast<uint8_t>(cell + std::min<uint32_t>(times, std::numeric_limits<uint8_t>::max() - cell));
      least = std::min<uint32_t>(least, cell);
    }
    return least;
  }

  uint64_t WrittenBytes() const noexcept override {
    return 2 * sizeof(uint64_t) + at_.parts * at_.here * kBlock;
  }

  void Write(const Sink& sink) const override {
    sink(&at_.first, sizeof(at_.first));
    sink(&at_.here, sizeof(at_.here));
    static constexpr std::array<uint8_t, kBlock> kZeros{};
    for (uint32_t part = 0; part < at_.parts; ++part) {
      for (uint64_t block = 0; block < at_.here; ++block) {
        const uint8_t* cells = cells_.Find(part, block);
        sink(cells == nullptr ? kZeros.data() : cells, kBlock);
      }
    }
  }

  bool Add(const Source& source, uint64_t bytes, const PartOf& /*part_of*/) override {
    uint64_t first = 0;
    uint64_t here = 0;
    if (bytes < sizeof(first) + sizeof(here)) return false;
    source(&first, sizeof(first));
    source(&here, sizeof(here));
    if (first > at_.blocks || here > at_.blocks - first ||
        bytes - sizeof(first) - sizeof(here) != at_.parts * here * kBlock) {
      return false;
    }
    std::array<uint8_t, kBlock> theirs{};
    for (uint32_t part = 0; part < at_.parts; ++part) {
      for (uint64_t block = first; block < first + here; ++block) {
        source(theirs.data(), kBlock);
        if (block < at_.first || block >= at_.first + at_.here) continue;
        if (std::all_of(theirs.begin(), theirs.end(), [](uint8_t cell) { return cell == 0; })) continue;
        uint8_t* ours = cells_.Writable(part, block - at_.first);
        for (uint64_t i = 0; i < kBlock; ++i) ours[i] = std::max(ours[i], theirs[i]);
      }
    }
    return true;
  }

 private:
  const Geometry at_;
  Blocks cells_;
};

std::unique_ptr<AdmissionFilter> CbfInDram(const AdmissionSpec& spec, uint32_t parts, ShardInfo shard) {
  const Geometry geometry(spec, parts, shard);
  return std::make_unique<BloomFilter<DramBlocks>>(spec, geometry, DramBlocks(geometry));
}

std::unique_ptr<AdmissionFilter> CbfInPool(const AdmissionSpec& spec, ShardInfo shard,
                                           AdmissionEntry::Maps maps) {
  const Geometry geometry(spec, static_cast<uint32_t>(maps.size()), shard);
  return std::make_unique<BloomFilter<PooledBlocks>>(spec, geometry, PooledBlocks(std::move(maps)));
}

void DescribeCbfPool(uint32_t parts, const AdmissionFilter::PartOf& /*part_of*/, PoolSpec* pool) {
  pool->row_bytes = kBlock;
  pool->shard_of = [parts](Key key) {
    return static_cast<uint32_t>(std::min<uint64_t>(key >> kPartShift, parts));
  };
}

const RegisterAdmission kCbf({"cbf", CompleteCbf, CbfInDram, DescribeCbfPool, CbfInPool});

}  // namespace
}  // namespace oe
