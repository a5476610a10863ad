#include "oe_runtime/core/client/gradients.h"

#include <string>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

void CheckShape(const GradientView& gradients, size_t group, size_t rows, size_t dim) {
  if (!gradients.given() || (gradients.rows == rows && gradients.dim == dim)) return;
  throw SpecError("gradients of group " + std::to_string(group) + " have shape (" +
                  std::to_string(gradients.rows) + ", " + std::to_string(gradients.dim) + "); expected (" +
                  std::to_string(rows) + ", " + std::to_string(dim) + ")");
}

}  // namespace

void CheckShapes(const BatchPlan& plan, const std::vector<GradientView>& of_ids,
                 const std::vector<GradientView>& of_rows) {
  const size_t groups = plan.groups.size();
  if (of_ids.size() != groups || (!of_rows.empty() && of_rows.size() != groups)) {
    throw SpecError(std::to_string(of_ids.size()) + " gradients for " + std::to_string(groups) + " groups");
  }
  for (size_t g = 0; g < groups; ++g) {
    const PlannedGroup& group = plan.groups[g];
    const GradientView rows = of_rows.empty() ? GradientView{} : of_rows[g];
    CheckShape(of_ids[g], g, group.inverse.size(), group.dim);
    CheckShape(rows, g, group.rows, group.dim);
    for (const PlannedLookup& lookup : group.lookups) {
      if (!of_ids[g].by_example || lookup.size == group.lookups[0].size) continue;
      throw SpecError("gradients of group " + std::to_string(g) +
                      " come by example, but its lookups have different numbers of ids");
    }
    if (of_ids[g].given() || rows.given()) continue;
    throw SpecError("group " + std::to_string(g) + " has no gradients");
  }
}

}  // namespace oe
