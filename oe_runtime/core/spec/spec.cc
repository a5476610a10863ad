#include "oe_runtime/core/spec/spec.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <utility>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

using nlohmann::json;

// Takes the fields of one JSON object and complains about what is missing, of a wrong type, or left over.
class Fields {
 public:
  Fields(json object, std::string where) : where_(std::move(where)), left_(std::move(object)) {
    if (left_.is_object()) return;
    throw SpecError((where_.empty() ? "the spec" : "'" + where_ + "'") + " must be a JSON object, not " +
                    left_.dump());
  }

  bool Has(const std::string& name) const { return left_.contains(name); }

  std::string String(const std::string& name) {
    const json value = Take(name);
    if (!value.is_string()) Refuse(name, value, "a string");
    return value.get<std::string>();
  }

  uint64_t Unsigned(const std::string& name, uint64_t most) {
    const json value = Take(name);
    // A non-negative integer built by hand may be stored as signed.
    const bool whole = value.is_number_unsigned() || (value.is_number_integer() && value.get<int64_t>() >= 0);
    if (!whole || value.get<uint64_t>() > most) {
      Refuse(name, value, "a whole number between 0 and " + std::to_string(most));
    }
    return value.get<uint64_t>();
  }

  bool Boolean(const std::string& name) {
    const json value = Take(name);
    if (!value.is_boolean()) Refuse(name, value, "true or false");
    return value.get<bool>();
  }

  Params Numbers() {
    Params params;
    for (const auto& [name, value] : left_.items()) {
      if (value.is_boolean()) {
        params[name] = value.get<bool>() ? 1 : 0;
      } else if (value.is_number()) {
        params[name] = value.get<double>();
      } else {
        Refuse(name, value, "a number");
      }
    }
    left_.clear();
    return params;
  }

  json Take(const std::string& name) {
    const auto found = left_.find(name);
    if (found == left_.end()) throw SpecError("the field '" + Full(name) + "' is missing");
    json value = std::move(*found);
    left_.erase(found);
    return value;
  }

  void End(const std::string& known) const {
    if (left_.empty()) return;
    throw SpecError("unknown field '" + Full(left_.begin().key()) + "'; the fields are " + known);
  }

 private:
  std::string Full(const std::string& name) const { return where_.empty() ? name : where_ + "." + name; }

  [[noreturn]] void Refuse(const std::string& name, const json& value, const std::string& wanted) const {
    throw SpecError("the field '" + Full(name) + "' must be " + wanted + ", not " + value.dump());
  }

  const std::string where_;
  json left_;
};

json Flat(const std::string& name, const Params& params) {
  json object = {{"name", name}};
  for (const auto& [param, value] : params) object[param] = value;
  return object;
}

std::vector<EvictionSpec> ReadEviction(const json& list) {
  if (!list.is_array()) throw SpecError("the field 'eviction' must be a list, not " + list.dump());
  std::vector<EvictionSpec> specs;
  for (const json& one : list) {
    Fields fields(one, "eviction[" + std::to_string(specs.size()) + "]");
    EvictionSpec spec;
    spec.name = fields.String("name");
    if (fields.Has("policy")) spec.policy = fields.String("policy");
    spec.params = fields.Numbers();
    specs.push_back(std::move(spec));
  }
  return specs;
}

[[noreturn]] void Refuse(const TableSpec& spec, const std::string& what) {
  throw SpecError("table '" + spec.name + "': " + what);
}

// Its type where the specification does not say it.
std::string DefaultStateDtype(const TableSpec& spec) {
  return spec.dtype == "float64" ? "float64" : "float32";
}

// Of a complete spec, but for the type of the state.
void CheckStateDtype(const TableSpec& spec) {
  if (spec.state_dtype == DefaultStateDtype(spec)) return;
  if (spec.dtype == "float64") {
    Refuse(spec, "'state_dtype' of a float64 table must be float64, not '" + spec.state_dtype + "'");
  }
  if (spec.state_dtype != "bfloat16") {
    Refuse(spec, "'state_dtype' must be float32 or bfloat16, not '" + spec.state_dtype + "'");
  }
  for (const OptimizerSlot& slot : SlotsOf(spec.optimizer, spec.dim)) {
    if (!slot.is_count) continue;
    Refuse(spec, "'state_dtype' must be float32, because '" + spec.optimizer.name + "' counts in '" +
                     slot.name + "' and bfloat16 counts to 256 only");
  }
}

// Of a complete spec, but for the type of gradients.
void CheckExchangeDtype(const TableSpec& spec) {
  if (spec.exchange_dtype.empty()) return;
  if (spec.dtype == "float64") {
    Refuse(spec, "'exchange_dtype' of a float64 table must be float64, not '" + spec.exchange_dtype + "'");
  }
  if (spec.exchange_dtype != "bfloat16") {
    Refuse(spec, "'exchange_dtype' must be float32 or bfloat16, not '" + spec.exchange_dtype + "'");
  }
}

