// A parameter server: the tables of its jobs behind a socket.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "oe_runtime/core/server/jobs.h"
#include "oe_runtime/core/server/limits.h"
#include "oe_runtime/core/wire/tls_mode.h"

namespace oe {

struct ServerOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 0;  // 0: any free one
  ShardInfo shard;
  StorageSpec storage;
  unsigned threads = 0;        // 0: one per core
  std::string checkpoint_dir;  // the server's own, for clients without a file system in common; may be empty
  std::string token;           // every client must know it; may only be empty on loopback
  TlsMode tls = TlsMode::kAuto;
  ServerLimits limits;
  uint64_t scrub_bytes_per_second = 0;  // of rows in pools that are checked in the background; 0: none
};

class Server {
 public:
  // Opens the storage, binds the port and serves. Throws Error when the address cannot be had, StorageError,
  // SpecError, CheckpointError.
  explicit Server(const ServerOptions& options);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  uint16_t port() const;
  const Storage& storage() const;
  bool encrypted() const;
  // Why it takes fewer clients than asked for; empty if it takes as many.
  const std::string& note() const;
  // Becomes readable when a client has asked for the end; the owner of the server then calls Stop().
  int stop_fd() const;
  // What Jobs::Stats says, and the traffic, connections and times.
  nlohmann::json Stats() const;
  // Finishes the requests that are being worked on, then ends. May be called twice.
  void Stop();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oe
