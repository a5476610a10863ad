// Which keys get rows and which rows go, as the table's policies say.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/common/prefetch.h"
#include "oe_runtime/core/table/content.h"
#include "oe_runtime/core/table/reduced_weights.h"
#include "oe_runtime/core/table/row_ops.h"

namespace oe {
namespace {

constexpr size_t kSample = 16;           // rows of which the cap evicts the first
constexpr size_t kSwept = size_t{4096};  // rows that a sweep looks at while pushes wait
constexpr size_t kSweptOfLog = 512;      // the same in a log, which must have room for their tombstones
constexpr uint64_t kSmallFilterBytes = uint64_t{128} << 10;
constexpr size_t kSampled = size_t{4096};  // rows of an internal shard that say how old the newest is

std::vector<std::unique_ptr<Index>> NewIndexes() {
  std::vector<std::unique_ptr<Index>> indexes(kShards);
  for (auto& index : indexes) index = NewHashIndex();
  return indexes;
}

// The slice of the places [0, last], of which `slices` are equally large.
Index::Range SliceOf(uint64_t last, uint64_t slice, uint64_t slices) {
  __extension__ using Wide = unsigned __int128;
  const auto begin = [&](uint64_t of) { return (Wide{last} + 1) * of / slices; };
  return {static_cast<uint64_t>(begin(slice)), static_cast<uint64_t>(begin(slice + 1) - 1)};
}

StorageError CountsError(const std::string& table, const StorageError& error) {
  return StorageError(error.what() + std::string("; its files hold what the admission filter of table '") +
                      table + "' counted: with them moved away, that begins at zero and no row is lost");
}

}  // namespace

PoolSpec Table::CountsPoolSpec() const {
  PoolSpec pool = CountsPool(spec_.admission, kShards, [this](Key key) { return InternalShard(key); });
  pool.table = spec_.name;
  pool.damage = damage_;
  const nlohmann::json table = spec_;
  pool.identity = IdentityOf(pool.kind, {{"name", spec_.name}, {"admission", table.at("admission")}});
  return pool;
}

// Of a content whose rows have their place. One that is there already gets its counts from RecoverFilter().
void Table::NewFilter(Content* content, bool fresh) const {
  if (spec_.admission.name.empty() || storage_->spec().weights_only) return;
  if (content->kept == nullptr) {
    try {
      content->filter = AdmissionFilter::Create(spec_.admission, kShards, shard_);
    } catch (const StorageError& error) {
      throw StorageError("table '" + spec_.name + "': " + error.what());
    }
    return;
  }
  bool opened = false;
  try {
    content->counts = storage_->NewPool(CountsPoolSpec(), fresh, &opened);
  } catch (const StorageError& error) {
    if (!content->opened) throw;
    throw CountsError(spec_.name, error);
  }
  if (opened && !content->opened) {  // of rows that are gone
    content->counts->Remove();
    content->counts = storage_->NewPool(CountsPoolSpec(), true, &opened);
  }
  content->kept->Lead(content->counts.get());
  if (!opened)
    content->filter = NewPooledFilter(spec_.admission, shard_, content->counts.get(), NewIndexes());
}

// Goes back to what was counted at checkpoint `id`, or without one to nothing. `recover_rows` does the same
// with the rows, when it is known that the counts are there and right.
void Table::RecoverFilter(std::optional<uint64_t> id, const std::function<void()>& recover_rows) {
  if (!content_->counts) return recover_rows();
  const std::vector<CheckpointInfo> kept = content_->counts->Checkpoints();
  const bool has =
      id && std::any_of(kept.begin(), kept.end(), [&](const CheckpointInfo& info) { return info.id == *id; });
  auto indexes = NewIndexes();
  if (id && !has) {
    damage_->Say("table '" + spec_.name + "': what its admission filter had counted at checkpoint " +
                 std::to_string(*id) +
                 " is not there, as in pools of an earlier version or after a drive has lost it; counting "
                 "begins at zero, and no row is lost");
  }
  if (has || kept.empty()) {
    std::vector<Index*> pointers;
    pointers.reserve(indexes.size());
    for (const auto& index : indexes) pointers.push_back(index.get());
    std::exception_ptr of_rows;
    try {
      (void)content_->counts->Recover(has ? id : std::nullopt, pointers, [&] {
        try {
          recover_rows();
        } catch (...) {
          of_rows = std::current_exception();
          throw;
        }
      });
    } catch (const StorageError& error) {
      if (of_rows) std::rethrow_exception(of_rows);
      throw CountsError(spec_.name, error);
    }
  } else {
    recover_rows();
    content_->filter.reset();
    content_->kept->Lead(nullptr);
    content_->counts->Remove();
    content_->counts.reset();  // which makes room
    bool opened = false;
    content_->counts = storage_->NewPool(CountsPoolSpec(), true, &opened);
    content_->kept->Lead(content_->counts.get());
  }
  content_->filter = NewPooledFilter(spec_.admission, shard_, content_->counts.get(), std::move(indexes));
}

std::array<uint64_t, Table::kParts> Table::ShareOfCap() const {
  std::array<uint64_t, kParts> shares{};
  shares.fill(std::numeric_limits<uint64_t>::max());
  if (!eviction_.capped()) return shares;
  const uint64_t parts = uint64_t{kParts} * shard_.servers;
  const uint64_t rows = eviction_.most_rows();
  if (rows < parts) {
    throw SpecError("table '" + spec_.name + "': 'eviction' cap has room for " + std::to_string(rows) +
                    " rows, but " + std::to_string(shard_.servers) + " server(s) need at least " +
                    std::to_string(parts));
  }
  for (uint32_t i = 0; i < kParts; ++i) {
    shares[i] = rows / parts + (uint64_t{shard_.server} * kParts + i < rows % parts ? 1 : 0);
  }
  return shares;
}

void Table::FillMissing(Key key, std::byte* out) const {
  if (spec_.admission.name.empty()) {
    ops_->ReadMissing(key, out);
  } else if (ops_->format().dtype == Dtype::kFloat64) {
    std::fill_n(reinterpret_cast<double*>(out), spec_.dim, default_value_);
  } else {
    std::fill_n(reinterpret_cast<float*>(out), spec_.dim, static_cast<float>(default_value_));
  }
  // An export has a row of each key of an array.
  if (reduced_ != nullptr && is_array_) reduced_->Round(out);
}

// The same as halves. These are the values themselves: see PullsHalves().
void Table::PackMissing(Key key, std::byte* out) const {
  constexpr size_t kOnStack = 4096;
  if (spec_.dim <= kOnStack) {
    std::array<float, kOnStack> values;
    FillMissing(key, reinterpret_cast<std::byte*>(values.data()));
    return ops_->Write(values.data(), out);
  }
  std::vector<float> values(spec_.dim);
  FillMissing(key, reinterpret_cast<std::byte*>(values.data()));
  ops_->Write(values.data(), out);
}

// numbers[begin .. end): the rows of the keys of an internal shard, kNoRow for those that get none. The
// caller holds the shard's lock, and with a cap no other push runs.
void Table::AddByPolicy(const Plan& plan, size_t begin, size_t end, uint32_t shard, const uint32_t* counts,
                        uint32_t* numbers) {
  RowMap& map = *content_->shards[shard];
  const RowFacts& facts = eviction_.facts();
  AdmissionFilter* filter = content_->filter.get();
  const auto step = static_cast<uint32_t>(content_->version.load() + 1);  // of this push
  map.FindWritable(&plan.keys[begin], end - begin, &numbers[begin]);
  uint64_t of_batch = 0;  // rows of this shard that are in the batch, which marks them, so that they stay
  for (size_t i = begin; i < end; ++i) {
    if (numbers[i] == kNoRow) continue;
    facts.SetStep(map.row(numbers[i]), step);
    ++of_batch;
  }
  for (size_t i = begin; i < end; ++i) {
    if (numbers[i] != kNoRow) continue;
    const Key key = plan.keys[i];
    const uint32_t times = TimesOf(counts, plan.order[i]);
    uint32_t before = 0;
    if (filter != nullptr) {
      const uint32_t count = filter->Count(shard, key, times);
      if (count < filter->filter_freq()) {
        ++not_admitted_;
        continue;
      }
      before = count - std::min(count, times);
    }
    // More than one where the cap was lowered, see KeepCap(): then a few for each new row, until there is
    // room.
    for (int more = 0; more < 2 && map.size() >= most_rows_[shard] && of_batch < most_rows_[shard]; ++more) {
      try {
        if (!EvictOne(content_.get(), shard, step)) break;
      } catch (const StorageFull&) {
        if (map.size() <= most_rows_[shard]) throw;
        break;
      }
    }
    if (map.size() >= most_rows_[shard]) {
      ++no_room_;
      continue;
    }
    map.FindOrAdd(&key, 1, &numbers[i], [&](Key /*key*/, std::byte* row) {
      ops_->Init(key, row);
      facts.Init(row, before);
      facts.SetStep(row, step);
      ++admitted_;
      ++of_batch;
    });
    if (filter != nullptr) filter->Forget(shard, key);
  }
}

// What policies know of the rows that keys have. In a log, that is in DRAM for all rows.
void Table::CopyFacts(const RowMap& map, const uint32_t* numbers, size_t n, Facts* facts) const {
  map.store().CopyFacts(numbers, n, eviction_.facts().at(), eviction_.facts().words(), facts->data(),
                        RowFacts::kMost);
}

// Evicts the row that goes first among the next few that are not of push number `step`; false if there is
// none. The hand goes around like CLOCK's, so that every row is looked at before one is a second time.
bool Table::EvictOne(Content* content, uint32_t shard, uint32_t step) {
  RowMap& map = *content->shards[shard];
  uint64_t& hand = content->hands[shard];
  std::array<Key, kSample> keys{};
  std::array<uint32_t, kSample> numbers{};
  std::array<Facts, kSample> facts{};
  size_t sample = 0;
  size_t seen = 0;
  for (int turns = 0; turns < 2 && sample < kSample && (sample == 0 || seen < 8 * kSample);) {
    const size_t found = map.Scan(&hand, kSample - sample, &keys[sample], &numbers[sample]);
    if (found == 0) {
      hand = 0;
      ++turns;
      continue;
    }
    seen += found;
    const size_t end = sample + found;
    CopyFacts(map, &numbers[sample], found, &facts[sample]);
    for (size_t i = sample; i < end; ++i) {
      if (by_facts_.facts().step(RowOf(facts[i])) == step) continue;
      keys[sample] = keys[i];
      numbers[sample] = numbers[i];
      facts[sample++] = facts[i];
    }
  }
  if (sample == 0) return false;
  size_t first = 0;
  for (size_t i = 1; i < sample; ++i) {
    if (by_facts_.Before(RowOf(facts[i]), RowOf(facts[first]), step)) first = i;
  }
  map.Erase(keys[first], numbers[first]);
  ++evicted_[eviction_.cap()];
  return true;
}

// For rows that came from another number of servers, which do not fall into the shares of the cap exactly, or
// were saved under a larger cap. What a full pool has no room to note as evicted goes later, when new rows
// come, which the cap does not let in until then.
void Table::KeepCap(Content* content) {
  const auto step = static_cast<uint32_t>(content->version.load() + 1);
  for (uint32_t shard = 0; shard < kShards; ++shard) {
    RowMap& map = *content->shards[shard];
    try {
      for (bool more = true; more && map.size() > most_rows_[shard];) {
        const RowLog::Room room = RoomToEvict(map, 1);
        const std::unique_lock<FairSharedMutex> lock(map.mutex());
        more = EvictOne(content, shard, step);
      }
    } catch (const StorageFull&) {  // NOLINT(bugprone-empty-catch): see above
    }
  }
}

// Looks at some rows of a range of an internal shard from *position on; false after the last. The caller
// keeps pushes away.
bool Table::Sweep(uint32_t shard, uint32_t reasons, const Index::Range& range, uint64_t* position) {
  RowMap& map = *content_->shards[shard];
  const RowLog::Room room = RoomToEvict(map, kSweptOfLog + RowMap::kJudgedAtOnce);
  const std::unique_lock<FairSharedMutex> lock(map.mutex());
  const auto step = static_cast<uint32_t>(content_->version.load());
  const TtlClock::Reading time = eviction_.has_ttl() ? clock_.Read() : TtlClock::Reading{};
  const bool whole = eviction_.NeedsRows(reasons);
  std::vector<Key> from_the_future;
  std::array<Eviction::Reason, RowMap::kJudgedAtOnce> why{};
  const auto judge = [&](const Key* keys, const uint32_t* numbers, size_t n, bool* goes) {
    std::array<Facts, RowMap::kJudgedAtOnce> facts{};
    std::array<const std::byte*, RowMap::kJudgedAtOnce> rows{};
    LogReads reads;  // of rows that are not in DRAM
    CopyFacts(map, numbers, n, facts.data());
    if (whole) map.store().Rows(keys, numbers, n, rows.data(), &reads);
    reads.Start();
    reads.Wait();
    for (size_t i = 0; i < n; ++i) {
      if (whole && rows[i] == nullptr) continue;  // it cannot be read; a pull or push looks after it
      why[i] = whole ? eviction_.Judge(rows[i], reasons, step, time)
                     : by_facts_.Judge(RowOf(facts[i]), reasons, step, time);
      goes[i] = why[i] != Eviction::kNoReason;
      const bool future = eviction_.has_ttl() && by_facts_.facts().seconds(RowOf(facts[i])) > time.now;
      if (!goes[i] && future) from_the_future.push_back(keys[i]);
    }
  };
  const bool more = map.EraseIf(range, position, map.store().pins() ? kSweptOfLog : kSwept, judge,
                                [&](size_t i) { ++evicted_[why[i]]; });
  if (from_the_future.empty()) return more;
  std::vector<uint32_t> numbers(from_the_future.size());
  map.FindWritable(from_the_future.data(), numbers.size(), numbers.data());
  const std::unique_lock<std::mutex> copies_lock = map.store().LockCopies();
  for (const uint32_t number : numbers) {
    if (number == kNoRow) continue;  // it was damaged
    eviction_.facts().SetSeconds(map.row(number), time.now);
  }
  map.store().Unpin(numbers.data(), numbers.size());
  return more;
}

// Room in a log, if the rows are in one, for what `rows` evicted rows need, or as many that are changed.
// Without the lock of the shard.
RowLog::Room Table::RoomToEvict(const RowMap& map, size_t rows) {
  return map.store().RoomFor(2 * rows, RowLog::Need::kWriteBack);
}

// Whether the filter's part is looked at in less time than is lost where it is cut (Index::Scan reads all of
// a segment for each slice).
bool Table::HasSmallFilter(uint32_t shard) const {
  return content_->filter->bytes(shard) <= kSmallFilterBytes;
}

// A slice of a sweep of the filter's part: forgets the keys that were not counted for as long as a row lives
// without a push. A sweep begins with the first place of the part, if the period has lasted that long, and
// ends the period with the last. `sweep` says whose it is (Content::Swept): several may be under way, and the
// first that has seen all places ends the period. As a slice is seen at once, the filter may grow between two
// of them. Small parts are one slice. False if no sweep is under way afterwards. The caller keeps pushes
// away.
bool Table::SweepFilter(uint32_t shard, uint32_t reasons, uint32_t sweep, Index::Range places) {
  if (!content_->filter) return false;
  if (HasSmallFilter(shard)) places = {};
  Content::Swept& swept = content_->swept[shard];
  const uint64_t step = content_->version.load();
  const TtlClock::Reading time = eviction_.has_ttl() ? clock_.Read() : TtlClock::Reading{};
  const uint64_t period = content_->filter->periods(shard);
  const auto begin_period = [&](uint64_t number) { swept = {step, time.now, true, 0, number}; };
  if (!swept.known) {
    begin_period(period);
    if (!content_->loaded) swept.step = 0;
  }
  // A want of room may have ended the period: its keys are no older than that.
  if (swept.period != period) begin_period(period);
  // The clock makes no key old either, and if it was set back, time begins anew.
  swept.seconds = std::min(std::max(swept.seconds, time.floor), time.now);
  const bool begins =
      places.first == 0 && eviction_.Expired(reasons, step - swept.step, time.now - swept.seconds);
  const bool goes_on = places.first != 0 && (swept.under_way & sweep) != 0;
  swept.under_way &= ~sweep;  // also of one that fails, which begins anew
  if (!begins && !goes_on) return false;
  uint64_t position = 0;
  for (bool more = true; more;) {
    const std::unique_lock<FairSharedMutex> lock(content_->shards[shard]->mutex());
    more = content_->filter->Sweep(shard, places, &position, kSwept);
  }
  swept.under_way |= sweep;
  if (places.last != Index::Range().last) return true;
  const std::unique_lock<FairSharedMutex> lock(content_->shards[shard]->mutex());
  content_->filter->EndPeriod(shard);
  begin_period(content_->filter->periods(shard));
  return false;
}

// Of rows that came from a checkpoint: whether the clock can be right (TtlClock).
void Table::NoteLoaded(const Content& content) {
  if (!eviction_.has_ttl() || !keeps_facts()) return;
  std::vector<uint32_t> pushed;
  std::array<Key, kSample> keys{};
  std::array<uint32_t, kSample> numbers{};
  std::array<Facts, kSample> facts{};
  for (const auto& map : content.shards) {
    uint64_t position = 0;
    const std::shared_lock<FairSharedMutex> lock(map->mutex());  // a log's thread may move rows
    for (size_t seen = 0; seen < kSampled;) {
      const size_t found = map->Scan(&position, kSample, keys.data(), numbers.data());
      if (found == 0) break;
      seen += found;
      CopyFacts(*map, numbers.data(), found, facts.data());
      for (size_t i = 0; i < found; ++i) pushed.push_back(by_facts_.facts().seconds(RowOf(facts[i])));
    }
  }
  clock_.Loaded(std::move(pushed), eviction_.seconds());
}

// All of a range of an internal shard, as far as the storage lets rows go: what stays is seen again the next
// time.
void Table::SweepQuietly(uint32_t shard, uint32_t reasons, const Index::Range& range) {
  try {
    uint64_t position = 0;
    while (Sweep(shard, reasons, range, &position)) {
    }
  } catch (const StorageError&) {  // NOLINT(bugprone-empty-catch): see above
  }
}

// The same of the counts of the filter.
void Table::SweepFilterQuietly(uint32_t shard, uint32_t reasons, uint32_t sweep, const Index::Range& places) {
  try {
    (void)SweepFilter(shard, reasons, sweep, places);
  } catch (const StorageError&) {  // NOLINT(bugprone-empty-catch): see above
  }
}

void Table::SweepInTurn(uint64_t step) {
  for (const Eviction::Turn& turn : eviction_.Due(step, kShards)) {
    const Index::Range places = SliceOf(Index::Range().last, turn.slice, turn.slices);
    if (!is_array_) {
      SweepQuietly(turn.part, turn.reasons, places);
      SweepFilterQuietly(turn.part, turn.reasons, turn.reasons, places);
      continue;
    }
    // The internal shard of a key depends on the number of servers, so a part is some of the keys. Of small
    // filters all shards forget at once, for the same reason.
    const Index::Range keys =
        SliceOf(spec_.input_dim - 1, turn.part * turn.slices + turn.slice, kShards * turn.slices);
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      SweepQuietly(shard, turn.reasons, keys);
      if (!content_->filter || (shard != turn.part && !HasSmallFilter(shard))) continue;
      SweepFilterQuietly(shard, turn.reasons, turn.reasons, places);
    }
  }
}

