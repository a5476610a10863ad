#include <dlfcn.h>
#include <pybind11/stl.h>

#include <cstdio>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "oe_runtime/core/bindings/module.h"
#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/front/http_server.h"
#include "oe_runtime/core/front/predictor.h"
#include "oe_runtime/core/wire/tls.h"

namespace py = pybind11;

namespace oe {
namespace {

// The last one who has the object may be a thread without the GIL.
template <typename Object>
std::shared_ptr<const Object> Share(Object object) {
  return {new Object(std::move(object)), [](const Object* shared) {
            const py::gil_scoped_acquire acquire;
            delete shared;
          }};
}

// The tensor of Python's TensorFlow in the terms of its C API, by a function of its bindings.
TFE_TensorHandle* HandleOf(const std::string& bindings, py::handle tensor) {
  void* const library = dlopen(bindings.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  void* const found = library == nullptr ? nullptr : dlsym(library, "_Z18EagerTensor_HandlePK7_object");
  if (found == nullptr) throw Error(bindings + " has no EagerTensor_Handle");
  return reinterpret_cast<TFE_TensorHandle* (*)(const PyObject*)>(found)(tensor.ptr());
}

NumberType TypeOf(const std::string& name) {
  const std::optional<NumberType> type = NumberTypeOf(name);
  if (!type) throw Error(name + " is no type of numbers that the core reads");
  return *type;
}

// A predictor, and the tensors of Python whose handles it has.
struct OwnedPredictor {
  std::unique_ptr<Predictor> predictor;
  std::vector<py::object> tensors;
};

constexpr const char* kNoGzip =
    R"({"error": "the body is not one file of gzip, as its Content-Encoding says, or it is damaged"})";

using Function = std::pair<std::string, std::vector<py::object>>;  // its name and captured tensors

std::unique_ptr<OwnedPredictor> NewPredictor(
    const std::string& target, const std::string& library, const std::string& bindings,
    const py::capsule& context,
    const std::vector<std::tuple<std::string, std::string, std::vector<int64_t>>>& inputs,
    const std::vector<std::pair<std::string, std::string>>& outputs, const Function& forward,
    const std::vector<std::pair<std::string, size_t>>& arguments, const std::optional<Function>& ids,
    const std::vector<size_t>& ids_inputs, size_t ids_outputs,
    const std::vector<std::pair<uint32_t, uint32_t>>& lookups,
    const std::vector<std::vector<size_t>>& groups) {
  auto owned = std::make_unique<OwnedPredictor>();
  const auto function_of = [&](const Function& function, size_t returned) {
    std::vector<TFE_TensorHandle*> captured;
    for (const py::object& tensor : function.second) {
      captured.push_back(HandleOf(bindings, tensor));
      owned->tensors.push_back(tensor);
    }
    return std::make_unique<const TensorFlowFunction>(function.first, std::move(captured), returned);
  };
  PredictorOptions options;
  options.target = target;
  options.library = library;
  options.context = static_cast<TFE_Context*>(context.get_pointer());
  for (const auto& [name, type, shape] : inputs) options.inputs.push_back({name, TypeOf(type), shape});
  for (const auto& [name, type] : outputs) options.outputs.push_back({name, TypeOf(type), {}, nullptr});
  options.forward = function_of(forward, outputs.size());
  for (const auto& [kind, number] : arguments) {
    const auto of = kind == "input"  ? ForwardArgument::Kind::kInput
                    : kind == "rows" ? ForwardArgument::Kind::kRows
                                     : ForwardArgument::Kind::kSizes;
    options.arguments.push_back({of, number});
  }
  if (ids) options.ids = function_of(*ids, ids_outputs);
  options.ids_inputs = ids_inputs;
  options.lookups = lookups;
  options.groups = groups;
  owned->predictor = std::make_unique<Predictor>(std::move(options));
  return owned;
}

std::optional<HttpReply> Lead(const py::function& lead, Predictor::Call* call) {
  const py::gil_scoped_acquire acquire;
  try {
    const py::object refused = lead(py::cast(call, py::return_value_policy::reference));
    if (refused.is_none()) return std::nullopt;
    return refused.cast<HttpReply>();
  } catch (const std::exception& error) {
    throw Error(error.what());  // Python finds it again, and the words for it
  }
}

HttpReply AskPython(const py::function& answer, const HttpRequest& request) {
  const py::gil_scoped_acquire acquire;
  try {
    return answer(request.method, request.target, py::bytes(request.body)).cast<HttpReply>();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: a request was not answered: %s\n", error.what());
    return {500, "{\"error\": \"internal error; the server's log has more\"}"};
  }
}

// Undoes gzip by Python's zlib, which every host has; the core would need a package for it.
std::optional<HttpRequest> Unpack(const py::function& unpack, const HttpRequest& request) {
  const py::gil_scoped_acquire acquire;
  const py::object body = unpack(py::bytes(request.body), *request.unpacked);
  if (body.is_none()) return std::nullopt;
  return HttpRequest{request.method, request.target, body.cast<std::string>(), std::nullopt};
}

HttpAccess AccessOf(const std::string& certificate, const std::string& key, const std::string& token) {
  HttpAccess access;
  access.token = token;
  if (!certificate.empty()) access.tls = std::make_shared<TlsContext>(TlsCertificate{certificate, key});
  return access;
}

// Its threads need the GIL to end.
struct Delete {
  void operator()(HttpServer* server) const {
    const py::gil_scoped_release release;
    delete server;
  }
};
using Owned = std::unique_ptr<HttpServer, Delete>;

Owned NewServer(py::function answer, py::function unpack, py::object predictor, py::function lead,
                HttpOptions options, int port) {
  if (port < 0 || port > std::numeric_limits<uint16_t>::max())
    throw Error("cannot listen on " + options.host + ":" + std::to_string(port) + ": there is no such port");
  options.port = static_cast<uint16_t>(port);
  return Owned(new HttpServer(
      options,
      [ask = Share(std::move(answer)), unpack_by = Share(std::move(unpack)), shared = Share(predictor),
       lead_by = Share(std::move(lead)),
       fast = predictor.is_none() ? nullptr : predictor.cast<OwnedPredictor*>()->predictor.get()](
          const HttpRequest& sent) {
        std::optional<HttpRequest> unpacked;
        if (sent.unpacked) unpacked = Unpack(*unpack_by, sent);
        if (sent.unpacked && !unpacked) return HttpReply{400, kNoGzip};
        const HttpRequest& request = unpacked ? *unpacked : sent;
        if (fast != nullptr) {
          std::optional<HttpReply> reply =
              fast->Answer(request, [&](Predictor::Call* call) { return Lead(*lead_by, call); });
          if (reply) return std::move(*reply);
        }
        return AskPython(*ask, request);
      },
      // One state of the interpreter for all requests of a thread.
      [](const std::function<void()>& run) {
        const py::gil_scoped_acquire acquire;
        const py::gil_scoped_release release;
        run();
      }));
}

}  // namespace

void BindFront(py::module_& module) {
  py::class_<Predictor::Call>(module, "PredictorCall", "A request that leads through its steps.")
      .def("pull", &Predictor::Call::Pull, py::call_guard<py::gil_scoped_release>(), py::arg("client"))
      .def("forward", &Predictor::Call::Forward, py::call_guard<py::gil_scoped_release>());
  py::class_<OwnedPredictor>(module, "Predictor", "Answers for HttpServer without Python.")
      .def(py::init(&NewPredictor), py::kw_only(), py::arg("target"), py::arg("library"), py::arg("bindings"),
           py::arg("context"), py::arg("inputs"), py::arg("outputs"), py::arg("forward"),
           py::arg("arguments"), py::arg("ids") = py::none(), py::arg("ids_inputs") = std::vector<size_t>(),
           py::arg("ids_outputs") = 0, py::arg("lookups") = std::vector<std::pair<uint32_t, uint32_t>>(),
           py::arg("groups") = std::vector<std::vector<size_t>>())
      .def(
          "batch",
          [](OwnedPredictor& self, size_t examples, double seconds) {
            self.predictor->Batch(examples, seconds);
          },
          py::arg("examples"), py::arg("timeout_seconds"));
  py::class_<HttpReply>(module, "HttpReply", "An answer of HttpServer.")
      .def(py::init<unsigned, std::string, std::string, uint64_t>(), py::arg("status"), py::arg("body"),
           py::arg("type") = "application/json", py::arg("examples") = 0);
  py::class_<HttpServer, Owned>(module, "HttpServer", "Answers HTTP by calling answer(method, target, body).")
      .def(py::init([](py::function answer, py::function unpack, py::object predictor, py::function lead,
                       const std::string& host, int port, size_t max_connections, size_t max_queued_requests,
                       size_t max_body_bytes, double head_seconds, double idle_seconds,
                       double patience_seconds, unsigned threads,
                       const std::vector<std::string>& open_targets) {
             HttpOptions options;
             options.host = host;
             options.connections = max_connections;
             options.requests = max_queued_requests;
             options.body_bytes = max_body_bytes;
             options.head_seconds = head_seconds;
             options.idle_seconds = idle_seconds;
             options.patience_seconds = patience_seconds;
             options.threads = threads;
             options.open_targets = open_targets;
             return NewServer(std::move(answer), std::move(unpack), std::move(predictor), std::move(lead),
                              options, port);
           }),
           py::arg("answer"), py::kw_only(), py::arg("unpack"), py::arg("predictor"), py::arg("lead"),
           py::arg("host"), py::arg("port"), py::arg("max_connections"), py::arg("max_queued_requests"),
           py::arg("max_body_bytes"), py::arg("head_seconds"), py::arg("idle_seconds"),
           py::arg("patience_seconds"), py::arg("threads"), py::arg("open_targets"))
      .def_property_readonly("port", &HttpServer::port)
      .def("stats", [](const HttpServer& server) { return server.Stats().dump(); })
      .def(
          "set_access",
          [](HttpServer& self, const std::string& certificate, const std::string& key,
             const std::string& token) { self.SetAccess(AccessOf(certificate, key, token)); },
          py::arg("certificate"), py::arg("key"), py::arg("token"),
          "What later connections and requests need: encryption with this certificate in PEM, a token; "
          "empty: not.")
      .def("start", &HttpServer::Start)
      .def("stop", &HttpServer::Stop, py::call_guard<py::gil_scoped_release>(), py::arg("seconds"));
}

}  // namespace oe
