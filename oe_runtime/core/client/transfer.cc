#include "oe_runtime/core/client/transfer.h"

#include <fcntl.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string_view>
#include <utility>

#include "oe_runtime/core/checkpoint/filter_file.h"
#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/checkpoint/table_pack.h"
#include "oe_runtime/core/common/file.h"
#include "oe_runtime/core/server/store.h"
#include "oe_runtime/core/wire/json_nesting.h"

namespace oe {
namespace {

using nlohmann::json;

constexpr size_t kAllChunks = size_t{64} << 20;  // what the chunks of all servers may take together
constexpr size_t kLeastChunk = size_t{256} << 10;

size_t ChunkBytes(size_t servers) {
  return std::clamp<size_t>(kAllChunks / std::max<size_t>(1, servers), kLeastChunk, kMaxChunk);
}

// ---- From the servers

// A file that is written under a temporary name until it is known to be good.
struct Incoming {
  std::string name;
  std::string path;
  std::string temporary;
  uint64_t bytes = 0;
  std::string checksum;  // in hexadecimal digits, as Store::Save says it
  bool filter = false;
};

Incoming IncomingOf(const json& entry, const std::string& name, const std::string& directory) {
  Incoming file;
  file.name = entry.at("file").get<std::string>();
  file.path = directory + "/" + file.name;
  file.temporary = file.path + ".tmp";
  if (entry.at("bytes").is_number_unsigned()) file.bytes = entry.at("bytes").get<uint64_t>();
  file.checksum = entry.at("checksum").get<std::string>();
  if (file.name != name || file.bytes == 0) {
    throw ProtocolError("a saved file has a name that is not its table's, or no content");
  }
  return file;
}

// Names that this side would have given, too: nothing that a server says becomes a path elsewhere.
std::vector<Incoming> FilesOf(const json& saved, const ShardInfo& shard, const std::string& directory) {
  std::vector<Incoming> files;
  std::set<std::string> names;
  try {
    if (!saved.is_array()) throw ProtocolError("the list of saved files is no list");
    for (const json& entry : saved) {
      const std::string name = TableFileName(entry.at("table").get<std::string>(), shard);
      if (!names.insert(name).second) throw ProtocolError("the list of saved files has a table twice");
      if (entry.at("server") != shard.server || entry.at("servers") != shard.servers) {
        throw ProtocolError("the list of saved files is another server's");
      }
      files.push_back(IncomingOf(entry, name, directory));
      if (!entry.contains("filter")) continue;
      files.push_back(IncomingOf(entry["filter"], FilterFileName(name), directory));
      files.back().filter = true;
    }
  } catch (const json::exception& error) {
    throw ProtocolError(std::string("the list of saved files makes no sense: ") + error.what());
  }
  return files;
}

// Brings one server's files, one after the other. What is not kept goes away with it.
class Fetch {
 public:
  Fetch(std::vector<Incoming> files, size_t chunk) : files_(std::move(files)), chunk_(chunk) {}
  Fetch(const Fetch&) = delete;
  Fetch& operator=(const Fetch&) = delete;
  ~Fetch() {
    if (kept_) return;
    for (size_t i = 0; i < std::min(at_ + 1, files_.size()); ++i) (void)::unlink(files_[i].temporary.c_str());
  }

