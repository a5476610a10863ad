#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace oe {

// A named piece of a medium, mapped: a file of a directory on persistent memory.
struct Region {
  std::string name;
  std::string path;  // for messages
  std::byte* data = nullptr;
  size_t size = 0;
  uint64_t device = 0;  // which file it is, whatever its name
  uint64_t inode = 0;
};

// Makes stores to regions durable. For one thread; its fence covers its own flushes.
class Flusher {
 public:
  virtual ~Flusher() = default;

  // An 8-byte store to an aligned word, which a power cut does or undoes as a whole. Everything that
  // publishes or invalidates goes through here; other data may be stored in any way.
  virtual void Store(uint64_t* word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
  // Begins to write the bytes back. They may have reached the medium before, without being asked to.
  virtual void Flush(const void* data, size_t size) = 0;
  // Returns when all that was flushed before is durable. Throws StorageError.
  virtual void Fence() = 0;
};

// Memory that outlives the process and a power cut: what pools (pool.h) are made of. Thread-safe.
class Medium {
 public:
  virtual ~Medium() = default;

  // A new region of zeros with at least `least` bytes, about `wanted` if there is room; both and the result
  // are multiples of 4096. Its name and size are durable at return. Throws StorageError; `owner` is the table
  // that the message names.
  virtual Region Create(const std::string& name, size_t least, size_t wanted, const std::string& owner) = 0;
  // Bytes of a region that exists: 0 if the process was killed while it was made. Throws StorageError.
  virtual size_t SizeOf(const std::string& name) const = 0;
  // Maps a region that exists and has bytes. Throws StorageError.
  virtual Region Open(const std::string& name) = 0;
  // Says that a part of a region is read from its first byte to its last in a moment, or, without `in_order`,
  // as it is at first, here and there: what lies beside is then not read too, where memory is a cache of a
  // file.
  virtual void Advise(const void* /*data*/, size_t /*size*/, bool /*in_order*/) noexcept {}
  // Unmaps it.
  virtual void Close(const Region& region) noexcept = 0;
  // Throws StorageError unless the next process finds the region under its name.
  virtual void RequirePresent(const Region& /*region*/) const {}
  // Removes a region that is not mapped; durable at return.
  virtual void Remove(const std::string& name) = 0;
  // About how many bytes new regions can still have.
  virtual uint64_t Room() const noexcept = 0;
  // The names of all regions, in order. Throws StorageError.
  virtual std::vector<std::string> List() const = 0;
  // What `name` is called in messages.
  virtual std::string PathOf(const std::string& name) const = 0;

  virtual std::unique_ptr<Flusher> NewFlusher() = 0;
};

// A region that exists, mapped while this object lives. Throws StorageError.
class OpenRegion {
 public:
  OpenRegion(Medium* medium, const std::string& name) : medium_(medium), region_(medium->Open(name)) {}
  ~OpenRegion() { medium_->Close(region_); }
  OpenRegion(const OpenRegion&) = delete;
  OpenRegion& operator=(const OpenRegion&) = delete;

  const Region& operator*() const noexcept { return region_; }

 private:
  Medium* const medium_;
  const Region region_;
};

}  // namespace oe
