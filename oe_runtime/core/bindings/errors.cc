// C++ errors become the classes of oe_runtime/errors.py, so that Python code never sees a binding's own.
#include "oe_runtime/core/wire/errors.h"

#include <exception>
#include <string>

#include "oe_runtime/core/bindings/module.h"

namespace py = pybind11;

namespace oe {
namespace {

void Raise(const char* class_name, const std::string& message) {
  const py::object type = py::module_::import("oe_runtime.errors").attr(class_name);
  py::set_error(type, message.c_str());
}

void Translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const ServerLost& error) {
    const py::object type = py::module_::import("oe_runtime.errors").attr("ServerLost");
    py::set_error(type, type(error.endpoint(), error.what()));
  } catch (const SpecError& error) {
    Raise("SpecError", error.what());
  } catch (const SpecMismatch& error) {
    Raise("SpecMismatch", error.what());
  } catch (const KeyRangeError& error) {
    Raise("KeyRangeError", error.what());
  } catch (const GradientError& error) {
    Raise("GradientError", error.what());
  } catch (const StorageFull& error) {
    Raise("StorageFull", error.what());
  } catch (const StorageError& error) {
    Raise("StorageError", error.what());
  } catch (const CheckpointError& error) {
    Raise("CheckpointError", error.what());
  } catch (const AuthError& error) {
    Raise("AuthError", error.what());
  } catch (const WorkerLost& error) {
    Raise("WorkerLost", error.what());
  } catch (const TooManyConnections& error) {
    Raise("TooManyConnections", error.what());
  } catch (const TornError& error) {
    Raise("TornError", error.what());
  } catch (const ProtocolError& error) {
    Raise("ProtocolError", error.what());
  } catch (const Error& error) {
    Raise("OeError", error.what());
  }
}

}  // namespace

void BindErrors() { py::register_exception_translator(Translate); }

}  // namespace oe
