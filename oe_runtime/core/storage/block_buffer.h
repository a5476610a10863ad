#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace oe {

// The unit of a block device: what one read or write has at least, and the alignment of memory for it.
constexpr size_t kBlockBytes = 4096;

// Memory for whole blocks, aligned as O_DIRECT asks. Not zeroed.
class BlockBuffer {
 public:
  explicit BlockBuffer(size_t bytes = 0) : size_((bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes) {
    if (size_ < bytes) throw std::bad_alloc();  // rounded up past what a size can say
    if (size_ == 0) return;
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, size_)));
    if (data_ == nullptr) throw std::bad_alloc();
  }

  std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }  // NOLINT(cppcoreguidelines-no-malloc)
  };
  size_t size_;
  std::unique_ptr<std::byte, Free> data_;
};

}  // namespace oe
