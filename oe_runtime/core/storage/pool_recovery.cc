// How a pool goes back to a checkpoint.
#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <utility>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/storage/pool.h"

namespace oe {
namespace {

constexpr size_t kRowsAtOnce = 64;
constexpr uint64_t kManySlots = 1 << 16;  // below it, threads cost more than they bring

// Calls task(0) … task(count - 1), on several threads if `parallel`; rethrows an error.
template <typename Task>
void ForEach(uint32_t count, bool parallel, const Task& task) {
  const uint32_t threads = parallel ? std::min(count, std::max(1U, std::thread::hardware_concurrency())) : 1;
  std::atomic<uint32_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    for (uint32_t i = next++; i < count; i = next++) {
      try {
        task(i);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!failure) failure = std::current_exception();
      }
    }
  };
  std::vector<std::thread> others;
  for (uint32_t i = 1; i < threads; ++i) others.emplace_back(work);
  work();
  for (std::thread& thread : others) thread.join();
  if (failure) std::rethrow_exception(failure);
}

// What is kept once a table is back at checkpoint `id`; without one, everything.
std::vector<KeptCheckpoint> KeptUpTo(std::optional<uint64_t> id, std::vector<KeptCheckpoint> kept,
                                     const std::string& table) {
  if (!id) return kept;
  std::string ids;
  for (const KeptCheckpoint& one : kept) ids += (ids.empty() ? "" : ", ") + std::to_string(one.id);
  while (!kept.empty() && kept.back().id != *id) kept.pop_back();
  if (!kept.empty()) return kept;
  throw StorageError("the pool of table '" + table + "' has no checkpoint " + std::to_string(*id) +
                     (ids.empty() ? "; it has none at all" : "; it has " + ids));
}

}  // namespace

// What recovery finds of one shard.
struct Pool::Scan {
  struct Loser {
    Key key;
    uint64_t state;
    uint32_t number;
  };
  std::vector<SlotBlock> blocks;
  std::unique_ptr<SlotStore> slots;
  std::vector<uint32_t> free;        // with the later ones
  std::vector<uint32_t> later;       // of epochs after the chosen one
  std::vector<Loser> losers;         // with a newer slot of the same key
  std::vector<uint32_t> tombstones;  // all
  uint64_t newest = 0;               // of the chosen epoch
  uint64_t rows = 0;
  uint64_t digest = 0;

  void Add(const Key* keys, const uint32_t* numbers, size_t n, Index* index, const std::string& path);
  static void RequireRowsOf(const KeptCheckpoint& chosen, const std::vector<Scan>& scans,
                            const std::string& path);
  template <typename Retired, typename Tombstone>
  void ListByEpoch(Index* index, const Retired& is_retired, const Tombstone& is_tombstone);
};

// Adds n <= kRowsAtOnce used slots to the index, where the newest of each key stays.
void Pool::Scan::Add(const Key* keys, const uint32_t* numbers, size_t n, Index* index,
                     const std::string& path) {
  std::array<uint32_t, kRowsAtOnce> found{};
  index->Find(keys, n, found.data());
  for (size_t i = 0; i < n; ++i) {
    const uint64_t state = slots->meta(numbers[i]).state;
    if (!IsTombstone(state)) {
      ++rows;
      digest += SlotDigest(keys[i], state);
    }
    // A key may come twice among these.
    if (found[i] == kNoRow) index->Find(&keys[i], 1, &found[i]);
    if (found[i] == kNoRow) {
      index->Reserve(keys[i]);
      index->Add(keys[i], numbers[i]);
      continue;
    }
    index->Find(&keys[i], 1, &found[i]);
    const uint64_t other = slots->meta(found[i]).state;
    const bool newer = Newer(state, other);
    if (!newer && !IsTombstone(state) && EpochOf(state) == EpochOf(other)) {
      throw StorageError("the pool " + path + " is damaged: key " + std::to_string(keys[i]) +
                         " has two rows of one epoch; restore from a checkpoint");
    }
    if (newer) index->Set(keys[i], numbers[i]);
    const uint64_t lost = newer ? other : state;
    losers.push_back({keys[i], lost, newer ? found[i] : numbers[i]});
    if (!IsTombstone(lost)) {
      --rows;
      digest -= SlotDigest(keys[i], lost);
    }
  }
}

