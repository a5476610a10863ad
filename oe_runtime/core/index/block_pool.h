#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace oe {

// Blocks of one size for all hash indexes of the process, cut from huge pages: an index grows block by block,
// and an allocator's small pages would cost it a TLB miss per lookup. Thread-safe.
class BlockPool {
 public:
  static constexpr size_t kBlockBytes = size_t{8} << 10;

  static BlockPool& Get();

  // A block of zeros. Throws std::bad_alloc.
  void* Take();
  void Give(void* block) noexcept;

 private:
  static constexpr size_t kChunkBytes = size_t{2} << 20;

  struct FreeBlock {
    FreeBlock* next;
  };
  struct Chunk {
    FreeBlock* free = nullptr;
    size_t used = 0;
  };

  static char* ChunkOf(void* block) noexcept;
  void AddChunk();

  std::mutex mutex_;
  std::unordered_map<char*, Chunk> chunks_;  // by address
  std::vector<char*> available_;             // chunks with free blocks
};

}  // namespace oe
