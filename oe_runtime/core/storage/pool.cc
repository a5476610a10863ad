#include "oe_runtime/core/storage/pool.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <shared_mutex>
#include <utility>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/storage/pool_identity.h"

namespace oe {
namespace {

using nlohmann::json;

constexpr size_t kLargeSegment = size_t{4} << 20;

// All that must be the same when a pool is opened again.
json Identity(const PoolSpec& spec) {
  json fields = json::parse(spec.identity);
  fields["row_bytes"] = spec.row_bytes;
  fields["block_bytes"] = spec.block_bytes;
  fields["shards"] = spec.shards;
  return fields;
}

// That of a pool that is there; of one that was never finished, any.
uint32_t FormatOf(Medium* medium, uint64_t uuid) {
  const OpenRegion super(medium, SuperName(uuid));
  uint32_t format = kPoolFormat;
  std::string text;
  (void)ReadSuperHeader(*super, &uuid, &text, &format);
  return format;
}

}  // namespace

Pool::Pool(Medium* medium, uint64_t uuid, const PoolSpec& spec)
    : KeptRows(spec),
      medium_(medium),
      layout_(RowLayout::InPool(spec.format, spec.row_bytes, spec.block_bytes)),
      uuid_(uuid),
      flusher_(medium->NewFlusher()),
      blocks_(spec.shards) {
  for (uint32_t i = 0; i < spec_.shards; ++i) {
    shards_.push_back(std::make_unique<SlotStore>(this, layout_, static_cast<uint32_t>(epoch_), spec_.cache));
  }
}

std::unique_ptr<Pool> Pool::Create(Medium* medium, const PoolSpec& spec) {
  std::random_device device;
  const uint64_t uuid = uint64_t{device()} << 32 | device();
  std::unique_ptr<Pool> pool(new Pool(medium, uuid, spec));
  pool->CreateSuper();
  pool->Start();
  return pool;
}

std::unique_ptr<Pool> Pool::Open(Medium* medium, uint64_t uuid, const PoolSpec& spec) {
  PoolSpec there = spec;
  there.format = FormatOf(medium, uuid);
  std::unique_ptr<Pool> pool(new Pool(medium, uuid, there));
  try {
    pool->OpenSuper();
    pool->OpenSegments();
  } catch (...) {
    pool->kept_.emplace_back();  // whatever is wrong with it, it stays
    throw;
  }
  pool->Start();
  return pool;
}

Pool::~Pool() {
  Stop();
  CloseRegions();
  if (remove_ || kept_.empty()) RemoveRegions();
}

void Pool::CreateSuper() {
  super_ = medium_->Create(SuperName(uuid_), kSuperBytes, kSuperBytes, spec_.table);
  Commit({});
  WriteSuperHeader(super_.data, spec_.format, uuid_, Identity(spec_).dump(), flusher_.get());
}

void Pool::OpenSuper() {
  super_ = medium_->Open(SuperName(uuid_));
  uint64_t uuid = 0;
  std::string text;
  if (!ReadSuperHeader(super_, &uuid, &text)) Damaged(super_.name, "it was never finished");
  if (uuid != uuid_) Damaged(super_.name, "its 'uuid' is another file's");
  CheckIdentity(super_.path, text, Identity(spec_), spec_.may_differ, spec_.table);
  SuperCopy newest;
  bool found = false;
  for (size_t i = 0; i < 2; ++i) {
    SuperCopy copy;
    if (!DecodeSuperCopy(super_.data + kSuperTextBytes + i * kPoolPage, &copy) || copy.sequence % 2 != i)
      continue;
    if (!found || copy.sequence > newest.sequence) newest = std::move(copy);
    found = true;
  }
  if (!found) Damaged(super_.name, "the 'checksum' of both copies of its list of checkpoints is wrong");
  sequence_ = newest.sequence;
  least_segments_ = newest.segments;
  kept_ = std::move(newest.kept);
}

void Pool::OpenSegments() {
  std::vector<std::string> names = medium_->List();
  const std::set<std::string> there(names.begin(), names.end());
  for (uint64_t number = 0;; ++number) {
    const std::string name = SegmentName(uuid_, number);
    if (there.count(name) == 0) {
      if (number >= least_segments_) break;
      throw StorageError(
          medium_->PathOf(name) + " is missing: the pool of table '" + spec_.table + "' has " +
          std::to_string(least_segments_) +
          " segments; bring it back, or start fresh (--storage-fresh) and restore from a checkpoint");
    }
    if (number >= least_segments_ && medium_->SizeOf(name) == 0) {
      medium_->Remove(name);  // the process was killed while it was made
      break;
    }
    Segment segment{medium_->Open(name), {}};
    const bool finished = [&] {
      try {
        return ReadSegmentHeader(segment.region, &segment.header);
      } catch (...) {
        medium_->Close(segment.region);
        throw;
      }
    }();
    if (!finished) {
      medium_->Close(segment.region);
      if (number < least_segments_) Damaged(name, "'magic' is missing");
      medium_->Remove(name);  // the power went while it was made; nothing is in it
      break;
    }
    segments_.push_back(segment);
    bytes_ += segment.region.size;
    const SegmentHeader expected =
        MakeSegmentHeader(spec_.format, uuid_, number, segment.region.size, layout_.row_bytes,
                          layout_.block_rows(), layout_.block_bytes);
    const auto check = [&](const char* field, uint64_t is, uint64_t wanted) {
      if (is == wanted) return;
      Damaged(name, std::string("'") + field + "' is " + std::to_string(is) + " instead of " +
                        std::to_string(wanted));
    };
    check("format", segment.header.format, spec_.format);
    check("uuid", segment.header.uuid, uuid_);
    check("number", segment.header.number, number);
    check("row_bytes", segment.header.row_bytes, expected.row_bytes);
    check("block_rows", segment.header.block_rows, expected.block_rows);
    check("block_bytes", segment.header.block_bytes, expected.block_bytes);
    check("blocks", segment.header.blocks, expected.blocks);
    check("rows_offset", segment.header.rows_offset, expected.rows_offset);
  }
}

void Pool::Damaged(const std::string& name, const std::string& what) const {
  throw StorageError(medium_->PathOf(name) + " is damaged: " + what +
                     "; move the pool away, or start fresh (--storage-fresh), and restore from a checkpoint");
}

SlotBlock Pool::BlockOf(const Segment& segment, uint64_t block) const {
  SlotBlock found;
  found.metas =
      reinterpret_cast<SlotMeta*>(segment.region.data + kPoolPage) + block * segment.header.block_rows;
  found.rows = segment.region.data + segment.header.rows_offset + block * segment.header.block_bytes;
  return found;
}

SlotBlock Pool::TakeBlock() {
  std::unique_lock<std::mutex> lock(segments_mutex_);
  while (free_blocks_.empty()) {
    lock.unlock();
    Grow(1);
    lock.lock();
  }
  const SlotBlock block = free_blocks_.back();
  free_blocks_.pop_back();
  const bool ask = spec_.background && free_blocks_.size() + 1 == low_water_;
  lock.unlock();
  // Getting a large segment takes the system a while, in which the pulls of a shard would wait.
  if (ask) AskForChore();
  return block;
}

// Gets a segment unless there are `blocks` free blocks.
void Pool::Grow(size_t blocks) {
  const std::lock_guard<std::mutex> grow_lock(grow_mutex_);
  uint64_t number = 0;
  size_t wanted = 0;
  {
    const std::lock_guard<std::mutex> lock(segments_mutex_);
    if (free_blocks_.size() >= blocks) return;
    number = segments_.size();
    segments_.reserve(number + 1);  // so that a region that was made is never lost
    wanted = RoundUp(NextSegment(bytes_), kPoolPage);
  }
  const size_t least = SegmentBytes(1, layout_.block_rows(), layout_.block_bytes);
  Segment segment{medium_->Create(SegmentName(uuid_, number), least, std::max(least, wanted), spec_.table),
                  {}};
  try {
    segment.header = MakeSegmentHeader(spec_.format, uuid_, number, segment.region.size, layout_.row_bytes,
                                       layout_.block_rows(), layout_.block_bytes);
    WriteSegmentHeader(segment.region.data, segment.header, medium_->NewFlusher().get());
    const std::lock_guard<std::mutex> lock(segments_mutex_);
    free_blocks_.reserve(free_blocks_.size() + segment.header.blocks);
    for (uint64_t block = segment.header.blocks; block > 0; --block) {
      free_blocks_.push_back(BlockOf(segment, block - 1));
    }
    segments_.push_back(segment);
    bytes_ += segment.region.size;
    low_water_ = segment.region.size < kLargeSegment ? 0 : segment.header.blocks / 4;
  } catch (...) {
    medium_->Close(segment.region);
    medium_->Remove(segment.region.name);
    throw;
  }
}

uint64_t Pool::bytes() const {
  const std::lock_guard<std::mutex> lock(segments_mutex_);
  return bytes_;
}

uint64_t Pool::slots_left() const {
  const uint64_t of_block = layout_.block_bytes + layout_.block_rows() * sizeof(SlotMeta);
  const uint64_t blocks = medium_->Room() / of_block;
  const std::lock_guard<std::mutex> lock(segments_mutex_);
  return (free_blocks_.size() + blocks) << layout_.shift;
}

uint64_t Pool::RowsIn(uint64_t slots) const {
  const uint64_t sixteenths = 16 + SlotStore::Epochs(spec_.window);
  return slots / sixteenths * 16 + slots % sixteenths * 16 / sixteenths;
}

PoolRoom Pool::room() const {
  PoolRoom room;
  uint64_t least = std::numeric_limits<uint64_t>::max() / spec_.shards;
  for (const auto& shard : shards_) {
    const std::shared_lock<FairSharedMutex> lock(shard->mutex());
    const PoolRoom of_shard = shard->room();
    least = std::min(least, of_shard.headroom);
    room += of_shard;
  }
  // New rows go to all shards alike, and are refused when one has no more room.
  room.headroom = RowsIn(least * spec_.shards + slots_left());
  return room;
}

void Pool::CloseRegions() noexcept {
  for (const Segment& segment : segments_) medium_->Close(segment.region);
  if (super_.data != nullptr) medium_->Close(super_);
  super_ = Region{};
}

void Pool::Remove() {
  WaitIdle();
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  remove_ = true;
  // Mapped or not, it is gone when the power is: so the old rows cannot come back beside new ones.
  medium_->Remove(SuperName(uuid_));
}

void Pool::RemoveRegions() noexcept {
  try {
    RemovePools(medium_, [this](std::optional<uint64_t> uuid) { return uuid == uuid_; });
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): what stays is removed at the next start
  }
}

}  // namespace oe
