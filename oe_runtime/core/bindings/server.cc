#include "oe_runtime/core/bindings/module.h"

namespace oe {

void BindServer(pybind11::module_&) {}

}  // namespace oe