uint64_t Table::Evict() {
  RequireWhole();
  if (eviction_.sweeps() == 0) return 0;
  uint64_t evicted = 0;
  std::string full;  // what some part of the table had no room for
  for (uint32_t shard = 0; shard < kShards; ++shard) {
    uint64_t position = 0;
    bool more = true;
    while (more) {
      const std::unique_lock<FairSharedMutex> push_lock(push_mutex_);
      const std::shared_lock<FairSharedMutex> content_lock(content_mutex_);
      const uint64_t before = content_->shards[shard]->size();  // only a push would change it
      try {
        more = Sweep(shard, eviction_.sweeps(), {}, &position);
      } catch (const StorageFull& error) {
        full = error.what();
        more = false;
      }
      evicted += before - content_->shards[shard]->size();
    }
    more = true;
    for (uint64_t slice = 0; more && slice < Eviction::kMostSlices; ++slice) {
      const std::unique_lock<FairSharedMutex> push_lock(push_mutex_);
      const std::shared_lock<FairSharedMutex> content_lock(content_mutex_);
      more = SweepFilter(shard, eviction_.sweeps(), Content::Swept::kOfCall,
                         SliceOf(Index::Range().last, slice, Eviction::kMostSlices));
    }
  }
  if (full.empty()) return evicted;
  throw StorageFull("table '" + spec_.name + "': evicted " + std::to_string(evicted) +
                    " rows and not all: " + full);
}

PolicyCounts Table::policy_counts() const {
  PolicyCounts counts;
  counts.admitted = admitted_;
  counts.not_admitted = not_admitted_;
  counts.no_room = no_room_;
  for (size_t i = 0; i < evicted_.size(); ++i) counts.evicted[spec_.eviction[i].name] = evicted_[i];
  const std::shared_lock<FairSharedMutex> content_lock(content_mutex_);
  for (uint32_t shard = 0; content_->filter && shard < kShards; ++shard) {
    const std::shared_lock<FairSharedMutex> lock(content_->shards[shard]->mutex());
    counts.filter_bytes += content_->filter->bytes(shard);
    counts.forgotten += content_->filter->forgotten(shard);
  }
  counts.clock_jumps = clock_.jumps();
  return counts;
}

}  // namespace oe
