// A block of 64-byte aligned, uninitialised memory: what keys, rows and frames are read into.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace oe {

class SharedArena;

class Buffer {
 public:
  static constexpr size_t kAlignment = 64;  // one cache line; what TensorFlow asks of memory it does not copy
  // Large blocks that buffers let go of wait for the next ones, up to a limit per process, and the
  // oldest go first: the kernel clears every page of new memory, which takes longer than to fill it with
  // rows.
  static constexpr size_t kMostSpare = size_t{256} << 20;

  Buffer() = default;
  explicit Buffer(size_t size) { Resize(size); }
  // In shared memory (wire/shared_memory.h) if that has room for it and it is worth it; `arena` may be
  // nullptr.
  Buffer(size_t size, const std::shared_ptr<SharedArena>& arena);
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)),
        capacity_(std::exchange(other.capacity_, 0)),
        arena_(std::move(other.arena_)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
    arena_.swap(other.arena_);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { Free(); }

  // The old content is lost. Memory is kept unless the new size needs less than a quarter of a large block,
  // so that one huge request does not hold its memory for the life of a connection.
  void Resize(size_t size) {
    const bool wasteful = capacity_ > kKeep && size < capacity_ / 4;
    if (size > capacity_ || wasteful) Allocate(size);
    size_ = size;
  }

  // Takes memory for `size` bytes, and keeps the first `kept` of the old content.
  void Grow(size_t size, size_t kept);

  uint8_t* data() { return data_; }
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  size_t capacity() const { return capacity_; }
  // The memory as an array of T; T must be a plain number.
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(data_);
  }
  template <typename T>
  const T* as() const {
    return reinterpret_cast<const T*>(data_);
  }

  // Bytes that wait for the next buffers of this process.
  static size_t Spare();
  // Gives them back to the system.
  static void FreeSpare();

 private:
  static constexpr size_t kKeep = size_t{8} << 20;
  void Allocate(size_t size);
  void Free() noexcept;

  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  size_t capacity_ = 0;
  std::shared_ptr<SharedArena> arena_;  // whose block it is
};

// Bytes that somebody else owns.
struct Bytes {
  const uint8_t* data = nullptr;
  size_t size = 0;
};

}  // namespace oe
