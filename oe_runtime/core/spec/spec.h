#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "oe_runtime/core/common/dtype.h"
#include "oe_runtime/core/initializer/initializer.h"
#include "oe_runtime/core/optimizer/optimizer_spec.h"
#include "oe_runtime/core/policy/policy_spec.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {

// The specification of a table. JSON has the same names. The optimizer and the initializer are flat objects
// with "name", their parameters and, for the initializer, "seed":
// {"name": "uniform", "minval": -0.05, "maxval": 0.05, "seed": 0}.
struct TableSpec {
  std::string name;
  uint32_t dim = 0;  // weights per row
  // Of the weights: "float32"; "float64", with gradients in float64; "bfloat16" and "float16", which pulls
  // and pushes carry as float32 (row_ops.h).
  std::string dtype = "float32";
  // Of the optimizer's state: "float32" or "bfloat16", but "float64" for float64. Empty: not "bfloat16". In
  // JSON, only where it is "bfloat16".
  std::string state_dtype = "";
  // Of gradients on their way to the servers: "float32" or "bfloat16", to which clients round them to
  // nearest; "float64" for float64. Empty: not "bfloat16". Of clients only: servers, their files and pools
  // never see it. In JSON, only where it is "bfloat16".
  std::string exchange_dtype = "";
  std::string index = "hash";  // "hash": any key; "array": keys [0, input_dim)
  uint64_t input_dim = 0;      // array: number of keys; hash: 0
  OptimizerSpec optimizer;
  InitializerSpec initializer;
  // What a push does with a key whose gradient has NaN or infinity. "refuse": change nothing and throw
  // GradientError, which names the key; "skip": leave that row as it is; "pass": update it unchecked, as
  // Keras does.
  std::string nonfinite_gradients = "refuse";
  // Which keys get a row, and which rows go (policy/policy_spec.h). In JSON, only where there are any:
  // {"name": "counter", "filter_freq": 3} and [{"name": "cap", "max_rows": 1000000, "policy": "lru"}].
  AdmissionSpec admission;
  std::vector<EvictionSpec> eviction;
};

constexpr uint32_t kLargestDim = 65536;

// Fills in every default. Throws SpecError naming the table, the field and the value.
TableSpec Complete(const TableSpec& spec);

// Of a complete spec.
Dtype DtypeOf(const TableSpec& spec);
Dtype StateDtypeOf(const TableSpec& spec);

struct SpecDifference {
  std::string field;  // "dim", "optimizer.epsilon"
  std::string left;   // the values as JSON
  std::string right;
};

// The first field in which two completed specs differ; nothing when they are equal.
std::optional<SpecDifference> Difference(const TableSpec& left, const TableSpec& right);

// JSON and back. from_json is strict: an unknown or missing key or a value of a wrong type throws SpecError
// naming the field. Parameters may be numbers or booleans. It does not complete the spec.
void to_json(nlohmann::json& json, const TableSpec& spec);
void from_json(const nlohmann::json& json, TableSpec& spec);
std::string ToJsonText(const TableSpec& spec);
// The same from text; text that is not JSON throws SpecError too. The result is completed.
TableSpec TableSpecFromJsonText(const std::string& text);

// {"type": "dram"|"pmem_libpmem"|"dram_pmem"|"dram_ssd"|"pmem_memkind", "path": "", "capacity_bytes": 0,
//  "recover": false, "kept_checkpoints": 2, "cache_bytes": 0, "weights_only": false, "row_precision": "int8",
//  "fresh": false}
void to_json(nlohmann::json& json, const StorageSpec& spec);
void from_json(const nlohmann::json& json, StorageSpec& spec);

}  // namespace oe
