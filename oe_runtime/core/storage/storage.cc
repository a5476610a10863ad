#include "oe_runtime/core/storage/storage.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

constexpr size_t kAlignment = 256;  // what Optane reads and writes at once
constexpr size_t kPage = 4096;
constexpr size_t kSmallestSegment = size_t{256} << 10;
constexpr size_t kLargestSegment = size_t{1} << 30;

size_t RoundUp(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

}  // namespace

std::string BytesText(uint64_t bytes) {
  static constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  std::array<char, 32> text{};
  (void)std::snprintf(text.data(), text.size(), value < 10 && unit > 0 ? "%.1f %s" : "%.0f %s", value,
                      kUnits[unit]);
  return text.data();
}

std::shared_ptr<Storage> Storage::Open(const StorageSpec& spec) {
  if (spec.type == "dram") return OpenDram(spec);
  if (spec.type == "pmem_libpmem") return OpenPmemLibpmem(spec);
  throw SpecError("storage type '" + spec.type + "' is not one of dram, pmem_libpmem");
}

std::unique_ptr<Arena> Storage::NewArena(const std::string& owner, const std::string& description) {
  return std::make_unique<Arena>(shared_from_this(), owner, description);
}

uint64_t Storage::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return bytes_;
}

Segment Storage::Take(size_t minimum, size_t wanted, const std::string& owner,
                      const std::string& description) {
  const size_t least = RoundUp(minimum + overhead(), kPage);
  size_t size = RoundUp(std::max(minimum, wanted) + overhead(), kPage);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (spec_.capacity_bytes > 0) {
    const uint64_t left = spec_.capacity_bytes > bytes_ ? spec_.capacity_bytes - bytes_ : 0;
    if (least > left) {
      throw StorageError("storage " + (spec_.path.empty() ? spec_.type : spec_.path) + " is full: table '" +
                         owner + "' needs " + BytesText(least) + " more, " + BytesText(bytes_) + " of " +
                         BytesText(spec_.capacity_bytes) +
                         " are in use; raise the storage size of the servers or use more servers");
    }
    size = static_cast<size_t>(std::min<uint64_t>(size, left / kPage * kPage));
  }
  while (true) {
    try {
      Segment segment = Map(size, description);
      bytes_ += segment.mapped;
      return segment;
    } catch (const StorageError& error) {
      // The device may still have room for a smaller piece.
      if (size == least) {
        throw StorageError("table '" + owner + "': " + error.what() +
                           "; free space there, or use more servers or another storage");
      }
      size = std::max(least, RoundUp(size / 2, kPage));
    }
  }
}

void Storage::Give(const Segment& segment) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  Unmap(segment);
  bytes_ -= segment.mapped;
}

Arena::Arena(std::shared_ptr<Storage> storage, std::string owner, std::string description)
    : storage_(std::move(storage)), owner_(std::move(owner)), description_(std::move(description)) {}

Arena::~Arena() {
  for (const Segment& segment : segments_) storage_->Give(segment);
}

std::byte* Arena::Allocate(size_t bytes) {
  const size_t size = RoundUp(bytes, kAlignment);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (segments_.empty() || segments_.back().size - used_ < size) {
    // Growing by an eighth keeps both the number of segments and the unused part of the last one small.
    const size_t wanted = std::clamp(static_cast<size_t>(bytes_ / 8), kSmallestSegment, kLargestSegment);
    segments_.reserve(segments_.size() + 1);  // so that a segment that was taken is never lost
    segments_.push_back(storage_->Take(size, wanted, owner_, description_));
    used_ = 0;
    bytes_ += segments_.back().mapped;
  }
  std::byte* block = segments_.back().data + used_;
  used_ += size;
  return block;
}

uint64_t Arena::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return bytes_;
}

}  // namespace oe
