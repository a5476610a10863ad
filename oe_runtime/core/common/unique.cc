#include "oe_runtime/core/common/unique.h"

#include <algorithm>
#include <array>

#include "oe_runtime/core/common/prefetch.h"

namespace oe {
namespace {

constexpr size_t kAhead = 16;  // ids hashed, and their slots fetched, before they are looked at
constexpr size_t kMostSlots = size_t{4} << 20;  // that a thread keeps for its next batch
constexpr unsigned kNearBits = 13;              // of the number of slots that lie in the first cache
constexpr size_t kSample = 512;                 // keys that tell whether many are repeated

// 32 bytes anywhere. Packed, since a reference to a vector forgets in Clang what its type's name says of
// alignment.
template <typename T>
struct [[gnu::packed, gnu::may_alias]] Lanes {
  static constexpr size_t kSize = 32 / sizeof(T);
  static Lanes& At(T* values) { return *reinterpret_cast<Lanes*>(values); }
  static const Lanes& At(const T* values) { return *reinterpret_cast<const Lanes*>(values); }
  T values [[gnu::vector_size(32)]];
};

// Left to itself, GCC 12 makes a call of memcpy and a loop over single values of short rows.
template <typename T>
void Set(const T* from, T* to, size_t size) {
  size_t d = 0;
  for (; d + Lanes<T>::kSize <= size; d += Lanes<T>::kSize) {
    Lanes<T>::At(to + d).values = Lanes<T>::At(from + d).values;
  }
  for (; d < size; ++d) to[d] = from[d];
}
template <typename T>
void Add(const T* from, T* to, size_t size) {
  size_t d = 0;
  for (; d + Lanes<T>::kSize <= size; d += Lanes<T>::kSize) {
    Lanes<T>::At(to + d).values += Lanes<T>::At(from + d).values;
  }
  for (; d < size; ++d) to[d] += from[d];
}

// kDim is 0 where the compiler shall not know it.
template <size_t kDim, typename T>
void SumFixed(const T* gradients, const int32_t* rows, size_t n, size_t dim, size_t step, T* sums,
              uint8_t* seen) {
  const size_t size = kDim == 0 ? dim : kDim;
  if (seen == nullptr) {
    for (size_t i = 0; i < n; ++i) {
      Add(gradients + i * step * size, sums + static_cast<size_t>(rows[i]) * size, size);
    }
    return;
  }
  for (size_t i = 0; i < n; ++i) {
    const auto row = static_cast<size_t>(rows[i]);
    const T* from = gradients + i * step * size;
    if (seen[row] != 0) {
      Add(from, sums + row * size, size);
    } else {
      seen[row] = 1;
      Set(from, sums + row * size, size);
    }
  }
}

template <typename T>
void Sum(const T* gradients, const int32_t* rows, size_t n, size_t dim, size_t step, T* sums, uint8_t* seen) {
  switch (dim) {
    case 1:
      return SumFixed<1>(gradients, rows, n, dim, step, sums, seen);
    case 8:
      return SumFixed<8>(gradients, rows, n, dim, step, sums, seen);
    case 9:
      return SumFixed<9>(gradients, rows, n, dim, step, sums, seen);
    case 16:
      return SumFixed<16>(gradients, rows, n, dim, step, sums, seen);
    case 32:
      return SumFixed<32>(gradients, rows, n, dim, step, sums, seen);
    case 64:
      return SumFixed<64>(gradients, rows, n, dim, step, sums, seen);
    default:
      return SumFixed<0>(gradients, rows, n, dim, step, sums, seen);
  }
}

// Multiplying spreads strided keys; the high bits are the good ones.
size_t HomeOf(Key key, unsigned shift) { return static_cast<size_t>((key * 0x9E3779B97F4A7C15ULL) >> shift); }

// Places in a list of distinct keys, found by key; -1 is an empty slot. A value, so that loops have it in
// registers.
struct KeySlots {
  int32_t* slots;
  unsigned shift;
  size_t mask;

  void Prefetch(Key key) const { oe::Prefetch(&slots[Home(key)]); }
  // The slot that has the place of `key` in `keys`, or the empty one where it belongs.
  int32_t& Find(Key key, const Key* keys) const {
    size_t at = Home(key);
    while (slots[at] >= 0 && keys[slots[at]] != key) at = (at + 1) & mask;
    return slots[at];
  }
  // The places of keys that are not in it.
  void Fill(const Key* keys, size_t n) const {
    for (size_t i = 0; i < n; ++i) {
      if (i + kAhead < n) Prefetch(keys[i + kAhead]);
      Find(keys[i], keys) = static_cast<int32_t>(i);
    }
  }
  size_t Home(Key key) const { return HomeOf(key, shift); }
};

// What stays with the thread: new memory would cost as much as the search.
class SlotMemory {
 public:
  SlotMemory() : kept_(Kept()) {}
  ~SlotMemory() {
    if (kept_.slots.size() > kMostSlots) kept_ = {};
  }
  SlotMemory(const SlotMemory&) = delete;
  SlotMemory& operator=(const SlotMemory&) = delete;

