// Our index and table beside plain maps and a bare gather, on one thread; a JSON object a line.
//   maps ROWS DIM ROUNDS
#include <absl/container/flat_hash_map.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

#include <algorithm>
#include <boost/unordered/unordered_flat_map.hpp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/table/table.h"

namespace {

using oe::Key;

constexpr size_t kBatch = size_t{4096} * 26;
constexpr size_t kBatches = 8;
constexpr uint32_t kShards = 16;
constexpr size_t kHugePage = size_t{2} << 20;

// Seconds of this thread's processor time: not what others take, but page faults.
double ThreadSeconds() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) / 1e9;
}

struct Contender {
  const char* name;
  std::function<void(const std::vector<Key>&)> work;
};

// Rounds in turn, so that what else the machine does falls on all alike.
void Compare(const char* what, const char* ids, uint64_t rows, size_t dim, int rounds,
             const std::vector<std::vector<Key>>& batches, const std::vector<Contender>& contenders) {
  std::vector<std::vector<double>> speeds(contenders.size());
  for (int round = -1; round < rounds; ++round) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      size_t keys = 0;
      const double start = ThreadSeconds();
      for (const auto& batch : batches) {
        contenders[i].work(batch);
        keys += batch.size();
      }
      const double seconds = ThreadSeconds() - start;
      if (round >= 0) speeds[i].push_back(static_cast<double>(keys) / seconds / 1e6);
    }
  }
  std::printf("{\"what\": \"%s\", \"ids\": \"%s\", \"rows\": %llu, \"dim\": %zu, \"speeds\": {", what, ids,
              static_cast<unsigned long long>(rows), dim);
  for (size_t i = 0; i < contenders.size(); ++i) {
    std::printf("%s\"%s\": [", i == 0 ? "" : ", ", contenders[i].name);
    for (int round = 0; round < rounds; ++round) {
      std::printf("%s%.4f", round == 0 ? "" : ", ", speeds[i][static_cast<size_t>(round)]);
    }
    std::printf("]");
  }
  std::printf("}}\n");
  (void)std::fflush(stdout);
}

Key KeyOf(uint64_t rank) { return oe::Mix64(rank); }

// Batches of ids as contenders.py makes them. Unless they are to be `repeated`, as they are where a client
// only reads (Client.pull_rows), each is made unique: that is what reaches a table in training.
std::vector<std::vector<uint64_t>> Batches(uint64_t rows, bool skewed, bool repeated = false) {
  std::mt19937_64 random(7);
  std::vector<std::vector<uint64_t>> batches(kBatches);
  for (auto& batch : batches) {
    for (size_t i = 0; i < kBatch; ++i) {
      const double u = std::uniform_real_distribution<double>(0, 1)(random);
      const uint64_t range = !skewed || u >= 0.957 ? rows : u < 0.857 ? rows / 2000 : rows / 100;
      batch.push_back(random() % range);
    }
    if (repeated) continue;
    std::sort(batch.begin(), batch.end());
    batch.erase(std::unique(batch.begin(), batch.end()), batch.end());
    std::shuffle(batch.begin(), batch.end(), random);
  }
  return batches;
}

std::vector<std::vector<Key>> Keys(std::vector<std::vector<uint64_t>> batches) {
  for (auto& batch : batches) {
    for (uint64_t& rank : batch) rank = KeyOf(rank);
  }
  return batches;
}

// Page faults of this thread.
long Faults() {
  rusage usage{};
  (void)::getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_minflt;
}

template <typename Insert>
void LongestStall(const char* name, uint64_t rows, const Insert& insert) {
  constexpr uint64_t kAtOnce = 64;
  double longest = 0;
  double longest_without = 0;  // a page fault
  const double start = ThreadSeconds();
  for (uint64_t at = 0; at < rows; at += kAtOnce) {
    const long faults = Faults();
    const double before = ThreadSeconds();
    for (uint64_t rank = at; rank < std::min(at + kAtOnce, rows); ++rank) {
      insert(KeyOf(rank), static_cast<uint32_t>(rank));
    }
    const double took = ThreadSeconds() - before;
    longest = std::max(longest, took);
    if (Faults() == faults) longest_without = std::max(longest_without, took);
  }
  const double seconds = ThreadSeconds() - start;
  std::printf(
      "{\"what\": \"insert\", \"name\": \"%s\", \"rows\": %llu, \"stall_ms\": %.4f, "
      "\"stall_without_fault_ms\": %.4f, \"speed\": %.3f}\n",
      name, static_cast<unsigned long long>(rows), longest * 1e3, longest_without * 1e3,
      static_cast<double>(rows) / seconds / 1e6);
  (void)std::fflush(stdout);
}

