// A function of a model as the front calls it, whichever library computes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include "oe_runtime/core/front/json_tensors.h"

namespace oe {

inline int64_t CountOf(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// Numbers in memory, one row after the other.
struct ProgramTensor {
  std::optional<NumberType> type;  // none: one that the front does not read
  std::vector<int64_t> shape;
  void* data = nullptr;
  std::shared_ptr<void> owner;  // of the memory, as the library knows it

  size_t count() const { return static_cast<size_t>(CountOf(shape)); }
};

class Program {
 public:
  Program() = default;
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;
  virtual ~Program() = default;

  // A tensor for Call(), with memory of the library's. Throws Error without it.
  virtual ProgramTensor New(NumberType type, std::vector<int64_t> shape) const = 0;
  // Arguments are of New(), or share memory with one that is. Thread-safe. Throws Error with the library's
  // message.
  virtual std::vector<ProgramTensor> Call(const std::vector<const ProgramTensor*>& arguments) const = 0;
};

}  // namespace oe
