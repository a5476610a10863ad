#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {
namespace {

constexpr size_t kDramAlignment = 256;

// How much an arena of `bytes` maps next, for blocks of `block` bytes. Its last segment counts as a whole,
// and an arena may have many segments, since they are no files: from 16 MiB on, all together are whole huge
// pages, and at most a page and 2 % are unused. Smaller segments have whole blocks.
size_t NextOfArena(uint64_t bytes, size_t block) {
  const size_t next = std::min(NextSegment(bytes), RoundUp(static_cast<size_t>(bytes / 64) + 1, kHugePage));
  if (next < kHugePage) return RoundUp(RoundUp(next, block), kPage);
  return RoundUp(static_cast<size_t>(bytes) + next - kHugePage + 1, kHugePage) - static_cast<size_t>(bytes);
}

class Dram final : public Storage {
 public:
  explicit Dram(const StorageSpec& spec) : Storage(spec) {}

  bool is_pmem() const override { return false; }
};

}  // namespace

std::byte* Storage::MapSegment(size_t bytes) {
  // Rows are read at random: with 4 KiB pages most reads would also miss the TLB. Huge pages need
  // alignment, and untouched memory costs nothing, so map more and give back the ends.
  const bool large = bytes >= kHugePage;
  const size_t mapped = large ? bytes + kHugePage : bytes;
  void* memory = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw StorageError("no memory for " + BytesText(bytes), errno);
  auto* begin = static_cast<std::byte*>(memory);
  if (large) {
    const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(memory) % kHugePage) % kHugePage;
    if (before > 0) (void)::munmap(begin, before);
    (void)::munmap(begin + before + bytes, kHugePage - before);
    begin += before;
    (void)::madvise(begin, bytes, MADV_HUGEPAGE);
  }
  return begin;
}

void Storage::UnmapSegment(std::byte* data, size_t bytes) noexcept { (void)::munmap(data, bytes); }

std::shared_ptr<Storage> OpenDram(const StorageSpec& spec) {
  if (!spec.path.empty()) throw SpecError("storage dram takes no path, but '" + spec.path + "' was given");
  if (spec.recover)
    throw SpecError("storage dram cannot recover tables; only pmem_libpmem and dram_pmem outlive a process");
  return std::make_shared<Dram>(spec);
}

Arena::Arena(std::shared_ptr<Storage> storage, std::string owner)
    : storage_(std::move(storage)), owner_(std::move(owner)) {}

Arena::~Arena() {
  for (const Segment& segment : segments_) {
    storage_->UnmapSegment(segment.data, segment.size);
    storage_->Give(segment.size);
  }
}

std::byte* Arena::Allocate(size_t bytes) {
  const size_t size = RoundUp(bytes, kDramAlignment);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (segments_.empty() || segments_.back().size - used_ < size) {
    segments_.reserve(segments_.size() + 1);  // so that a segment that was taken is never lost
    Segment segment;
    segment.size = storage_->Take(RoundUp(size, kPage), NextOfArena(bytes_, size), owner_,
                                  [&](size_t wanted) { segment.data = storage_->MapSegment(wanted); });
    segments_.push_back(segment);
    used_ = 0;
    bytes_ += segment.size;
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
