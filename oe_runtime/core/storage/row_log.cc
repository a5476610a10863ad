#include "oe_runtime/core/storage/row_log.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <random>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/storage/row_store.h"
#include "oe_runtime/core/storage/slot_store.h"

namespace oe {
namespace {

constexpr uint64_t kCleanerSegments = 2;    // that appends leave to the cleaner
constexpr uint64_t kWriteBackSegments = 4;  // that pushes leave to checkpoints
constexpr uint64_t kLeastSegments = 8;      // that the log has at least, if the device has room
// Without that, a recovery would bring the row back.
constexpr const char* kNoTombstone =
    "the log has no room to note that a row is gone; save the table to a file and restore it";
constexpr uint64_t kPartForPushes = 72;  // of the rows
constexpr uint64_t kMostGrowth = 256;    // segments at once
constexpr size_t kMostUnwritten = 16;    // full chunks, beyond which Reserve() writes them
constexpr int kMostAttempts = 64;        // to make room
constexpr uint64_t kReserveWindow = 16;  // segments that are begun; see IsLow()
constexpr int kMostInVain = 2;           // cleanings in turn, beyond which the log takes more space

// Of `most` segments, those that only write-backs and cleaning may fill.
uint64_t KeptSegments(uint64_t most) { return std::min(most, kCleanerSegments + kWriteBackSegments + 2); }

}  // namespace

RowLog::RowLog(BlockDevice* device, const RowLogSpec& spec) : device_(device), spec_(spec) { SetLayout(); }

RowLog::~RowLog() = default;

void RowLog::SetLayout() {
  if (spec_.row_bytes == 0 || spec_.segment_bytes % kBlockBytes != 0 ||
      spec_.super_bytes % kBlockBytes != 0 || spec_.segment_bytes / kBlockBytes > UINT16_MAX) {
    throw SpecError("table '" + spec_.table + "': a log cannot have segments of " +
                    BytesText(spec_.segment_bytes) + " with rows of " + BytesText(spec_.row_bytes));
  }
  segment_blocks_ = static_cast<uint32_t>(spec_.segment_bytes / kBlockBytes);
  block_rows_ = static_cast<uint32_t>(std::max<size_t>(1, kBlockBytes / spec_.row_bytes));
  row_blocks_ = static_cast<uint32_t>((spec_.row_bytes + kBlockBytes - 1) / kBlockBytes);
  const auto whole =
      static_cast<uint32_t>(std::min<size_t>(spec_.chunk_bytes / kBlockBytes, segment_blocks_));
  chunk_row_blocks_ = 0;
  for (uint32_t blocks = row_blocks_; blocks < whole; blocks += row_blocks_) {
    if (HeaderFor(blocks) + blocks <= whole) chunk_row_blocks_ = blocks;
  }
  if (chunk_row_blocks_ == 0) {
    throw SpecError("table '" + spec_.table + "': rows of " + BytesText(spec_.row_bytes) +
                    " are too large for chunks of " + BytesText(spec_.chunk_bytes));
  }
  segment_rows_ = 0;
  for (uint32_t used = 0;;) {
    const uint32_t blocks = RowBlocksFor(segment_blocks_ - used);
    if (blocks == 0) break;
    segment_rows_ += static_cast<uint32_t>(RowsIn(blocks));
    used += HeaderFor(blocks) + blocks;
  }
  retired_ = RetiredSlots(segment_blocks_ * block_rows_);
}

// Blocks of the header of a chunk that has room for so many blocks of rows: for their entries and, beside
// these, for some tombstones.
uint32_t RowLog::HeaderFor(uint32_t row_blocks) const {
  const uint64_t rows = RowsIn(row_blocks);
  return ChunkHeaderBlocks(rows + rows / 16 + 16, row_blocks, rows * spec_.fact_words);
}

// The most blocks of rows that a chunk in so many blocks has.
uint32_t RowLog::RowBlocksFor(uint32_t left) const {
  uint32_t blocks = std::min(chunk_row_blocks_, left / row_blocks_ * row_blocks_);
  while (blocks > 0 && HeaderFor(blocks) + blocks > left) blocks -= row_blocks_;
  return blocks;
}

std::unique_ptr<RowLog> RowLog::Create(BlockDevice* device, const RowLogSpec& spec) {
  std::random_device random;
  std::unique_ptr<RowLog> log(new RowLog(device, spec));
  RowLogSuper super;
  super.format = spec.format;
  super.uuid = uint64_t{random()} << 32 | random();
  super.segment_bytes = spec.segment_bytes;
  super.row_bytes = spec.row_bytes;
  super.identity = spec.identity;
  device->Grow(2 * spec.super_bytes);
  // What an earlier log left in the other copy must not count any more.
  const BlockBuffer nothing(kBlockBytes);
  std::memset(nothing.data(), 0, kBlockBytes);
  for (uint64_t copy = 0; copy < 2; ++copy)
    device->Write(copy * spec.super_bytes, nothing.data(), kBlockBytes);
  device->Flush();
  log->WriteSuper(super);
  log->super_ = std::move(super);
  return log;
}

std::unique_ptr<RowLog> RowLog::Open(BlockDevice* device, const RowLogSpec& spec) {
  std::unique_ptr<RowLog> log(new RowLog(device, spec));
  const std::optional<RowLogSuper> super = log->ReadSuper(true);
  if (!super) return nullptr;
  if (super->segment_bytes != spec.segment_bytes || super->row_bytes != spec.row_bytes) {
    throw StorageError(spec.where + " has rows of " + BytesText(super->row_bytes) + " in segments of " +
                       BytesText(super->segment_bytes) + ", but table '" + spec.table + "' has rows of " +
                       BytesText(spec.row_bytes) + " in segments of " + BytesText(spec.segment_bytes) +
                       "; start it as it was, or fresh (--storage-fresh)");
  }
  log->spec_.format = super->format;
  log->super_ = *super;
  return log;
}

void RowLog::Damaged(const std::string& what) const {
  throw StorageError(spec_.where + " is damaged: " + what +
                     "; move it away, or start fresh (--storage-fresh), and restore from a checkpoint");
}

void RowLog::RequireBadBlocks(int error) const {
  if (error == EBADMSG) return;
  const bool of_device = error == EIO || error == ENODATA || error == EILSEQ || error == EREMOTEIO;
  BlockBuffer block(kBlockBytes);
  // A device that gives back either copy of the superblock is there.
  if (of_device && (!ReadBlocks(0, 1, block.data()) || !ReadBlocks(spec_.super_bytes, 1, block.data())))
    return;
  throw StorageError(
      spec_.where + " cannot be read" + (of_device ? ", not even its superblock" : "") + ": " +
      std::strerror(error) +
      "; no row was given up. Check the drive (`nvme smart-log`, `dmesg`), and go on when it is back");
}

void RowLog::RefuseUnread(const std::string& what, int error) const {
  RequireBadBlocks(error);
  throw StorageError("table '" + spec_.table + "': " + what + " cannot be read from " + spec_.where + ": " +
                     std::strerror(error) +
                     "; no row was given up. Check the drive (`nvme smart-log`, `dmesg`), and go on; if the "
                     "rows stay lost, restore the table from files, or erase their keys to begin them anew");
}

void RowLog::RequireHealthy() const {
  if (!failure_.empty()) throw StorageError(failure_);
}

void RowLog::Fail(const std::string& why) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.empty()) failure_ = "table '" + spec_.table + "': " + why;
  }
  written_.notify_all();
}

