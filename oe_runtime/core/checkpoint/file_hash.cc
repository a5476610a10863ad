#include "oe_runtime/core/checkpoint/file_hash.h"

#include <new>

namespace oe {

FileHash::FileHash() : state_(XXH3_createState(), XXH3_freeState) {
  if (!state_) throw std::bad_alloc();
  (void)XXH3_64bits_reset(state_.get());
}

void FileHash::Update(const void* data, size_t size) { (void)XXH3_64bits_update(state_.get(), data, size); }

uint64_t FileHash::Digest() const { return XXH3_64bits_digest(state_.get()); }

}  // namespace oe