// Whether all fields are. A new one must be named here before this compiles.
bool AreEqual(const TableSpec& left, const TableSpec& right) {
  const auto fields_of = [](const TableSpec& spec) {
    const auto& [name, dim, dtype, state_dtype, exchange_dtype, index, input_dim, optimizer, initializer,
                 nonfinite_gradients, admission, eviction] = spec;
    return std::tuple(std::tie(name, dim, dtype, state_dtype, exchange_dtype, index, input_dim),
                      std::tie(optimizer.name, optimizer.params),
                      std::tie(initializer.name, initializer.params, initializer.seed),
                      std::tie(nonfinite_gradients), std::tie(admission.name, admission.params));
  };
  return fields_of(left) == fields_of(right) &&
         std::equal(left.eviction.begin(), left.eviction.end(), right.eviction.begin(), right.eviction.end(),
                    [](const EvictionSpec& one, const EvictionSpec& other) {
                      return std::tie(one.name, one.params, one.policy) ==
                             std::tie(other.name, other.params, other.policy);
                    });
}

}  // namespace

TableSpec Complete(const TableSpec& spec) {
  TableSpec complete = spec;
  if (spec.name.empty() || spec.name.size() > 1024) throw SpecError("a table's name has 1 to 1024 bytes");
  if (spec.dim == 0 || spec.dim > kLargestDim) {
    Refuse(spec, "'dim' must be between 1 and " + std::to_string(kLargestDim) + ", not " +
                     std::to_string(spec.dim));
  }
  if (!ParseDtype(spec.dtype)) {
    Refuse(spec, "'dtype' must be float32, float64, bfloat16 or float16, not '" + spec.dtype + "'");
  }
  if (spec.index == "array") {
    if (spec.input_dim == 0) Refuse(spec, "an array table needs 'input_dim', the number of its keys");
  } else if (spec.index == "hash") {
    if (spec.input_dim != 0) {
      Refuse(spec,
             "a hash table takes any key, so 'input_dim' must be 0, not " + std::to_string(spec.input_dim));
    }
  } else {
    Refuse(spec, "'index' must be hash or array, not '" + spec.index + "'");
  }
  const std::string& policy = spec.nonfinite_gradients;
  if (policy != "refuse" && policy != "skip" && policy != "pass") {
    Refuse(spec, "'nonfinite_gradients' must be refuse, skip or pass, not '" + policy + "'");
  }
  if (spec.state_dtype.empty()) complete.state_dtype = DefaultStateDtype(spec);
  if (spec.exchange_dtype == DefaultStateDtype(spec)) complete.exchange_dtype.clear();
  try {
    complete.optimizer = Complete(spec.optimizer);
    complete.initializer = Initializer::Complete(spec.initializer);
    complete.admission = Complete(spec.admission, spec.index == "hash");
    complete.eviction = Complete(spec.eviction);
  } catch (const SpecError& error) {
    Refuse(spec, error.what());
  }
  CheckStateDtype(complete);
  CheckExchangeDtype(complete);
  return complete;
}

Dtype DtypeOf(const TableSpec& spec) { return ParseDtype(spec.dtype).value_or(Dtype::kFloat32); }

Dtype StateDtypeOf(const TableSpec& spec) { return ParseDtype(spec.state_dtype).value_or(Dtype::kFloat32); }

std::optional<SpecDifference> Difference(const TableSpec& left, const TableSpec& right) {
  if (AreEqual(left, right)) return std::nullopt;  // as nearly always; JSON takes long
  const auto fields_of = [](const TableSpec& spec) {
    json fields = spec;
    fields["state_dtype"] = spec.state_dtype;  // also where JSON leaves it out
    return fields;
  };
  const json left_fields = fields_of(left).flatten();
  const json right_fields = fields_of(right).flatten();
  const auto field_name = [](std::string pointer) {
    pointer.erase(0, 1);
    for (char& c : pointer) {
      if (c == '/') c = '.';
    }
    return pointer;
  };
  // Names first: their parameters differ as a consequence.
  for (const char* first : {"/name", "/dtype", "/optimizer/name", "/initializer/name", "/admission/name"}) {
    const json value = left_fields.value(first, json());
    const json other = right_fields.value(first, json());
    if (value != other) return SpecDifference{field_name(first), value.dump(), other.dump()};
  }
  for (const json* fields : {&left_fields, &right_fields}) {
    for (const auto& [pointer, ignored] : fields->items()) {
      const auto differs = [&](const std::string& field) {
        return left_fields.value(field, json()) != right_fields.value(field, json());
      };
      if (!differs(pointer)) continue;
      const std::string name = pointer.substr(0, pointer.rfind('/')) + "/name";  // of a policy of eviction
      const std::string field = differs(name) ? name : pointer;
      return SpecDifference{field_name(field), left_fields.value(field, json()).dump(),
                            right_fields.value(field, json()).dump()};
    }
  }
  return std::nullopt;
}

