#include "oe_runtime/core/index/block_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace oe {

BlockPool& BlockPool::Get() {
  static auto* pool = new BlockPool;  // never destroyed: indexes may outlive any static object
  return *pool;
}

char* BlockPool::ChunkOf(void* block) noexcept {
  return static_cast<char*>(block) - reinterpret_cast<uintptr_t>(block) % kChunkBytes;
}

void BlockPool::AddChunk() {
  available_.reserve(chunks_.size() + 1);  // so that Give() has room for every chunk
  auto* memory = static_cast<char*>(std::aligned_alloc(kChunkBytes, kChunkBytes));
  if (memory == nullptr) throw std::bad_alloc();
  (void)::madvise(memory, kChunkBytes, MADV_HUGEPAGE);  // best effort
  Chunk chunk;
  for (size_t at = kChunkBytes; at > 0; at -= kBlockBytes) {
    chunk.free = new (memory + at - kBlockBytes) FreeBlock{chunk.free};
  }
  try {
    chunks_.emplace(memory, chunk);
  } catch (...) {
    std::free(memory);
    throw;
  }
  available_.push_back(memory);
}

void* BlockPool::Take() {
  void* block = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (available_.empty()) AddChunk();
    Chunk& chunk = chunks_.find(available_.back())->second;
    block = chunk.free;
    chunk.free = chunk.free->next;
    ++chunk.used;
    if (chunk.free == nullptr) available_.pop_back();
  }
  std::memset(block, 0, kBlockBytes);
  return block;
}

void BlockPool::Give(void* block) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  char* const address = ChunkOf(block);
  const auto chunk = chunks_.find(address);
  if (chunk->second.free == nullptr) available_.push_back(address);
  chunk->second.free = new (block) FreeBlock{chunk->second.free};
  if (--chunk->second.used > 0 || available_.size() == 1) return;  // one stays for the next Take()
  available_.erase(std::find(available_.begin(), available_.end(), address));
  chunks_.erase(chunk);
  std::free(address);
}

}  // namespace oe