std::string RowLog::failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

// Segments and room.

void RowLog::AddSegments(uint64_t count) {
  const auto before = static_cast<uint32_t>(segments_.size());
  const uint64_t after = before + count;
  const uint64_t slots = after * segment_blocks_ * block_rows_;
  segments_.resize(after);
  sums_.resize(after * segment_blocks_);
  live_.resize((slots + 63) / 64);
  facts_.resize(slots * spec_.fact_words);
  appended_now_.Grow(slots);
  for (auto segment = static_cast<uint32_t>(after); segment > before; --segment) free_.push_back(segment - 1);
}

uint64_t RowLog::MostSegments() const {
  if (device_full_) return segments_.size();
  const uint64_t by_bytes = spec_.max_bytes <= 2 * spec_.super_bytes
                                ? 0
                                : (spec_.max_bytes - 2 * spec_.super_bytes) / spec_.segment_bytes;
  const uint64_t by_number = kMostRowsOfAStore / (uint64_t{segment_blocks_} * block_rows_);
  return std::max<uint64_t>(segments_.size(), std::min({by_bytes, by_number, spec_.MostSegments()}));
}

bool RowLog::HasRoom(uint64_t rows) const {
  const uint64_t segments = (reserved_ + rows + segment_rows_ - 1) / segment_rows_ + 1;
  return free_.size() >= segments + kCleanerSegments;
}

