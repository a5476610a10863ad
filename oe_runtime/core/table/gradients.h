#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/executor.h"
#include "oe_runtime/core/common/shard.h"
#include "oe_runtime/core/spec/spec.h"

namespace oe {

// Of gradients of a table, n rows of dim doubles for float64 and dim floats for other dtypes.

// Whether none is NaN or an infinity. As fast as memory brings them; the threads of `executor`, if there is
// one, share the work.
bool AllFinite(const TableSpec& spec, const void* grads, size_t n, Executor* executor = nullptr);

// How many of the rows have NaN or an infinity.
size_t CountNonfinite(const TableSpec& spec, const void* grads, size_t n, Executor* executor = nullptr);

// Throws SpecError naming the first key with NaN or an infinity among its `of_key` values, doubles for
// float64 tables and floats for others, unless the table's nonfinite_gradients is "pass". `stride` as
// RowStrides.
void RefuseNonfinite(const TableSpec& spec, const Key* keys, size_t n, const void* values, size_t of_key,
                     const std::string& what, size_t stride = 0, Executor* executor = nullptr);

// The error of a table that refuses such gradients: names the table and the first key with one.
GradientError Nonfinite(const TableSpec& spec, const Key* keys, size_t n, const void* grads);

}  // namespace oe
