#include "oe_runtime/core/checkpoint/table_pack.h"

#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>
#include <utility>

#include "oe_runtime/core/checkpoint/open_file.h"
#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

constexpr std::array<char, 8> kPackMagic = {'O', 'E', 'T', 'A', 'B', 'L', 'S', '\n'};
constexpr uint32_t kPackFormat = 1;
constexpr uint32_t kLargestIndex = 64U << 20;
constexpr size_t kPackFixed = kPackMagic.size() + 2 * sizeof(uint32_t);

void PutNumber(uint64_t value, std::string* to) {
  to->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void PutSmall(size_t value, std::string* to) {
  const auto number = static_cast<uint32_t>(value);
  to->append(reinterpret_cast<const char*>(&number), sizeof(number));
}

// Takes the next number of an index.
template <typename Number>
Number Take(std::string_view* from, const std::string& pack) {
  Number number = 0;
  if (from->size() < sizeof(number)) Damaged(pack, "its index ends too early");
  std::copy_n(from->begin(), sizeof(number), reinterpret_cast<char*>(&number));
  from->remove_prefix(sizeof(number));
  return number;
}

std::string ReadAt(const File& file, const std::string& name, uint64_t offset, size_t size) {
  std::string content(size, '\0');
  oe::ReadAt(file, name, offset, content.data(), size);
  return content;
}

uint64_t SizeOf(const File& file, const std::string& name) {
  struct stat status{};
  if (::fstat(file.get(), &status) != 0) throw CheckpointError(name + ": " + std::strerror(errno));
  return static_cast<uint64_t>(status.st_size);
}

// "…/server-0-of-3.C1.oet" → "…/server-0-of-3.oets"; "" where the name is no table file's. Names of tables
// have no dots there.
std::string PackOf(const std::string& path) {
  const size_t name = path.rfind('/') + 1;
  const size_t dot = path.find('.', name);
  const std::string_view end = ".oet";
  if (dot == std::string::npos || path.size() < dot + end.size() ||
      std::string_view(path).substr(path.size() - end.size()) != end) {
    return "";
  }
  return path.substr(0, dot) + ".oets";
}

std::vector<PackedFile> ReadIndex(const File& file, const std::string& pack) {
  const uint64_t size = SizeOf(file, pack);
  if (size < kPackFixed + sizeof(uint64_t)) Damaged(pack, "it has only " + std::to_string(size) + " bytes");
  const std::string head = ReadAt(file, pack, 0, kPackFixed);
  if (!std::equal(kPackMagic.begin(), kPackMagic.end(), head.begin())) {
    throw CheckpointError(pack + " is not a pack of table files: its first 8 bytes are not OETABLS");
  }
  std::string_view rest = std::string_view(head).substr(kPackMagic.size());
  const auto format = Take<uint32_t>(&rest, pack);
  if (format != kPackFormat) {
    throw CheckpointError(pack + " has the pack format " + std::to_string(format) + "; this version reads 1");
  }
  const auto index_size = Take<uint32_t>(&rest, pack);
  if (index_size > kLargestIndex || index_size > size - kPackFixed - sizeof(uint64_t)) {
    Damaged(pack, "its index has " + std::to_string(index_size) + " bytes, the file " + std::to_string(size));
  }
  const std::string index = ReadAt(file, pack, kPackFixed, index_size + sizeof(uint64_t));
  const std::string hashed = head + index.substr(0, index_size);
  std::string_view checksum = std::string_view(index).substr(index_size);
  if (Take<uint64_t>(&checksum, pack) != XXH3_64bits(hashed.data(), hashed.size())) {
    Damaged(pack, "the checksum of its index is wrong");
  }
  std::vector<PackedFile> files;
  std::set<std::string> names;
  uint64_t offset = kPackFixed + index_size + sizeof(uint64_t);
  for (rest = std::string_view(index).substr(0, index_size); !rest.empty();) {
    PackedFile of;
    of.offset = offset;
    of.bytes = Take<uint64_t>(&rest, pack);
    of.checksum = Take<uint64_t>(&rest, pack);
    const auto length = Take<uint32_t>(&rest, pack);
    if (length > rest.size() || of.bytes > size - offset) Damaged(pack, "its index contradicts itself");
    of.name = rest.substr(0, length);
    const auto is_printed = [](char one) { return one >= ' ' && one <= '~'; };
    if (!std::all_of(of.name.begin(), of.name.end(), is_printed)) {
      Damaged(pack, "a file in it has a name that no table's file has");
    }
    rest.remove_prefix(length);
    offset += of.bytes;
    // The checksum is right, so this guards against a writer's mistake, or its intent.
    const std::string path = pack.substr(0, pack.rfind('/') + 1) + of.name;
    if (of.name.find('/') != std::string::npos || PackOf(path) != pack || !names.insert(of.name).second) {
      Damaged(pack, "a file in it is named '" + of.name + "'");
    }
    files.push_back(std::move(of));
  }
  if (offset != size) {
    Damaged(pack, "its index promises " + std::to_string(offset) + " bytes, it has " + std::to_string(size));
  }
  return files;
}

bool IsThere(const std::string& path) { return ::access(path.c_str(), F_OK) == 0; }

std::string NameOf(const std::string& path) { return path.substr(path.rfind('/') + 1); }

OpenedTable Opened(const std::string& path, File file, uint64_t offset, uint64_t bytes) {
  if (bytes > kSmallTable) return {path, std::move(file), offset, bytes, ""};
  return {path, File(), 0, bytes, ReadAt(file, path, offset, bytes)};
}

}  // namespace

