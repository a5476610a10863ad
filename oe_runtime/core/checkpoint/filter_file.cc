#include "oe_runtime/core/checkpoint/filter_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "oe_runtime/core/checkpoint/file_hash.h"
#include "oe_runtime/core/checkpoint/open_file.h"
#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/file.h"

namespace oe {
namespace {

using nlohmann::json;

constexpr std::array<char, 8> kFilterMagic = {'O', 'E', 'F', 'I', 'L', 'T', 'R', '\n'};
constexpr uint32_t kFilterFormat = 1;
constexpr uint32_t kLargestFilterHeader = 1U << 20;
constexpr size_t kFilterBlockBytes = size_t{1} << 20;

// One file's bytes from its beginning, hashed as they are read.
class HashedReader {
 public:
  explicit HashedReader(const std::string& file) : file_(file), in_(OpenToRead(file)) {
    struct stat status{};
    if (::fstat(in_.get(), &status) != 0) {
      throw CheckpointError("cannot read " + file + ": " + std::strerror(errno));
    }
    size_ = static_cast<uint64_t>(status.st_size);
  }

  uint64_t size() const { return size_; }
  uint64_t hash() const { return hash_.Digest(); }

  void Read(void* data, size_t size) {
    auto* to = static_cast<char*>(data);
    for (size_t left = size; left > 0;) {
      const ssize_t got = ::read(in_.get(), to, left);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw CheckpointError("cannot read " + file_ + ": " + std::strerror(errno));
      if (got == 0) Damaged(file_, "it ends too early");
      to += got;
      left -= static_cast<size_t>(got);
    }
    hash_.Update(data, size);
  }

