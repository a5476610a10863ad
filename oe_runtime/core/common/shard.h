#pragma once

#include <cstdint>

namespace oe {

using Key = uint64_t;  // all 2^64 values are legal

// Which of how many servers a part of a table lives on.
struct ShardInfo {
  uint32_t server = 0;
  uint32_t servers = 1;
};

// A bijection of 64-bit words in which every input bit reaches every output bit (the finalizer of
// SplitMix64), so that strided keys spread evenly. Servers are chosen by the low 32 bits, internal shards by
// the top 4, and buckets by others or by all: no choice narrows another. Table files of other server counts
// rely on it.
inline uint64_t Mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

// The inverse: Unmix64(Mix64(x)) == x. Each line undoes one of those above, the last one first.
inline uint64_t Unmix64(uint64_t x) {
  x = (x ^ (x >> 31) ^ (x >> 62)) * 0x319642B2D24D8EC3ULL;
  x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96DE1B173F119089ULL;
  return x ^ (x >> 30) ^ (x >> 60);
}

// The server of a hash-table key whose Mix64 is `hash`.
inline uint32_t server_of_hash(uint64_t hash, uint32_t servers) {
  return static_cast<uint32_t>((static_cast<uint64_t>(static_cast<uint32_t>(hash)) * servers) >> 32);
}

// The server that owns `key`: key % servers for array tables (local position key / servers), an even share of
// the mixed key for hash tables. `servers` must be at least 1.
inline uint32_t server_of(Key key, uint32_t servers, bool array) {
  if (servers == 1) return 0;
  return array ? static_cast<uint32_t>(key % servers) : server_of_hash(Mix64(key), servers);
}

}  // namespace oe
