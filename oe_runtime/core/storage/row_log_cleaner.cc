// How a log gives room back: the rows that are live move out of segments that are mostly dead.
#include <algorithm>
#include <limits>
#include <new>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/storage/row_log.h"

namespace oe {
namespace {

constexpr uint64_t kLeastBudget = 2;  // segments that the cleaner may fill at once, whatever is reserved
constexpr size_t kMostVictims = 32;   // at once

}  // namespace

bool RowLog::Clean() {
  const std::lock_guard<std::mutex> lock(commit_mutex_);
  return CleanLocked(Effort::kMost);
}

bool RowLog::CleanLocked(Effort effort) {
  const std::vector<uint32_t> victims = Victims(effort);
  bool empty = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    empty = std::any_of(segments_.begin(), segments_.end(), [](const Segment& segment) {
      return segment.state == State::kFull && segment.live == 0 && segment.tombstones == 0;
    });
  }
  if (victims.empty() && !empty) return false;
  for (const uint32_t victim : victims) Evacuate(victim);
  CommitLocked(std::nullopt);
  return true;
}

// The room in rows that the cleaner needs for what it moves out of a segment.
uint64_t RowLog::RowsToMove(const Segment& segment) const {
  const uint64_t tombstones = segment.tombstones * sizeof(LogEntry) * segment_rows_ / spec_.segment_bytes;
  return std::min<uint64_t>(segment_rows_, segment.live + tombstones);
}

// The segment to be moved for the tombstones' sake, whatever garbage it has: with more of them than rows, the
// one that has been in use for longest of those that can be free. Each tombstone waits for all that were in
// use before it, and where nobody writes no garbage arises. kNoRow: there are few tombstones, or they wait
// for a segment that cannot be free.
uint32_t RowLog::HoldsTombstones() const {
  if (tombstones_.size() <= segment_rows_ + rows_live_) return kNoRow;
  uint32_t oldest = kNoRow;
  uint64_t bad = UINT64_MAX;  // the first use
  for (uint32_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = segments_[i];
    if (segment.state == State::kBad && segment.live > 0) bad = std::min(bad, segment.use);
    if (segment.state != State::kFull || segment.unwritten > 0) continue;
    if (segment.live == 0 && segment.tombstones == 0) continue;  // free with the next commit
    if (oldest == kNoRow || segment.use < segments_[oldest].use) oldest = i;
  }
  return oldest != kNoRow && segments_[oldest].use < bad ? oldest : kNoRow;
}

// Segments whose rows are to be moved, the best first: those that have much garbage, and old ones, since what
// is still live there will stay so (Rosenblum and Ousterhout, 1992). Before them, what tombstones wait for.
std::vector<uint32_t> RowLog::Victims(Effort effort) {
  const std::lock_guard<std::mutex> lock(mutex_);
  RequireHealthy();
  const uint32_t least = segment_rows_ / (effort == Effort::kMost ? 16 : 4);
  std::vector<std::pair<double, uint32_t>> found;
  for (uint32_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = segments_[i];
    if (segment.state != State::kFull || segment.unwritten > 0) continue;
    if (segment.live == 0 && segment.tombstones == 0) continue;  // free with the next commit
    if (RowsToMove(segment) + least >= segment_rows_) continue;
    const double used = static_cast<double>(RowsToMove(segment)) / segment_rows_;
    // Of those from before a recovery, which leaves uses out, nobody knows how old they are.
    const auto age = static_cast<double>(std::min(last_use_ - segment.use + 1, 4 * segments_.size()));
    found.emplace_back(-(1 - used) / (1 + used) * age, i);
  }
  const uint32_t oldest = HoldsTombstones();
  if (oldest != kNoRow) {
    const auto is_oldest = [&](const auto& one) { return one.second == oldest; };
    found.erase(std::remove_if(found.begin(), found.end(), is_oldest), found.end());
    found.emplace_back(-std::numeric_limits<double>::infinity(), oldest);
  }
  std::sort(found.begin(), found.end());
  const uint64_t reserved = (reserved_ + segment_rows_ - 1) / segment_rows_ + 1;
  const uint64_t spare = free_.size() > reserved ? free_.size() - reserved : 0;
  uint64_t budget = std::max<uint64_t>(kLeastBudget, spare);
  budget = std::min<uint64_t>(budget, free_.size()) * segment_rows_ * 3 / 4;
  std::vector<uint32_t> victims;
  uint64_t rows = 0;
  uint64_t garbage = 0;
  const uint64_t wanted = std::max<uint64_t>(2, segments_.size() / 64) * segment_rows_;
  for (const auto& [score, i] : found) {
    if (victims.size() == kMostVictims || garbage >= wanted) break;
    const uint64_t moving = RowsToMove(segments_[i]);
    if (rows + moving > budget) continue;
    rows += moving;
    garbage += segment_rows_ - moving;
    segments_[i].state = State::kCleaning;
    victims.push_back(i);
  }
  return victims;
}