 private:
  const std::string file_;
  const File in_;
  FileHash hash_;
  uint64_t size_ = 0;
};

// Everything of the header that must be as the table says.
json Expected(const TableSpec& spec, uint64_t version) {
  return {{"table", spec.name}, {"admission", json(spec).at("admission")}, {"version", version}};
}

// How many bytes of counts follow. `expected`: the fields that must have these values.
uint64_t ReadHeader(HashedReader* reader, const std::string& file, const json& expected) {
  std::array<char, 8> magic{};
  uint32_t format = 0;
  uint32_t size = 0;
  reader->Read(magic.data(), magic.size());
  if (magic != kFilterMagic)
    throw CheckpointError(file + " is not a filter file: its first 8 bytes are not OEFILTR");
  reader->Read(&format, sizeof(format));
  if (format != kFilterFormat) {
    throw CheckpointError(file + " has the filter file format " + std::to_string(format) +
                          "; this version reads " + std::to_string(kFilterFormat));
  }
  reader->Read(&size, sizeof(size));
  if (size > kLargestFilterHeader) Damaged(file, "its header has " + std::to_string(size) + " bytes");
  std::string text(size, '\0');
  reader->Read(text.data(), size);
  json header = json::parse(text, nullptr, false);
  if (!header.is_object() || !header.contains("bytes") || !header["bytes"].is_number_unsigned()) {
    Damaged(file, "its header makes no sense");
  }
  const auto bytes = header["bytes"].get<uint64_t>();
  const uint64_t rest = magic.size() + sizeof(format) + sizeof(size) + text.size() + sizeof(uint64_t);
  if (bytes > reader->size() || reader->size() - bytes != rest) {
    Damaged(file, "it has " + std::to_string(reader->size()) + " bytes, but its header says " +
                      std::to_string(bytes) + " of counts");
  }
  for (const auto& [field, value] : expected.items()) {
    const json there = header.value(field, json());
    if (there == value) continue;
    throw CheckpointError(file + ": '" + field + "' is " + there.dump() + ", but for table " +
                          expected["table"].dump() + " it should be " + value.dump());
  }
  return bytes;
}

void Skip(HashedReader* reader, uint64_t bytes) {
  std::vector<char> block(kFilterBlockBytes);
  while (bytes > 0) {
    const size_t size = std::min<uint64_t>(bytes, kFilterBlockBytes);
    reader->Read(block.data(), size);
    bytes -= size;
  }
}

uint64_t CheckEnd(HashedReader* reader, const std::string& file) {
  const uint64_t wanted = reader->hash();
  uint64_t checksum = 0;
  reader->Read(&checksum, sizeof(checksum));
  if (checksum != wanted) Damaged(file, "its checksum is wrong");
  return checksum;
}

}  // namespace

std::string FilterFileName(const std::string& table_file) { return table_file + ".filter"; }

FilterFileInfo VerifyFilterFile(const std::string& file) {
  HashedReader reader(file);
  Skip(&reader, ReadHeader(&reader, file, json::object()));
  return {reader.size(), CheckEnd(&reader, file)};
}

void EncodeFilter(const AdmissionFilter& filter, const TableSpec& spec, ShardInfo shard, uint64_t version,
                  const AdmissionFilter::Sink& sink) {
  json header = Expected(spec, version);
  header["server"] = shard.server;
  header["servers"] = shard.servers;
  header["bytes"] = filter.WrittenBytes();
  const std::string text = header.dump();
  const auto size = static_cast<uint32_t>(text.size());
  FileHash hash;
  const auto write = [&](const void* data, size_t bytes) {
    hash.Update(data, bytes);
    sink(data, bytes);
  };
  write(kFilterMagic.data(), kFilterMagic.size());
  write(&kFilterFormat, sizeof(kFilterFormat));
  write(&size, sizeof(size));
  write(text.data(), text.size());
  filter.Write(write);
  const uint64_t checksum = hash.Digest();
  sink(&checksum, sizeof(checksum));
}

void SaveFilter(const AdmissionFilter& filter, const TableSpec& spec, ShardInfo shard, uint64_t version,
                const std::string& file, PendingFiles* files) {
  const std::string temporary = file + ".tmp";
  File out(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!out.ok()) throw CheckpointError("cannot write " + temporary + ": " + std::strerror(errno));
  try {
    EncodeFilter(filter, spec, shard, version,
                 [&](const void* data, size_t size) { WriteFully(out.get(), data, size, temporary); });
  } catch (...) {
    (void)::unlink(temporary.c_str());
    throw;
  }
  files->Add(std::move(out), temporary, file);
}

bool LoadFilters(const std::vector<std::string>& table_files, const TableSpec& spec, uint64_t version,
                 AdmissionFilter* filter, const AdmissionFilter::PartOf& part_of) {
  std::vector<std::string> files;
  std::string missing;
  for (const std::string& table_file : table_files) {
    const std::string file = FilterFileName(table_file);
    if (::access(file.c_str(), F_OK) == 0) {
      files.push_back(file);
    } else {
      missing = file;
    }
  }
  if (files.empty()) return false;
  if (!missing.empty()) throw CheckpointError(missing + " is missing (beside " + files.front() + ")");
  const json expected = Expected(spec, version);
  for (const std::string& file : files) {
    HashedReader reader(file);
    const uint64_t bytes = ReadHeader(&reader, file, expected);
    if (filter == nullptr) {
      Skip(&reader, bytes);
    } else if (!filter->Add([&](void* data, size_t size) { reader.Read(data, size); }, bytes, part_of)) {
      Damaged(file, "its counts are not those of its 'admission'");
    }
    (void)CheckEnd(&reader, file);
  }
  return true;
}

std::unique_ptr<AdmissionFilter> FilterOf(const std::vector<std::string>& table_files, const TableSpec& spec,
                                          uint64_t version, ShardInfo shard) {
  constexpr uint32_t kParts = 16;  // any number does: a file has no parts
  std::unique_ptr<AdmissionFilter> filter = AdmissionFilter::Create(spec.admission, kParts, shard);
  const auto part_of = [&](Key key) {
    return server_of(key, shard.servers, spec.index == "array") == shard.server
               ? static_cast<uint32_t>(Mix64(key) % kParts)
               : kParts;
  };
  return LoadFilters(table_files, spec, version, filter.get(), part_of) ? std::move(filter) : nullptr;
}

}  // namespace oe
