// Table files without a server, for oe_runtime/checkpoint/. What has fields comes as JSON.
#include <pybind11/stl.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "oe_runtime/core/bindings/module.h"
#include "oe_runtime/core/checkpoint/compare.h"
#include "oe_runtime/core/server/store.h"
#include "oe_runtime/core/storage/log_verify.h"
#include "oe_runtime/core/storage/pool_verify.h"

namespace py = pybind11;

namespace oe {
namespace {

using nlohmann::json;
using Release = py::call_guard<py::gil_scoped_release>;

json ToJson(const TableFileInfo& info) {
  json object = {{"spec", info.spec},           {"table", info.spec.name},
                 {"server", info.shard.server}, {"servers", info.shard.servers},
                 {"format", info.base ? 2 : 1}, {"version", info.version},
                 {"rows", info.rows},           {"row_bytes", info.row_bytes},
                 {"bytes", info.bytes},         {"checksum", HexText(info.checksum)}};
  if (info.base) {
    object["base"] = HexText(*info.base);
    object["tombstones"] = info.tombstones;
  }
  return object;
}

std::vector<TableChain> Chains(const std::vector<std::string>& directories, const std::string& table) {
  const std::vector<TableChain> chains = FindTableChains(directories, table);
  const TableFileInfo info = ReadTableFileInfo(chains.front().back());
  (void)CheckChains(info.spec, info.row_bytes, chains);
  return chains;
}

std::string Compare(const std::vector<TableChain>& before, const std::vector<TableChain>& after,
                    size_t memory) {
  const TableDifference found = CompareTables(before, after, memory);
  // JSON has no infinity.
  const auto number = [](double value) { return std::isinf(value) ? json("inf") : json(value); };
  return json{{"rows", {found.before, found.after}}, {"only_before", found.only_before},
              {"only_after", found.only_after},      {"changed", found.changed},
              {"weights", number(found.weights)},    {"state", number(found.state)}}
      .dump();
}

std::string Reshard(const std::vector<TableChain>& chains, const std::string& table,
                    const std::string& directory, uint32_t servers, const std::string& dtype,
                    const std::string& state_dtype) {
  std::vector<std::string> files;
  for (uint32_t server = 0; server < servers; ++server) {
    files.push_back(directory + "/" + TableFileName(table, {server, servers}));
  }
  json written = json::array();
  for (const TableFileInfo& info : ReshardTable(chains, files, {dtype, state_dtype})) {
    written.push_back(ToJson(info));
    written.back()["file"] = TableFileName(table, info.shard);
  }
  return written.dump();
}

}  // namespace

void BindCheckpoint(py::module_& module) {
  module.def(
      "table_file", [](const std::string& file) { return ToJson(ReadTableFileInfo(file)).dump(); }, Release(),
      py::arg("file"), "What the header of a table file says.");
  module.def(
      "verify_table_file", [](const std::string& file) { return ToJson(VerifyTableFile(file)).dump(); },
      Release(), py::arg("file"), "The same, after comparing every checksum in it.");
  module.def(
      "packed_files",
      [](const std::string& pack) {
        std::vector<std::string> names;
        for (const PackedFile& file : ReadPack(pack)) names.push_back(file.name);
        return names;
      },
      Release(), py::arg("pack"), "The names of the table files in a pack.");
  module.def("verify_pools", &VerifyPools, Release(), py::arg("directory"),
             "What is wrong with the pools in a directory that no server uses, a line each.");
  module.def("verify_logs", &VerifyLogs, Release(), py::arg("directory"),
             "What is wrong with the logs in a directory that no server uses, a line each.");
  module.def("table_chains", &Chains, Release(), py::arg("directories"), py::arg("table"),
             "Each server's files of a table, oldest first, after checking that they belong together.");
  module.def("compare_tables", &Compare, Release(), py::arg("before"), py::arg("after"), py::arg("memory"));
  module.def("reshard_table", &Reshard, Release(), py::arg("chains"), py::arg("table"), py::arg("directory"),
             py::arg("servers"), py::arg("dtype") = "", py::arg("state_dtype") = "",
             "Writes a table's files for another number of servers, with the dtypes that are given.");
}

}  // namespace oe
