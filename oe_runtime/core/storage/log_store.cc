#include "oe_runtime/core/storage/log_store.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

constexpr uint64_t kLeastBlock = uint64_t{4} << 10;  // bytes of a block of rows and their frames, at most,
constexpr uint64_t kMostBlock = uint64_t{32} << 10;
constexpr uint64_t kBlocks = 4096;  // of a cache, so that each shard of some dozens of tables has several

}  // namespace

void LogReads::Add(const LogStore* store, Key key, uint32_t slot, const std::byte** row) {
  if (store_ == nullptr) store_ = store;
  if (row != nullptr) *row = Pending();
  entries_.push_back({key, slot, row, 0});
}

void LogReads::Start() {
  if (store_ == nullptr) return;  // there are no entries
  const RowLog* const log = store_->log();
  const size_t n = entries_.size();
  const size_t parts = log->reads_per_row();
  row_bytes_ = log->spec().row_bytes;
  rows_.reset(new std::byte[n * row_bytes_]);
  std::vector<uint32_t> slots(n);
  std::vector<std::byte*> into(n);
  for (size_t i = 0; i < n; ++i) {
    slots[i] = entries_[i].slot;
    into[i] = rows_.get() + i * row_bytes_;
  }
  reads_.resize(n * parts);
  copied_.resize(n);
  log->Locate(slots.data(), n, into.data(), reads_.data(), copied_.data());
  queue_ = store_->device()->NewQueue();
  for (size_t begin = 0; begin < n;) {  // one submission, unless some were copied
    if (copied_[begin] != 0) {
      ++begin;
      continue;
    }
    size_t end = begin;
    while (end < n && copied_[end] == 0) ++end;
    queue_->Submit(&reads_[begin * parts], (end - begin) * parts);
    begin = end;
  }
}

void LogReads::Wait() {
  if (store_ == nullptr) return;
  queue_->Wait();
  const size_t parts = store_->log()->reads_per_row();
  ReadAgain(queue_.get(), reads_.data(), reads_.size());
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    for (size_t part = 0; copied_[i] == 0 && part < parts; ++part) {
      if (reads_[i * parts + part].error != 0) entry.error = reads_[i * parts + part].error;
    }
    if (entry.row != nullptr) *entry.row = entry.error == 0 ? content(i) : nullptr;
  }
}

void LogReads::Require() const {
  if (store_ == nullptr) return;
  uint64_t damaged = 0;
  uint64_t unread = 0;
  const Entry* first = nullptr;
  for (const Entry& entry : entries_) {
    if (entry.error == 0) continue;
    ++(entry.error == EBADMSG ? damaged : unread);
    if (entry.error != EBADMSG && first == nullptr) first = &entry;
  }
  if (first != nullptr) {
    const std::string what = unread == 1 ? "the row of key " + std::to_string(first->key)
                                         : std::to_string(unread) + " rows, the first of them of key " +
                                               std::to_string(first->key) + ",";
    store_->log()->RefuseUnread(what, first->error);
  }
  if (damaged > 0) store_->RequireFewDamaged(damaged);
}

LogStore::LogStore(RowLog* log, BlockDevice* device, CacheMemory* memory, Damage* damage)
    : RowStore(RowLayout::Dense(log->spec().row_bytes,
                                std::clamp(memory->limit() / kBlocks, kLeastBlock, kMostBlock) *
                                    log->spec().row_bytes / (log->spec().row_bytes + sizeof(Frame)))),
      log_(log),
      device_(device),
      memory_(memory),
      damage_(damage),
      row_bytes_(log->spec().row_bytes),
      frames_(memory, &copies(), layout(), 0),
      blocks_at_once_(static_cast<uint32_t>(std::max<uint64_t>(1, kMostBlock / frames_.block_bytes()))) {
  frames_.Join();
}

void LogStore::EnsureFree() {
  if (frames_.has_free() || frames_.Grow() || EvictOne()) return;
  // All are pinned, or there is no room in the log: then that is so for the next rows too.
  for (uint32_t i = 0; i < blocks_at_once_; ++i) (void)frames_.Grow(true);
}

bool LogStore::EvictOne() noexcept {
  uint32_t least = kNoRow;
  uint8_t least_reads = 0;
  for (size_t seen = 0; seen < frames_.size() && (seen < kMostPassed || least == kNoRow); ++seen) {
    const uint32_t at = frames_.Pass();
    Frame& frame = frames_[at];
    if (!frame.used || frame.pins > 0) continue;
    if (frame.reads == 0) return Evict(at);
    if (least == kNoRow || frame.reads < least_reads) {
      least = at;
      least_reads = frame.reads;
    }
    frame.reads = frame.reads > kMostReads ? uint8_t{0} : static_cast<uint8_t>(frame.reads - 1);
  }
  return least != kNoRow && Evict(least);
}

