#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "oe_runtime/core/common/shard.h"
#include "oe_runtime/core/spec/row_format.h"
#include "oe_runtime/core/spec/spec.h"

namespace oe {

// The weights of rows in fewer bytes than those of a table's dtype, for tables that are only read
// (StorageSpec::row_precision). "bfloat16": each is rounded to the nearest. "int8": each is rounded to the
// nearest multiple of the row's scale, a float32 that is 1/127 of its largest weight; the scale comes first.
// That is what exports of int8 rows do, in the same order and precision (oe_runtime/keras/export.py).
// Immutable.
class ReducedWeights {
 public:
  // nullptr for "": as trained. `spec` must be complete. Throws SpecError for another name.
  static std::unique_ptr<const ReducedWeights> Create(const std::string& precision, const TableSpec& spec);

  virtual ~ReducedWeights() = default;

  size_t bytes() const { return bytes_; }  // of a row

  // Writes the weights of a row of a file. Throws CheckpointError naming table and key for NaN, infinity and
  // a weight beyond float32's or bfloat16's largest.
  void Reduce(Key key, const std::byte* row, std::byte* reduced) const;
  // Writes them as pulls return them (RowFormat::value_bytes).
  void Read(const std::byte* reduced, void* values) const noexcept;
  // Makes weights as pulls return them those of a row that was reduced.
  void Round(void* values) const;

 protected:
  ReducedWeights(std::string precision, std::string table, const RowFormat& format, size_t bytes)
      : precision_(std::move(precision)), table_(std::move(table)), format_(format), bytes_(bytes) {}

  // Of dim() weights that are finite. Returns whether they can be had in these bytes.
  virtual bool Pack(const float* weights, std::byte* reduced) const noexcept = 0;
  virtual void Unpack(const std::byte* reduced, float* weights) const noexcept = 0;
  size_t dim() const { return format_.dim; }

 private:
  const std::string precision_;
  const std::string table_;
  const RowFormat format_;
  const size_t bytes_;
};

}  // namespace oe
