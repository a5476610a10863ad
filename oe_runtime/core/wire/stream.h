// A TCP connection that may be encrypted: what frames are read from and written to.
#pragma once

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/ssl/stream.hpp>
#include <cstdint>
#include <optional>
#include <utility>

#include "oe_runtime/core/wire/tls.h"

namespace oe {

// An AsyncReadStream and AsyncWriteStream of Asio's. At most one read and one write at a time, and no two of
// its handlers at once.
class Stream {
 public:
  using executor_type = asio::ip::tcp::socket::executor_type;

  // One key encrypts this many bytes; then the sender takes the next one. AES-GCM's limit is 2^24.5 records
  // of 16 KiB (RFC 8446 section 5.5).
  static constexpr uint64_t kBytesPerKey = uint64_t{1} << 36;

  explicit Stream(asio::ip::tcp::socket socket, uint64_t bytes_per_key = kBytesPerKey)
      : socket_(std::move(socket)), bytes_per_key_(bytes_per_key) {}
  explicit Stream(asio::io_context* io) : socket_(*io), bytes_per_key_(kBytesPerKey) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  executor_type get_executor() { return socket_.get_executor(); }
  asio::ip::tcp::socket& socket() { return socket_; }
  bool encrypted() const { return tls_.has_value(); }

  // Makes it one that is not connected; nothing may be under way.
  void Reset() {
    tls_.reset();
    socket_ = asio::ip::tcp::socket(socket_.get_executor());
    sent_ = 0;
  }

  // Everything after this is encrypted. handler(error): see ProblemOf.
  template <typename Handler>
  void AsyncHandshake(TlsContext* context, TlsContext::Role role, Handler handler) {
    tls_.emplace(socket_, *context->get());
    const auto type =
        role == TlsContext::Role::kServer ? asio::ssl::stream_base::server : asio::ssl::stream_base::client;
    tls_->async_handshake(type, [this, handler = std::move(handler)](asio::error_code error) mutable {
      // Without the key there is nothing that this side could have agreed to; asked nevertheless.
      if (!error && SSL_session_reused(tls_->native_handle()) != 1) error = asio::error::no_permission;
      handler(error);
    });
  }

  // Before a message of `bytes` is written.
  void Sending(uint64_t bytes) {
    if (!tls_) return;
    sent_ += bytes;
    if (sent_ < bytes_per_key_) return;
    sent_ = 0;
    SSL_key_update(tls_->native_handle(), SSL_KEY_UPDATE_NOT_REQUESTED);
  }

  template <typename Buffers, typename Handler>
  void async_read_some(const Buffers& buffers, Handler&& handler) {
    if (tls_) {
      tls_->async_read_some(buffers, std::forward<Handler>(handler));
    } else {
      socket_.async_read_some(buffers, std::forward<Handler>(handler));
    }
  }

  template <typename Buffers, typename Handler>
  void async_write_some(const Buffers& buffers, Handler&& handler) {
    if (tls_) {
      tls_->async_write_some(buffers, std::forward<Handler>(handler));
    } else {
      socket_.async_write_some(buffers, std::forward<Handler>(handler));
    }
  }

 private:
  asio::ip::tcp::socket socket_;
  std::optional<asio::ssl::stream<asio::ip::tcp::socket&>> tls_;
  const uint64_t bytes_per_key_;
  uint64_t sent_ = 0;  // with the present key, about
};

}  // namespace oe