// Of a frame that is not pinned: the row is in the log only. False: that has no room.
bool LogStore::Evict(uint32_t at) noexcept {
  if (!has_index() || !WriteFrame(at)) return false;
  index().Set(frames_[at].key, frames_[at].slot);
  frames_.CountEviction();
  frames_.Free(at);
  return true;
}

bool LogStore::WriteFrame(uint32_t at) noexcept {
  Frame& frame = frames_[at];
  if (frame.dirty == 0) return true;
  const uint32_t slot = log_->Append(frame.key, frame.dirty, content(at));
  if (slot == kNoRow) return false;
  frame.slot = slot;
  frame.dirty = 0;
  frame.entries = true;
  log_->Claim(-1);
  frames_.CountWriteBack();
  return true;
}

// The content changes now: a checkpoint that is under way gets what was there, and there is no newest version
// in the log any more.
void LogStore::BeginChange(uint32_t at) {
  Frame& frame = frames_[at];
  const auto epoch = static_cast<uint32_t>(log_->epoch());
  if (frame.dirty == epoch) return;
  if (!WriteFrame(at)) {
    throw StorageFull("storage " + log_->spec().where + " is full: table '" + log_->spec().table +
                      "' needs room for changes of its rows" + kMakeRoom);
  }
  if (frame.slot != kNoRow) log_->Supersede(frame.slot);
  frame.slot = kNoRow;
  frame.dirty = epoch;
  changed_ = true;
  log_->Claim(1);
}

void LogStore::Reserve() { EnsureFree(); }

uint32_t LogStore::Add(Key key) noexcept {
  const uint32_t at = frames_.Take();
  Frame& frame = frames_[at];
  frame.key = key;
  frame.used = true;
  frame.pins = 1;
  frame.dirty = static_cast<uint32_t>(log_->epoch());
  log_->Claim(1);
  changed_ = true;
  ++size_;
  digest_ += RowLog::KeyDigest(key);
  return at | kCopyBit;
}

void LogStore::Erase(Key key, uint32_t number) noexcept {
  bool entries = true;
  uint32_t slot = number;
  const uint64_t epoch = log_->epoch();
  if ((number & kCopyBit) != 0) {
    const uint32_t at = number % kCopyBit;
    Frame& frame = frames_[at];
    // A checkpoint that is under way still needs it.
    if (frame.dirty != 0 && frame.dirty < epoch) (void)WriteFrame(at);
    if (frame.dirty != 0) log_->Claim(-1);
    slot = frame.slot;
    entries = frame.entries;
    frames_.Free(at);
  }
  if (slot != kNoRow) log_->Supersede(slot);
  if (entries) (void)log_->AppendTombstone(key, epoch);
  changed_ = true;
  --size_;
  digest_ -= RowLog::KeyDigest(key);
}

void LogStore::MakeWritable(const Key* keys, size_t n, uint32_t* numbers) {
  OrStorageError([&] { TakeFrames(keys, n, numbers); });
}

void LogStore::TakeFrames(const Key* keys, size_t n, uint32_t* numbers) {
  // All that are there first, so that they stay when others come.
  struct Missing {
    size_t i;
    uint32_t slot;
  };
  std::vector<Missing> missing;
  for (size_t i = 0; i < n; ++i) {
    if (numbers[i] == kNoRow) continue;
    if ((numbers[i] & kCopyBit) != 0) {
      Pin(numbers[i]);
      continue;
    }
    const uint32_t slot = std::exchange(numbers[i], kNoRow);
    try {
      missing.push_back({i, slot});
    } catch (const std::bad_alloc&) {
      for (++i; i < n; ++i) numbers[i] = kNoRow;
      throw;
    }
  }
  if (!missing.empty()) {
    LogReads reads;
    std::vector<const std::byte*> rows(missing.size());
    for (size_t at = 0; at < missing.size(); ++at) {
      reads.Add(this, keys[missing[at].i], missing[at].slot, &rows[at]);
    }
    reads.Run();
    for (size_t at = 0; at < missing.size(); ++at) {
      const size_t i = missing[at].i;
      uint32_t now = kNoRow;
      index().Find(&keys[i], 1, &now);  // the key may have come earlier in this batch
      if (now != kNoRow && (now & kCopyBit) == 0) {
        if (rows[at] == nullptr) {
          Quarantine(keys[i], now);
          continue;
        }
        EnsureFree();
        Install(keys[i], now, rows[at], false);
        index().Find(&keys[i], 1, &now);
        if ((now & kCopyBit) == 0) throw std::bad_alloc();
      }
      if (now == kNoRow) continue;
      Pin(now);
      numbers[i] = now;
    }
  }
  for (size_t i = 0; i < n; ++i) {
    if (numbers[i] == kNoRow) continue;
    uint8_t& reads = frames_[numbers[i] % kCopyBit].reads;
    if (reads == kPulled) reads = 0;
    BeginChange(numbers[i] % kCopyBit);
  }
}