// Throws StorageError unless all shards have the rows of the checkpoint.
void Pool::Scan::RequireRowsOf(const KeptCheckpoint& chosen, const std::vector<Scan>& scans,
                               const std::string& path) {
  uint64_t rows = 0;
  uint64_t digest = 0;
  for (const Scan& scan : scans) {
    rows += scan.rows;
    digest += scan.digest;
  }
  if (rows != chosen.rows || digest != chosen.digest) {
    throw StorageError(
        "the pool " + path + " is damaged: checkpoint " + std::to_string(chosen.id) + " has " +
        std::to_string(chosen.rows) + " rows, but the segments beside it have " + std::to_string(rows) +
        (rows == chosen.rows ? " with other checksums" : "") +
        "; move the pool away, or start fresh (--storage-fresh), and restore from a checkpoint");
  }
}

// Retired slots wait for the checkpoints that need them to be dropped, by the epoch of the next newer slot
// of their key; tombstones by their own epoch. The index forgets the keys that are gone.
template <typename Retired, typename Tombstone>
void Pool::Scan::ListByEpoch(Index* index, const Retired& is_retired, const Tombstone& is_tombstone) {
  std::sort(losers.begin(), losers.end(), [](const Loser& left, const Loser& right) {
    return left.key != right.key ? left.key < right.key : Newer(left.state, right.state);
  });
  for (size_t at = 0; at < losers.size(); ++at) {
    const Loser& loser = losers[at];
    if (IsTombstone(loser.state)) continue;
    uint64_t newer = 0;
    if (at > 0 && losers[at - 1].key == loser.key) {
      newer = losers[at - 1].state;
    } else {
      uint32_t newest_slot = kNoRow;
      index->Find(&loser.key, 1, &newest_slot);
      newer = slots->meta(newest_slot).state;
    }
    is_retired(EpochOf(newer), loser.number);
  }
  for (const uint32_t number : tombstones) {
    const SlotMeta& meta = slots->meta(number);
    is_tombstone(EpochOf(meta.state), number);
    uint32_t newest_slot = kNoRow;
    index->Find(&meta.key, 1, &newest_slot);
    if (newest_slot == number) index->Erase(meta.key);
  }
}

// Blocks belong to the shard of their keys; those without any are free.
void Pool::AssignBlocks(std::vector<Scan>* scans, std::vector<SlotBlock>* free_blocks) const {
  for (const Segment& segment : segments_) {
    for (uint64_t b = 0; b < segment.header.blocks; ++b) {
      const SlotBlock block = BlockOf(segment, b);
      const SlotMeta* end = block.metas + segment.header.block_rows;
      const SlotMeta* used = std::find_if(block.metas, block.metas + segment.header.block_rows,
                                          [](const SlotMeta& meta) { return meta.state != 0; });
      if (used == end) {
        free_blocks->push_back(block);
        continue;
      }
      const uint32_t shard = spec_.shard_of(used->key);
      if (shard >= spec_.shards) {
        Damaged(segment.region.name,
                "it has a row of key " + std::to_string(used->key) + ", which cannot be here");
      }
      (*scans)[shard].blocks.push_back(block);
    }
  }
}

// Of all segments: a scan reads all of it, and nothing else does.
void Pool::AdviseMetas(bool in_order) const noexcept {
  for (const Segment& segment : segments_) {
    medium_->Advise(segment.region.data, segment.header.rows_offset, in_order);
  }
}