// Moves what is needed out of a segment. What cannot be read stays there, and the segment with it.
void RowLog::Evacuate(uint32_t victim) {
  SegmentExtent extent;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    extent = Written(victim);
  }
  const uint32_t used = extent.blocks;
  const BlockBuffer buffer(used * kBlockBytes);
  SegmentChunks chunks(*this, extent, buffer.data(),
                       ReadBlocks(OffsetOf(FirstBlock(victim)), used, buffer.data()));
  bool unreadable = false;
  while (chunks.Next()) {
    if (!MoveRows(&chunks)) unreadable = true;
    MoveTombstones(victim, chunks.chunk());
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  segments_[victim].state = unreadable || chunks.passed() < used ? State::kBad : State::kFull;
}

// Those of the chunk. False if a row that is needed cannot be read.
bool RowLog::MoveRows(SegmentChunks* chunks) {
  std::vector<uint32_t> live;  // numbers in the chunk
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (uint32_t row = 0; row < chunks->chunk().rows.size(); ++row) {
      if (IsLive(chunks->slot(row))) live.push_back(row);
    }
  }
  bool all = true;
  for (const uint32_t row : live) {
    const uint32_t slot = chunks->slot(row);
    const LogEntry& entry = chunks->chunk().rows[row];
    const std::byte* const content = chunks->row(row);
    if (content == nullptr) {
      all = false;
      if (spec_.damaged) spec_.damaged(entry.key, slot);
      continue;
    }
    const std::function<uint32_t()> move = [&] { return Move(slot, entry, content); };
    spec_.relocate(entry.key, slot, move);
  }
  return all;
}

// The new slot of a row that is still live, or kNoRow.
uint32_t RowLog::Move(uint32_t slot, const LogEntry& entry, const std::byte* row) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!IsLive(slot)) return kNoRow;
  uint32_t moved = kNoRow;
  try {
    moved = AppendTo(&streams_[kCleaner], entry.key, entry.lsn, row);
    if (moved == kNoRow) return kNoRow;
    retired_.Move(slot, moved);
  } catch (const std::bad_alloc&) {
    if (moved != kNoRow) Kill(moved);  // a second copy of an entry that stays
    return kNoRow;
  }
  ++moved_;
  if (appended_now_.Has(slot, static_cast<uint32_t>(epoch_))) {
    appended_now_.Set(moved, static_cast<uint32_t>(epoch_));
  } else {
    appended_now_.Clear(moved);
  }
  Kill(slot);
  return moved;
}

void RowLog::MoveTombstones(uint32_t victim, const Chunk& chunk) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const LogEntry& entry : chunk.tombstones) {
    const auto found = tombstones_.find(entry.lsn);
    if (found == tombstones_.end() || found->second.segment != victim) continue;
    const Tombstone tombstone = found->second;
    if (!AppendTombstoneTo(&streams_[kCleaner], entry.key, entry.lsn, tombstone)) return;
    --segments_[victim].tombstones;
  }
}

}  // namespace oe
