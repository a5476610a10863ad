#pragma once

#include <cstddef>
#include <vector>

#include "oe_runtime/core/client/plan.h"

namespace oe {

// What a batch's training gives for the rows of its groups.

struct GradientView {
  const void* data = nullptr;  // rows x dim floats, or doubles for a group of float64 tables
  size_t rows = 0;
  size_t dim = 0;  // 0 where there is no gradient
  // Of ids of lookups of equal length: those of the first example come first, then those of the next.
  bool by_example = false;

  bool given() const { return dim != 0; }
};

// Throws SpecError unless every group of the plan has gradients of its ids, of its rows, or both, and of the
// right shapes. `of_rows` may be empty.
void CheckShapes(const BatchPlan& plan, const std::vector<GradientView>& of_ids,
                 const std::vector<GradientView>& of_rows);

}  // namespace oe
