#include "oe_runtime/core/table/pooled_filter.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "oe_runtime/core/storage/row_map.h"

namespace oe {
namespace {

using Maps = std::vector<std::unique_ptr<RowMap>>;  // by part

// The row of a key, to be written; of zeros where there was none.
std::byte* Writable(RowMap* map, Key key, size_t bytes) {
  uint32_t number = kNoRow;
  map->FindOrAdd(&key, 1, &number, [bytes](Key, std::byte* row) { std::memset(row, 0, bytes); });
  return map->row(number);
}

class PooledCounter final : public CounterFilter {
 public:
  PooledCounter(const AdmissionSpec& spec, ShardInfo shard, Maps maps)
      : CounterFilter(spec, static_cast<uint32_t>(maps.size()), shard), maps_(std::move(maps)) {}

  uint64_t bytes(uint32_t part) const noexcept override { return maps_[part]->index_bytes(); }

 protected:
  // Of a count that is damaged there is none: what is written next has a right checksum.
  uint32_t Get(uint32_t part, Key key) override {
    uint32_t number = kNoRow;
    maps_[part]->FindWritable(&key, 1, &number);
    uint32_t word = kNoRow;
    if (number != kNoRow) std::memcpy(&word, maps_[part]->row(number), sizeof(word));
    return word;
  }
  void Put(uint32_t part, Key key, uint32_t word, bool /*added*/) override {
    std::memcpy(Writable(maps_[part].get(), key, sizeof(word)), &word, sizeof(word));
  }
  void Erase(uint32_t part, Key key) override { (void)maps_[part]->Erase(key); }
  uint64_t keys(uint32_t part) const noexcept override { return maps_[part]->size(); }
  size_t Scan(uint32_t part, uint64_t* position, size_t max, Key* keys,
              uint32_t* words) const noexcept override {
    const RowMap& map = *maps_[part];
    const size_t found = map.Scan(position, max, keys, words);
    for (size_t i = 0; i < found; ++i) Prefetch(map.row(words[i]));
    for (size_t i = 0; i < found; ++i) std::memcpy(&words[i], map.row(words[i]), sizeof(uint32_t));
    return found;
  }

 private:
  const Maps maps_;
};

// A block's key: those of a part come together, so that a key says its part whatever the filter's size is.
constexpr uint32_t kPartShift = 40;

class PooledBloom final : public BloomFilter {
 public:
  PooledBloom(const AdmissionSpec& spec, ShardInfo shard, Maps maps)
      : BloomFilter(spec, static_cast<uint32_t>(maps.size()), shard), maps_(std::move(maps)) {}

  uint64_t bytes(uint32_t part) const noexcept override { return maps_[part]->index_bytes(); }

 protected:
  uint8_t* Writable(uint32_t part, uint64_t block) override {
    return reinterpret_cast<uint8_t*>(oe::Writable(maps_[part].get(), KeyOf(part, block), kBlock));
  }
  const uint8_t* Find(uint32_t part, uint64_t block) const noexcept override {
    const Key key = KeyOf(part, block);
    const std::byte* row = nullptr;
    maps_[part]->Find(&key, 1, &row);
    return reinterpret_cast<const uint8_t*>(row);
  }

 private:
  static Key KeyOf(uint32_t part, uint64_t block) { return Key{part} << kPartShift | block; }

  const Maps maps_;
};

}  // namespace

PoolSpec CountsPool(const AdmissionSpec& spec, uint32_t parts, const AdmissionFilter::PartOf& part_of) {
  PoolSpec pool;
  pool.kind = "counts";
  pool.shards = parts;
  if (spec.name == "cbf") {
    pool.row_bytes = BloomFilter::kBlock;
    pool.shard_of = [parts](Key key) {
      return static_cast<uint32_t>(std::min<uint64_t>(key >> kPartShift, parts));
    };
    return pool;
  }
  pool.row_bytes = sizeof(uint32_t);
  pool.block_bytes = size_t{4} << 10;  // 1024 counts, and with what the pool keeps of each 20 KiB
  pool.shard_of = part_of;
  return pool;
}

std::unique_ptr<AdmissionFilter> NewPooledFilter(const AdmissionSpec& spec, ShardInfo shard, Pool* pool,
                                                 std::vector<std::unique_ptr<Index>> indexes) {
  Maps maps;
  for (uint32_t part = 0; part < indexes.size(); ++part) {
    maps.push_back(std::make_unique<RowMap>(std::move(indexes[part]), pool->shard(part)));
  }
  try {
    if (spec.name == "cbf") return std::make_unique<PooledBloom>(spec, shard, std::move(maps));
    return std::make_unique<PooledCounter>(spec, shard, std::move(maps));
  } catch (const std::bad_alloc&) {
    throw NoMemory("the admission filter");
  }
}

}  // namespace oe