// What it takes to touch fresh huge pages, one byte each, as many as `bytes`: the kernel clears them, and
// under a hypervisor the host may have to find them first.
void TouchPages(uint64_t bytes) {
  const size_t pages = bytes / kHugePage + 1;
  std::unique_ptr<char, void (*)(void*)> memory(
      static_cast<char*>(std::aligned_alloc(kHugePage, pages * kHugePage)), [](void* it) { std::free(it); });
  (void)::madvise(memory.get(), pages * kHugePage, MADV_HUGEPAGE);
  std::vector<double> times;
  for (size_t page = 0; page < pages; ++page) {
    const double before = ThreadSeconds();
    *const_cast<volatile char*>(memory.get() + page * kHugePage) = 1;
    times.push_back(ThreadSeconds() - before);
  }
  std::sort(times.begin(), times.end());
  std::printf("{\"what\": \"touch\", \"pages\": %zu, \"median_ms\": %.4f, \"longest_ms\": %.4f}\n", pages,
              times[pages / 2] * 1e3, times.back() * 1e3);
  (void)std::fflush(stdout);
}

// As our index's memory.
template <typename T>
struct HugePages {
  using value_type = T;
  HugePages() = default;
  template <typename U>
  explicit HugePages(const HugePages<U>& /*other*/) {}
  static T* allocate(size_t n) {
    const size_t bytes = (n * sizeof(T) + kHugePage - 1) / kHugePage * kHugePage;
    void* memory = std::aligned_alloc(kHugePage, bytes);
    (void)::madvise(memory, bytes, MADV_HUGEPAGE);
    return static_cast<T*>(memory);
  }
  static void deallocate(T* memory, size_t /*n*/) { std::free(memory); }
  friend bool operator==(const HugePages& /*a*/, const HugePages& /*b*/) { return true; }
  friend bool operator!=(const HugePages& /*a*/, const HugePages& /*b*/) { return false; }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const uint64_t rows = std::strtoull(argv[1], nullptr, 10);
  const size_t dim = std::strtoull(argv[2], nullptr, 10);
  const int rounds = std::atoi(argv[3]);

  boost::unordered_flat_map<Key, uint32_t> boost_map;
  absl::flat_hash_map<Key, uint32_t> absl_map;
  std::vector<std::unique_ptr<oe::Index>> indexes(kShards);
  for (auto& index : indexes) index = oe::NewHashIndex();
  LongestStall("ours", rows, [&](Key key, uint32_t row) {
    oe::Index& index = *indexes[oe::Mix64(key) >> 60];
    index.Reserve(key);
    index.Add(key, row);
  });
  uint64_t bytes = 0;
  for (const auto& index : indexes) bytes += index->bytes();
  std::printf("{\"what\": \"bytes\", \"rows\": %llu, \"bytes_a_key\": %.2f}\n",
              static_cast<unsigned long long>(rows), static_cast<double>(bytes) / static_cast<double>(rows));
  TouchPages(bytes);
  LongestStall("Boost", rows, [&](Key key, uint32_t row) { boost_map.emplace(key, row); });
  LongestStall("Abseil", rows, [&](Key key, uint32_t row) { absl_map.emplace(key, row); });

  // Of the allocator's pages, which are small unless the system gives huge ones to all, and of ours.
  boost::unordered_flat_map<Key, uint32_t, boost::hash<Key>, std::equal_to<Key>,
                            HugePages<std::pair<const Key, uint32_t>>>
      huge_map;
  for (uint64_t rank = 0; rank < rows; ++rank) huge_map.emplace(KeyOf(rank), static_cast<uint32_t>(rank));

  std::vector<uint32_t> found(kBatch);
  for (const bool skewed : {true, false}) {
    const char* ids = skewed ? "skewed" : "uniform";
    const auto batches = Keys(Batches(rows, skewed));
    // As a table hands them over: the keys of one internal shard after the other.
    std::vector<std::vector<Key>> ordered = batches;
    for (auto& batch : ordered) {
      std::stable_sort(batch.begin(), batch.end(),
                       [](Key a, Key b) { return oe::Mix64(a) >> 60 < oe::Mix64(b) >> 60; });
    }
    const Contender ours{"ours", [&](const std::vector<Key>& keys) {
                           for (size_t begin = 0; begin < keys.size();) {
                             const uint64_t shard = oe::Mix64(keys[begin]) >> 60;
                             const auto next = std::partition_point(
                                 keys.begin() + static_cast<ptrdiff_t>(begin), keys.end(),
                                 [shard](Key key) { return oe::Mix64(key) >> 60 == shard; });
                             const auto end = static_cast<size_t>(next - keys.begin());
                             indexes[shard]->Find(&keys[begin], end - begin, &found[begin]);
                             begin = end;
                           }
                         }};
    const auto plain = [&](const char* name, const auto& map) {
      return Contender{name, [&](const std::vector<Key>& keys) {
                         for (size_t i = 0; i < keys.size(); ++i) found[i] = map.find(keys[i])->second;
                       }};
    };
    Compare(
        "lookup", ids, rows, 0, rounds, ordered,
        {ours, plain("Boost", boost_map), plain("Boost, huge pages", huge_map), plain("Abseil", absl_map)});
  }
  indexes.clear();
  huge_map = {};