void Pool::ScanShard(uint32_t shard, uint32_t epoch, Index* index, Scan* scan) const {
  scan->slots = std::make_unique<SlotStore>(const_cast<Pool*>(this), layout_, epoch + 1, spec_.cache);
  SlotStore& slots = *scan->slots;
  for (const SlotBlock& block : scan->blocks) (void)slots.Adopt(block);

  std::array<Key, kRowsAtOnce> keys{};
  std::array<uint32_t, kRowsAtOnce> numbers{};
  size_t filled = 0;
  const auto take = [&] {
    scan->Add(keys.data(), numbers.data(), filled, index, super_.path);
    filled = 0;
  };
  for (uint32_t b = static_cast<uint32_t>(scan->blocks.size()); b > 0; --b) {
    for (uint32_t i = layout_.block_rows(); i > 0; --i) {
      const uint32_t number = ((b - 1) << layout_.shift) + i - 1;
      const SlotMeta& meta = scan->blocks[b - 1].metas[i - 1];
      if (meta.state == 0 || EpochOf(meta.state) > epoch) {
        if (meta.state != 0) scan->later.push_back(number);
        scan->free.push_back(number);
        continue;
      }
      if (spec_.shard_of(meta.key) != shard) {
        throw StorageError("the pool " + super_.path + " is damaged: key " + std::to_string(meta.key) +
                           " lies among keys of another part of the table; restore from a checkpoint");
      }
      if (IsTombstone(meta.state)) scan->tombstones.push_back(number);
      if (EpochOf(meta.state) == epoch) ++scan->newest;
      keys[filled] = meta.key;
      numbers[filled] = number;
      if (++filled == kRowsAtOnce) take();
    }
  }
  take();
}

// Blocks without any used slot are no shard's on the medium, and may have been reserved for the rows of one.
// They are shared out before one shard, whose rows are evicted first for instance, takes them all.
void Pool::ReserveAgain() {
  try {
    for (bool any = true; any;) {
      any = false;
      for (const auto& shard : shards_) {
        if (!shard->LacksSlots()) continue;
        {
          const std::lock_guard<std::mutex> lock(segments_mutex_);
          if (free_blocks_.empty()) return;
        }
        shard->TakeBlock();
        any = true;
      }
    }
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the caller that needs one takes it then
  }
}

// Reads everything and changes nothing. Returns the blocks that no shard has. Throws StorageError unless the
// rows are those of the checkpoint.
std::vector<SlotBlock> Pool::ScanAll(const KeptCheckpoint& chosen, const std::vector<Index*>& indexes,
                                     std::vector<Scan>* scans) {
  const std::unique_ptr<Pool, void (*)(Pool*)> advice(this, [](Pool* pool) { pool->AdviseMetas(false); });
  AdviseMetas(true);
  std::vector<SlotBlock> free_blocks;
  AssignBlocks(scans, &free_blocks);
  uint64_t blocks = 0;
  for (const Scan& scan : *scans) blocks += scan.blocks.size();
  ForEach(spec_.shards, blocks << layout_.shift > kManySlots,
          [&](uint32_t i) { ScanShard(i, static_cast<uint32_t>(chosen.epoch), indexes[i], &(*scans)[i]); });
  Scan::RequireRowsOf(chosen, *scans, super_.path);
  return free_blocks;
}

// Makes durable what was read, and that `kept` are all checkpoints: the slots of later ones are free.
void Pool::DiscardLater(const std::vector<KeptCheckpoint>& kept, const Slots& later, const Slots& free,
                        const std::vector<SlotBlock>& free_blocks) {
  // A process that was killed, without a power cut, leaves stores that can be read and are not durable yet.
  // What was fenced before something else was stored is, so what is left is what comes last: the superblock,
  // headers, and states that were zeroed.
  flusher_->Flush(super_.data, super_.size);
  for (const Segment& segment : segments_) flusher_->Flush(segment.region.data, sizeof(SegmentHeader));
  for (uint32_t i = 0; i < spec_.shards; ++i) {
    for (const uint32_t number : free[i]) flusher_->Flush(MetaOf(i, number), sizeof(SlotMeta));
  }
  for (const SlotBlock& block : free_blocks) {
    flusher_->Flush(block.metas, layout_.block_rows() * sizeof(SlotMeta));
  }
  flusher_->Fence();
  // Later checkpoints first, then their slots: interrupted in between, these are still later than the newest.
  // One that failed may be in the superblock all the same.
  if (kept.size() != kept_.size() || has_failed()) Commit(kept);
  Invalidate(later);
  flusher_->Fence();
}

