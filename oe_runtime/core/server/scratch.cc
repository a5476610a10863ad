#include "oe_runtime/core/server/scratch.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "oe_runtime/core/checkpoint/filter_file.h"
#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/wire/errors.h"

namespace oe {
namespace {

using nlohmann::json;

[[noreturn]] void Unusable(const std::string& directory, int error) {
  throw CheckpointError("cannot use the checkpoint directory " + directory + ": " + std::strerror(error) +
                        "; give one that this user may write in");
}

// As the file is called in a transfer to a server: it holds that server's keys of the table, all there are
// for it, so it restores like the file of a table that only ever had one server.
std::string ReceivedName(const std::string& table) { return TableFileName(table, {0, 1}); }

void ReadFully(int descriptor, uint64_t offset, size_t size, uint8_t* data, const std::string& file) {
  while (size > 0) {
    const ssize_t got = ::pread(descriptor, data, size, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      throw CheckpointError("cannot read " + file + ": " + (got < 0 ? std::strerror(errno) : "it was cut"));
    }
    data += got;
    offset += static_cast<uint64_t>(got);
    size -= static_cast<size_t>(got);
  }
}

std::vector<std::string> NamesIn(int directory) {
  std::vector<std::string> names;
  const int copy = ::openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (copy < 0) return names;
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(::fdopendir(copy), closedir);
  if (!listing) {
    (void)::close(copy);
    return names;
  }
  while (const dirent* entry = readdir(listing.get())) {  // NOLINT(concurrency-mt-unsafe): own stream
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  return names;
}

}  // namespace

Scratch::Scratch(const std::string& directory) : path_(directory + "/transfer") {
  for (const std::string& folder : {directory, path_}) {
    if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) Unusable(folder, errno);
  }
  directory_ = File(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!directory_.ok()) Unusable(path_, errno);
  if (::faccessat(directory_.get(), ".", W_OK | X_OK, 0) != 0) Unusable(path_, errno);
  if (::flock(directory_.get(), LOCK_EX | LOCK_NB) != 0) {
    throw CheckpointError("the checkpoint directory " + directory +
                          " is in use by another server; give each server its own");
  }
  for (const std::string& name : NamesIn(directory_.get())) {  // of a server that was killed
    RemoveFolder(name);
    (void)::unlinkat(directory_.get(), name.c_str(), 0);
  }
}

Scratch::~Scratch() {
  while (!transfers_.empty()) Drop(transfers_.begin()->first);
}

// One of ours, which has files only.
void Scratch::RemoveFolder(const std::string& name) const noexcept {
  if (name.compare(0, std::strlen(kPrefix), kPrefix) != 0) return;
  try {
    const File folder(
        ::openat(directory_.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!folder.ok()) return;
    for (const std::string& file : NamesIn(folder.get())) (void)::unlinkat(folder.get(), file.c_str(), 0);
  } catch (const std::bad_alloc&) {  // it goes when the server is started again
    return;
  }
  (void)::unlinkat(directory_.get(), name.c_str(), AT_REMOVEDIR);
}

Scratch::Transfer* Scratch::Begin(uint64_t client) {
  Drop(client);
  auto transfer = std::make_unique<Transfer>();
  const std::string name = FolderName(client);
  transfer->path = path_ + "/" + name;
  if (::mkdirat(directory_.get(), name.c_str(), 0700) != 0) Unusable(transfer->path, errno);
  transfer->directory =
      File(::openat(directory_.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!transfer->directory.ok()) Unusable(transfer->path, errno);
  const std::lock_guard<std::mutex> lock(mutex_);
  return (transfers_[client] = std::move(transfer)).get();
}

Scratch::Transfer* Scratch::Get(uint64_t client, State state) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = transfers_.find(client);
  if (found != transfers_.end() && found->second->state == state) return found->second.get();
  throw CheckpointError("this server has no " + std::string(state == State::kSaved ? "save" : "restore") +
                        " of this client under way; begin it again");
}

Scratch::Entry* Scratch::Find(Transfer* transfer, const std::string& file) {
  const auto found = transfer->files.find(file);
  if (found == transfer->files.end()) {
    throw ProtocolError("the file that was named is not part of this transfer");
  }
  return &found->second;
}

json Scratch::Save(uint64_t client, const Store& store, const json& since) {
  Transfer* const transfer = Begin(client);
  try {
    json saved = store.Save(transfer->path, since, false);  // the client syncs what it gets
    for (const json& entry : saved) {
      transfer->files[entry["file"].get<std::string>()].bytes = entry["bytes"].get<uint64_t>();
      if (!entry.contains("filter")) continue;
      const json& filter = entry["filter"];
      transfer->files[filter["file"].get<std::string>()].bytes = filter["bytes"].get<uint64_t>();
    }
    transfer->state = State::kSaved;
    return saved;
  } catch (...) {
    Drop(client);
    throw;
  }
}

void Scratch::Read(uint64_t client, const FileChunk& chunk, uint8_t* data) {
  Transfer* const transfer = Get(client, State::kSaved);
  Entry* entry = Find(transfer, chunk.file);
  if (chunk.size > entry->bytes || chunk.offset > entry->bytes - chunk.size) {
    throw ProtocolError("a chunk beyond the end of its file of " + std::to_string(entry->bytes) + " bytes");
  }
  const std::string file = transfer->path + "/" + chunk.file;
  if (!entry->file.ok()) {
    entry->file =
        File(::openat(transfer->directory.get(), chunk.file.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
    if (!entry->file.ok()) throw CheckpointError("cannot read " + file + ": " + std::strerror(errno));
  }
  ReadFully(entry->file.get(), chunk.offset, chunk.size, data, file);
  if (chunk.offset + chunk.size == entry->bytes) entry->file = File();
}

void Scratch::Receive(uint64_t client, const json& files, const std::string& save, const Store& store) {
  std::map<std::string, Entry> wanted;
  uint64_t total = 0;
  if (!files.is_array()) throw ProtocolError("the request lists no files");
  for (const json& file : files) {
    if (!file.is_object() || !file.contains("file") || !file["file"].is_string() || !file.contains("bytes") ||
        !file["bytes"].is_number_unsigned()) {
      throw ProtocolError("a file of the request has no name or size");
    }
    const auto bytes = file["bytes"].get<uint64_t>();
    if (bytes > std::numeric_limits<uint64_t>::max() / 2 - total) throw ProtocolError("a size is too large");
    total += bytes;
    Entry entry;
    entry.bytes = bytes;
    if (!wanted.emplace(file["file"].get<std::string>(), std::move(entry)).second) {
      throw ProtocolError("the request names a file twice");
    }
  }
  const std::vector<std::string> tables = store.TableNames();
  size_t filters = 0;
  for (const std::string& table : tables) {
    filters += wanted.count(FilterFileName(ReceivedName(table)));
    if (wanted.count(ReceivedName(table)) == 0) {
      throw CheckpointError("this server has the table '" + table +
                            "', which is not among those to be restored");
    }
  }
  if (wanted.size() != tables.size() + filters)
    throw ProtocolError("a file of the request is not that of a table here");
  Transfer* const transfer = Begin(client);
  try {
    AwaitBytes(transfer, total);
  } catch (...) {
    Drop(client);
    throw;
  }
  transfer->files = std::move(wanted);
  transfer->save = save;
  transfer->state = State::kReceiving;
}

void Scratch::AwaitBytes(Transfer* transfer, uint64_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  uint64_t awaited = 0;  // by others
  for (const auto& [client, other] : transfers_) awaited += other->awaited;
  struct statvfs status{};
  if (::fstatvfs(directory_.get(), &status) != 0) Unusable(path_, errno);
  const uint64_t room = uint64_t{status.f_bavail} * status.f_frsize;
  if (awaited > room || bytes > room - awaited) {
    throw CheckpointError(path_ + " has " + BytesText(room) + " free, " +
                          (awaited > 0 ? "of which other restores need " + BytesText(awaited) + ", " : "") +
                          "but this server's part of the checkpoint is " + BytesText(bytes) +
                          "; make room there");
  }
  transfer->awaited = bytes;
}

void Scratch::Write(uint64_t client, const FileChunk& chunk, Bytes data) {
  Transfer* const transfer = Get(client, State::kReceiving);
  Entry* entry = Find(transfer, chunk.file);
  if (data.size != chunk.size) {
    throw ProtocolError("a chunk of " + std::to_string(chunk.size) + " bytes came with " +
                        std::to_string(data.size));
  }
  if (chunk.offset != entry->written) {
    throw ProtocolError("a chunk at offset " + std::to_string(chunk.offset) + " where " +
                        std::to_string(entry->written) + " was expected");
  }
  if (chunk.size > entry->bytes - entry->written) {
    throw ProtocolError("a chunk beyond the announced " + std::to_string(entry->bytes) +
                        " bytes of its file");
  }
  const std::string file = transfer->path + "/" + chunk.file;
  try {
    if (entry->written == 0) {
      entry->file = File(::openat(transfer->directory.get(), chunk.file.c_str(),
                                  O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
      if (!entry->file.ok()) throw CheckpointError("cannot write " + file + ": " + std::strerror(errno));
    }
    WriteFully(entry->file.get(), data.data, data.size, file);
  } catch (...) {
    Drop(client);
    throw;
  }
  entry->written += chunk.size;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    transfer->awaited -= chunk.size;
  }
  if (entry->written == entry->bytes) entry->file = File();
}

void Scratch::Restore(uint64_t client, Store* store) {
  const Transfer* const transfer = Get(client, State::kReceiving);
  for (const auto& [file, entry] : transfer->files) {
    if (entry.written != entry.bytes) {
      throw ProtocolError(file + " has " + std::to_string(entry.written) + " of " +
                          std::to_string(entry.bytes) + " bytes");
    }
  }
  try {
    store->Restore({transfer->path}, transfer->save);
  } catch (...) {
    Drop(client);
    throw;
  }
  Drop(client);
}

void Scratch::Drop(uint64_t client) noexcept {
  std::unique_ptr<Transfer> transfer;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = transfers_.find(client);
    if (found != transfers_.end()) {
      transfer = std::move(found->second);
      transfers_.erase(found);
    }
  }
  if (transfer) RemoveFolder(FolderName(client));
}

}  // namespace oe
