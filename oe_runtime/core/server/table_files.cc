// Names of table files in a checkpoint directory.
#include <dirent.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>

#include "oe_runtime/core/server/store.h"
#include "oe_runtime/core/wire/errors.h"

namespace oe {
namespace {

std::string Escape(const std::string& name) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  std::string out;
  for (const char c : name) {
    const auto byte = static_cast<unsigned char>(c);
    const bool plain =
        (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
    if (plain) {
      out += c;
    } else {
      out += '%';
      out += kDigits[byte >> 4];
      out += kDigits[byte & 15];
    }
  }
  return out;
}

// The numbers of "server-<server>-of-<servers>..."; false for another name.
bool ReadShard(std::string_view name, ShardInfo* shard) {
  const auto text = [&name](std::string_view wanted) {
    if (name.substr(0, wanted.size()) != wanted) return false;
    name.remove_prefix(wanted.size());
    return true;
  };
  const auto number = [&name](uint32_t* value) {
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), *value);
    name.remove_prefix(static_cast<size_t>(end - name.data()));
    return error == std::errc();
  };
  return text("server-") && number(&shard->server) && text("-of-") && number(&shard->servers);
}

}  // namespace

std::string TableFileName(const std::string& table, const ShardInfo& shard) {
  return "server-" + std::to_string(shard.server) + "-of-" + std::to_string(shard.servers) + "." +
         Escape(table) + ".oet";
}

std::vector<std::string> FindTableFiles(const std::string& directory, const std::string& table) {
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(opendir(directory.c_str()), closedir);
  if (!listing) throw CheckpointError(directory + ": cannot be listed: " + std::strerror(errno));
  std::map<uint32_t, std::map<uint32_t, std::string>> found;  // by count, then by index
  while (const dirent* entry = readdir(listing.get())) {      // NOLINT(concurrency-mt-unsafe): own stream
    ShardInfo shard;
    if (!ReadShard(entry->d_name, &shard)) continue;
    if (entry->d_name != TableFileName(table, shard)) continue;
    found[shard.servers][shard.server] = directory + "/" + entry->d_name;
  }
  if (found.empty()) throw CheckpointError(directory + ": has no file of table '" + table + "'");
  if (found.size() > 1) {
    throw CheckpointError(directory + ": has files of table '" + table + "' from " +
                          std::to_string(found.begin()->first) + " and from " +
                          std::to_string(std::next(found.begin())->first) +
                          " servers; it is not one checkpoint");
  }
  const auto& [count, by_index] = *found.begin();
  std::vector<std::string> files;
  for (uint32_t index = 0; index < count; ++index) {
    const auto file = by_index.find(index);
    if (file == by_index.end()) {
      throw CheckpointError(directory + ": " + TableFileName(table, {index, count}) + " is missing");
    }
    files.push_back(file->second);
  }
  return files;
}

std::vector<TableChain> FindTableChains(const std::vector<std::string>& directories,
                                        const std::string& table) {
  if (directories.empty()) throw CheckpointError("there is no directory to find table '" + table + "' in");
  std::vector<TableChain> chains;
  for (const std::string& file : FindTableFiles(directories.back(), table)) {
    const std::string name = file.substr(directories.back().size());
    TableChain chain = {file};
    for (size_t at = directories.size() - 1; at > 0 && ReadTableFileInfo(chain.front()).base; --at) {
      chain.insert(chain.begin(), directories[at - 1] + name);
    }
    chains.push_back(std::move(chain));
  }
  return chains;
}

nlohmann::json TableChecksums(const std::string& directory, const std::vector<std::string>& tables) {
  nlohmann::json checksums = nlohmann::json::object();
  for (const std::string& table : tables) {
    nlohmann::json of_servers = nlohmann::json::array();
    for (const std::string& file : FindTableFiles(directory, table)) {
      of_servers.push_back(HexText(ReadTableFileInfo(file).checksum));
    }
    checksums[table] = std::move(of_servers);
  }
  return checksums;
}

}  // namespace oe
