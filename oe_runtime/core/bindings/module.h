// The parts of the Python module oe_runtime._core.
#pragma once

#include <pybind11/pybind11.h>

namespace oe {

void BindCheckpoint(pybind11::module_& module);
void BindData(pybind11::module_& module);
void BindErrors();
void BindClient(pybind11::module_& module);
void BindFront(pybind11::module_& module);
void BindOptimizers(pybind11::module_& module);
void BindServer(pybind11::module_& module);
void BindStrings(pybind11::module_& module);

}  // namespace oe