void LogStore::Unpin(uint32_t* numbers, size_t n) noexcept {
  for (size_t i = 0; i < n; ++i) {
    if (numbers[i] != kNoRow) --frames_[numbers[i] % kCopyBit].pins;
    numbers[i] = kNoRow;
  }
}

void LogStore::NoteReads(const Key* /*keys*/, const uint32_t* numbers, size_t n) const noexcept {
  uint64_t hits = 0;
  uint64_t misses = 0;
  for (size_t i = 0; i < n; ++i) {
    if (numbers[i] == kNoRow) continue;
    const bool hit = (numbers[i] & kCopyBit) != 0 && !NoteRead(numbers[i]);
    hits += hit ? 1 : 0;
    misses += hit ? 0 : 1;
  }
  frames_.CountReads(hits, misses);
}

void LogStore::Rows(const Key* keys, const uint32_t* numbers, size_t n, const std::byte** rows,
                    LogReads* reads) const {
  for (size_t i = 0; i < n; ++i) {
    if (numbers[i] != kNoRow && reads != nullptr && (numbers[i] & kCopyBit) == 0) {
      reads->Add(this, keys[i], numbers[i], &rows[i]);
    } else {
      rows[i] = numbers[i] == kNoRow ? nullptr : row(numbers[i]);
    }
  }
}

void LogStore::ReadAhead(const Key* keys, const uint32_t* numbers, size_t n, LogReads* reads) const {
  for (size_t i = 0; i < n; ++i) {
    if (numbers[i] == kNoRow) continue;
    if ((numbers[i] & kCopyBit) != 0) {
      Keep(numbers[i]);
    } else {
      reads->Add(this, keys[i], numbers[i]);
    }
  }
}

// The log has the facts of all rows in DRAM.
void LogStore::CopyFacts(const uint32_t* numbers, size_t n, size_t at, size_t words, uint32_t* facts,
                         size_t stride) const {
  for (size_t i = 0; i < n; ++i) {
    if ((numbers[i] & kCopyBit) != 0) oe::Prefetch(row(numbers[i]) + at);
  }
  for (size_t i = 0; i < n; ++i) {
    if ((numbers[i] & kCopyBit) != 0) {
      RowStore::CopyFacts(&numbers[i], 1, at, words, facts + i * stride, stride);
    } else {
      log_->CopyFacts(&numbers[i], 1, facts + i * stride);
    }
  }
}

void LogStore::Changed(const Key* keys, const uint32_t* numbers, size_t n) noexcept {
  for (size_t i = 0; i < n; ++i) {
    if (numbers[i] != kNoRow) changes_.ChangedKey(keys[i], size_);
  }
}

void LogStore::CheckRow(Key key, uint32_t number) {
  const bool in_frame = (number & kCopyBit) != 0;
  const uint32_t slot = in_frame ? frames_[number % kCopyBit].slot : number;
  if (slot == kNoRow) return;
  LogReads reads;
  reads.Add(this, key, slot);
  reads.Start();
  reads.Wait();
  const int error = reads.entries().front().error;
  if (error == 0) return;
  if (!in_frame) {
    reads.Require();
    return Quarantine(key, number);
  }
  log_->RequireBadBlocks(error);
  BeginChange(number % kCopyBit);  // to be written anew, as if it had changed
  Report(Damage::Kind::kRepaired, key, slot);
}

void LogStore::Upkeep() noexcept {
  try {
    while (frames_.wants_shrink()) {
      const RowLog::Room room =
          log_->Reserve(uint64_t{layout().block_rows()} * blocks_at_once_, RowLog::Need::kWriteBack);
      const std::unique_lock<FairSharedMutex> lock(mutex());
      if (!Shrink()) return;
    }
  } catch (const StorageError&) {  // NOLINT(bugprone-empty-catch): then they stay
  }
}