void to_json(json& json, const TableSpec& spec) {
  nlohmann::json initializer = Flat(spec.initializer.name, spec.initializer.params);
  initializer["seed"] = spec.initializer.seed;
  json = {{"name", spec.name},           {"dim", spec.dim},
          {"dtype", spec.dtype},         {"index", spec.index},
          {"input_dim", spec.input_dim}, {"optimizer", Flat(spec.optimizer.name, spec.optimizer.params)},
          {"initializer", initializer},  {"nonfinite_gradients", spec.nonfinite_gradients}};
  // Left out where there are none, so that such tables' files and pools stay what they were.
  if (spec.state_dtype == "bfloat16") json["state_dtype"] = spec.state_dtype;
  if (spec.exchange_dtype == "bfloat16") json["exchange_dtype"] = spec.exchange_dtype;
  if (!spec.admission.name.empty()) json["admission"] = Flat(spec.admission.name, spec.admission.params);
  for (const EvictionSpec& eviction : spec.eviction) {
    nlohmann::json one = Flat(eviction.name, eviction.params);
    if (!eviction.policy.empty()) one["policy"] = eviction.policy;
    json["eviction"].push_back(std::move(one));
  }
}

void from_json(const json& json, TableSpec& spec) {
  TableSpec read;
  Fields fields(json, "");
  read.name = fields.String("name");
  read.dim = static_cast<uint32_t>(fields.Unsigned("dim", kLargestDim));
  if (fields.Has("dtype")) read.dtype = fields.String("dtype");
  if (fields.Has("state_dtype")) read.state_dtype = fields.String("state_dtype");
  if (fields.Has("exchange_dtype")) read.exchange_dtype = fields.String("exchange_dtype");
  if (fields.Has("index")) read.index = fields.String("index");
  if (fields.Has("input_dim")) {
    read.input_dim = fields.Unsigned("input_dim", std::numeric_limits<uint64_t>::max());
  }
  if (fields.Has("optimizer")) {
    Fields optimizer(fields.Take("optimizer"), "optimizer");
    read.optimizer.name = optimizer.String("name");
    read.optimizer.params = optimizer.Numbers();
  }
  if (fields.Has("initializer")) {
    Fields initializer(fields.Take("initializer"), "initializer");
    read.initializer.name = initializer.String("name");
    if (initializer.Has("seed")) {
      read.initializer.seed = initializer.Unsigned("seed", std::numeric_limits<uint64_t>::max());
    }
    read.initializer.params = initializer.Numbers();
  }
  if (fields.Has("nonfinite_gradients")) read.nonfinite_gradients = fields.String("nonfinite_gradients");
  if (fields.Has("admission")) {
    Fields admission(fields.Take("admission"), "admission");
    read.admission.name = admission.String("name");
    read.admission.params = admission.Numbers();
  }
  if (fields.Has("eviction")) read.eviction = ReadEviction(fields.Take("eviction"));
  fields.End(
      "name, dim, dtype, state_dtype, exchange_dtype, index, input_dim, optimizer, initializer, "
      "nonfinite_gradients, admission, eviction");
  spec = std::move(read);
}

std::string ToJsonText(const TableSpec& spec) {
  try {
    return json(spec).dump();
  } catch (const json::exception& error) {
    throw SpecError("the name of a table must be UTF-8");
  }
}

TableSpec TableSpecFromJsonText(const std::string& text) {
  json object;
  try {
    object = json::parse(text);
  } catch (const json::exception& error) {
    throw SpecError(std::string("a table spec that is not JSON: ") + error.what());
  }
  return Complete(object.get<TableSpec>());
}

void to_json(json& json, const StorageSpec& spec) {
  json = {{"type", spec.type},
          {"path", spec.path},
          {"capacity_bytes", spec.capacity_bytes},
          {"recover", spec.recover},
          {"kept_checkpoints", spec.kept_checkpoints},
          {"cache_bytes", spec.cache_bytes},
          {"weights_only", spec.weights_only},
          {"fresh", spec.fresh}};
  if (!spec.row_precision.empty()) json["row_precision"] = spec.row_precision;
}

void from_json(const json& json, StorageSpec& spec) {
  StorageSpec read;
  Fields fields(json, "storage");
  read.type = fields.String("type");
  if (fields.Has("path")) read.path = fields.String("path");
  if (fields.Has("capacity_bytes")) {
    read.capacity_bytes = fields.Unsigned("capacity_bytes", std::numeric_limits<uint64_t>::max());
  }
  if (fields.Has("recover")) read.recover = fields.Boolean("recover");
  if (fields.Has("kept_checkpoints")) {
    read.kept_checkpoints = static_cast<uint32_t>(fields.Unsigned("kept_checkpoints", kMostKeptCheckpoints));
  }
  if (fields.Has("cache_bytes")) {
    read.cache_bytes = fields.Unsigned("cache_bytes", std::numeric_limits<uint64_t>::max());
  }
  if (fields.Has("weights_only")) read.weights_only = fields.Boolean("weights_only");
  if (fields.Has("row_precision")) read.row_precision = fields.String("row_precision");
  if (fields.Has("fresh")) read.fresh = fields.Boolean("fresh");
  fields.End(
      "type, path, capacity_bytes, recover, kept_checkpoints, cache_bytes, weights_only, "
      "row_precision, fresh");
  spec = std::move(read);
}

}  // namespace oe
