#pragma once

#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace oe {

// XXH3-64 of bytes that come in pieces.
class FileHash {
 public:
  FileHash();  // throws std::bad_alloc
  void Update(const void* data, size_t size);
  uint64_t Digest() const;

 private:
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state_;
};

}  // namespace oe
