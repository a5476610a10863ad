#include "oe_runtime/core/storage/row_log_walk.h"

#include <algorithm>
#include <utility>

#include "oe_runtime/core/storage/row_log.h"

namespace oe {

SegmentChunks::SegmentChunks(const RowLog& log, const SegmentExtent& extent, std::byte* data,
                             std::optional<std::vector<bool>> bad)
    : log_(log), extent_(extent), data_(data), bad_(std::move(bad)) {}

// Of a header that is here as a whole; 0: it is not.
uint32_t SegmentChunks::HeaderBlocks(const std::byte* header) const {
  const uint32_t blocks = IsBad(passed_) ? 0 : ChunkHeaderBlocks(header);
  if (blocks == 0 || passed_ + blocks > extent_.blocks) return 0;
  for (uint32_t block = 1; block < blocks; ++block) {
    if (IsBad(passed_ + block)) return 0;
  }
  return blocks;
}

bool SegmentChunks::Decode(std::byte* header) {
  if (HeaderBlocks(header) > 0 && DecodeChunk(header, &chunk_)) return true;
  if (IsBad(passed_) || RepairChunk(header, (extent_.blocks - passed_) * kBlockBytes) == 0) return false;
  return HeaderBlocks(header) > 0 && DecodeChunk(header, &chunk_);
}

bool SegmentChunks::Next() {
  if (passed_ >= extent_.blocks || !Decode(data_ + passed_ * kBlockBytes)) return false;
  if (chunk_.place != passed_ || passed_ + chunk_.blocks > extent_.blocks) return false;
  if (chunk_.uuid != extent_.uuid || chunk_.use != extent_.use) return false;
  passed_ += chunk_.blocks;
  checked_ = UINT32_MAX;
  return true;
}

uint32_t SegmentChunks::slot(size_t row) const {
  return log_.SlotAt(log_.FirstBlock(extent_.segment) + chunk_.place + chunk_.header_blocks, row);
}

const std::byte* SegmentChunks::row(size_t row) {
  const auto number = static_cast<uint32_t>(row);
  const uint32_t block = number / log_.block_rows_ * log_.row_blocks_;
  const uint32_t place = chunk_.place + chunk_.header_blocks + block;
  const std::byte* const at = data_ + place * kBlockBytes;
  if (block != checked_) {
    checked_ = block;
    intact_ = true;
    for (uint32_t part = 0; intact_ && part < log_.row_blocks_; ++part) {
      intact_ = !IsBad(place + part) && BlockChecksum(at + part * kBlockBytes) == chunk_.sums[block + part];
    }
  }
  return intact_ ? at + number % log_.block_rows_ * log_.spec_.row_bytes : nullptr;
}

RowLogWalk::RowLogWalk(const RowLog* log, uint32_t first, uint32_t most_segments)
    : log_(log),
      queue_(log->device_->NewQueue()),
      begin_segment_(first),
      left_segments_(most_segments),
      next_segment_(first) {
  Begin(readings_.data());
}

// Begins to read the next segment that has something.
void RowLogWalk::Begin(Reading* reading) {
  SegmentExtent& extent = reading->extent;
  extent.blocks = 0;
  if (left_segments_ == 0) return;
  {
    const std::lock_guard<std::mutex> lock(log_->mutex_);
    for (; extent.blocks == 0 && begin_segment_ < log_->segments_.size(); ++begin_segment_) {
      extent = log_->Written(begin_segment_);
    }
  }
  if (extent.blocks == 0) return;
  --left_segments_;
  const size_t bytes = extent.blocks * kBlockBytes;
  if (reading->buffer.size() < bytes) reading->buffer = BlockBuffer(log_->spec_.segment_bytes);
  reading->read = BlockRead{};
  reading->read.offset = log_->OffsetOf(log_->FirstBlock(extent.segment));
  reading->read.into = reading->buffer.data();
  reading->read.bytes = static_cast<uint32_t>(bytes);
  queue_->Submit(&reading->read, 1);
  read_bytes_ += bytes;
}

bool RowLogWalk::NextSegment() {
  if (chunks_) turn_ ^= 1;
  Reading& now = readings_[turn_];
  if (now.extent.blocks == 0) return false;
  queue_->Wait();
  Begin(&readings_[turn_ ^ 1]);
  std::optional<std::vector<bool>> bad;
  if (now.read.error != 0) bad = log_->ReadBlocks(now.read.offset, now.extent.blocks, now.buffer.data());
  chunks_ = std::make_unique<SegmentChunks>(*log_, now.extent, now.buffer.data(), std::move(bad));
  next_segment_ = now.extent.segment + 1;
  return true;
}

bool RowLogWalk::Next() {
  while (!chunks_ || !chunks_->Next()) {
    if (!NextSegment()) return false;
  }
  const uint32_t segment = next_segment_ - 1;
  if (passed_.size() <= segment) passed_.resize(segment + 1);
  passed_[segment] = static_cast<uint16_t>(chunks_->passed());
  live_.clear();
  const std::lock_guard<std::mutex> lock(log_->mutex_);
  for (uint32_t row = 0; row < chunks_->chunk().rows.size(); ++row) {
    if (log_->IsLive(chunks_->slot(row))) live_.push_back(row);
  }
  return true;
}

std::optional<uint64_t> RowLogWalk::BrokeOff() const {
  if (!chunks_ || chunks_->passed() == chunks_->extent().blocks) return std::nullopt;
  const SegmentExtent& extent = chunks_->extent();
  const std::lock_guard<std::mutex> lock(log_->mutex_);
  if (log_->segments_[extent.segment].use != extent.use) return std::nullopt;  // it was cleaned meanwhile
  return log_->OffsetOf(log_->FirstBlock(extent.segment) + chunks_->passed());
}

bool RowLogWalk::HasPassed(uint32_t slot) const {
  const uint32_t block = log_->BlockOf(slot);
  const uint32_t segment = block / log_->segment_blocks_;
  return segment < passed_.size() && block % log_->segment_blocks_ < passed_[segment] &&
         left_out_.count(slot) == 0;
}

}  // namespace oe
