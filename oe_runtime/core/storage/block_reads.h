#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "oe_runtime/core/storage/block_device.h"

namespace oe {

// What the implementations of ReadQueue share.

// Of all queues of a device.
struct ReadCounts {
  std::atomic<uint64_t> reads{0};
  std::atomic<uint64_t> bytes{0};
  std::atomic<uint64_t> errors{0};

  void Add(const BlockDeviceStats& more) {
    reads.fetch_add(more.reads, std::memory_order_relaxed);
    bytes.fetch_add(more.read_bytes, std::memory_order_relaxed);
    errors.fetch_add(more.read_errors, std::memory_order_relaxed);
  }
};

enum class ReadShape { kBlocks, kPiece, kRefused };

// Which of BlockRead's shapes this is.
inline ReadShape ShapeOf(const BlockRead& read) {
  const uint64_t from = read.offset % kBlockBytes;
  const bool aligned = reinterpret_cast<uintptr_t>(read.into) % kBlockBytes == 0;
  if (read.bytes == 0 || read.into == nullptr) return ReadShape::kRefused;
  if (from == 0 && read.bytes % kBlockBytes == 0 && aligned) {
    const bool checkable = read.expected == 0 || read.bytes == kBlockBytes;
    return checkable ? ReadShape::kBlocks : ReadShape::kRefused;
  }
  return from + read.bytes <= kBlockBytes ? ReadShape::kPiece : ReadShape::kRefused;
}

// Compares the checksum, if one is expected, and copies a piece from its block. 0, or the error.
inline int Deliver(const BlockRead& read, ReadShape shape, const std::byte* block) {
  if (read.expected != 0 && BlockChecksum(block) != read.expected) return EBADMSG;
  if (shape == ReadShape::kPiece) std::memcpy(read.into, block + read.offset % kBlockBytes, read.bytes);
  return 0;
}

}  // namespace oe
