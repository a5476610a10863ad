#include "oe_runtime/core/bindings/module.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ core of oe_runtime. Use oe_runtime.Client and python -m oe_runtime.server.";
  oe::BindErrors();
  oe::BindCheckpoint(module);
  oe::BindClient(module);
  oe::BindData(module);
  oe::BindFront(module);
  oe::BindOptimizers(module);
  oe::BindServer(module);
  oe::BindStrings(module);
}
