#pragma once

#include <atomic>
#include <cstdint>

#include "oe_runtime/core/storage/block_device.h"

namespace oe {

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
  if (from == 0 && read.bytes % kBlockBytes == 0 && aligned) return ReadShape::kBlocks;
  return from + read.bytes <= kBlockBytes ? ReadShape::kPiece : ReadShape::kRefused;
}

}  // namespace oe
