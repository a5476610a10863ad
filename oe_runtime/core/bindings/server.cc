#include "oe_runtime/core/server/server.h"

#include <nlohmann/json.hpp>
#include <string>

#include "oe_runtime/core/bindings/module.h"
#include "oe_runtime/core/storage/memory_error.h"

namespace py = pybind11;

namespace oe {
namespace {

std::unique_ptr<Server> NewServer(const std::string& host, uint16_t port, uint32_t index, uint32_t count,
                                  const std::string& storage, unsigned threads, const std::string& token,
                                  const std::string& checkpoint_dir, const std::string& tls,
                                  uint64_t max_connections, uint64_t max_request_bytes,
                                  uint64_t scrub_bytes_per_second) {
  ServerOptions options;
  options.host = host;
  options.port = port;
  options.shard = {index, count};
  options.storage = nlohmann::json::parse(storage).get<StorageSpec>();
  options.threads = threads;
  options.token = token;
  options.checkpoint_dir = checkpoint_dir;
  options.tls = ParseTlsMode(tls);
  options.limits.connections = max_connections;
  options.limits.bytes = max_request_bytes;
  options.scrub_bytes_per_second = scrub_bytes_per_second;
  const py::gil_scoped_release release;
  return std::make_unique<Server>(options);
}

}  // namespace

void BindServer(py::module_& module) {
  py::class_<Server>(module, "Server", "A parameter server; python -m oe_runtime.server runs one.")
      .def(py::init(&NewServer), py::kw_only(), py::arg("host"), py::arg("port"), py::arg("index"),
           py::arg("count"), py::arg("storage"), py::arg("threads"), py::arg("token"),
           py::arg("checkpoint_dir"), py::arg("tls"), py::arg("max_connections"),
           py::arg("max_request_bytes"), py::arg("scrub_bytes_per_second") = 0)
      .def_property_readonly("port", &Server::port)
      .def_property_readonly("stop_fd", &Server::stop_fd)
      .def_property_readonly("encrypted", &Server::encrypted)
      .def_property_readonly("note", &Server::note)
      .def_property_readonly("is_pmem", [](const Server& server) { return server.storage().is_pmem(); })
      .def("stats",
           [](const Server& server) {
             const py::gil_scoped_release release;
             return server.Stats().dump();
           })
      .def("stop", [](Server& server) {
        const py::gil_scoped_release release;
        server.Stop();
      });
  module.def("report_memory_errors", &ReportMemoryErrors,
             "Name the pool file on stderr before the process ends by SIGBUS.");
}

}  // namespace oe