// Rows that the log may have in `most` segments, those that are promised among them, so that enough is left
// to what must go on: cleaning, and for new rows also updates.
uint64_t RowLog::MostRows(uint64_t most, Need need) const {
  // Commits leave chunks that are not full.
  const uint64_t rows = (most - KeptSegments(most)) * segment_rows_ * 7 / 8;
  if (need != Need::kNewRows) return rows;
  // A part for the appends of pushes, and the versions that kept checkpoints will need: of as many rows as
  // they did, or of as many as are expected where no epoch has shown more. For four epochs both together are
  // what `spare` has beside the rows: as the log grows by that first, it knows whether the device has it.
  const uint64_t kept = rows - rows / kPartForPushes;
  const uint64_t retired = retired_.size();
  const uint64_t shown = (spec_.window + uint64_t{1}) * std::max(most_changed_, changed_now_);
  const uint64_t more = shown > retired ? shown - retired : 0;
  const uint64_t unseen = kept * 16 / (16 + SlotStore::Epochs(spec_.window)) + retired;
  return std::min(kept - std::min(kept, more), unseen);
}

bool RowLog::MayTake(uint64_t rows, Need need) const {
  return need == Need::kWriteBack || RowsWanted() + rows <= MostRows(MostSegments(), need);
}

RowLogRoom RowLog::room(uint64_t left) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t most = std::min(MostSegments(), segments_.size() + left / spec_.segment_bytes);
  const uint64_t wanted = RowsWanted();
  RowLogRoom room;
  room.slots = segments_.size() * segment_rows_;
  room.free = room.slots - std::min(room.slots, wanted);
  room.changed = std::max(most_changed_, changed_now_);
  const uint64_t rows = MostRows(most, Need::kNewRows);
  room.reserved = most * segment_rows_ - std::min(most * segment_rows_, rows);
  room.headroom = rows - std::min(rows, wanted);
  return room;
}

uint64_t RowLog::TargetSegments() const {
  const double wanted = static_cast<double>(RowsWanted()) / segment_rows_ * spec_.spare;
  return std::min(MostSegments(), static_cast<uint64_t>(wanted) + kLeastSegments);
}

bool RowLog::Grow(bool beyond_target) {
  uint64_t size = 0;
  uint64_t limit = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    size = segments_.size();
    limit = beyond_target ? MostSegments() : TargetSegments();
  }
  if (size >= limit) return false;
  uint64_t more = std::min(limit - size, std::clamp<uint64_t>(size / 8, 1, kMostGrowth));
  while (true) {
    try {
      device_->Grow(OffsetOf((size + more) * segment_blocks_));
      break;
    } catch (const StorageFull&) {
      if (more > 1) {
        more = 1;
        continue;
      }
      const std::lock_guard<std::mutex> lock(mutex_);
      device_full_ = true;
      return false;
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  AddSegments(more);
  return true;
}

size_t RowLog::free_segments() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return free_.size();
}