  // Makes at least that many slots, all empty. The old ones are gone.
  KeySlots Empty(size_t least) {
    unsigned bits = 4;
    while ((size_t{1} << bits) < least) ++bits;
    const size_t size = size_t{1} << bits;
    if (kept_.slots.size() < size) kept_.slots.resize(size);
    std::fill_n(kept_.slots.begin(), size, -1);
    return {kept_.slots.data(), 64 - bits, size - 1};
  }
  Key* Keys(size_t n) {
    if (kept_.keys.size() < n) kept_.keys.resize(n);
    return kept_.keys.data();
  }

 private:
  struct Memory {
    std::vector<int32_t> slots;
    std::vector<Key> keys;
  };
  static Memory& Kept() {
    static thread_local Memory memory;
    return memory;
  }
  Memory& kept_;
};

// A batch on its way through FindUnique.
struct Search {
  const Key* ids;
  int32_t* inverse;
  Key* keys;         // distinct ones
  size_t at = 0;     // ids that are done
  size_t count = 0;  // keys so far
};

// Goes on to `end`, or until there are `most` keys.
template <bool kFetches>
void Number(const KeySlots slots, Search* search, size_t end, size_t most) {
  const Search was = *search;
  size_t at = was.at;
  size_t count = was.count;
  while (at < end && count < most) {
    if (kFetches) slots.Prefetch(was.ids[at + kAhead]);
    const Key key = was.ids[at];
    int32_t& place = slots.Find(key, was.keys);
    if (place < 0) {
      place = static_cast<int32_t>(count);
      was.keys[count++] = key;
    }
    was.inverse[at++] = place;
  }
  search->at = at;
  search->count = count;
}

}  // namespace

// Slots are a quarter full at most: that two keys meet is what the processor cannot foresee. A batch that
// repeats its ids, as most do, stays in few slots, which lie in a nearer cache; another goes on in as many as
// it may ever need.
std::vector<Key> FindUnique(const Key* ids, size_t n, int32_t* inverse) {
  SlotMemory scratch;
  Search search{ids, inverse, scratch.Keys(n)};
  const auto run = [&](const KeySlots& slots, size_t most) {
    Number<true>(slots, &search, n - std::min(n, kAhead), most);
    Number<false>(slots, &search, n, most);
  };
  KeySlots slots = scratch.Empty(n);
  run(slots, (slots.mask + 1) / 4);
  if (search.at < n) {
    slots = scratch.Empty(4 * n);
    slots.Fill(search.keys, search.count);
    run(slots, n);
  }
  return {search.keys, search.keys + search.count};
}

UniqueKeys FindUnique(const Key* ids, size_t n) {
  UniqueKeys result;
  result.inverse.resize(n);
  result.keys = FindUnique(ids, n, result.inverse.data());
  return result;
}

// Of keys that meet in a slot the last one has it, and the others are taken for new when they come again:
// nothing branches on whether a key came before, which cannot be foreseen.
size_t LeaveOutRepeated(const Key* keys, size_t n, Key* distinct, uint16_t* which) {
  std::array<uint16_t, size_t{1} << kNearBits> slots{};  // an empty one says 0, where the first key is
  distinct[0] = keys[0];
  which[0] = 0;
  size_t count = 1;
  for (size_t i = 1; i < n; ++i) {
    const Key key = keys[i];
    uint16_t& slot = slots[HomeOf(key, 64 - kNearBits)];
    // With ?: GCC 12 branches.
    const size_t again = distinct[slot] == key ? 1 : 0;
    distinct[count] = key;
    slot = static_cast<uint16_t>(count ^ ((count ^ slot) & (0 - again)));
    which[i] = slot;
    count += 1 - again;
  }
  return count;
}

bool RepeatMuch(const Key* keys, size_t n) {
  if (n < kSample) return false;
  std::array<Key, kSample> distinct;    // NOLINT(cppcoreguidelines-pro-type-member-init)
  std::array<uint16_t, kSample> which;  // NOLINT(cppcoreguidelines-pro-type-member-init)
  return LeaveOutRepeated(keys, kSample, distinct.data(), which.data()) < kSample - kSample / 8;
}

void MarkCommon(const std::vector<Key>& keys, const std::vector<Key>& others, std::vector<uint8_t>* common) {
  // The smaller of the two fills the slots, which are then in the nearer cache.
  const bool of_keys = keys.size() <= others.size();
  const std::vector<Key>& few = of_keys ? keys : others;
  const std::vector<Key>& many = of_keys ? others : keys;
  SlotMemory scratch;
  const KeySlots slots = scratch.Empty(2 * few.size());
  slots.Fill(few.data(), few.size());
  for (size_t i = 0; i < many.size(); ++i) {
    if (i + kAhead < many.size()) slots.Prefetch(many[i + kAhead]);
    const int32_t place = slots.Find(many[i], few.data());
    if (place >= 0) (*common)[of_keys ? static_cast<size_t>(place) : i] = 1;
  }
}

void SumByRow(const float* gradients, const int32_t* rows, size_t n, size_t dim, float* sums, uint8_t* seen,
              size_t step) {
  Sum(gradients, rows, n, dim, step, sums, seen);
}

void SumByRow(const double* gradients, const int32_t* rows, size_t n, size_t dim, double* sums, uint8_t* seen,
              size_t step) {
  Sum(gradients, rows, n, dim, step, sums, seen);
}

}  // namespace oe
