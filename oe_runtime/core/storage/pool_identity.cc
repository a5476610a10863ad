#include "oe_runtime/core/storage/pool_identity.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

using nlohmann::json;

// "/table/dim" → "table.dim"
std::string FieldName(std::string pointer) {
  pointer.erase(0, 1);
  std::replace(pointer.begin(), pointer.end(), '/', '.');
  return pointer;
}

std::string TextOf(const json& value) { return value.is_null() ? "not set" : value.dump(); }

constexpr size_t kMostNamed = 8;

}  // namespace

void RefuseToRemove(const std::string& directory, const std::vector<std::string>& texts) {
  if (texts.empty()) return;
  std::set<std::string> tables;
  for (const std::string& text : texts) {
    const json there = json::parse(text, nullptr, false);
    const std::string job = there.value("job", "");
    tables.insert("'" + there.value("/table/name"_json_pointer, "") + "'" +
                  (job.empty() ? "" : " of job '" + job + "'"));
  }
  std::string names;
  size_t named = 0;
  for (const std::string& table : tables) {
    if (named == kMostNamed) {
      names += " and " + std::to_string(tables.size() - named) + " more";
      break;
    }
    names += (named++ == 0 ? "" : ", ") + table;
  }
  throw StorageError(
      "the storage directory " + directory + " has checkpoints of table" + (tables.size() == 1 ? " " : "s ") +
      names + ": start with recovery (--storage-recover) to go on from them, or fresh (--storage-fresh) " +
      "to remove them");
}

void CheckIdentity(const std::string& path, const std::string& text, const json& identity,
                   const std::vector<std::string>& may_differ, const std::string& table) {
  const json parsed = json::parse(text, nullptr, false);
  if (!parsed.is_object()) {
    throw StorageError(path + " is damaged: its description is no JSON object; move the pool away, or " +
                       "start fresh (--storage-fresh), and restore from a checkpoint");
  }
  const json there = parsed.flatten();
  const json wanted = identity.flatten();
  std::vector<std::string> fields;
  for (const auto& [field, value] : wanted.items()) fields.push_back(field);
  for (const auto& [field, value] : there.items()) fields.push_back(field);
  // Names first, then the number of servers, then the table: what else differs may follow from them.
  std::stable_sort(fields.begin(), fields.end(), [](const std::string& left, const std::string& right) {
    const auto rank = [](const std::string& field) {
      if (field.size() >= 5 && field.compare(field.size() - 5, 5, "/name") == 0) return 0;
      if (field == "/servers") return 1;
      return field.compare(0, 7, "/table/") == 0 ? 2 : 3;
    };
    return rank(left) < rank(right);
  });
  for (const std::string& field : fields) {
    const json left = there.value(field, json());
    const json right = wanted.value(field, json());
    const std::string name = field.substr(field.rfind('/') + 1);
    if (left == right || std::find(may_differ.begin(), may_differ.end(), name) != may_differ.end()) continue;
    throw StorageError(
        path + ": '" + FieldName(field) + "' is " + TextOf(left) + " in this pool, but table '" + table +
        "' has " + TextOf(right) +
        "; start it as it was, or fresh (--storage-fresh), which removes all tables of the directory");
  }
}

void RefuseTwo(const std::string& first, const std::string& second, const std::string& table) {
  throw StorageError(first + " and " + second + " both have checkpoints of table '" + table +
                     "'; move the one away that is a copy");
}

}  // namespace oe
