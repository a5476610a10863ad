#include <sys/mman.h>

#include <cerrno>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

class Dram final : public Storage {
 public:
  explicit Dram(const StorageSpec& spec) : Storage(spec) {}

  bool is_pmem() const override { return false; }

 private:
  size_t overhead() const override { return 0; }

  Segment Map(size_t bytes, const std::string& /*description*/) override {
    // Rows are read at random: with 4 KiB pages most reads would also miss the TLB. Huge pages need
    // alignment, and untouched memory costs nothing, so map more and give back the ends.
    const bool large = bytes >= kHugePage;
    const size_t mapped = large ? bytes + kHugePage : bytes;
    void* memory = ::mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw StorageError("no memory for " + BytesText(bytes), errno);
    if (large) {
      auto* begin = static_cast<std::byte*>(memory);
      const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(memory) % kHugePage) % kHugePage;
      if (before > 0) (void)::munmap(begin, before);
      (void)::munmap(begin + before + bytes, kHugePage - before);
      memory = begin + before;
      (void)::madvise(memory, bytes, MADV_HUGEPAGE);
    }
    return {static_cast<std::byte*>(memory), bytes, memory, bytes, ""};
  }

  void Unmap(const Segment& segment) noexcept override { (void)::munmap(segment.mapping, segment.mapped); }
};

}  // namespace

std::shared_ptr<Storage> OpenDram(const StorageSpec& spec) {
  if (!spec.path.empty()) throw SpecError("storage dram takes no path, but '" + spec.path + "' was given");
  return std::make_shared<Dram>(spec);
}

}  // namespace oe
