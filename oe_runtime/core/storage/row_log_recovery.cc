// What a log finds on its device.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/storage/row_log.h"

namespace oe {
namespace {

constexpr size_t kHeadersAtOnce = 64;  // segments whose headers are read together

// Whether all of a chunk's header is in the buffer.
bool IsChunk(const BlockBuffer& header) {
  const uint32_t blocks = ChunkHeaderBlocks(header.data());
  return blocks > 0 && blocks * kBlockBytes <= header.size();
}

// Takes a superblock back to the kept checkpoint `id`, or without one to the newest, and returns that one.
// The epochs after it are discarded.
KeptCheckpoint GoBack(std::optional<uint64_t> id, const std::string& table, RowLogSuper* super) {
  std::string ids;
  for (const KeptCheckpoint& one : super->kept) ids += (ids.empty() ? "" : ", ") + std::to_string(one.id);
  const auto has = [&](const KeptCheckpoint& one) { return !id || one.id == *id; };
  while (!super->kept.empty() && !has(super->kept.back())) super->kept.pop_back();
  if (super->kept.empty() && id) {
    throw StorageError("the pool of table '" + table + "' has no checkpoint " + std::to_string(*id) +
                       "; it has " + (ids.empty() ? "none" : ids));
  }
  const KeptCheckpoint chosen = super->kept.empty() ? KeptCheckpoint{} : super->kept.back();
  std::vector<EpochRange>& discarded = super->discarded;
  if (super->kept.empty()) {
    // Nothing counts; the next commit says that all segments are free.
    std::fill(super->extents.begin(), super->extents.end(), 0);
    discarded.clear();
  } else if (!discarded.empty() && discarded.back().last + 1 > chosen.epoch) {
    discarded.back().first = std::min(discarded.back().first, chosen.epoch + 1);
    discarded.back().last = super->epoch;
  } else {
    discarded.push_back({chosen.epoch + 1, super->epoch});
  }
  // An older checkpoint may lie before several of them.
  while (discarded.size() > 1 && discarded[discarded.size() - 2].last >= discarded.back().first) {
    EpochRange& one = discarded[discarded.size() - 2];
    one = {std::min(one.first, discarded.back().first), discarded.back().last};
    discarded.pop_back();
  }
  return chosen;
}

// By a recovery. What was written since the commit lies there still, in as many segments as there are at
// most, each of one use more. Where segments that are taken later had these uses again, such a chunk would
// pass for one that the drive has lost, and what the crash undid would count as the checkpoint. So they have
// others, in their lowest bits too (RowLogSuper::uses), and most probably even if the superblock of the
// recovery is lost before a second crash.
uint64_t UsesLeftOut(uint64_t segments) {
  return 65536 + segments + uint64_t{16} * (std::random_device{}() % 1024);
}

std::string HeaderText(uint64_t offset) { return "the header at byte " + std::to_string(offset); }

}  // namespace

// The entries that count, as they are found.
struct RowLog::Scan {
  uint64_t epoch = 0;  // of the checkpoint; later ones never happened
  std::vector<EpochRange> discarded;
  std::vector<bool> met;  // whether a range of these has entries
  std::function<Index*(Key)> index_of;

  std::vector<Segment> segments;
  std::vector<uint32_t> sums;
  std::vector<uint64_t> lsns;   // of the entries that slots have
  std::vector<uint32_t> facts;  // of their rows
  struct Loser {
    uint32_t slot;
    uint64_t epoch;  // of an entry that superseded it
  };
  std::vector<Loser> losers;
  std::unordered_map<Key, uint64_t> erased;  // the greatest LSN of a tombstone
  std::unordered_map<uint64_t, Tombstone> tombstones;
  std::vector<std::pair<uint64_t, BlockBuffer>> repaired;  // headers, and where they are
  uint64_t rows = 0;
  uint64_t digest = 0;
  std::vector<uint64_t> live;  // slots, as bits
  uint64_t rows_live = 0;

  void FindLive(const RowLog& log, const RowLogSuper& super, RetiredSlots* retired);
  std::vector<uint32_t> FreeSegments(RowLogSuper* super);

  void Resize(const RowLog& log, uint64_t count) {
    segments.resize(count);
    sums.resize(count * log.segment_blocks_);
    lsns.resize(count * log.segment_blocks_ * log.block_rows_);
    facts.resize(lsns.size() * log.spec_.fact_words);
  }
  void MoveTo(RowLog* log) {
    log->segments_ = std::move(segments);
    log->sums_ = std::move(sums);
    log->live_ = std::move(live);
    log->facts_ = std::move(facts);
    log->rows_live_ = rows_live;
    log->tombstones_ = std::move(tombstones);
  }

