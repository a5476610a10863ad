#pragma once

#include <cstddef>
#include <string>

#include "oe_runtime/core/common/shard.h"
#include "oe_runtime/core/policy/row_facts.h"
#include "oe_runtime/core/spec/row_format.h"

namespace oe {

// A number of a row.
double NumberAt(const std::byte* from, Dtype dtype);

// Rows of a table as those of one that differs in the dtypes of its weights and its optimizer's state.
class RowConverter {
 public:
  // Both must be complete.
  RowConverter(const TableSpec& from, const TableSpec& to);

  size_t row_bytes() const { return facts_.row_bytes(); }
  // Writes the row with each number rounded to the nearest. Throws CheckpointError naming table and key for
  // NaN, infinity and a number beyond the new dtype's largest.
  void Convert(Key key, const std::byte* row, std::byte* to) const;

 private:
  void ConvertNumbers(Key key, const std::byte* row, Dtype dtype, size_t n, std::byte* to,
                      Dtype to_dtype) const;

  const std::string table_;
  const RowFormat from_;
  const RowFormat to_;
  const RowFacts facts_;  // behind the new state
};

}  // namespace oe