// The most slots of a shard that were retired and erased in the epoch of a kept checkpoint.
uint64_t Pool::ChangedInAnEpoch(uint32_t shard) const {
  uint64_t most = 0;
  for (const auto& [epoch, slots] : retired_) {
    const auto erased = tombstones_.find(epoch);
    const uint64_t tombstones = erased == tombstones_.end() ? 0 : erased->second[shard].size();
    most = std::max(most, slots[shard].size() + tombstones);
  }
  return most;
}

CheckpointInfo Pool::Recover(std::optional<uint64_t> id, const std::vector<Index*>& indexes,
                             const std::function<void()>& before) {
  WaitIdle();
  if (has_failed()) RequirePresent();
  const std::vector<KeptCheckpoint> kept = KeptUpTo(id, kept_, spec_.table);
  const KeptCheckpoint chosen = kept.empty() ? KeptCheckpoint{} : kept.back();

  std::vector<Scan> scans(spec_.shards);
  std::vector<SlotBlock> free_blocks = ScanAll(chosen, indexes, &scans);
  std::map<uint64_t, Slots> retired;
  std::map<uint64_t, Slots> tombstones;
  const auto put = [this](std::map<uint64_t, Slots>* lists, uint64_t epoch, uint32_t shard, uint32_t number) {
    Slots& slots = (*lists)[epoch];
    slots.resize(spec_.shards);
    slots[shard].push_back(number);
  };
  for (uint32_t i = 0; i < spec_.shards; ++i) {
    scans[i].ListByEpoch(
        indexes[i], [&](uint64_t epoch, uint32_t number) { put(&retired, epoch, i, number); },
        [&](uint64_t epoch, uint32_t number) { put(&tombstones, epoch, i, number); });
  }

  if (before) before();
  Slots later(spec_.shards);
  Slots free(spec_.shards);
  for (uint32_t i = 0; i < spec_.shards; ++i) {
    later[i] = std::move(scans[i].later);
    free[i] = std::move(scans[i].free);
    blocks_[i] = std::move(scans[i].blocks);
  }
  try {
    DiscardLater(kept, later, free, free_blocks);
  } catch (const StorageError& error) {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    failure_ = error.what();  // blocks_ no longer has the numbers of the shards
    throw;
  }

  retired_ = std::move(retired);
  tombstones_ = std::move(tombstones);
  for (uint32_t i = 0; i < spec_.shards; ++i) {
    // Of a single checkpoint, what changed in its epoch is not known; rows that came in it count too, so no
    // more than is expected of any.
    const uint64_t newest = kept.size() < 2 ? scans[i].newest : 0;
    const uint64_t expected = std::min(newest, SlotStore::Expected(scans[i].rows));
    scans[i].slots->SetSize(scans[i].rows, std::max(expected, ChangedInAnEpoch(i)));
    scans[i].slots->Give(free[i]);
    shards_[i] = std::move(scans[i].slots);
  }
  {
    const std::lock_guard<std::mutex> lock(segments_mutex_);
    free_blocks_ = std::move(free_blocks);
  }
  digest_ = chosen.digest;
  sealed_ = chosen.epoch;
  suspect_ = false;
  epoch_ = chosen.epoch + 1;
  last_id_ = chosen.id;
  has_id_ = !kept.empty();
  ForgetFailure();
  ReserveAgain();
  Recycle();
  return {chosen.id, chosen.version, chosen.rows};
}

}  // namespace oe
