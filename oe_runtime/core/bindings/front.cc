#include <dlfcn.h>
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstdio>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "oe_runtime/core/bindings/module.h"
#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/front/http_server.h"
#include "oe_runtime/core/front/predictor.h"
#include "oe_runtime/core/front/tensorflow.h"
#include "oe_runtime/core/front/torch_program.h"
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

constexpr const char* kNoGzip =
    R"({"error": "the body is not one file of gzip, as its Content-Encoding says, or it is damaged"})";

std::shared_ptr<TensorFlowFunction> NewTensorFlowFunction(const std::string& library,
                                                          const std::string& bindings,
                                                          const py::capsule& context, const std::string& name,
                                                          const py::list& captured, size_t outputs) {
  std::vector<TFE_TensorHandle*> handles;
  for (const py::handle tensor : captured) handles.push_back(HandleOf(bindings, tensor));
  return std::make_shared<TensorFlowFunction>(FindTensorFlow(library),
                                              static_cast<TFE_Context*>(context.get_pointer()), name,
                                              std::move(handles), outputs);
}

using Weights =
    std::vector<std::tuple<std::string, std::string, uintptr_t, std::vector<int64_t>, std::vector<int64_t>>>;

std::shared_ptr<TorchProgram> NewTorchProgram(const std::string& library, const std::string& torch,
                                              const Weights& weights, size_t instances) {
  std::vector<TorchWeight> found;
  for (const auto& [name, type, data, shape, strides] : weights)
    found.push_back({name, type, reinterpret_cast<void*>(data), shape, strides});
  return std::make_shared<TorchProgram>(library, torch, found, instances);
}

// Raises Error for arrays of other types, and TypeError for those that are not contiguous.
std::vector<py::array> CallTorch(const TorchProgram& program, const std::vector<py::array>& arguments) {
  std::vector<ProgramTensor> tensors(arguments.size()), found;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const py::array& one = arguments[i];
    if ((one.flags() & py::array::c_style) == 0) throw py::type_error("an array is not contiguous");
    tensors[i].type = TypeOf(py::str(one.dtype().attr("name")));
    tensors[i].shape.assign(one.shape(), one.shape() + one.ndim());
    tensors[i].data = const_cast<void*>(one.data());
  }
  {
    const py::gil_scoped_release release;
    std::vector<const ProgramTensor*> given;
    for (const ProgramTensor& one : tensors) given.push_back(&one);
    found = program.Call(given);
  }
  std::vector<py::array> outputs;
  for (const ProgramTensor& one : found) {
    if (!one.type) throw Error("an output has a type that the core does not read");
    outputs.emplace_back(py::dtype(NameOf(*one.type)), one.shape, one.data);  // a copy
  }
  return outputs;
}

ForwardArgument::Kind KindOf(const std::string& name) {
  if (name == "input") return ForwardArgument::Kind::kInput;
  if (name == "rows") return ForwardArgument::Kind::kRows;
  return name == "sizes" ? ForwardArgument::Kind::kSizes : ForwardArgument::Kind::kLookup;
}

std::unique_ptr<Predictor> NewPredictor(
    const std::string& model,
    const std::vector<std::tuple<std::string, std::string, std::vector<int64_t>>>& inputs,
    const std::vector<std::pair<std::string, std::string>>& outputs, std::shared_ptr<Program> forward,
    std::shared_ptr<Program> ids, const std::vector<std::pair<std::string, size_t>>& arguments,
    const std::vector<size_t>& ids_inputs, const std::vector<int64_t>& limits,
    const std::vector<std::pair<uint32_t, uint32_t>>& lookups,
    const std::vector<std::vector<size_t>>& groups) {
  PredictorOptions options;
  options.name = model;
  for (const auto& [name, type, shape] : inputs) options.inputs.push_back({name, TypeOf(type), shape});
  for (const auto& [name, type] : outputs) options.outputs.push_back({name, TypeOf(type), {}, nullptr});
  options.forward = std::move(forward);
  options.ids = std::move(ids);
  for (const auto& [kind, number] : arguments) options.arguments.push_back({KindOf(kind), number});
  options.ids_inputs = ids_inputs;
  options.limits = limits;
  options.lookups = lookups;
  options.groups = groups;
  return std::make_unique<Predictor>(std::move(options));
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
    return answer(request.method, request.target, py::bytes(request.body), request.json_length)
        .cast<HttpReply>();
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
  return HttpRequest{request.method, request.target, body.cast<std::string>(), std::nullopt,
                     request.json_length};
}

HttpAccess AccessOf(const std::string& certificate, const std::string& key, const std::string& token) {
  HttpAccess access;
  access.token = token;
  if (!certificate.empty()) access.tls = std::make_shared<TlsContext>(TlsCertificate{certificate, key});
  return access;
}

// Predictors by the targets of their requests, which may change at any time.
class Routes {
 public:
  struct Route {
    std::shared_ptr<const py::object> predictor;  // keeps `core`
    const Predictor* core = nullptr;
    std::shared_ptr<const py::function> lead;
    std::optional<int64_t> version;
  };
  using Map = std::unordered_map<std::string, Route>;

