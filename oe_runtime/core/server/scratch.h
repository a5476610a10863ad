// A server's own directory, through which table files travel between it and clients that share no file system
// with it. What clients say (wire/messages.h) is not trusted: a name counts only if it is one that the server
// made up itself, and everything is bounded.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "oe_runtime/core/common/file.h"
#include "oe_runtime/core/server/store.h"
#include "oe_runtime/core/wire/messages.h"

namespace oe {

// Holds for each client (a number that its connection has) the files of one save or one restore, in a folder
// of its own: no client can touch another's, or has to wait for it. Thread-safe, for different clients.
class Scratch {
 public:
  // `directory` is made if only its last part is missing; its subfolder `transfer` is emptied and locked.
  // Throws CheckpointError for one that cannot be used or that another server uses.
  explicit Scratch(const std::string& directory);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Begins anew: removes what the client had here, writes every table's file. Returns what Store::Save does.
  nlohmann::json Save(uint64_t client, const Store& store, const nlohmann::json& since);
  // Reads chunk.size bytes of a saved file to `data`.
  void Read(uint64_t client, const FileChunk& chunk, uint8_t* data);

  // Begins anew and awaits `files`, [{"file", "bytes"}]: of each table one file that stands for all servers',
  // and maybe its filter's. `save` names that of which they are a part (Store::Restore).
  void Receive(uint64_t client, const nlohmann::json& files, const std::string& save, const Store& store);
  void Write(uint64_t client, const FileChunk& chunk, Bytes data);
  // Restores from what came, all of which must be there; removes it in any case.
  void Restore(uint64_t client, Store* store);

  // Removes the client's files, if it has any.
  void Drop(uint64_t client) noexcept;

 private:
  enum class State { kEmpty, kSaved, kReceiving };
  struct Entry {
    uint64_t bytes = 0;    // what the file has, or will have
    uint64_t written = 0;  // of a file that comes
    File file;             // open while it is on its way
  };

  struct Transfer {
    std::string path;
    File directory;
    State state = State::kEmpty;
    std::map<std::string, Entry> files;
    std::string save;      // that comes
    uint64_t awaited = 0;  // bytes of files that are still to come; with mutex_
  };

  static std::string FolderName(uint64_t client) { return kPrefix + std::to_string(client); }
  Transfer* Begin(uint64_t client);
  void RemoveFolder(const std::string& name) const noexcept;
  // Throws CheckpointError if the client's transfer is not in that state.
  Transfer* Get(uint64_t client, State state) const;
  // Throws ProtocolError for another file.
  static Entry* Find(Transfer* transfer, const std::string& file);
  // Sets space aside for files that are to come. Throws CheckpointError.
  void AwaitBytes(Transfer* transfer, uint64_t bytes);

  static constexpr const char* kPrefix = "client-";
  std::string path_;
  File directory_;

  mutable std::mutex mutex_;
  std::map<uint64_t, std::unique_ptr<Transfer>> transfers_;  // each is its client's alone
};

}  // namespace oe