RowLog::Room RowLog::Reserve(uint64_t rows, Need need) {
  int in_vain = 0;
  for (int attempt = 0; attempt < kMostAttempts; ++attempt) {
    bool behind = false;
    bool may = false;
    bool lags = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      RequireHealthy();
      may = MayTake(rows, need);
      // New rows take the space that their updates will need with them: a device that is full is to be known
      // before it is full of rows.
      lags = attempt == 0 && need == Need::kNewRows && segments_.size() < TargetSegments();
      if (may && HasRoom(rows) && !lags) {
        behind = unwritten_.size() > kMostUnwritten;
        if (!behind) {
          reserved_ += rows;
          most_reserved_ = std::max(most_reserved_, reserved_);
          return {this, rows};
        }
      }
    }
    if (behind) {
      WriteChunks();
      continue;
    }
    if (!may) break;
    const std::lock_guard<std::mutex> lock(commit_mutex_);
    {
      const std::lock_guard<std::mutex> again(mutex_);
      if (HasRoom(rows) && !lags) continue;  // another thread has made it
    }
    if (lags) {
      (void)Grow(false);
      continue;
    }
    if (Grow(false)) continue;
    const size_t before = free_segments();
    const bool cleaned = CleanLocked(Effort::kMost);
    if (free_segments() > before) {
      in_vain = 0;
      continue;
    }
    // One that moves much may give room only with the next.
    if (cleaned && ++in_vain < kMostInVain) continue;
    in_vain = 0;
    if (!Grow(true) && !cleaned) break;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  throw StorageFull("storage " + spec_.where + " is full: table '" + spec_.table + "' needs room for " +
                    std::to_string(rows) + " rows beside the " + std::to_string(rows_live_) + " in its " +
                    BytesText(segments_.size() * spec_.segment_bytes) + ", of which kept checkpoints need " +
                    std::to_string(retired_.size()) + kMakeRoom);
}

void RowLog::GiveRoom(uint64_t rows) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    reserved_ -= rows;
  }
  given_.notify_all();
}

bool RowLog::AwaitRoom() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (reserved_ == 0) return false;
  given_.wait(lock, [this, before = reserved_] { return reserved_ < before; });
  return true;
}