  void Set(Map routes) {
    auto next = std::make_shared<const Map>(std::move(routes));
    const std::lock_guard<std::mutex> lock(mutex_);
    routes_.swap(next);  // the former ones end after the lock, which their end does not need
  }

  std::optional<HttpReply> Answer(const HttpRequest& request) const {
    const std::shared_ptr<const Map> routes = Now();
    const auto found = routes->find(request.target);
    if (found == routes->end()) return std::nullopt;
    const Route& route = found->second;
    return route.core->Answer(request, route.version,
                              [&](Predictor::Call* call) { return Lead(*route.lead, call); });
  }

 private:
  std::shared_ptr<const Map> Now() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return routes_;
  }

  mutable std::mutex mutex_;
  std::shared_ptr<const Map> routes_ = std::make_shared<const Map>();
};

void SetRoutes(
    Routes* self,
    const std::vector<std::tuple<std::string, py::object, py::function, std::optional<int64_t>>>& routes) {
  Routes::Map map;
  for (const auto& [target, predictor, lead, version] : routes)
    map[target] = {Share(predictor), predictor.cast<const Predictor*>(), Share(lead), version};
  self->Set(std::move(map));
}

// Its threads need the GIL to end.
struct Delete {
  void operator()(HttpServer* server) const {
    const py::gil_scoped_release release;
    delete server;
  }
};
using Owned = std::unique_ptr<HttpServer, Delete>;

Owned NewFront(py::function answer, py::function unpack, std::shared_ptr<const Routes> routes,
               HttpOptions options, int port) {
  if (port < 0 || port > std::numeric_limits<uint16_t>::max())
    throw Error("cannot listen on " + options.host + ":" + std::to_string(port) + ": there is no such port");
  options.port = static_cast<uint16_t>(port);
  return Owned(new HttpServer(
      options,
      [ask = Share(std::move(answer)), unpack_by = Share(std::move(unpack)),
       routes = std::move(routes)](const HttpRequest& sent) {
        std::optional<HttpRequest> unpacked;
        if (sent.unpacked) unpacked = Unpack(*unpack_by, sent);
        if (sent.unpacked && !unpacked) return HttpReply{400, kNoGzip};
        const HttpRequest& request = unpacked ? *unpacked : sent;
        if (std::optional<HttpReply> reply = routes->Answer(request)) return std::move(*reply);
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
      .def("forward", &Predictor::Call::Forward, py::call_guard<py::gil_scoped_release>())
      .def_readwrite("version", &Predictor::Call::version);
  py::class_<Program, std::shared_ptr<Program>>(module, "Program", "A function of a model, for Predictor.");
  py::class_<TensorFlowFunction, Program, std::shared_ptr<TensorFlowFunction>>(module, "TensorFlowFunction",
                                                                               "One of TensorFlow.")
      .def(py::init(&NewTensorFlowFunction), py::keep_alive<1, 6>(), py::arg("library"), py::arg("bindings"),
           py::arg("context"), py::arg("name"), py::arg("captured"), py::arg("outputs"));
  py::class_<TorchProgram, Program, std::shared_ptr<TorchProgram>>(module, "TorchProgram",
                                                                   "One that AOTInductor compiled.")
      .def(py::init(&NewTorchProgram), py::arg("library"), py::arg("torch"), py::arg("weights"),
           py::arg("instances"))
      .def("call", &CallTorch, py::arg("arguments"));
  // Programs keep tensors of Python alive, and the predictor these programs.
  py::class_<Predictor>(module, "Predictor", "Answers for HttpServer without Python.")
      .def(py::init(&NewPredictor), py::keep_alive<1, 5>(), py::keep_alive<1, 6>(), py::arg("name"),
           py::arg("inputs"), py::arg("outputs"), py::arg("forward"), py::arg("ids"), py::kw_only(),
           py::arg("arguments"), py::arg("ids_inputs") = std::vector<size_t>(),
           py::arg("limits") = std::vector<int64_t>(),
           py::arg("lookups") = std::vector<std::pair<uint32_t, uint32_t>>(),
           py::arg("groups") = std::vector<std::vector<size_t>>())
      .def("batch", &Predictor::Batch, py::arg("examples"), py::arg("timeout_seconds"));
  py::class_<Routes, std::shared_ptr<Routes>>(module, "Routes", "Which Predictor answers which targets.")
      .def(py::init())
      .def("set", &SetRoutes, py::arg("routes"),
           "Replace all: (target, predictor, lead, version), of which None is any.");
  py::class_<HttpReply>(module, "HttpReply", "An answer of HttpServer.")
      .def(py::init<unsigned, std::string, std::string, uint64_t, size_t>(), py::arg("status"),
           py::arg("body"), py::arg("type") = "application/json", py::arg("examples") = 0,
           py::arg("json_length") = 0);
  py::class_<HttpServer, Owned>(module, "HttpServer",
                                "Answers HTTP by calling answer(method, target, body, json_length).")
      .def(py::init([](py::function answer, py::function unpack, std::shared_ptr<Routes> routes,
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
             return NewFront(std::move(answer), std::move(unpack), std::move(routes), options, port);
           }),
           py::arg("answer"), py::kw_only(), py::arg("unpack"), py::arg("routes"), py::arg("host"),
           py::arg("port"), py::arg("max_connections"), py::arg("max_queued_requests"),
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