  // Where the next header of a segment is.
  struct Cursor {
    uint32_t segment = 0;
    uint32_t place = 0;
    uint32_t header_blocks = 0;
    BlockBuffer header;
  };
  void Decode(const RowLog& log, const RowLogSuper& super, const Cursor& cursor, Chunk* chunk);
  void Add(const RowLog& log, const Chunk& chunk, uint32_t segment, uint32_t first);

  bool Counts(uint64_t lsn) {
    const uint64_t of = LsnEpoch(lsn);
    const auto range =
        std::lower_bound(discarded.begin(), discarded.end(), of,
                         [](const EpochRange& one, uint64_t wanted) { return one.last < wanted; });
    if (range != discarded.end() && range->first <= of) {
      met[static_cast<size_t>(range - discarded.begin())] = true;
      return false;
    }
    return of <= epoch;
  }

  void AddRow(const LogEntry& entry, uint32_t slot) {
    lsns[slot] = entry.lsn;
    const auto tombstone = erased.find(entry.key);
    if (tombstone != erased.end() && tombstone->second > entry.lsn) {
      losers.push_back({slot, LsnEpoch(tombstone->second)});
      return;
    }
    Index* const index = index_of(entry.key);
    uint32_t other = kNoRow;
    index->Find(&entry.key, 1, &other);
    if (other == kNoRow) {
      index->Reserve(entry.key);
      index->Add(entry.key, slot);
      ++rows;
      digest += KeyDigest(entry.key);
    } else if (lsns[other] < entry.lsn) {
      index->Set(entry.key, slot);
      losers.push_back({other, LsnEpoch(entry.lsn)});
    } else if (lsns[other] > entry.lsn) {
      losers.push_back({slot, LsnEpoch(lsns[other])});
    } else {
      lsns[slot] = 0;  // the same entry again: the cleaner had moved it
    }
  }

