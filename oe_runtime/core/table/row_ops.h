#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "oe_runtime/core/common/shard.h"
#include "oe_runtime/core/spec/row_format.h"

namespace oe {

// The operations on the bytes of rows, for a table's dtype, initializer and optimizer. Pulls return and
// pushes bring doubles for float64, floats for all other dtypes. Immutable.
//
// Weights and a state of halves are updated in float32 and rounded stochastically (common/half.h). Rounded to
// the nearest half, an update below half the distance of two halves would be lost each time, and most updates
// become that small; so would the decay of Adam's velocity. Each row is loaded, updated, rounded and stored
// before the next, so that the processor overlaps these steps of several rows. The random bits are a function
// of the seed and name of the table, the key, the number of the push, and the weight or the number of the
// state, so any storage, number of servers and threads gives the same rows.
class RowOps {
 public:
  // `spec` must be complete. `wide`: with AVX-512, by default where the processor has it; the rows are the
  // same.
  static std::unique_ptr<const RowOps> Create(const TableSpec& spec);
  static std::unique_ptr<const RowOps> Create(const TableSpec& spec, bool wide);

  virtual ~RowOps() = default;

  const RowFormat& format() const { return format_; }

  // Weights and state of a new row.
  virtual void Init(Key key, std::byte* row) const noexcept = 0;
  // The weights of a key that has no row: those that Init() would give it.
  virtual void ReadMissing(Key key, void* values) const noexcept = 0;
  // The weights of a row. Rows of float32 and float64 begin with just these bytes.
  virtual void Read(const std::byte* row, void* values) const noexcept = 0;
  // The state of a row, as many values as it has.
  virtual void ReadState(const std::byte* row, void* values) const noexcept = 0;
  // Sets the weights of a row, halves rounded to the nearest as Init() does: what Read() gave stays the same.
  virtual void Write(const void* values, std::byte* row) const noexcept = 0;
  // The same of its state.
  virtual void WriteState(const void* values, std::byte* row) const noexcept = 0;

  // Applies the optimizer to rows[i] of keys[i] with gradients[i] for i < n <= kMostRows. `step` is the
  // number of the push.
  static constexpr size_t kMostRows = 64;
  virtual void Update(std::byte* const* rows, const Key* keys, const void* const* gradients, size_t n,
                      double learning_rate, uint64_t step) const noexcept = 0;

 protected:
  explicit RowOps(const RowFormat& format) : format_(format) {}

 private:
  const RowFormat format_;
};

}  // namespace oe
