// Servers and clients in one process, for tests only.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "oe_runtime/core/client/client.h"
#include "oe_runtime/core/server/server.h"
#include "oe_runtime/core/wire/frame.h"

namespace oe {

struct Cluster {
  // scratch: where each server has a directory of its own for checkpoints; empty for none.
  explicit Cluster(uint32_t count, const std::string& token = "", const std::string& scratch = "",
                   const ServerOptions& base = {}) {
    for (uint32_t i = 0; i < count; ++i) {
      ServerOptions options = base;
      options.shard = {i, count};
      options.threads = 2;
      options.token = token;
      if (!scratch.empty()) options.checkpoint_dir = scratch + "/server-" + std::to_string(i);
      servers.push_back(std::make_unique<Server>(options));
      remote.endpoints.push_back("127.0.0.1:" + std::to_string(servers.back()->port()));
    }
    remote.token = token;
    remote.tls = base.tls;
    remote.timeout = 30;
    remote.wire_checkpoints = !scratch.empty();
  }
  std::vector<std::unique_ptr<Server>> servers;
  RemoteOptions remote;
};

// Waits until the server's statistics at `pointer` are at least `least`; the time that a loaded machine takes
// is no failure.
uint64_t AwaitStat(const Server& server, const std::string& pointer, uint64_t least);

// Waits until the statistics are at most `most`.
uint64_t AwaitLess(const Server& server, const std::string& pointer, uint64_t most);

inline TableSpec Spec(const std::string& name, uint32_t dim, const std::string& optimizer) {
  TableSpec spec;
  spec.name = name;
  spec.dim = dim;
  spec.optimizer.name = optimizer;
  spec.initializer.name = "uniform";
  return spec;
}

// Sends raw bytes, then reads until the server closes.
std::string Talk(uint16_t port, const std::string& bytes);

// Trains a little; all rows that were pulled on the way.
std::vector<float> Train(Client* client, uint64_t seed);

inline std::string Frame(Op op, const std::string& body, uint64_t length) {
  const HeaderBytes header = EncodeHeader({op, 1, length});
  return std::string(header.begin(), header.end()) + body;
}

inline std::string Frame(Op op, const std::string& body) { return Frame(op, body, body.size()); }

}  // namespace oe