uint64_t RowLog::CloseEpoch() {
  const uint64_t closed = epoch();
  if (closed >= kLastLsnEpoch) {
    throw StorageError("table '" + spec_.table + "': " + std::to_string(closed) +
                       " checkpoints are the most of a log of rows; save the table to a file and restore it");
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  epoch_ = closed + 1;
  most_changed_ = std::max(changed_now_, most_changed_ - most_changed_ / 8);
  changed_now_ = 0;
  return closed;
}

// Appends.

void RowLog::SetLive(uint32_t slot) {
  live_[slot / 64] |= uint64_t{1} << slot % 64;
  ++segments_[SegmentOf(slot)].live;
  ++rows_live_;
}

void RowLog::Kill(uint32_t slot) {
  live_[slot / 64] &= ~(uint64_t{1} << slot % 64);
  --segments_[SegmentOf(slot)].live;
  --rows_live_;
}

// The open chunk of the stream, with room for one more entry; nullptr: there is no free segment.
RowLog::Pending* RowLog::OpenChunk(Stream* stream, bool row) {
  if (stream->open) {
    const Pending& open = *stream->open;
    const size_t rows = open.chunk.rows.size();
    const size_t entries = rows + open.chunk.tombstones.size() + 1;
    const uint64_t facts = (rows + 1) * spec_.fact_words;
    const bool fits = ChunkHeaderBlocks(entries, open.row_blocks, facts) <= open.chunk.header_blocks;
    if (fits && (!row || rows < RowsIn(open.row_blocks))) return stream->open.get();
    Seal(stream);
  }
  if (stream->segment != kNoRow && RowBlocksFor(segment_blocks_ - segments_[stream->segment].blocks) == 0) {
    segments_[stream->segment].state = State::kFull;
    stream->segment = kNoRow;
  }
  if (stream->segment == kNoRow) {
    if (free_.empty()) return nullptr;
    stream->segment = free_.back();
    free_.pop_back();
    Segment& segment = segments_[stream->segment];
    segment = Segment{};
    segment.use = ++last_use_;
    segment.state = State::kOpen;
    if (segment.use % kReserveWindow == 0) {
      most_reserved_before_ = most_reserved_;
      most_reserved_ = reserved_;
    }
  }
  const Segment& segment = segments_[stream->segment];
  auto open = std::make_unique<Pending>();
  open->segment = stream->segment;
  open->row_blocks = RowBlocksFor(segment_blocks_ - segment.blocks);
  open->chunk.uuid = super_.uuid;
  open->chunk.use = segment.use;
  open->chunk.place = segment.blocks;
  open->chunk.header_blocks = HeaderFor(open->row_blocks);
  open->buffer = BlockBuffer((open->chunk.header_blocks + open->row_blocks) * kBlockBytes);
  open->chunk.rows.reserve(RowsIn(open->row_blocks));
  open->chunk.fact_words = spec_.fact_words;
  open->chunk.facts.reserve(RowsIn(open->row_blocks) * spec_.fact_words);
  resident_[FirstBlock(open->segment) + open->chunk.place + open->chunk.header_blocks] = open.get();
  stream->open = std::move(open);
  return stream->open.get();
}

// The open chunk is complete: to be written.
void RowLog::Seal(Stream* stream) {
  if (!stream->open) return;
  Pending& open = *stream->open;
  Chunk& chunk = open.chunk;
  const size_t rows = chunk.rows.size();
  const uint32_t first = FirstBlock(open.segment) + chunk.place + chunk.header_blocks;
  if (rows + chunk.tombstones.size() == 0) {
    resident_.erase(first);
    stream->open.reset();
    return;
  }
  const auto row_blocks = static_cast<uint32_t>((rows + block_rows_ - 1) / block_rows_ * row_blocks_);
  chunk.blocks = chunk.header_blocks + row_blocks;
  open.row_blocks = row_blocks;  // the next chunk begins after these
  std::byte* const begin = open.buffer.data() + chunk.header_blocks * kBlockBytes;
  for (uint32_t block = 0; block < row_blocks; ++block) {
    const uint32_t sum = BlockChecksum(begin + block * kBlockBytes);
    chunk.sums.push_back(sum);
    sums_[first + block] = sum;
  }
  EncodeChunk(chunk, open.buffer.data());
  segments_[open.segment].blocks += chunk.blocks;
  ++segments_[open.segment].unwritten;
  open.ticket = ++tickets_;
  unwritten_[open.ticket] = std::move(stream->open);
}

uint32_t RowLog::AppendTo(Stream* stream, Key key, uint64_t lsn, const std::byte* row) {
  Pending* const open = OpenChunk(stream, true);
  if (open == nullptr) return kNoRow;
  const size_t number = open->chunk.rows.size();
  std::byte* const at = open->buffer.data() +
                        (open->chunk.header_blocks + number / block_rows_ * row_blocks_) * kBlockBytes +
                        number % block_rows_ * spec_.row_bytes;
  std::memcpy(at, row, spec_.row_bytes);
  // What the last row leaves of its blocks must not be what memory held by chance.
  const size_t used = number % block_rows_ * spec_.row_bytes + spec_.row_bytes;
  if (number % block_rows_ == 0) std::memset(at + spec_.row_bytes, 0, row_blocks_ * kBlockBytes - used);
  open->chunk.rows.push_back({key, lsn});
  const uint32_t first = FirstBlock(open->segment) + open->chunk.place + open->chunk.header_blocks;
  const uint32_t slot = SlotAt(first, number);
  if (spec_.fact_words > 0) {
    uint32_t* const facts = &facts_[size_t{slot} * spec_.fact_words];
    std::memcpy(facts, row + spec_.facts_at, spec_.fact_words * sizeof(uint32_t));
    open->chunk.facts.insert(open->chunk.facts.end(), facts, facts + spec_.fact_words);
  }
  SetLive(slot);
  return slot;
}

bool RowLog::AppendTombstoneTo(Stream* stream, Key key, uint64_t lsn, Tombstone tombstone) {
  Pending* const open = OpenChunk(stream, false);
  if (open == nullptr) return false;
  open->chunk.tombstones.push_back({key, lsn});
  tombstone.segment = open->segment;
  tombstones_[lsn] = tombstone;
  ++segments_[open->segment].tombstones;
  return true;
}

uint32_t RowLog::Append(Key key, uint64_t epoch, const std::byte* row) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    const uint32_t slot = AppendTo(&streams_[kOwner], key, MakeLsn(epoch, ++number_), row);
    if (slot == kNoRow) return kNoRow;
    ++appended_;
    // A slot may have a mark of an earlier use in this epoch.
    if (epoch == epoch_) {
      appended_now_.Set(slot, static_cast<uint32_t>(epoch));
    } else {
      appended_now_.Clear(slot);
    }
    return slot;
  } catch (const std::bad_alloc&) {
    return kNoRow;
  }
}

