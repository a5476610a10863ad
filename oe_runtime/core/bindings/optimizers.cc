// What the bindings of Keras need to know of the registered optimizers.
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/bindings/module.h"
#include "oe_runtime/core/optimizer/symbol.h"

namespace py = pybind11;

namespace oe {

void BindOptimizers(py::module_& module) {
  module.def(
      "optimizers",
      [] {
        py::dict all;
        for (const OptimizerInfo& info : Optimizers()) {
          py::dict defaults;
          for (const auto& [name, value, is_flag] : Describe({info.name, {}}).params) {
            defaults[py::str(name)] = is_flag ? py::object(py::bool_(value != 0)) : py::float_(value);
          }
          all[py::str(info.name)] = py::make_tuple(defaults, info.counts_pushes);
        }
        return all;
      },
      "Every optimizer: its parameters' defaults, and whether updates depend on the number of the push.");
  module.def(
      "trace_rule",
      [](const std::string& name, const Params& params) {
        const OptimizerDescription description = Describe({name, params});
        py::list operations;
        for (const auto& [operation, value, operands] : description.program.operations) {
          operations.append(py::make_tuple(operation, value, operands));
        }
        std::vector<std::pair<std::string, double>> slots;
        for (const StateSlot& slot : description.slots) slots.emplace_back(slot.name, slot.initial);
        return py::make_tuple(operations, description.program.results, slots);
      },
      "An optimizer's rule for one weight: operations (name, value, operands), the operations that give the "
      "new weight and "
      "slots, and the slots (name, first value).");
}

}  // namespace oe
