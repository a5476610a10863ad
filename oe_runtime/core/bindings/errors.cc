// C++ errors become the classes of oe_runtime/errors.py, so that Python code never sees a binding's own.
#include "oe_runtime/core/wire/errors.h"

#include <exception>

#include "oe_runtime/core/bindings/module.h"
#include "oe_runtime/core/wire/error_kinds.h"

namespace py = pybind11;

namespace oe {
namespace {

void Translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const ServerLost& error) {
    const py::object type = py::module_::import("oe_runtime.errors").attr("ServerLost");
    py::set_error(type, type(error.endpoint(), error.what()));
  } catch (const Error& error) {
    for (const ErrorKind& kind : kErrorKinds) {
      if (kind.is(error))
        return py::set_error(py::module_::import("oe_runtime.errors").attr(kind.name), error.what());
    }
  }
}

}  // namespace

void BindErrors() { py::register_exception_translator(Translate); }

}  // namespace oe