std::string PackName(const ShardInfo& shard) {
  return "server-" + std::to_string(shard.server) + "-of-" + std::to_string(shard.servers) + ".oets";
}

std::string EncodePack(const std::vector<std::pair<std::string, std::string_view>>& files) {
  std::string index;
  size_t bytes = 0;
  for (const auto& [name, content] : files) {
    uint64_t checksum = 0;
    std::memcpy(&checksum, content.data() + content.size() - sizeof(checksum), sizeof(checksum));
    PutNumber(content.size(), &index);
    PutNumber(checksum, &index);
    PutSmall(name.size(), &index);
    index += name;
    bytes += content.size();
  }
  std::string pack(kPackMagic.data(), kPackMagic.size());
  pack.reserve(kPackFixed + index.size() + sizeof(uint64_t) + bytes);
  PutSmall(kPackFormat, &pack);
  PutSmall(index.size(), &pack);
  pack += index;
  PutNumber(XXH3_64bits(pack.data(), pack.size()), &pack);
  for (const auto& [name, content] : files) pack += content;
  return pack;
}

std::vector<PackedFile> ReadPack(const std::string& pack) { return ReadIndex(OpenToRead(pack), pack); }

OpenedTable OpenTable(const std::string& path) {
  const std::string pack = PackOf(path);
  if (!pack.empty() && !IsThere(path) && IsThere(pack)) {
    File file = OpenToRead(pack);
    for (const PackedFile& of : ReadIndex(file, pack)) {
      if (of.name == NameOf(path)) return Opened(path, std::move(file), of.offset, of.bytes);
    }
  }
  File file = OpenToRead(path);
  const uint64_t bytes = SizeOf(file, path);
  return Opened(path, std::move(file), 0, bytes);
}

std::vector<OpenedTable> OpenTables(const std::string& directory, const std::vector<std::string>& names) {
  const std::string pack = names.empty() ? "" : PackOf(directory + "/" + names.front());
  std::map<std::string, PackedFile> packed;
  std::string content;  // of the pack
  if (!pack.empty() && IsThere(pack)) {
    const File file = OpenToRead(pack);
    for (PackedFile& of : ReadIndex(file, pack)) packed.emplace(of.name, std::move(of));
    const uint64_t bytes = SizeOf(file, pack);
    if (bytes <= names.size() * kSmallTable) content = ReadAt(file, pack, 0, bytes);
  }
  std::vector<OpenedTable> opened;
  opened.reserve(names.size());
  for (const std::string& name : names) {
    const std::string path = directory + "/" + name;
    const auto of = packed.find(name);
    const bool small = of != packed.end() && of->second.bytes <= kSmallTable && !content.empty();
    if (small && PackOf(path) == pack && !IsThere(path)) {
      const PackedFile& part = of->second;
      opened.push_back({path, File(), 0, part.bytes, content.substr(part.offset, part.bytes)});
    } else {
      opened.push_back(OpenTable(path));
    }
  }
  return opened;
}

}  // namespace oe
