// How checkpoints of a pool become durable.
#include <algorithm>
#include <functional>
#include <utility>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/prefetch.h"
#include "oe_runtime/core/storage/pool.h"

namespace oe {
namespace {

constexpr size_t kRowsAhead = 8;  // rows on their way

// Flushes metadata by cache lines, of which one holds that of several slots: once after the last of them that
// follow each other, since a line that is stored to while it is written back waits for that.
class MetaFlusher {
 public:
  explicit MetaFlusher(Flusher* flusher) : flusher_(flusher) {}

  void Store(SlotMeta* meta, uint64_t state) {
    const std::byte* line = reinterpret_cast<const std::byte*>(meta);
    line -= reinterpret_cast<uintptr_t>(line) % kCacheLine;
    if (line != line_) Flush();
    line_ = line;
    flusher_->Store(&meta->state, state);
  }
  // To be called after the last.
  void Flush() {
    if (line_ != nullptr) flusher_->Flush(line_, kCacheLine);
    line_ = nullptr;
  }

 private:
  Flusher* const flusher_;
  const std::byte* line_ = nullptr;
};

// Sorts different numbers below `slots`, the largest first.
void SortDescending(std::vector<uint32_t>* numbers, size_t slots) {
  const size_t words = slots / 64 + 1;
  if (numbers->size() < words) {  // few of many
    std::sort(numbers->begin(), numbers->end(), std::greater<>());
    return;
  }
  std::vector<uint64_t> bits(words);
  for (const uint32_t number : *numbers) bits[number / 64] |= uint64_t{1} << number % 64;
  size_t at = 0;
  for (size_t word = words; word > 0; --word) {
    for (uint64_t left = bits[word - 1]; left != 0;) {
      const int bit = 63 - __builtin_clzll(left);
      (*numbers)[at++] = static_cast<uint32_t>((word - 1) * 64) + static_cast<uint32_t>(bit);
      left ^= uint64_t{1} << bit;
    }
  }
}

}  // namespace

void Pool::PrepareClose(ClosedEpoch* closed) {
  if (epoch_ >= kLastEpoch) {
    throw StorageError("table '" + spec_.table + "' has had as many checkpoints as a pool can have");
  }
  closed->changes.reserve(spec_.shards);
}

void Pool::CloseEpoch(ClosedEpoch* closed) {
  closed->checkpoint.epoch = epoch_++;
  for (const auto& shard : shards_) {
    closed->checkpoint.rows += shard->size();
    closed->changes.push_back(shard->Close());
  }
}

// Grows ahead.
void Pool::DoChore() noexcept {
  try {
    size_t blocks = 0;
    {
      const std::lock_guard<std::mutex> lock(segments_mutex_);
      blocks = low_water_;
    }
    Grow(blocks);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the next to need it throws
  }
}

std::vector<KeptCheckpoint> Pool::kept() const {
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  return kept_;
}

SlotMeta* Pool::MetaOf(uint32_t shard, uint32_t number) const {
  return &blocks_[shard][number >> layout_.shift].metas[number & (layout_.block_rows() - 1)];
}

const std::byte* Pool::RowOf(uint32_t shard, uint32_t number) const {
  return blocks_[shard][number >> layout_.shift].rows + layout_.Offset(number & (layout_.block_rows() - 1));
}

void Pool::MakeDurable(const ClosedEpoch& closed) {
  for (uint32_t i = 0; i < spec_.shards; ++i) {
    const std::vector<SlotBlock>& blocks = closed.changes[i].blocks;
    blocks_[i].insert(blocks_[i].end(), blocks.begin(), blocks.end());
  }
  Seal(closed);

  const uint64_t epoch = closed.checkpoint.epoch;
  Slots retired(spec_.shards);
  Slots tombstones(spec_.shards);
  for (uint32_t i = 0; i < spec_.shards; ++i) {
    // In order, their metadata is read, and later flushed, line by line; and so is what will be written to
    // them, which begins with those that are given back last.
    retired[i] = closed.changes[i].retired;
    SortDescending(&retired[i], blocks_[i].size() << layout_.shift);
    for (const uint32_t number : retired[i]) {
      const SlotMeta* meta = MetaOf(i, number);
      digest_ -= SlotDigest(meta->key, meta->state);
    }
    tombstones[i] = closed.changes[i].tombstones;
  }
  if (suspect_.exchange(false) && CountDigest(retired) != digest_) {
    // Recovery would find other rows than the checkpoint has, and refuse it.
    throw StorageError(
        "the metadata of the rows beside " + super_.path +
        " is damaged, and no later checkpoint could be recovered; save the tables to files, then "
        "start fresh (--storage-fresh) and restore from these");
  }
  RequirePresent();
  std::vector<KeptCheckpoint> kept = kept_;
  kept.push_back(closed.checkpoint);
  kept.back().digest = digest_;
  while (kept.size() > spec_.window) kept.erase(kept.begin());
  Commit(std::move(kept));
  retired_[epoch] = std::move(retired);
  tombstones_[epoch] = std::move(tombstones);
  Recycle();
}

// Writes down the slots of a closed epoch. States need not wait for their rows: until the superblock has the
// epoch, recovery invalidates them.
void Pool::Seal(const ClosedEpoch& closed) {
  const uint64_t epoch = closed.checkpoint.epoch;
  MetaFlusher metas(flusher_.get());
  for (uint32_t i = 0; i < spec_.shards; ++i) {
    shards_[i]->WriteBackUpTo(static_cast<uint32_t>(epoch));
    std::vector<uint32_t> tombstones = closed.changes[i].tombstones;
    std::sort(tombstones.begin(), tombstones.end());
    const std::vector<uint32_t>& written = closed.changes[i].written;
    for (size_t at = 0; at < written.size(); ++at) {
      const uint32_t number = written[at];
      if (at + kRowsAhead < written.size())
        PrefetchRow(RowOf(i, written[at + kRowsAhead]), layout_.row_bytes);
      SlotMeta* meta = MetaOf(i, number);
      const std::byte* row = RowOf(i, number);
      uint64_t state = 0;
      if (std::binary_search(tombstones.begin(), tombstones.end(), number)) {
        state = TombstoneState(epoch, meta->key);
      } else {
        state = SlotState(epoch, meta->key, row, layout_.row_bytes);
        digest_ += SlotDigest(meta->key, state);
        flusher_->Flush(row, layout_.row_bytes);
      }
      metas.Store(meta, state);
    }
  }
  for (uint32_t i = 0; i < spec_.shards; ++i) {
    for (const uint32_t number : closed.changes[i].repaired)
      flusher_->Flush(MetaOf(i, number), sizeof(SlotMeta));
  }
  metas.Flush();
  flusher_->Fence();
  sealed_.store(epoch, std::memory_order_release);
}

// digest_ as the metadata of all slots has it. `retired`: in the epoch that is made durable.
uint64_t Pool::CountDigest(const Slots& retired) const {
  uint64_t digest = 0;
  for (const std::vector<SlotBlock>& blocks : blocks_) {
    for (const SlotBlock& block : blocks) {
      for (const SlotMeta* meta = block.metas; meta < block.metas + layout_.block_rows(); ++meta) {
        if (meta->state != 0 && !IsTombstone(meta->state)) digest += SlotDigest(meta->key, meta->state);
      }
    }
  }
  const auto leave_out = [&](const Slots& slots) {
    for (uint32_t i = 0; i < spec_.shards; ++i) {
      for (const uint32_t number : slots[i]) {
        const SlotMeta* meta = MetaOf(i, number);
        if (meta->state != 0 && !IsTombstone(meta->state)) digest -= SlotDigest(meta->key, meta->state);
      }
    }
  };
  leave_out(retired);
  for (const auto& [epoch, slots] : retired_) leave_out(slots);
  return digest;
}

// A checkpoint in files that the next process does not find is none.
void Pool::RequirePresent() const {
  medium_->RequirePresent(super_);
  std::vector<Region> regions;
  {
    const std::lock_guard<std::mutex> lock(segments_mutex_);
    regions.reserve(segments_.size());
    for (const Segment& segment : segments_) regions.push_back(segment.region);
  }
  for (const Region& region : regions) medium_->RequirePresent(region);
}

void Pool::Commit(std::vector<KeptCheckpoint> kept) {
  SuperCopy copy;
  copy.sequence = sequence_ + 1;
  {
    const std::lock_guard<std::mutex> lock(segments_mutex_);
    copy.segments = segments_.size();
  }
  copy.kept = kept;
  const std::vector<uint64_t> words = EncodeSuperCopy(copy);
  auto* at = reinterpret_cast<uint64_t*>(super_.data + kSuperTextBytes + copy.sequence % 2 * kPoolPage);
  // A copy that was interrupted here before, with the same sequence, may lack a single word on the medium,
  // and be whole once we store it: its checksum goes first.
  flusher_->Store(at, 0);
  flusher_->Flush(at, sizeof(uint64_t));
  flusher_->Fence();
  for (size_t i = 0; i < words.size(); ++i) flusher_->Store(at + i, words[i]);
  flusher_->Flush(at, words.size() * sizeof(uint64_t));
  flusher_->Fence();
  sequence_ = copy.sequence;
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  kept_ = std::move(kept);
}

// Gives back the slots that no kept checkpoint needs: one that was retired in epoch e is part of checkpoints
// before e only. The tombstones of e go after it, since an erased row without its tombstone would be back.
void Pool::Recycle() {
  if (kept_.empty()) return;
  const uint64_t oldest = kept_.front().epoch;
  for (std::map<uint64_t, Slots>* lists : {&retired_, &tombstones_}) {
    const auto end = lists->upper_bound(oldest);
    for (auto of_epoch = lists->begin(); of_epoch != end; ++of_epoch) Invalidate(of_epoch->second);
    flusher_->Fence();
  }
  for (std::map<uint64_t, Slots>* lists : {&retired_, &tombstones_}) {
    const auto end = lists->upper_bound(oldest);
    for (auto of_epoch = lists->begin(); of_epoch != end; of_epoch = lists->erase(of_epoch)) {
      for (uint32_t i = 0; i < spec_.shards; ++i) shards_[i]->Give(of_epoch->second[i]);
    }
  }
}

void Pool::Invalidate(const Slots& slots) {
  MetaFlusher metas(flusher_.get());
  for (uint32_t i = 0; i < spec_.shards; ++i) {
    for (const uint32_t number : slots[i]) metas.Store(MetaOf(i, number), 0);
  }
  metas.Flush();
}

void Pool::Verify(uint32_t shard, const std::vector<uint32_t>& numbers) const {
  for (const uint32_t number : numbers) {
    const SlotMeta* meta = MetaOf(shard, number);
    const std::byte* row = RowOf(shard, number);
    if (meta->state == SlotState(EpochOf(meta->state), meta->key, row, layout_.row_bytes)) continue;
    for (const Segment& segment : segments_) {
      if (row < segment.region.data || row >= segment.region.data + segment.region.size) continue;
      Damaged(segment.region.name,
              "the checksum of the row of key " + std::to_string(meta->key) + " is wrong");
    }
  }
}

void Pool::Report(Damage::Kind kind, Key key, const std::byte* row) noexcept {
  if (!spec_.damage) return;
  try {
    std::string where;
    {
      const std::lock_guard<std::mutex> lock(segments_mutex_);
      for (const Segment& segment : segments_) {
        if (row < segment.region.data || row >= segment.region.data + segment.region.size) continue;
        where = "at byte " + std::to_string(row - segment.region.data) + " of " + segment.region.path;
      }
    }
    const std::string what = spec_.led() ? "what the admission filter counted under key " : "the row of key ";
    spec_.damage->Report(kind, what + std::to_string(key), where);
  } catch (const std::bad_alloc&) {
    spec_.damage->Report(kind, {}, {});
  }
}

}  // namespace oe
