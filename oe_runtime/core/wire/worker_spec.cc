#include "oe_runtime/core/wire/worker_spec.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

using nlohmann::json;

[[noreturn]] void Refuse(const char* field, const json& value, const std::string& wanted) {
  throw SpecError(std::string("worker: '") + field + "' is " +
                  value.dump(-1, ' ', false, json::error_handler_t::replace) + "; it must be " + wanted);
}

// Removes the field from the object.
json Take(json* object, const char* field) {
  const auto found = object->find(field);
  if (found == object->end()) throw SpecError(std::string("worker: '") + field + "' is missing");
  json value = *found;
  object->erase(found);
  return value;
}

uint32_t TakeNumber(json* object, const char* field, uint32_t least, uint32_t most) {
  const json value = Take(object, field);
  if (!value.is_number_unsigned() || value.get<uint64_t>() < least || value.get<uint64_t>() > most) {
    Refuse(field, value, "a number from " + std::to_string(least) + " to " + std::to_string(most));
  }
  return value.get<uint32_t>();
}

// Whether the field is the first of two words.
bool TakeChoice(json* object, const char* field, const char* first, const char* second) {
  const json value = Take(object, field);
  if (value != first && value != second) {
    Refuse(field, value, std::string("'") + first + "' or '" + second + "'");
  }
  return value == first;
}

}  // namespace

std::string ToJsonText(const WorkerSpec& spec) {
  json object = {{"rank", spec.rank},
                 {"of", spec.of},
                 {"mode", spec.synchronous ? "sync" : "async"},
                 {"staleness", spec.staleness ? json(*spec.staleness) : json()},
                 {"on_lost", spec.stop_when_lost ? "stop" : "continue"},
                 {"wait", spec.wait}};
  if (spec.generation != 0)
    object["generation"] = spec.generation;  // servers of before refuse what is unknown
  return object.dump();
}

WorkerSpec WorkerSpecFromJsonText(const std::string& text) {
  json object = json::parse(text, nullptr, false);
  if (!object.is_object()) throw SpecError("worker: this is not a JSON object");
  WorkerSpec spec;
  spec.of = TakeNumber(&object, "of", 1, WorkerSpec::kMost);
  spec.rank = TakeNumber(&object, "rank", 0, spec.of - 1);
  spec.synchronous = TakeChoice(&object, "mode", "sync", "async");
  spec.stop_when_lost = TakeChoice(&object, "on_lost", "stop", "continue");
  if (!object.contains("staleness") || !object["staleness"].is_null()) {
    spec.staleness = TakeNumber(&object, "staleness", 0, std::numeric_limits<uint32_t>::max());
    if (spec.synchronous) Refuse("staleness", *spec.staleness, "null where the mode is 'sync'");
  } else {
    object.erase("staleness");
  }
  const json wait = Take(&object, "wait");
  if (!wait.is_number() || !(wait.get<double>() > 0) || wait.get<double>() > 1e6) {
    Refuse("wait", wait, "more than 0 and at most 1e6 seconds");
  }
  spec.wait = wait.get<double>();
  if (object.contains("generation")) {
    spec.generation = TakeNumber(&object, "generation", 0, std::numeric_limits<uint32_t>::max());
  }
  if (!object.empty()) throw SpecError("worker: '" + object.begin().key() + "' is not a field");
  return spec;
}

}  // namespace oe
