#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace oe {

// Compares whose rows a file has, a JSON object in `text`, with what a table wants. Throws StorageError
// naming the file and the field that differs, unless its name is in `may_differ`.
void CheckIdentity(const std::string& path, const std::string& text, const nlohmann::json& wanted,
                   const std::vector<std::string>& may_differ, const std::string& table);

// Throws StorageError if there are `texts`, as CheckIdentity() has them, of files with checkpoints in a
// directory whose files a start would remove though nobody asked for it.
void RefuseToRemove(const std::string& directory, const std::vector<std::string>& texts);

// Throws StorageError: two files have checkpoints of one table, and nobody can tell which of them counts.
[[noreturn]] void RefuseTwo(const std::string& first, const std::string& second, const std::string& table);

}  // namespace oe