  void AddTombstone(const LogEntry& entry, uint32_t segment) {
    Tombstone tombstone;
    tombstone.segment = segment;
    tombstone.epoch = LsnEpoch(entry.lsn);
    if (!tombstones.emplace(entry.lsn, tombstone).second) return;  // the same again
    ++segments[segment].tombstones;
    uint64_t& greatest = erased[entry.key];
    greatest = std::max(greatest, entry.lsn);
    Index* const index = index_of(entry.key);
    uint32_t slot = kNoRow;
    index->Find(&entry.key, 1, &slot);
    if (slot == kNoRow || lsns[slot] > entry.lsn) return;
    index->Erase(entry.key);
    losers.push_back({slot, LsnEpoch(entry.lsn)});
    --rows;
    digest -= KeyDigest(entry.key);
  }
};

// The newer copy, or nullopt without any. Where the other one is damaged or cannot be read, that may have
// been newer. What is written after it, as by a process that goes on, shows in chunks of other uses.
// `repair`: a bit that flipped is corrected.
std::optional<RowLogSuper> RowLog::ReadSuper(bool repair, std::vector<SuperDamage>* damaged) const {
  std::optional<RowLogSuper> newest;
  if (device_->size() < 2 * spec_.super_bytes) return newest;
  std::optional<uint64_t> blank;
  int unread = 0;
  for (uint64_t copy = 0; copy < 2; ++copy) {
    const uint64_t offset = copy * spec_.super_bytes;
    BlockBuffer buffer(kBlockBytes);
    bool readable = !ReadBlocks(offset, 1, buffer.data());
    uint64_t bytes = readable ? RowLogSuperBytes(buffer.data(), spec_.super_bytes) : 0;
    if (bytes > 0) {
      buffer = BlockBuffer(bytes);
      readable = !ReadBlocks(offset, static_cast<uint32_t>(buffer.size() / kBlockBytes), buffer.data());
    }
    RowLogSuper super;
    bool decoded = readable && bytes > 0 && DecodeRowLogSuper(buffer.data(), bytes, &super);
    const bool is_blank = readable && std::all_of(buffer.data(), buffer.data() + kBlockBytes,
                                                  [](std::byte one) { return one == std::byte{0}; });
    if (is_blank) blank = offset;
    if (!decoded && repair && !is_blank) {
      buffer = BlockBuffer(spec_.super_bytes);
      readable = !ReadBlocks(offset, static_cast<uint32_t>(spec_.super_bytes / kBlockBytes), buffer.data());
      bytes = readable ? RepairRowLogSuper(buffer.data(), buffer.size()) : 0;
      decoded = bytes > 0 && DecodeRowLogSuper(buffer.data(), bytes, &super);
      if (damaged != nullptr) {
        damaged->push_back({offset, decoded ? Damage::Kind::kRepaired : Damage::Kind::kReplaced});
      }
    }
    unread += readable ? 0 : 1;
    if (decoded && (!newest || super.sequence > newest->sequence)) newest = std::move(super);
  }
  // A log has one copy only until its first commit.
  if (blank && newest && newest->sequence > 0 && damaged != nullptr) {
    damaged->push_back({*blank, Damage::Kind::kReplaced});
  }
  if (!newest && unread > 0) {
    RequireBadBlocks(EIO);
    Damaged("neither copy of its superblock can be read");
  }
  return newest;
}

// The chunk whose header was read; one with a bit that flipped is corrected. Throws StorageError unless it is
// the one that the superblock means.
void RowLog::Scan::Decode(const RowLog& log, const RowLogSuper& super, const Cursor& cursor, Chunk* chunk) {
  const uint64_t offset = log.OffsetOf(log.FirstBlock(cursor.segment) + cursor.place);
  const auto refuse = [&](const std::string& what) { log.Damaged(HeaderText(offset) + what); };
  if (!IsChunk(cursor.header) || !DecodeChunk(cursor.header.data(), chunk)) {
    const uint32_t left = super.extents[cursor.segment] - cursor.place;
    BlockBuffer rest(left * kBlockBytes);
    (void)log.ReadBlocks(offset, left, rest.data());
    const size_t bytes = RepairChunk(rest.data(), rest.size());
    if (bytes == 0 || !DecodeChunk(rest.data(), chunk)) {
      refuse(" has a wrong checksum, and more than one bit is wrong");
    }
    repaired.emplace_back(offset, BlockBuffer(bytes));
    std::memcpy(repaired.back().second.data(), rest.data(), bytes);
  }
  if (chunk->uuid != super.uuid || chunk->place != cursor.place || chunk->use > super.use ||
      (cursor.place > 0 && chunk->use != segments[cursor.segment].use) ||
      chunk->place + chunk->blocks > super.extents[cursor.segment]) {
    refuse(" is of another time than the superblock");
  }
  if (!super.uses.empty() && static_cast<uint16_t>(chunk->use) != super.uses[cursor.segment]) {
    refuse(
        " is of another time than the superblock: the drive lost writes, or a part of the file is of an "
        "older "
        "copy");
  }
  if (chunk->fact_words != log.spec_.fact_words) {
    refuse(" has " + std::to_string(chunk->fact_words) + " facts of each row, not " +
           std::to_string(log.spec_.fact_words));
  }
}

// The entries of a chunk whose rows begin at block `first`.
void RowLog::Scan::Add(const RowLog& log, const Chunk& chunk, uint32_t segment, uint32_t first) {
  segments[segment].use = chunk.use;
  std::copy(chunk.sums.begin(), chunk.sums.end(), sums.begin() + first);
  const size_t words = chunk.fact_words;
  for (uint32_t row = 0; row < chunk.rows.size(); ++row) {
    if (!Counts(chunk.rows[row].lsn)) continue;
    const uint32_t slot = log.SlotAt(first, row);
    AddRow(chunk.rows[row], slot);
    std::copy_n(chunk.facts.data() + row * words, words, facts.data() + slot * words);
  }
  for (const LogEntry& entry : chunk.tombstones) {
    if (Counts(entry.lsn)) AddTombstone(entry, segment);
  }
}

// Live are the slots of the rows, and those that an older checkpoint may need.
void RowLog::Scan::FindLive(const RowLog& log, const RowLogSuper& super, RetiredSlots* retired) {
  const uint64_t oldest = super.kept.empty() ? 0 : super.kept.front().epoch;
  uint64_t latest = 0;
  for (const Loser& loser : losers) {
    if (loser.epoch > oldest) {
      retired->Add(loser.slot, loser.epoch);
      latest = std::max(latest, loser.epoch);
    } else {
      lsns[loser.slot] = 0;
    }
  }
  live.resize((lsns.size() + 63) / 64);
  for (uint64_t slot = 0; slot < lsns.size(); ++slot) {
    if (lsns[slot] == 0) continue;
    live[slot / 64] |= uint64_t{1} << slot % 64;
    ++segments[log.SegmentOf(static_cast<uint32_t>(slot))].live;
    ++rows_live;
  }
  std::vector<uint64_t>().swap(lsns);
  // A version may stay longer than it is needed, as it is not known what superseded it first. So long a
  // tombstone hides it.
  for (auto& [lsn, tombstone] : tombstones) {
    tombstone.epoch = std::max(tombstone.epoch, latest);
    if (tombstone.epoch <= oldest) tombstone.barrier = super.use;
  }
}

// Says in the superblock which segments are used, and which of the discarded epochs have entries. Returns the
// segments that are free.
std::vector<uint32_t> RowLog::Scan::FreeSegments(RowLogSuper* super) {
  std::vector<uint32_t> free;
  for (auto i = static_cast<uint32_t>(segments.size()); i > 0; --i) {
    Segment& segment = segments[i - 1];
    if (segment.live == 0 && segment.tombstones == 0) super->extents[i - 1] = 0;
    segment.blocks = super->extents[i - 1];
    if (!super->uses.empty()) super->uses[i - 1] = static_cast<uint16_t>(segment.use);
    segment.state = segment.blocks > 0 ? State::kFull : State::kFree;
    if (segment.blocks == 0) free.push_back(i - 1);
  }
  super->discarded.clear();
  for (size_t i = 0; i < discarded.size(); ++i) {
    if (met[i]) super->discarded.push_back(discarded[i]);
  }
  return free;
}

// The headers of all chunks, those of many segments at once.
void RowLog::ScanSegments(const RowLogSuper& super, Scan* scan) const {
  using Cursor = Scan::Cursor;
  std::vector<Cursor> cursors;
  std::vector<BlockRead> reads;
  const std::unique_ptr<ReadQueue> queue = device_->NewQueue();  // after the memory that it reads into
  uint32_t next = 0;
  Chunk chunk;
  while (true) {
    cursors.erase(std::remove_if(cursors.begin(), cursors.end(),
                                 [&](const Cursor& one) { return one.place == super.extents[one.segment]; }),
                  cursors.end());
    for (; next < super.extents.size() && cursors.size() < kHeadersAtOnce; ++next) {
      if (super.extents[next] == 0) continue;
      cursors.emplace_back();
      cursors.back().segment = next;
    }
    if (cursors.empty()) return;
    // First a block of each, then what more it has.
    reads.assign(cursors.size(), {});
    for (size_t i = 0; i < cursors.size(); ++i) {
      cursors[i].header = BlockBuffer(kBlockBytes);
      reads[i].offset = OffsetOf(FirstBlock(cursors[i].segment) + cursors[i].place);
      reads[i].into = cursors[i].header.data();
      reads[i].bytes = kBlockBytes;
    }
    const auto read_all = [&] {
      queue->Submit(reads.data(), reads.size());
      queue->Wait();
      ReadAgain(queue.get(), reads.data(), reads.size());
      for (size_t i = 0; i < reads.size(); ++i) {
        if (reads[i].error != 0) {
          RequireBadBlocks(reads[i].error);
          Damaged(HeaderText(OffsetOf(FirstBlock(cursors[i].segment) + cursors[i].place)) +
                  " cannot be read (" + std::strerror(reads[i].error) + ")");
        }
      }
    };
    read_all();
    for (size_t i = 0; i < cursors.size(); ++i) {
      Cursor& cursor = cursors[i];
      cursor.header_blocks = ChunkHeaderBlocks(cursor.header.data());
      // One that is none may have a bit that flipped, see below.
      if (cursor.place + cursor.header_blocks > super.extents[cursor.segment]) cursor.header_blocks = 0;
      cursor.header_blocks = std::max(cursor.header_blocks, 1U);
      cursor.header = BlockBuffer(cursor.header_blocks * kBlockBytes);
      reads[i] = BlockRead{};
      reads[i].offset = OffsetOf(FirstBlock(cursor.segment) + cursor.place);
      reads[i].into = cursor.header.data();
      reads[i].bytes = static_cast<uint32_t>(cursor.header.size());
    }
    read_all();
    for (Cursor& cursor : cursors) {
      scan->Decode(*this, super, cursor, &chunk);
      scan->Add(*this, chunk, cursor.segment,
                FirstBlock(cursor.segment) + cursor.place + chunk.header_blocks);
      cursor.place += chunk.blocks;
    }
  }
}

// As if the log had just been opened.
void RowLog::Reset() {
  segments_.clear();
  free_.clear();
  sums_.clear();
  live_.clear();
  facts_.clear();
  rows_live_ = 0;
  appended_now_ = EpochMarks();
  retired_ = RetiredSlots(segment_blocks_ * block_rows_);
  tombstones_.clear();
  for (Stream& stream : streams_) stream = Stream();
  resident_.clear();
  unwritten_.clear();
  number_ = 0;
  claimed_ = 0;
  device_full_ = false;
}

std::optional<RowLogSuper> RowLog::Peek(BlockDevice* device, const RowLogSpec& spec) {
  return RowLog(device, spec).ReadSuper(false);
}

// A chunk that is being written must not come later than what is written next to its place.
void RowLog::AwaitWrites() {
  std::unique_lock<std::mutex> lock(mutex_);
  RequireHealthy();
  written_.wait(lock, [&] {
    return std::none_of(unwritten_.begin(), unwritten_.end(),
                        [](const auto& one) { return one.second->writing; });
  });
  RequireHealthy();
}

void RowLog::ReportRepairs(const std::vector<SuperDamage>& supers, const Scan& scan) const {
  if (!spec_.damage) return;
  const auto report = [&](Damage::Kind kind, const std::string& what, uint64_t offset) {
    spec_.damage->Report(kind, what, "at byte " + std::to_string(offset) + " of " + spec_.where);
  };
  for (const SuperDamage& one : supers) report(one.kind, "a copy of the superblock", one.offset);
  for (const auto& [offset, header] : scan.repaired) {
    report(Damage::Kind::kRepaired, "the header of some rows", offset);
  }
}

KeptCheckpoint RowLog::Recover(std::optional<uint64_t> id, const std::function<Index*(Key)>& index_of,
                               const std::function<void()>& before) {
  const std::lock_guard<std::mutex> commit_lock(commit_mutex_);
  AwaitWrites();
  std::vector<SuperDamage> damaged_supers;
  const std::optional<RowLogSuper> there = ReadSuper(true, &damaged_supers);
  if (!there) Damaged("both copies of its superblock are gone");
  RowLogSuper next = *there;
  const KeptCheckpoint chosen = GoBack(id, spec_.table, &next);

  // The device may have grown since the commit, and more is used then.
  const uint64_t segments = std::max<uint64_t>(
      next.extents.size(),
      device_->size() < OffsetOf(0) ? 0 : (device_->size() - OffsetOf(0)) / spec_.segment_bytes);
  if (device_->size() < OffsetOf(next.extents.size() * segment_blocks_)) {
    Damaged("it is truncated to " + std::to_string(device_->size()) + " bytes");
  }
  next.extents.resize(segments, 0);
  if (next.format > 1) next.uses.resize(segments, 0);
  Scan scan;
  scan.epoch = chosen.epoch;
  scan.discarded = next.discarded;
  scan.met.assign(scan.discarded.size(), false);
  scan.index_of = index_of;
  scan.Resize(*this, segments);
  ScanSegments(next, &scan);
  if (scan.rows != chosen.rows || scan.digest != chosen.digest) {
    Damaged("checkpoint " + std::to_string(chosen.id) + " has " + std::to_string(scan.rows) + " rows of " +
            std::to_string(chosen.rows) + (scan.rows == chosen.rows ? ", but not the same" : ""));
  }

  if (before) before();

  RetiredSlots retired(segment_blocks_ * block_rows_);
  scan.FindLive(*this, next, &retired);
  std::vector<uint32_t> free = scan.FreeSegments(&next);
  ++next.sequence;
  next.use += UsesLeftOut(segments);
  ++next.epoch;
  if (next.epoch > kLastLsnEpoch) {
    throw StorageError("table '" + spec_.table +
                       "': its log has no more epochs; save the table to a file and restore it");
  }
  try {
    // Again as it was written: a part of that is the same as what is there.
    for (const auto& [offset, header] : scan.repaired) device_->Write(offset, header.data(), header.size());
    device_->Flush();  // what a process that was killed had written may be durable only now
    WriteSuper(next);
  } catch (const StorageError& error) {
    Fail(error.what());
    throw StorageError(failure());
  }

  ReportRepairs(damaged_supers, scan);

  // What counted so far is thrown away only here.
  const std::lock_guard<std::mutex> lock(mutex_);
  Reset();
  AddSegments(segments);
  scan.MoveTo(this);
  free_ = std::move(free);
  retired_ = std::move(retired);
  last_use_ = next.use;
  epoch_ = next.epoch;
  super_ = std::move(next);
  return chosen;
}

}  // namespace oe
