// A server's own directory, through which table files travel between it and clients that share no file system
// with it. What clients say (wire/messages.h) is not trusted: a name counts only if it is one that the server
// made up itself, and everything is bounded.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "oe_runtime/core/common/file.h"
#include "oe_runtime/core/server/store.h"
#include "oe_runtime/core/wire/messages.h"

namespace oe {

// Holds the files of one save or one restore of one client (a number that its connection has). Thread-safe.
class Scratch {
 public:
  // `directory` is made if only its last part is missing; its subfolder `transfer` is emptied and locked.
  // Throws CheckpointError for one that cannot be used or that another server uses.
  explicit Scratch(const std::string& directory);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // Takes over: removes what was there, writes every table's file. Returns what Store::Save does.
  nlohmann::json Save(uint64_t client, const Store& store, const nlohmann::json& since);
  // Reads chunk.size bytes of a saved file to `data`.
  void Read(uint64_t client, const FileChunk& chunk, uint8_t* data);

  // Takes over and awaits `files`, [{"file", "bytes"}]: of each table one file that stands for all servers',
  // and maybe its filter's.
  void Receive(uint64_t client, const nlohmann::json& files, const Store& store);
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

  void Begin(uint64_t client);
  void Empty() noexcept;
  // Throws CheckpointError if the client's transfer is not in that state, ProtocolError for another file.
  Entry* Find(uint64_t client, State state, const std::string& file);
  void CheckOwner(uint64_t client, State state) const;
  void CheckRoom(uint64_t bytes) const;

  std::string path_;
  File directory_;

  std::mutex mutex_;
  uint64_t owner_ = 0;
  State state_ = State::kEmpty;
  std::map<std::string, Entry> files_;
};

}  // namespace oe