// Notes a read; whether it is the first of a row that was read ahead, so that it would have missed it. Many
// threads may do this at once, and the hand of the clock needs no more than a hint.
bool LogStore::NoteRead(uint32_t number) const noexcept {
  auto* reads = const_cast<uint8_t*>(&frames_[number % kCopyBit].reads);
  const uint8_t before = __atomic_load_n(reads, __ATOMIC_RELAXED);
  if (before == kMostReads) return false;
  const bool is_first = before == kReadAhead;
  const uint8_t after = is_first            ? kPulled
                        : before == kPulled ? uint8_t{1}
                                            : static_cast<uint8_t>(before + 1);
  __atomic_store_n(reads, after, __ATOMIC_RELAXED);
  return is_first;
}

// The row is going to be read.
void LogStore::Keep(uint32_t number) const noexcept {
  auto* reads = const_cast<uint8_t*>(&frames_[number % kCopyBit].reads);
  const uint8_t before = __atomic_load_n(reads, __ATOMIC_RELAXED);
  if (before == 0 || before == kPulled) __atomic_store_n(reads, uint8_t{1}, __ATOMIC_RELAXED);
}

size_t LogStore::MostReadAhead() const noexcept {
  // What it has, or what it may have while the cache fills.
  return std::max(frames_.size(), static_cast<size_t>(memory_->FairShare() / (row_bytes_ + sizeof(Frame)))) /
         4;
}

void LogStore::Install(Key key, uint32_t slot, const std::byte* row, bool ahead) noexcept {
  if (!has_index()) return;
  uint32_t now = kNoRow;
  index().Find(&key, 1, &now);
  if (now != slot) return;
  try {
    EnsureFree();
  } catch (const std::bad_alloc&) {
    return;
  }
  if (!frames_.has_free()) return;
  const uint32_t at = frames_.Take();
  Frame& frame = frames_[at];
  frame.key = key;
  frame.used = true;
  frame.slot = slot;
  frame.entries = true;
  frame.reads = ahead ? kReadAhead : kPulled;
  std::memcpy(content(at), row, row_bytes_);
  index().Set(key, at | kCopyBit);
}

// Gives some blocks of frames back, with room to write back as many rows; false: it could not.
bool LogStore::Shrink() noexcept {
  const auto evict = [this](uint32_t at) {
    return !frames_[at].used || (frames_[at].pins == 0 && Evict(at));
  };
  for (uint32_t i = 0; i < blocks_at_once_; ++i) {
    if (!frames_.wants_shrink() || !frames_.Shrink(evict)) return i > 0;
  }
  return true;
}

void LogStore::Relocate(Key key, uint32_t slot, const std::function<uint32_t()>& move) {
  const std::unique_lock<FairSharedMutex> lock(mutex());
  if (!has_index()) return;
  uint32_t now = kNoRow;
  index().Find(&key, 1, &now);
  const uint32_t moved = move();
  if (moved == kNoRow || now == kNoRow) return;
  if (now == slot) {
    index().Set(key, moved);
  } else if ((now & kCopyBit) != 0 && frames_[now % kCopyBit].slot == slot) {
    frames_[now % kCopyBit].slot = moved;
  }
}

// What pushes under way have reserved, mostly more than they take, comes back when they end.
RowLog::Room LogStore::RoomToWriteBack() {
  while (true) {
    try {
      return log_->Reserve(kAtOnce, RowLog::Need::kWriteBack);
    } catch (const StorageFull&) {
      if (!log_->AwaitRoom()) throw;
    }
  }
}

bool LogStore::WriteBack(uint64_t epoch, size_t* position) {
  const RowLog::Room room = RoomToWriteBack();
  const std::unique_lock<FairSharedMutex> lock(mutex());
  for (size_t count = 0; *position < frames_.size(); ++*position) {
    const Frame& frame = frames_[*position];
    if (frame.dirty == 0 || frame.dirty > epoch) continue;
    if (count++ == kAtOnce) return true;
    if (WriteFrame(static_cast<uint32_t>(*position))) continue;
    throw StorageFull("storage " + log_->spec().where + " has no room for a checkpoint of table '" +
                      log_->spec().table + "'" + kMakeRoom);
  }
  return false;
}

void LogStore::Report(Damage::Kind kind, Key key, uint32_t slot) const noexcept {
  if (damage_ == nullptr) return;
  try {
    damage_->Report(kind, "the row of key " + std::to_string(key),
                    "slot " + std::to_string(slot) + " of " + log_->spec().where);
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): nothing more can be said
  }
}

void LogStore::SetRows(uint64_t size, uint64_t digest) noexcept {
  size_ = size;
  digest_ = digest;
  changed_ = false;
  frames_.FreeAll();
}

}  // namespace oe