bool RowLog::AppendTombstone(Key key, uint64_t epoch) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  try {
    Tombstone tombstone;
    tombstone.epoch = epoch;
    if (AppendTombstoneTo(&streams_[kOwner], key, MakeLsn(epoch, ++number_), tombstone)) return true;
    if (failure_.empty()) failure_ = "table '" + spec_.table + "': " + kNoTombstone;
  } catch (const std::bad_alloc&) {
    if (failure_.empty()) failure_ = "out of memory";  // short: it is no allocation
  }
  written_.notify_all();
  return false;
}

void RowLog::Supersede(uint32_t slot) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (appended_now_.Has(slot, static_cast<uint32_t>(epoch_))) return Kill(slot);
  try {
    retired_.Add(slot, epoch_);
  } catch (const std::bad_alloc&) {
    // It would stay live, and a recovery bring it back once the tombstone of its key is gone.
    if (failure_.empty()) failure_ = "out of memory";  // short: it is no allocation
    return written_.notify_all();
  }
  ++changed_now_;
}

// Reads.

void RowLog::Locate(const uint32_t* slots, size_t n, std::byte* const* into, BlockRead* reads,
                    uint8_t* copied) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < n; ++i, reads += row_blocks_) {
    const uint32_t block = BlockOf(slots[i]);
    const size_t within = slots[i] % block_rows_ * spec_.row_bytes;
    copied[i] = 0;
    auto found = resident_.upper_bound(block);
    if (found != resident_.begin()) {
      --found;
      const Pending& pending = *found->second;
      if (block < found->first + pending.row_blocks && pending.segment == block / segment_blocks_) {
        const size_t from = (pending.chunk.header_blocks + block - found->first) * kBlockBytes;
        std::memcpy(into[i], pending.buffer.data() + from + within, spec_.row_bytes);
        copied[i] = 1;
        continue;
      }
    }
    for (uint32_t part = 0; part < row_blocks_; ++part) {
      const size_t done = part * kBlockBytes;
      reads[part] = BlockRead{};
      reads[part].offset = OffsetOf(block + part) + within;
      reads[part].into = into[i] + done;
      reads[part].bytes = static_cast<uint32_t>(std::min(kBlockBytes, spec_.row_bytes - done));
      reads[part].expected = sums_[block + part];
    }
  }
}

void RowLog::CopyFacts(const uint32_t* slots, size_t n, uint32_t* into) const {
  const size_t words = spec_.fact_words;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < n; ++i) std::copy_n(facts_.data() + slots[i] * words, words, into + i * words);
}

// What of a segment is on the device. With mutex_.
SegmentExtent RowLog::Written(uint32_t segment) const {
  SegmentExtent extent;
  extent.segment = segment;
  extent.uuid = super_.uuid;
  extent.use = segments_[segment].use;
  extent.blocks = segments_[segment].state == State::kFree ? 0 : segments_[segment].blocks;
  if (segments_[segment].unwritten == 0) return extent;
  for (const auto& [ticket, pending] : unwritten_) {
    if (pending->segment == segment) extent.blocks = std::min(extent.blocks, pending->chunk.place);
  }
  return extent;
}

uint64_t RowLog::used_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  uint64_t blocks = 0;
  for (const Segment& segment : segments_) blocks += segment.state == State::kFree ? 0 : segment.blocks;
  return blocks * kBlockBytes;
}

