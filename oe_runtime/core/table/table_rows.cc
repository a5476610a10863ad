// Rows by key, as they are: written, erased, and read with the optimizer's state.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

#include "oe_runtime/core/table/content.h"
#include "oe_runtime/core/table/gradients.h"
#include "oe_runtime/core/table/row_ops.h"

namespace oe {
namespace {

constexpr size_t kAhead = 8;  // rows that are fetched before they are copied

// The values of keys in the caller's memory, by position.
template <typename Byte>
class Columns {
 public:
  template <typename Void>
  Columns(Void* values, size_t stride, size_t bytes)
      : values_(static_cast<Byte*>(values)), stride_(stride == 0 ? bytes : stride) {}
  Byte* operator[](size_t at) const { return values_ + at * stride_; }

 private:
  Byte* const values_;
  const size_t stride_;
};

}  // namespace

size_t Table::state_values() const { return ops_->format().state_values; }

Table::AssignCounts Table::Assign(const Key* keys, size_t n, const void* weights, const void* states,
                                  Executor* executor, const RowStrides& strides, bool checked) {
  RequireWhole();
  const RowFormat& format = ops_->format();
  if (!checked) {
    RefuseNonfinite(spec_, keys, n, weights, format.dim, "row", strides.weights, executor);
    if (states != nullptr) {
      RefuseNonfinite(spec_, keys, n, states, format.state_values, "optimizer's state", strides.states,
                      executor);
    }
  }
  const Plan plan = MakePlan(keys, n);
  const std::unique_ptr<uint32_t[]> numbers(new uint32_t[n]);
  std::array<AssignCounts, kShards> counts{};
  // A push that runs may hold the number of a row that is evicted here.
  const std::unique_lock<FairSharedMutex> push_lock(push_mutex_);
  const std::shared_lock<FairSharedMutex> content_lock(content_mutex_);
  const RowLog::Room room = RoomFor(plan, AppendsOf(n), true);
  const Pins pins(plan, *content_, numbers.get());
  // First every row that is missing, which may fail.
  plan.ForEachShard(executor, [&](size_t begin, size_t end, size_t shard) {
    const std::unique_lock<FairSharedMutex> lock(content_->shards[shard]->mutex());
    AddAssigned(plan, begin, end, static_cast<uint32_t>(shard), numbers.get(), &counts[shard]);
  });
  const auto step = static_cast<uint32_t>(content_->version.load());
  const uint32_t seconds = eviction_.has_ttl() ? clock_.Read().now : 0;
  const size_t state_bytes = states != nullptr ? format.state_bytes() : 0;
  const Columns<const std::byte> of_weights(weights, strides.weights, format.value_bytes());
  const Columns<const std::byte> of_states(states, strides.states, state_bytes);
  plan.ForEachShard(executor, [&](size_t begin, size_t end, size_t shard) {
    RowMap& map = *content_->shards[shard];
    const std::unique_lock<FairSharedMutex> lock(map.mutex());
    const std::unique_lock<std::mutex> copies_lock = map.store().LockCopies();
    for (size_t i = begin; i < end; ++i) {
      const size_t ahead = i + kAhead;
      if (ahead < end && numbers[ahead] != kNoRow) {
        PrefetchRow(map.row(numbers[ahead]), row_bytes_);
        PrefetchRow(of_weights[plan.order[ahead]], format.value_bytes());
        if (state_bytes > 0) PrefetchRow(of_states[plan.order[ahead]], state_bytes);
      }
      if (numbers[i] == kNoRow) continue;  // no room
      std::byte* row = map.row(numbers[i]);
      const size_t at = plan.order[i];
      ops_->Write(of_weights[at], row);
      if (state_bytes > 0) ops_->WriteState(of_states[at], row);
      if (has_policies_) eviction_.facts().Touch(row, step, 1, seconds);
    }
    map.store().Unpin(&numbers[begin], end - begin);
  });
  if (content_->kept) content_->kept->Poke();
  AssignCounts sum;
  for (const AssignCounts& of_shard : counts) {
    sum.created += of_shard.created;
    sum.evicted += of_shard.evicted;
    sum.no_room += of_shard.no_room;
  }
  no_room_ += sum.no_room;
  return sum;
}

// numbers[begin .. end): rows of the keys of an internal shard that may be written; kNoRow where the cap has
// no room. The caller holds the shard's lock, and no push runs.
void Table::AddAssigned(const Plan& plan, size_t begin, size_t end, uint32_t shard, uint32_t* numbers,
                        AssignCounts* counts) {
  RowMap& map = *content_->shards[shard];
  const RowFacts& facts = eviction_.facts();
  AdmissionFilter* filter = content_->filter.get();
  const auto step = static_cast<uint32_t>(content_->version.load() + 1);  // marks the rows of this call
  map.FindWritable(&plan.keys[begin], end - begin, &numbers[begin]);
  uint64_t of_call = 0;
  for (size_t i = begin; i < end; ++i) {
    if (numbers[i] == kNoRow) continue;
    facts.SetStep(map.row(numbers[i]), step);
    ++of_call;
  }
  for (size_t i = begin; i < end; ++i) {
    if (numbers[i] != kNoRow) continue;
    const Key key = plan.keys[i];
    // As many as AppendsOf() has room for, see AddByPolicy().
    for (int more = 0; more < 2 && map.size() >= most_rows_[shard] && of_call < most_rows_[shard]; ++more) {
      if (!EvictOne(content_.get(), shard, step)) break;
      ++counts->evicted;
    }
    if (map.size() >= most_rows_[shard]) {
      ++counts->no_room;
      continue;
    }
    map.FindOrAdd(&key, 1, &numbers[i], [&](Key /*key*/, std::byte* row) {
      ops_->Init(key, row);
      facts.Init(row, 0);
      facts.SetStep(row, step);
      ++counts->created;
      ++of_call;
    });
    if (filter != nullptr) filter->Forget(shard, key);
  }
}

uint64_t Table::Erase(const Key* keys, size_t n, Executor* executor) {
  RequireWhole();
  const Plan plan = MakePlan(keys, n);
  const std::unique_lock<FairSharedMutex> push_lock(push_mutex_);  // see Assign()
  const std::shared_lock<FairSharedMutex> content_lock(content_mutex_);
  const RowLog::Room room = RoomFor(plan, 2 * n, false);
  std::atomic<uint64_t> erased{0};
  plan.ForEachShard(executor, [&](size_t begin, size_t end, size_t shard) {
    RowMap& map = *content_->shards[shard];
    const std::unique_lock<FairSharedMutex> lock(map.mutex());
    for (size_t i = begin; i < end; ++i) {
      if (map.Erase(plan.keys[i])) ++erased;
    }
  });
  return erased;
}

void Table::ReadRows(const Key* keys, size_t n, void* weights, void* states, uint8_t* found,
                     Executor* executor, const RowStrides& strides) const {
  RequireWhole();
  constexpr size_t kAtOnce = 256;
  const RowFormat& format = ops_->format();
  const size_t state_bytes = states != nullptr ? format.state_bytes() : 0;
  const size_t used_bytes = state_bytes > 0 ? row_bytes_ : format.value_bytes();
  const Columns<std::byte> of_weights(weights, strides.weights, format.value_bytes());
  const Columns<std::byte> of_states(states, strides.states, state_bytes);
  const Plan plan = MakePlan(keys, n);
  const std::shared_lock<FairSharedMutex> content_lock(content_mutex_);
  std::array<std::vector<Key>, kShards> damaged;
  plan.ForEachShard(executor, [&](size_t first, size_t last, size_t shard) {
    const RowMap& map = *content_->shards[shard];
    const std::unique_ptr<std::byte[]> fresh(new std::byte[row_bytes_]);
    std::array<const std::byte*, kAtOnce> rows{};
    for (size_t begin = first; begin < last; begin += kAtOnce) {
      const size_t size = std::min(kAtOnce, last - begin);
      CheckUnread(static_cast<uint32_t>(shard), &plan.keys[begin], size);
      const std::shared_lock<FairSharedMutex> lock(map.mutex());
      LogReads reads;
      map.Find(&plan.keys[begin], size, rows.data(), &reads);
      reads.Run();
      for (const LogReads::Entry& entry : reads.entries()) {
        if (entry.error != 0) damaged[shard].push_back(entry.key);
      }
      for (size_t i = 0; i < size; ++i) {
        if (i + kAhead < size && rows[i + kAhead] != nullptr) PrefetchRow(rows[i + kAhead], used_bytes);
        const size_t at = plan.order[begin + i];
        found[at] = rows[i] != nullptr ? 1 : 0;
        if (rows[i] == nullptr) ops_->Init(plan.keys[begin + i], fresh.get());
        const std::byte* row = rows[i] != nullptr ? rows[i] : fresh.get();
        ops_->Read(row, of_weights[at]);
        if (state_bytes > 0) ops_->ReadState(row, of_states[at]);
      }
    }
  });
  std::vector<Key> all;
  for (const std::vector<Key>& of_shard : damaged) all.insert(all.end(), of_shard.begin(), of_shard.end());
  if (all.empty()) return;
  {
    const RowMap& map = *content_->shards[InternalShard(all.front())];
    const std::shared_lock<FairSharedMutex> lock(map.mutex());
    map.store().RequireFewDamaged(all.size());
  }
  const std::shared_lock<FairSharedMutex> moves_lock(content_->kept->moves_mutex(), std::try_to_lock);
  if (moves_lock) CheckRows(all);
}

}  // namespace oe
