#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "oe_runtime/core/checkpoint/table_chain.h"

namespace oe {

struct TableDifference {
  uint64_t before = 0;  // rows
  uint64_t after = 0;
  uint64_t only_before = 0;  // keys with a row in one of them
  uint64_t only_after = 0;
  uint64_t changed = 0;  // rows in which a bit differs (of tables of two dtypes: a number), of those compared
  // The largest absolute difference of two weights and of two numbers of the optimizer's state; infinity
  // where one of them is not a number.
  double weights = 0;
  double state = 0;
};

// Compares two saves of a table, of any numbers of servers. Weights are compared when both have the same dim,
// the optimizer's state when that also has the same size and name. About `memory` bytes are used: when the
// rows of `before` need more, the files are read several times, a part of the keys each. Throws
// CheckpointError naming the file.
TableDifference CompareTables(const std::vector<TableChain>& before, const std::vector<TableChain>& after,
                              size_t memory);

// The dtypes that a table gets; empty: those that it has.
struct RowDtypes {
  std::string weights;
  std::string state;
};

// Writes the rows of a table anew for files.size() servers, files[s] being that of server s. Memory: two
// blocks of 1 MiB for each of them. Throws CheckpointError naming the file, or the key whose row has a number
// beyond the new dtype, and SpecError for dtypes that the table cannot have; then files that were published
// stay.
std::vector<TableFileInfo> ReshardTable(const std::vector<TableChain>& chains,
                                        const std::vector<std::string>& files, const RowDtypes& dtypes = {});

}  // namespace oe