std::optional<std::vector<bool>> RowLog::ReadBlocks(uint64_t offset, uint32_t blocks, std::byte* into) const {
  BlockRead whole;
  std::vector<BlockRead> reads;
  const std::unique_ptr<ReadQueue> queue = device_->NewQueue();  // after the memory that it reads into
  whole.offset = offset;
  whole.into = into;
  whole.bytes = static_cast<uint32_t>(blocks * kBlockBytes);
  queue->Submit(&whole, 1);
  queue->Wait();
  if (whole.error == 0) return std::nullopt;
  reads.resize(blocks);
  for (uint32_t block = 0; block < blocks; ++block) {
    reads[block].offset = offset + block * kBlockBytes;
    reads[block].into = into + block * kBlockBytes;
    reads[block].bytes = kBlockBytes;
  }
  queue->Submit(reads.data(), reads.size());
  queue->Wait();
  ReadAgain(queue.get(), reads.data(), reads.size());
  std::vector<bool> bad(blocks);
  bool any = false;
  for (uint32_t block = 0; block < blocks; ++block) {
    bad[block] = reads[block].error != 0;
    any = any || bad[block];
  }
  if (!any) return std::nullopt;
  return bad;
}

// Writes.

// Writes the oldest chunk that waits for it; false: none does.
bool RowLog::WriteOne(uint64_t up_to) {
  Pending* pending = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    RequireHealthy();
    for (auto& [ticket, waiting] : unwritten_) {
      if (ticket > up_to) break;
      if (waiting->writing) continue;
      pending = waiting.get();
      break;
    }
    if (pending == nullptr) return false;
    pending->writing = true;
  }
  const uint64_t block = FirstBlock(pending->segment) + pending->chunk.place;
  const size_t bytes = pending->chunk.blocks * kBlockBytes;
  try {
    device_->Write(OffsetOf(block), pending->buffer.data(), bytes);
  } catch (const StorageError& error) {
    Fail(error.what());  // its rows are read from the buffer for good
    throw StorageError(failure());
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    written_bytes_ += bytes;
    --segments_[pending->segment].unwritten;
    resident_.erase(FirstBlock(pending->segment) + pending->chunk.place + pending->chunk.header_blocks);
    unwritten_.erase(pending->ticket);
  }
  written_.notify_all();
  return true;
}

void RowLog::WriteChunks() {
  while (WriteOne(UINT64_MAX)) {
  }
}

// Whether cleaning should begin before somebody waits for it: whether few segments are free, and not twice as
// many as the largest of the latest reservations takes. Older ones are forgotten: a single large call must
// not have the log cleaned early for good.
bool RowLog::IsLow() const {
  const uint64_t rows = std::max(most_reserved_, most_reserved_before_);
  const uint64_t wanted = (rows + segment_rows_ - 1) / segment_rows_;
  return free_.size() < kCleanerSegments + 3 + 2 * wanted;
}

bool RowLog::WantsTending() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_.empty() && (!unwritten_.empty() || IsLow());
}

void RowLog::Tend() {
  WriteChunks();
  const std::lock_guard<std::mutex> lock(commit_mutex_);
  {
    const std::lock_guard<std::mutex> again(mutex_);
    if (!IsLow()) return;
  }
  if (!Grow(false)) (void)CleanLocked(Effort::kLittle);
}

// Returns when all chunks up to `ticket` are written.
void RowLog::WriteUpTo(uint64_t ticket) {
  while (WriteOne(ticket)) {
  }
  std::unique_lock<std::mutex> lock(mutex_);
  written_.wait(
      lock, [&] { return !failure_.empty() || unwritten_.empty() || unwritten_.begin()->first > ticket; });
  RequireHealthy();
}

// Commits.

void RowLog::WriteSuper(const RowLogSuper& super) {
  const BlockBuffer buffer = EncodeRowLogSuper(super, spec_.super_bytes);
  device_->Write(super.sequence % 2 * spec_.super_bytes, buffer.data(), buffer.size());
  device_->Flush();
}

void RowLog::Commit(const std::optional<KeptCheckpoint>& checkpoint) {
  const std::lock_guard<std::mutex> lock(commit_mutex_);
  CommitLocked(checkpoint);
}

