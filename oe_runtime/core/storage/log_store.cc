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
constexpr size_t kAlignment = 256;

// Of a vector that grows by a little again and again: a quarter more, since the cache's memory does not count
// what is not used.
template <typename T>
void ReserveFor(std::vector<T>* vector, size_t size) {
  if (vector->capacity() < size) vector->reserve(std::max(size, vector->capacity() + vector->capacity() / 4));
}

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
      blocks_at_once_(
          static_cast<uint32_t>(std::max<uint64_t>(1, kMostBlock / (layout().block_bytes + FrameBytes())))) {
  memory_->Join();
}

LogStore::~LogStore() {
  for (size_t block = 0; block < copies().size(); ++block) {
    if (beyond_[block]) {
      ::operator delete[](copies()[block], std::align_val_t{kAlignment});
    } else {
      memory_->Give(copies()[block], layout().block_bytes, FrameBytes());
    }
  }
  memory_->Leave();
}

// Frames.

// One more block; `beyond` the memory of the cache if it has none.
bool LogStore::AddBlock(bool beyond) {
  const uint32_t rows = layout().block_rows();
  ReserveFor(&copies(), copies().size() + 1);
  ReserveFor(&beyond_, beyond_.size() + 1);
  ReserveFor(&frames_, frames_.size() + rows);
  ReserveFor(&free_, frames_.size() + rows);
  const size_t more = FrameBytes();
  std::byte* block = nullptr;
  if (beyond) {
    block = static_cast<std::byte*>(::operator new[](layout().block_bytes, std::align_val_t{kAlignment}));
  } else {
    block = memory_->Take(layout().block_bytes, more, bytes_);
    if (block == nullptr) return false;
  }
  copies().push_back(block);
  beyond_.push_back(beyond);
  beyond_blocks_ += beyond ? 1 : 0;
  const auto first = static_cast<uint32_t>(frames_.size());
  frames_.resize(first + rows);
  for (uint32_t frame = first + rows; frame > first; --frame) free_.push_back(frame - 1);
  bytes_ += layout().block_bytes + more;
  return true;
}

void LogStore::EnsureFree() {
  if (!free_.empty() || AddBlock(false) || EvictOne()) return;
  // All are pinned, or there is no room in the log: then that is so for the next rows too.
  for (uint32_t i = 0; i < blocks_at_once_; ++i) (void)AddBlock(true);
}

bool LogStore::EvictOne() noexcept {
  uint32_t least = kNoRow;
  uint8_t least_reads = 0;
  for (size_t seen = 0; seen < frames_.size() && (seen < kMostPassed || least == kNoRow); ++seen) {
    if (hand_ >= frames_.size()) hand_ = 0;
    const uint32_t at = hand_++;
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
  evictions_.fetch_add(1, std::memory_order_relaxed);
  Free(at);
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
  write_backs_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

void LogStore::Free(uint32_t at) noexcept {
  frames_[at] = Frame{};
  free_.push_back(at);  // it has room for all
  rows_.fetch_sub(1, std::memory_order_relaxed);
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
  const uint32_t at = free_.back();
  free_.pop_back();
  Frame& frame = frames_[at];
  frame.key = key;
  frame.used = true;
  frame.pins = 1;
  frame.dirty = static_cast<uint32_t>(log_->epoch());
  rows_.fetch_add(1, std::memory_order_relaxed);
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
    Free(at);
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
  hits_.fetch_add(hits, std::memory_order_relaxed);
  misses_.fetch_add(misses, std::memory_order_relaxed);
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
    while (wants_shrink()) {
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
  if (free_.empty()) return;
  const uint32_t at = free_.back();
  free_.pop_back();
  Frame& frame = frames_[at];
  frame.key = key;
  frame.used = true;
  frame.slot = slot;
  frame.entries = true;
  frame.reads = ahead ? kReadAhead : kPulled;
  std::memcpy(content(at), row, row_bytes_);
  index().Set(key, at | kCopyBit);
  rows_.fetch_add(1, std::memory_order_relaxed);
}

// Gives some blocks of frames back, with room to write back as many rows; false: it could not.
bool LogStore::Shrink() noexcept {
  for (uint32_t i = 0; i < blocks_at_once_; ++i) {
    if (!ShrinkByBlock()) return i > 0;
  }
  return true;
}

bool LogStore::ShrinkByBlock() noexcept {
  if (copies().empty() || !wants_shrink()) return false;
  const auto first = static_cast<uint32_t>(frames_.size() - layout().block_rows());
  for (uint32_t at = first; at < frames_.size(); ++at) {
    if (frames_[at].used && (frames_[at].pins > 0 || !Evict(at))) return false;
  }
  free_.erase(std::remove_if(free_.begin(), free_.end(), [&](uint32_t at) { return at >= first; }),
              free_.end());
  frames_.resize(first);
  const size_t more = FrameBytes();
  if (beyond_.back()) {
    --beyond_blocks_;
    ::operator delete[](copies().back(), std::align_val_t{kAlignment});
  } else {
    memory_->Give(copies().back(), layout().block_bytes, more);
  }
  bytes_ -= layout().block_bytes + more;
  copies().pop_back();
  beyond_.pop_back();
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
  free_.clear();
  for (auto at = static_cast<uint32_t>(frames_.size()); at > 0; --at) {
    frames_[at - 1] = Frame{};
    free_.push_back(at - 1);
  }
  rows_ = 0;
}

CacheStats LogStore::cache_stats() const noexcept {
  CacheStats stats;
  stats.hits = hits_;
  stats.misses = misses_;
  stats.rows = rows_;
  stats.bytes = bytes_;
  stats.evictions = evictions_;
  stats.write_backs = write_backs_;
  return stats;
}

}  // namespace oe
