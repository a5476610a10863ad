#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oe_runtime/core/common/file.h"
#include "oe_runtime/core/common/shard.h"

namespace oe {

// A pack: the small table files of one server's save in one file, "server-0-of-3.oets". Little-endian, no
// padding:
//
//   "OETABLS\n"           8 bytes
//   format                u32, 1
//   index size            u32
//   index                 per file: bytes u64, checksum u64 (its last 8 bytes), size of its name u32, name
//   checksum              u64, XXH3-64 of all bytes before it
//
//   files                 one after the other
//
// The size of the pack follows from the index. A table file in a pack is opened by the path that it would
// have beside the pack.
struct PackedFile {
  std::string name;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t checksum = 0;
};

// "server-0-of-3.oets"
std::string PackName(const ShardInfo& shard);

// A whole pack of table files: names and contents.
std::string EncodePack(const std::vector<std::pair<std::string, std::string_view>>& files);

// The index of a pack. Throws CheckpointError naming the pack and what is wrong with it, also for a file in
// it that is not named as one of its server.
std::vector<PackedFile> ReadPack(const std::string& pack);

// A table file to read: from `offset` of what is opened, or its content, of one with at most kSmallTable
// bytes.
struct OpenedTable {
  std::string path;
  File file;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  std::string content;
};
constexpr uint64_t kSmallTable = uint64_t{256} << 10;

// Opens a file by its path, or where it is missing, in the pack beside it. Throws CheckpointError.
OpenedTable OpenTable(const std::string& path);

// The same of several files of one server in a directory. Reads their pack once.
std::vector<OpenedTable> OpenTables(const std::string& directory, const std::vector<std::string>& names);

}  // namespace oe
