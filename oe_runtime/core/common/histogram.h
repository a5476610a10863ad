#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>

namespace oe {

// How often something took how long: buckets that double from 10 microseconds to 42 seconds, and one for all
// that is longer. Counting is a few nanoseconds and takes no lock; a reader may see a measurement in the
// count of its bucket before it is in the sum.
class Histogram {
 public:
  static constexpr size_t kBounds = 23;
  static constexpr size_t kBuckets = kBounds + 1;

  // The longest time, in nanoseconds, that bucket i < kBounds counts.
  static constexpr uint64_t Bound(size_t i) { return kFirst << i; }

  void Add(std::chrono::nanoseconds time) {
    const uint64_t nanoseconds = time.count() > 0 ? static_cast<uint64_t>(time.count()) : 0;
    buckets_[BucketOf(nanoseconds)].fetch_add(1, std::memory_order_relaxed);
    sum_.fetch_add(nanoseconds, std::memory_order_relaxed);
  }

  uint64_t bucket(size_t i) const { return buckets_[i].load(std::memory_order_relaxed); }
  double sum_seconds() const { return static_cast<double>(sum_.load(std::memory_order_relaxed)) * 1e-9; }

  static constexpr size_t BucketOf(uint64_t nanoseconds) {
    const uint64_t firsts = (nanoseconds + kFirst - 1) / kFirst;
    if (firsts <= 1) return 0;
    const size_t bits = 64 - static_cast<size_t>(__builtin_clzll(firsts - 1));
    return bits < kBounds ? bits : kBounds;
  }

 private:
  static constexpr uint64_t kFirst = 10'000;
  std::array<std::atomic<uint64_t>, kBuckets> buckets_{};
  std::atomic<uint64_t> sum_{0};
};

// Its counts per bucket, and the bounds of the buckets in seconds; the last has none.
nlohmann::json TimesOf(const Histogram& histogram);

}  // namespace oe
