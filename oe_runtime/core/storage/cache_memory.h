#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace oe {

// What caches did since they were made. A read is that of a row that exists.
struct CacheStats {
  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t rows = 0;   // that are cached
  uint64_t bytes = 0;  // of DRAM
  uint64_t evictions = 0;
  uint64_t write_backs = 0;  // copies that were written to their slots

  CacheStats& operator+=(const CacheStats& other) {
    hits += other.hits;
    misses += other.misses;
    rows += other.rows;
    bytes += other.bytes;
    evictions += other.evictions;
    write_backs += other.write_backs;
    return *this;
  }
};

// The DRAM for the caches (row_cache.h) of all tables of a server, never more than a limit. A caller gets
// some while there is some. Then a cache that has less than its fair share (the limit by the number of
// caches) is served by those that have more: these ask Owes() and give blocks back, which are kept for it.
// Thread-safe.
class CacheMemory {
 public:
  // Reserves addresses; memory is taken when it is used. Throws StorageError.
  explicit CacheMemory(uint64_t limit);
  ~CacheMemory();
  CacheMemory(const CacheMemory&) = delete;
  CacheMemory& operator=(const CacheMemory&) = delete;

  // A cache begins or ceases to ask.
  void Join() noexcept { members_.fetch_add(1, std::memory_order_relaxed); }
  void Leave() noexcept {
    members_.fetch_sub(1, std::memory_order_relaxed);
    wanted_ = 0;  // who still lacks something asks again
  }

  // A block of `bytes`, 256-byte aligned, for a cache that holds `held`; `more` bytes elsewhere that go with
  // it are counted too. nullptr at the limit.
  std::byte* Take(size_t bytes, size_t more, uint64_t held) noexcept;
  // Gives a block back, as it was taken.
  void Give(std::byte* block, size_t bytes, size_t more) noexcept;
  // Whether a cache that holds `held` has to give a block back.
  bool Owes(uint64_t held) const noexcept {
    const uint64_t wanted = wanted_.load(std::memory_order_relaxed);
    return wanted > 0 && held > FairShare() && bytes() + wanted > limit_;
  }

  uint64_t limit() const noexcept { return limit_; }
  // The bytes of each cache, if all have as many.
  uint64_t FairShare() const noexcept {
    const uint64_t members = members_.load(std::memory_order_relaxed);
    return members == 0 ? limit_ : limit_ / members;
  }
  // Bytes that are taken.
  uint64_t bytes() const noexcept { return bytes_.load(std::memory_order_relaxed); }

 private:
  const uint64_t limit_;
  const size_t reserved_;
  std::byte* begin_ = nullptr;

  std::mutex mutex_;
  size_t used_ = 0;                                  // addresses that were given out so far
  std::map<size_t, std::vector<std::byte*>> given_;  // back, by size
  std::atomic<uint64_t> bytes_{0};
  std::atomic<uint64_t> members_{0};
  std::atomic<uint64_t> wanted_{0};  // bytes that caches below their share lack, or some of them
};

}  // namespace oe
