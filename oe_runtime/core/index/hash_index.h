#ifndef OE_CORE_INDEX_HASH_INDEX_H_
#define OE_CORE_INDEX_HASH_INDEX_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "oe_runtime/core/index/index.h"

namespace oe {

// Open addressing over buckets of one cache line with five entries each: most lookups touch one line. A full
// bucket sends its overflow to the next. Between 8/15 and 4/5 of the entries are used once the index has
// grown, which is 16 to 24 bytes a key.
class HashIndex final : public Index {
 public:
  HashIndex();

  void Find(const Key* keys, size_t n, uint32_t* rows) const noexcept override;
  void Reserve(uint64_t more) override;
  void Add(Key key, uint32_t row) noexcept override;
  void Set(Key key, uint32_t row) noexcept override;
  void Erase(Key key) noexcept override;
  size_t Scan(uint64_t* position, size_t max, Key* keys, uint32_t* rows) const noexcept override;
  uint64_t bytes() const noexcept override { return buckets_ * sizeof(Bucket); }

  // Buckets that a lookup of a present key reads, on average; 1 is best. Reads the whole index.
  double AverageProbes() const noexcept;
  // The same of a key that is absent.
  double AverageProbesOfAbsent() const noexcept;

 private:
  static constexpr uint32_t kEntries = 5;
  static constexpr uint16_t kManyOverflowed = 0xFFFF;

  struct alignas(64) Bucket {
    std::array<Key, kEntries> keys;
    std::array<uint32_t, kEntries> rows;
    uint16_t used;        // entries [0, used) hold keys: no key value has to be reserved for "empty"
    uint16_t overflowed;  // how many keys lie further on because this one was full (kManyOverflowed: or more)
  };

  struct Free {
    void operator()(Bucket* buckets) const noexcept;
  };
  using Buckets = std::unique_ptr<Bucket[], Free>;

  static Buckets Allocate(uint64_t count);
  static void Insert(Bucket* table, uint64_t count, Key key, uint32_t row) noexcept;
  static uint64_t BucketOf(Key key, uint64_t count) noexcept;
  // Buckets from one on to another, around the end.
  uint64_t Distance(uint64_t from, uint64_t to) const noexcept;
  // The bucket of a key that is present, and its entry there.
  Bucket* Locate(Key key, uint32_t* entry) noexcept;

  uint64_t buckets_;
  uint64_t size_ = 0;
  Buckets table_;
};

}  // namespace oe

#endif  // OE_CORE_INDEX_HASH_INDEX_H_