  oe::TableSpec spec;
  spec.name = "benchmark";
  spec.dim = static_cast<uint32_t>(dim);
  const auto table = oe::Table::Create(spec, oe::StorageSpec{});
  const std::vector<float> gradients(kBatch * dim, 0.01F);
  std::vector<Key> keys;
  for (uint64_t rank = 0; rank < rows;) {
    keys.clear();
    for (; keys.size() < kBatch && rank < rows; ++rank) keys.push_back(KeyOf(rank));
    table->Push(keys.data(), keys.size(), gradients.data(), 0.01);
  }
  const size_t stride = 2 * dim;  // weights and Adagrad's sums, as in our rows
  const size_t row_bytes = stride * sizeof(float);
  std::unique_ptr<float, void (*)(void*)> memory(
      static_cast<float*>(std::aligned_alloc(kHugePage, (rows * row_bytes / kHugePage + 1) * kHugePage)),
      [](void* pointer) { std::free(pointer); });
  (void)::madvise(memory.get(), rows * row_bytes, MADV_HUGEPAGE);
  std::fill_n(memory.get(), rows * stride, 0.5F);
  std::vector<float> out(kBatch * dim);
  // Rows on their way, as suits the gathers best.
  const size_t ahead = std::clamp<size_t>(4096 / (dim * sizeof(float)), 16, 64);
  const auto fetch = [&](const float* row) {
    for (size_t at = 0; at < dim; at += 16) __builtin_prefetch(row + at);
    __builtin_prefetch(row + dim - 1);
  };
  // As large as our index.
  struct alignas(64) Line {
    uint64_t word;
  };
  std::vector<Line, HugePages<Line>> lines(table->index_bytes() / sizeof(Line) + 1, Line{1});
  uint64_t sum = 0;
  struct Ids {
    const char* name;
    bool skewed;
    bool repeated;
  };
  for (const Ids ids :
       {Ids{"skewed, repeated", true, true}, {"skewed", true, false}, {"uniform", false, false}}) {
    const auto ranks = Batches(rows, ids.skewed, ids.repeated);
    const auto batches = Keys(ranks);
    std::vector<std::vector<uint32_t>> places(ranks.size());  // of lines
    for (size_t i = 0; i < ranks.size(); ++i) {
      for (const Key key : batches[i])
        places[i].push_back(static_cast<uint32_t>(oe::Mix64(key) % lines.size()));
    }
    // All get the same rows of the same size; the gathers have their numbers, the others their keys.
    size_t turn = 0;
    // The limit: where every row lies is known.
    const Contender gather{"gather", [&](const std::vector<Key>&) {
                             const std::vector<uint64_t>& batch = ranks[turn++ % ranks.size()];
                             for (size_t i = 0; i < batch.size(); ++i) {
                               if (i + ahead < batch.size()) fetch(memory.get() + batch[i + ahead] * stride);
                               std::memcpy(&out[i * dim], memory.get() + batch[i] * stride,
                                           dim * sizeof(float));
                             }
                           }};
    // The same bytes as a pull of hashed keys: one line of an index for each key besides, at a known place.
    const Contender gather_both{"gather with an index line", [&](const std::vector<Key>&) {
                                  const size_t number = turn++ % ranks.size();
                                  const std::vector<uint64_t>& batch = ranks[number];
                                  const std::vector<uint32_t>& place = places[number];
                                  for (size_t i = 0; i < batch.size(); ++i) {
                                    if (i + 2 * ahead < batch.size())
                                      __builtin_prefetch(&lines[place[i + 2 * ahead]]);
                                    if (i + ahead < batch.size())
                                      fetch(memory.get() + batch[i + ahead] * stride);
                                    sum += lines[place[i]].word;
                                    std::memcpy(&out[i * dim], memory.get() + batch[i] * stride,
                                                dim * sizeof(float));
                                  }
                                }};
    const Contender ours{
        "ours", [&](const std::vector<Key>& batch) { table->Pull(batch.data(), batch.size(), out.data()); }};
    const auto plain = [&](const char* name, const auto& map) {
      return Contender{name, [&](const std::vector<Key>& batch) {
                         for (size_t i = 0; i < batch.size(); ++i) {
                           const float* row = memory.get() + size_t{map.find(batch[i])->second} * stride;
                           std::memcpy(&out[i * dim], row, dim * sizeof(float));
                         }
                       }};
    };
    // Each by itself: others that have just read its rows would leave them in the processor's caches.
    Compare("pull", ids.name, rows, dim, rounds, batches, {gather, ours});
    Compare("pull", ids.name, rows, dim, rounds, batches, {gather_both, ours});
    Compare("pull", ids.name, rows, dim, rounds, batches,
            {ours, plain("Boost", boost_map), plain("Abseil", absl_map)});
  }
  return sum > 0 ? 0 : 1;
}
