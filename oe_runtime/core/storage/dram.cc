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
    void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw StorageError("no memory for " + BytesText(bytes), errno);
    // Rows are read at random: with 4 KiB pages most reads would also miss the TLB. Best effort.
    if (bytes >= kHugePage) (void)::madvise(memory, bytes, MADV_HUGEPAGE);
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
