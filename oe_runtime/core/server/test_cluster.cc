#include "oe_runtime/core/server/test_cluster.h"

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/read.hpp>
#include <asio/write.hpp>
#include <chrono>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

namespace oe {

uint64_t AwaitStat(const Server& server, const std::string& pointer, uint64_t least) {
  uint64_t value = 0;
  for (int i = 0; i < 6000; ++i) {
    value = server.Stats().at(nlohmann::json::json_pointer(pointer)).get<uint64_t>();
    if (value >= least) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return value;
}

uint64_t AwaitLess(const Server& server, const std::string& pointer, uint64_t most) {
  uint64_t value = 0;
  for (int i = 0; i < 6000; ++i) {
    value = server.Stats().at(nlohmann::json::json_pointer(pointer)).get<uint64_t>();
    if (value <= most) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return value;
}

std::vector<float> Train(Client* client, uint64_t seed) {
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

std::string Talk(uint16_t port, const std::string& bytes) {
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

}  // namespace oe
