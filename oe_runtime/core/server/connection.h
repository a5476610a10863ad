// One client's connection to a server.
#pragma once

#include <array>
#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/steady_timer.hpp>
#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "oe_runtime/core/server/service.h"

namespace oe {

// What the connections of one server share.
struct ConnectionContext {
  Store* store = nullptr;
  Scratch* scratch = nullptr;  // may be nullptr
  std::string token;
  std::string hello;                   // the reply to a good hello
  std::function<std::string()> stats;  // the reply to kStats
  std::function<void()> on_shutdown;   // a client asked the server to end, and was answered
  std::atomic<uint64_t> open{0};
  std::atomic<uint64_t> accepted{0};
  std::atomic<uint64_t> refused_frames{0};
  std::atomic<uint64_t> refused_tokens{0};
  std::atomic<uint64_t> requests{0};   // that were read whole
  std::atomic<uint64_t> bytes_in{0};   // of their frames
  std::atomic<uint64_t> bytes_out{0};  // of the replies' frames
};

// Lives as long as one of its operations is under way. One request at a time; the handlers of one connection
// never run beside each other.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(asio::ip::tcp::socket socket, ConnectionContext* context);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void Start();

 private:
  void ReadHeader();
  void ReadBody();
  void Answer();
  void Hello();
  void SetReply(const std::string& text);
  void Reply(Op op, bool last);
  void Refuse(ErrorCode code, const std::string& message);
  void Linger();
  void Discard();

  asio::ip::tcp::socket socket_;
  ConnectionContext* const context_;
  const Session session_;
  bool may_have_files_ = false;  // in the scratch directory
  asio::steady_timer deadline_;  // for the hello, and for the farewell
  bool greeted_ = false;
  HeaderBytes header_bytes_{};
  FrameHeader header_;
  Buffer body_;
  HeaderBytes reply_header_{};
  Buffer reply_;
  std::array<uint8_t, 4096> discarded_{};
};

}  // namespace oe
