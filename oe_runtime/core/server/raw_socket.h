// A client that sends bytes of its own making, for tests only.
#pragma once

#include <asio/ip/tcp.hpp>
#include <asio/read.hpp>
#include <string>

#include "oe_runtime/core/wire/frame.h"

namespace oe {

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

}  // namespace oe