  // The request of the next chunk; false, and to be skipped, when all files are here.
  bool Next(Call* call) {
    call->skip = at_ == files_.size();
    if (call->skip) return false;
    const Incoming& file = files_[at_];
    if (!out_.ok()) {
      (void)::unlink(file.temporary.c_str());
      out_ = File(::open(file.temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
      if (!out_.ok()) {
        throw CheckpointError("cannot write " + file.temporary + ": " + std::strerror(errno));
      }
    }
    const auto size = static_cast<uint32_t>(std::min<uint64_t>(chunk_, file.bytes - received_));
    request_ = EncodeFileChunk({file.name, received_, size});
    data_.Resize(size);
    call->body = {asio::buffer(request_)};
    call->into = {asio::buffer(data_.data(), size)};
    call->exact = true;
    return true;
  }

  // Writes what came for the last request.
  void Write() {
    if (at_ == files_.size()) return;
    const Incoming& file = files_[at_];
    WriteFully(out_.get(), data_.data(), data_.size(), file.temporary);
    received_ += data_.size();
    if (received_ < file.bytes) return;
    out_ = File();
    received_ = 0;
    ++at_;
  }

  const std::vector<Incoming>& files() const { return files_; }
  void Keep() { kept_ = true; }

 private:
  const std::vector<Incoming> files_;
  const size_t chunk_;
  size_t at_ = 0;
  File out_;
  uint64_t received_ = 0;
  std::string request_;
  Buffer data_;
  bool kept_ = false;
};

void Check(const Incoming& file) {
  const uint64_t checksum =
      file.filter ? VerifyFilterFile(file.temporary).checksum : VerifyTableFile(file.temporary).checksum;
  if (HexText(checksum) == file.checksum) return;
  throw CheckpointError(file.temporary + " is not what its server saved: its checksum is another");
}

void Publish(const std::vector<const Incoming*>& all) {
  PendingFiles files;
  for (const Incoming* const file : all) {
    File written(::open(file->temporary.c_str(), O_RDONLY | O_CLOEXEC));
    if (!written.ok()) throw CheckpointError("cannot read " + file->temporary + ": " + std::strerror(errno));
    files.Add(std::move(written), file->temporary, file->path);
  }
  files.Publish();
}

// ---- To the servers

// One table's files, of which every row goes to its server.
struct Source {
  TableFileInfo info;              // spec, version and row_bytes, which all files share
  std::vector<TableChain> chains;  // in the order of the servers that wrote them
  std::vector<uint64_t> rows;      // for each server that shall have them
  // For each server, the file with its keys' counts of the filter; nothing where none were saved.
  std::vector<std::string> filters;
  uint64_t checksums = 0;  // SumOfChecksums of all chains
};

// The part of one table that one server gets, as a file. Whole chunks of it are sent, and the rest at its
// end.
class Part {
 public:
  Part(const Source& source, uint32_t server)
      : name_(TableFileName(source.info.spec.name, {0, 1})),
        row_bytes_(source.info.row_bytes),
        encoder_(InfoOf(source, server), [this](const void* data, size_t size) {
          out_.append(static_cast<const char*>(data), size);
        }) {
    keys_.reserve(encoder_.block_rows());
    rows_.reserve(encoder_.block_rows() * row_bytes_);
  }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;

  // The server gets one file that holds all that is its own: that of a table with one server.
  static TableFileInfo InfoOf(const Source& source, uint32_t server) {
    TableFileInfo info = source.info;
    info.shard = {0, 1};
    info.base = std::nullopt;
    info.tombstones = 0;
    info.rows = source.rows[server];
    return info;
  }

  void Add(Key key, const std::byte* row) {
    keys_.push_back(key);
    rows_.insert(rows_.end(), row, row + row_bytes_);
    if (keys_.size() == encoder_.block_rows()) WriteBlock();
  }

  void Finish() {
    if (!keys_.empty()) WriteBlock();
    (void)encoder_.Finish();
  }

  size_t waiting() const { return out_.size(); }

  // The request that sends up to `chunk` bytes; to be skipped when none wait.
  void Next(size_t chunk, Call* call) {
    call->skip = out_.empty();
    if (call->skip) return;
    sending_ = std::min(chunk, out_.size());
    request_ = EncodeFileChunk({name_, sent_, static_cast<uint32_t>(sending_)});
    call->body = {asio::buffer(request_), asio::buffer(out_.data(), sending_)};
    call->exact = true;
  }
  void Sent() {
    out_.erase(0, sending_);
    sent_ += std::exchange(sending_, 0);
  }

 private:
  void WriteBlock() {
    encoder_.WriteBlock(keys_.data(), rows_.data(), keys_.size());
    keys_.clear();
    rows_.clear();
  }

  const std::string name_;
  const size_t row_bytes_;
  std::vector<Key> keys_;
  std::vector<std::byte> rows_;
  std::string out_;
  size_t sending_ = 0;
  uint64_t sent_ = 0;
  std::string request_;
  TableFileEncoder encoder_;
};

uint32_t OwnerOf(Key key, const TableSpec& spec, uint32_t servers) {
  return server_of(key, servers, spec.index == "array");
}

// Verifies the files of a table and counts the rows that each server will have.
Source Open(const TableSpec& spec, const std::vector<std::string>& directories, uint32_t servers,
            ThreadPool* pool) {
  Source source;
  source.chains = FindTableChains(directories, spec.name);
  const size_t row_bytes = ReadTableFileInfo(source.chains.front().back()).row_bytes;
  const std::vector<TableFileInfo> infos = CheckChains(spec, row_bytes, source.chains);
  source.info = infos.front();
  source.checksums = SumOfChecksums(infos);
  source.rows.resize(servers);
  std::vector<std::vector<uint64_t>> counts(source.chains.size(), std::vector<uint64_t>(servers));
  pool->ParallelFor(source.chains.size(), [&](size_t i) { AddRowsByServer(source.chains[i], &counts[i]); });
  for (const auto& of_file : counts) {
    for (uint32_t server = 0; server < servers; ++server) source.rows[server] += of_file[server];
  }
  return source;
}

// Each server's part of what the filters of the servers that saved the table had counted.
std::vector<std::string> OpenFilters(const TableSpec& spec, const Source& source, uint32_t servers) {
  std::vector<std::string> filters;
  if (spec.admission.name.empty()) return filters;
  for (uint32_t server = 0; server < servers; ++server) {
    const auto filter = FilterOf(Newest(source.chains), spec, source.info.version, {server, servers});
    if (filter == nullptr) break;
    std::string& bytes = filters.emplace_back();
    EncodeFilter(*filter, spec, {0, 1}, source.info.version,
                 [&](const void* data, size_t size) { bytes.append(static_cast<const char*>(data), size); });
  }
  return filters;
}

void Announce(const std::vector<Source>& sources, const std::string& directory, uint32_t servers,
              const Ask& ask) {
  uint64_t checksums = 0;
  for (const Source& source : sources) checksums += source.checksums;
  const std::string save = NameOfSave(checksums, directory);
  std::vector<std::string> bodies(servers);
  std::vector<Call> calls(servers);
  for (uint32_t server = 0; server < servers; ++server) {
    json files = json::array();
    for (const Source& source : sources) {
      files.push_back({{"file", TableFileName(source.info.spec.name, {0, 1})},
                       {"bytes", TableFileBytes(Part::InfoOf(source, server))}});
      if (source.filters.empty()) continue;
      files.push_back({{"file", FilterFileName(TableFileName(source.info.spec.name, {0, 1}))},
                       {"bytes", source.filters[server].size()}});
    }
    bodies[server] = json{{"files", std::move(files)}, {"save", save}}.dump(-1, ' ', false,
                                                                            json::error_handler_t::replace);
    calls[server].body = {asio::buffer(bodies[server])};
  }
  ask(Op::kReceive, &calls);
}

// Once a part has `least` bytes waiting, sends what all have, until none has that many.
void Send(std::vector<std::unique_ptr<Part>>* parts, size_t chunk, size_t least, const Ask& ask) {
  const auto waits = [least](const std::unique_ptr<Part>& part) { return part->waiting() >= least; };
  while (std::any_of(parts->begin(), parts->end(), waits)) {
    std::vector<Call> calls(parts->size());
    for (size_t s = 0; s < parts->size(); ++s) (*parts)[s]->Next(chunk, &calls[s]);
    ask(Op::kWriteFile, &calls);
    for (const auto& part : *parts) part->Sent();
  }
}

void SendTable(const Source& source, uint32_t servers, const Ask& ask) {
  const size_t chunk = ChunkBytes(servers);
  std::vector<std::unique_ptr<Part>> parts;
  parts.reserve(servers);
  for (uint32_t server = 0; server < servers; ++server) {
    parts.push_back(std::make_unique<Part>(source, server));
  }
  std::vector<std::unique_ptr<TableChainReader>> readers;
  readers.reserve(source.chains.size());
  for (const TableChain& chain : source.chains) readers.push_back(std::make_unique<TableChainReader>(chain));
  // A block of each file in turn: the server count is mostly what it was, and then every file is another
  // server's.
  for (bool more = true; more;) {
    more = false;
    for (const auto& reader : readers) {
      const size_t n = reader->NextBlock();
      more = more || n > 0;
      for (size_t i = 0; i < n; ++i) {
        const Key key = reader->keys()[i];
        const std::byte* row = reader->rows() + i * source.info.row_bytes;
        parts[OwnerOf(key, source.info.spec, servers)]->Add(key, row);
      }
      Send(&parts, chunk, chunk, ask);
    }
  }
  for (const auto& part : parts) part->Finish();
  Send(&parts, chunk, 1, ask);
}

void SendFilters(const Source& source, uint32_t servers, const Ask& ask) {
  if (source.filters.empty()) return;
  const std::string name = FilterFileName(TableFileName(source.info.spec.name, {0, 1}));
  const size_t chunk = ChunkBytes(servers);
  size_t longest = 0;
  for (const std::string& bytes : source.filters) longest = std::max(longest, bytes.size());
  for (size_t sent = 0; sent < longest; sent += chunk) {
    std::vector<Call> calls(servers);
    std::vector<std::string> requests(servers);
    for (uint32_t server = 0; server < servers; ++server) {
      const std::string& bytes = source.filters[server];
      calls[server].skip = sent >= bytes.size();
      if (calls[server].skip) continue;
      const size_t size = std::min(chunk, bytes.size() - sent);
      requests[server] = EncodeFileChunk({name, sent, static_cast<uint32_t>(size)});
      calls[server].body = {asio::buffer(requests[server]), asio::buffer(bytes.data() + sent, size)};
      calls[server].exact = true;
    }
    ask(Op::kWriteFile, &calls);
  }
}

// The held files, one after the other.
std::string PackOf(const std::vector<Incoming>& files, std::string_view held) {
  std::vector<std::pair<std::string, std::string_view>> packed;
  for (const Incoming& file : files) {
    if (file.filter || file.bytes < sizeof(uint64_t) || file.bytes > held.size()) {
      throw ProtocolError("the content of a saved file is missing");
    }
    const std::string_view content = held.substr(0, file.bytes);
    const uint64_t checksum = XXH3_64bits(content.data(), content.size() - sizeof(checksum));
    uint64_t its_own = 0;
    std::memcpy(&its_own, content.data() + content.size() - sizeof(its_own), sizeof(its_own));
    if (file.checksum != HexText(checksum) || its_own != checksum) {
      throw CheckpointError(file.name + " is not what its server saved: its checksum is another");
    }
    packed.emplace_back(file.name, content);
    held.remove_prefix(file.bytes);
  }
  if (!held.empty()) throw ProtocolError("more came than the saved files");
  return EncodePack(packed);
}

}  // namespace

json ParseJsonReply(const std::string& endpoint, Bytes text) {
  const std::string what = "server " + endpoint + ": the reply";
  CheckNesting(text, what);
  json reply = json::parse(text.data, text.data + text.size, nullptr, false);
  if (reply.is_discarded()) throw ProtocolError(what + " is not JSON");
  return reply;
}

json ReadSaved(const std::string& endpoint, Bytes reply, const ShardInfo& shard, Contents* contents) {
  const uint8_t* const end = reply.data + reply.size;
  const uint8_t* const list = std::find(reply.data, end, uint8_t{'\n'});
  json saved = ParseJsonReply(endpoint, {reply.data, static_cast<size_t>(list - reply.data)});
  try {
    const std::vector<Incoming> files = FilesOf(saved, shard, "");
    if (list == end) return saved;
    if (contents == nullptr) throw ProtocolError("saved files came that were not asked for");
    const std::string_view held(reinterpret_cast<const char*>(list + 1), static_cast<size_t>(end - list) - 1);
    (*contents)[PackName(shard)] = PackOf(files, held);
  } catch (const ProtocolError& error) {
    throw ProtocolError("server " + endpoint + ": " + error.what());
  }
  return saved;
}

void FetchTables(const std::vector<json>& saved, const std::string& directory, const Ask& ask,
                 ThreadPool* pool) {
  const auto servers = static_cast<uint32_t>(saved.size());
  std::vector<std::unique_ptr<Fetch>> fetches;
  std::vector<const Incoming*> all;
  for (uint32_t server = 0; server < servers; ++server) {
    fetches.push_back(
        std::make_unique<Fetch>(FilesOf(saved[server], {server, servers}, directory), ChunkBytes(servers)));
    for (const Incoming& file : fetches.back()->files()) all.push_back(&file);
  }
  for (;;) {
    std::vector<Call> calls(servers);
    bool more = false;
    for (uint32_t s = 0; s < servers; ++s) more = fetches[s]->Next(&calls[s]) || more;
    if (!more) break;
    ask(Op::kReadFile, &calls);
    pool->ParallelFor(servers, [&](size_t s) { fetches[s]->Write(); });
  }
  pool->ParallelFor(all.size(), [&](size_t i) { Check(*all[i]); });
  Publish(all);
  SyncDirectory(directory);
  for (const auto& fetch : fetches) fetch->Keep();
}

void SendTables(const std::map<std::string, TableSpec>& tables, const std::vector<std::string>& directories,
                uint32_t servers, const Ask& ask, ThreadPool* pool) {
  std::vector<Source> sources;
  sources.reserve(tables.size());
  for (const auto& [name, spec] : tables) {
    sources.push_back(Open(spec, directories, servers, pool));
    sources.back().filters = OpenFilters(spec, sources.back(), servers);
  }
  Announce(sources, directories.back(), servers, ask);
  for (const Source& source : sources) {
    SendTable(source, servers, ask);
    SendFilters(source, servers, ask);
  }
}

}  // namespace oe
