// Names of table files in a checkpoint directory.
#include <dirent.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <system_error>

#include "oe_runtime/core/checkpoint/table_pack.h"
#include "oe_runtime/core/server/store.h"
#include "oe_runtime/core/table/reduced_weights.h"
#include "oe_runtime/core/wire/errors.h"

namespace oe {
namespace {

constexpr uint64_t kBytesAlone = uint64_t{16} << 20;  // of an increment that one thread reads

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

// A file of a table, by itself or in a pack, of which the checksum is known without a look at it.
struct ListedPart {
  ShardInfo shard;
  std::optional<uint64_t> checksum;
};
using Listing =
    std::map<std::string, std::vector<ListedPart>>;  // by the name after the server: ".wide%2Femb.oet"

std::string ServerName(const ShardInfo& shard) {
  return "server-" + std::to_string(shard.server) + "-of-" + std::to_string(shard.servers);
}

std::string TableSuffix(const std::string& table) { return "." + Escape(table) + ".oet"; }

void AddPart(const std::string& name, std::optional<uint64_t> checksum, Listing* listing) {
  ShardInfo shard;
  if (!ReadShard(name, &shard)) return;
  const size_t dot = name.find('.');
  if (dot == std::string::npos || name.compare(0, dot, ServerName(shard)) != 0) return;
  std::vector<ListedPart>& parts = (*listing)[name.substr(dot)];
  const bool there = checksum && std::any_of(parts.begin(), parts.end(), [&](const ListedPart& part) {
                       return part.shard.server == shard.server && part.shard.servers == shard.servers;
                     });
  if (!there) parts.push_back({shard, checksum});  // OpenTable() prefers a file by itself, too
}

Listing ListTables(const std::string& directory) {
  const std::unique_ptr<DIR, int (*)(DIR*)> opened(opendir(directory.c_str()), closedir);
  if (!opened) throw CheckpointError(directory + ": cannot be listed: " + std::strerror(errno));
  Listing listing;
  std::vector<std::string> packs;
  while (const dirent* entry = readdir(opened.get())) {  // NOLINT(concurrency-mt-unsafe): own stream
    ShardInfo shard;
    const std::string name = entry->d_name;
    if (ReadShard(name, &shard) && name == PackName(shard)) packs.push_back(name);
    AddPart(name, std::nullopt, &listing);
  }
  for (const std::string& pack : packs) {
    for (const PackedFile& file : ReadPack(directory + "/" + pack))
      AddPart(file.name, file.checksum, &listing);
  }
  return listing;
}

// The table's files of all servers, in their order.
std::vector<ListedPart> PartsOf(const std::string& directory, const Listing& listing,
                                const std::string& table) {
  std::map<uint32_t, std::map<uint32_t, ListedPart>> found;  // by count, then by index
  const auto parts = listing.find(TableSuffix(table));
  if (parts == listing.end()) throw CheckpointError(directory + ": has no file of table '" + table + "'");
  for (const ListedPart& part : parts->second) found[part.shard.servers][part.shard.server] = part;
  if (found.size() > 1) {
    throw CheckpointError(directory + ": has files of table '" + table + "' from " +
                          std::to_string(found.begin()->first) + " and from " +
                          std::to_string(std::next(found.begin())->first) +
                          " servers; it is not one checkpoint");
  }
  const auto& [count, by_index] = *found.begin();
  std::vector<ListedPart> all;
  for (uint32_t index = 0; index < count; ++index) {
    const auto part = by_index.find(index);
    if (part == by_index.end()) {
      throw CheckpointError(directory + ": " + TableFileName(table, {index, count}) + " is missing");
    }
    all.push_back(part->second);
  }
  return all;
}

}  // namespace

std::string TableFileName(const std::string& table, const ShardInfo& shard) {
  return ServerName(shard) + TableSuffix(table);
}

std::vector<std::string> FindTableFiles(const std::string& directory, const std::string& table) {
  std::vector<std::string> files;
  for (const ListedPart& part : PartsOf(directory, ListTables(directory), table)) {
    files.push_back(directory + "/" + TableFileName(table, part.shard));
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
  const Listing listing = ListTables(directory);
  for (const std::string& table : tables) {
    nlohmann::json of_servers = nlohmann::json::array();
    for (const ListedPart& part : PartsOf(directory, listing, table)) {
      const std::string file = directory + "/" + TableFileName(table, part.shard);
      of_servers.push_back(HexText(part.checksum ? *part.checksum : ReadTableFileInfo(file).checksum));
    }
    checksums[table] = std::move(of_servers);
  }
  return checksums;
}

Increment ReadIncrement(const std::string& directory, const std::vector<std::string>& tables,
                        const ShardInfo& shard, const std::string& row_precision) {
  std::vector<std::string> names;
  names.reserve(tables.size());
  for (const std::string& table : tables) names.push_back(TableFileName(table, shard));
  Increment increment{directory, {}};
  std::vector<OpenedTable> opened = OpenTables(directory, names);
  uint64_t bytes = 0;
  std::vector<Increment::Part*> parts;
  for (size_t i = 0; i < tables.size(); ++i) {
    bytes += opened[i].bytes;
    parts.push_back(&increment.parts[tables[i]]);
  }
  const auto read = [&](size_t i) {
    auto reader = std::make_unique<TableFileReader>(std::move(opened[i]));
    const TableFileInfo& info = reader->info();
    const auto reduced = ReducedWeights::Create(row_precision, info.spec);
    std::vector<std::byte> row(reduced != nullptr ? reduced->bytes() : 0);
    while (const size_t n = reader->NextBlock()) {
      for (size_t r = 0; reduced != nullptr && r < n; ++r) {
        reduced->Reduce(reader->keys()[r], reader->rows() + r * info.row_bytes, row.data());
      }
    }
    parts[i]->info = reader->info();
    if (reader->info().bytes <= kSmallTable) parts[i]->held = std::move(reader);
  };
  ThreadPool(bytes < kBytesAlone ? 1 : 0).ParallelFor(parts.size(), read);
  return increment;
}

}  // namespace oe