void RowLog::CommitLocked(const std::optional<KeptCheckpoint>& checkpoint) {
  RowLogSuper next;
  std::vector<uint32_t> freeing;
  uint64_t ticket = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    RequireHealthy();
    next = NextSuper(checkpoint, &freeing);
    ticket = tickets_;
  }
  try {
    WriteUpTo(ticket);
    device_->Flush();
    WriteSuper(next);
  } catch (const StorageError& error) {
    Fail(error.what());
    throw StorageError(failure());
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  super_ = std::move(next);
  for (const uint32_t segment : freeing) {
    segments_[segment] = Segment{};
    free_.push_back(segment);
  }
  ForgetTombstones();
  if (checkpoint) device_full_ = false;  // somebody may have made room
}

// The superblock of a commit, for which the open chunks are sealed; `freeing` gets the segments that are free
// once it is durable. With mutex_.
RowLogSuper RowLog::NextSuper(const std::optional<KeptCheckpoint>& checkpoint,
                              std::vector<uint32_t>* freeing) {
  RowLogSuper next = super_;
  ++next.sequence;
  if (checkpoint) {
    next.kept.push_back(*checkpoint);
    while (next.kept.size() > spec_.window) next.kept.erase(next.kept.begin());
  }
  // Nothing dies here that the superblock before needs: its segment stays until this one is durable.
  const uint64_t oldest = next.kept.empty() ? 0 : next.kept.front().epoch;
  retired_.ForgetUpTo(oldest, [this](uint32_t slot) { Kill(slot); });
  for (Stream& stream : streams_) Seal(&stream);
  for (auto& [lsn, tombstone] : tombstones_) {
    if (tombstone.epoch <= oldest) tombstone.barrier = std::min(tombstone.barrier, last_use_);
  }
  next.epoch = epoch_;
  next.use = last_use_;
  next.extents.assign(segments_.size(), 0);
  next.uses.assign(segments_.size(), 0);
  for (uint32_t i = 0; i < segments_.size(); ++i) {
    Segment& segment = segments_[i];
    if (segment.live == 0 && segment.tombstones == 0 &&
        (segment.state == State::kFull || segment.state == State::kBad)) {
      segment.state = State::kFreeing;
      freeing->push_back(i);
    } else if (segment.state != State::kFree) {
      next.extents[i] = static_cast<uint16_t>(segment.blocks);
      next.uses[i] = static_cast<uint16_t>(segment.use);
    }
  }
  return next;
}

// Those that no segment needs any more. With mutex_.
void RowLog::ForgetTombstones() {
  uint64_t oldest_use = UINT64_MAX;
  for (const Segment& segment : segments_) {
    if (segment.state != State::kFree) oldest_use = std::min(oldest_use, segment.use);
  }
  for (auto at = tombstones_.begin(); at != tombstones_.end();) {
    if (at->second.barrier >= oldest_use) {
      ++at;
      continue;
    }
    --segments_[at->second.segment].tombstones;
    at = tombstones_.erase(at);
  }
}

std::vector<KeptCheckpoint> RowLog::kept() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return super_.kept;
}

RowLogStats RowLog::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  RowLogStats stats;
  stats.segments = segments_.size();
  stats.free_segments = free_.size();
  stats.live = rows_live_;
  stats.retired = retired_.size();
  stats.tombstones = tombstones_.size();
  stats.appended = appended_;
  stats.moved = moved_;
  stats.written_bytes = written_bytes_;
  stats.segment_rows = segment_rows_;
  // A node of a map has a pointer and, before it, what malloc needs.
  constexpr size_t kNode = sizeof(decltype(tombstones_)::value_type) + 2 * sizeof(void*);
  stats.memory_bytes = segments_.capacity() * sizeof(Segment) + sums_.capacity() * sizeof(uint32_t) +
                       live_.capacity() * sizeof(uint64_t) + facts_.capacity() * sizeof(uint32_t) +
                       appended_now_.bytes() + retired_.bytes() + tombstones_.size() * kNode +
                       tombstones_.bucket_count() * sizeof(void*);
  return stats;
}

}  // namespace oe
