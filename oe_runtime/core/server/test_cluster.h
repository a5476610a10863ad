// Servers and clients in one process, for tests only.
#pragma once

#include <asio/ip/tcp.hpp>
#include <asio/read.hpp>
#include <asio/write.hpp>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
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
inline uint64_t AwaitStat(const Server& server, const std::string& pointer, uint64_t least) {
  uint64_t value = 0;
  for (int i = 0; i < 6000; ++i) {
    value = server.Stats().at(nlohmann::json::json_pointer(pointer)).get<uint64_t>();
    if (value >= least) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return value;
}

// Waits until the statistics are at most `most`.
inline uint64_t AwaitLess(const Server& server, const std::string& pointer, uint64_t most) {
  uint64_t value = 0;
  for (int i = 0; i < 6000; ++i) {
    value = server.Stats().at(nlohmann::json::json_pointer(pointer)).get<uint64_t>();
    if (value <= most) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return value;
}

inline TableSpec Spec(const std::string& name, uint32_t dim, const std::string& optimizer) {
  TableSpec spec;
  spec.name = name;
  spec.dim = dim;
  spec.optimizer.name = optimizer;
  spec.initializer.name = "uniform";
  return spec;
}

// Trains a little; all rows that were pulled on the way.
inline std::vector<float> Train(Client* client, uint64_t seed) {
  const uint32_t wide = client->CreateTable(Spec("wide", 9, "adam"));
  const uint32_t narrow = client->CreateTable(Spec("narrow", 1, "ftrl"));
  std::mt19937_64 random(seed);
  std::vector<float> seen;
  for (int step = 0; step < 6; ++step) {
    std::vector<Key> ids(700);
    for (Key& id : ids) id = random() % 300;
    const auto pulled = client->Pull({{ids.data(), ids.size()}}, {{wide, 0}, {narrow, 0}});
    std::vector<std::vector<float>> gradients;
    std::vector<GradientView> views;
    for (size_t g = 0; g < 2; ++g) {
      const PlannedGroup& group = pulled->plan.groups[g];
      for (const int32_t row : group.inverse) {
        const float* from = pulled->rows[g].as<float>() + static_cast<size_t>(row) * group.dim;
        seen.insert(seen.end(), from, from + group.dim);
      }
      gradients.emplace_back(group.inverse.size() * group.dim);
      for (float& x : gradients.back()) x = static_cast<float>(random() % 1000) / 500.0F - 1.0F;
    }
    for (size_t g = 0; g < 2; ++g) {
      const PlannedGroup& group = pulled->plan.groups[g];
      views.push_back({gradients[g].data(), group.inverse.size(), group.dim});
    }
    client->Push(*pulled, views, {0.05});
  }
  return seen;
}

// Sends raw bytes, then reads until the server closes.
inline std::string Talk(uint16_t port, const std::string& bytes) {
  asio::io_context io;
  asio::ip::tcp::socket socket(io);
  socket.connect({asio::ip::address_v4::loopback(), port});
  asio::write(socket, asio::buffer(bytes));
  asio::error_code ignored;
  socket.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  std::string reply;
  asio::read(socket, asio::dynamic_buffer(reply), ignored);
  return reply;
}

// The body of the next frame that is a reply: a busy server may say so before.
inline std::string ReadReply(asio::ip::tcp::socket* socket) {
  for (;;) {
    HeaderBytes bytes{};
    asio::read(*socket, asio::buffer(bytes));
    const FrameHeader header = DecodeHeader(bytes, kMaxBody);
    std::string body(header.length, '\0');
    asio::read(*socket, asio::buffer(body));
    if (header.op != Op::kBusy) return body;
  }
}

inline std::string Frame(Op op, const std::string& body, uint64_t length) {
  const HeaderBytes header = EncodeHeader({op, 1, length});
  return std::string(header.begin(), header.end()) + body;
}

inline std::string Frame(Op op, const std::string& body) { return Frame(op, body, body.size()); }

}  // namespace oe
