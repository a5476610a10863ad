// TLS on a socket that does not block, with a certificate. Nothing of it stays in memory between requests but
// its keys, unlike that of Asio's streams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "oe_runtime/core/wire/tls.h"

namespace oe {

class TlsSocket {
 public:
  // After what the same call is to be made again; or that the connection has ended.
  enum class Step : uint8_t { kDone, kReadable, kWritable, kEnd };

  // The process must ignore SIGPIPE, as Python does.
  TlsSocket(std::shared_ptr<TlsContext> context, int socket);
  ~TlsSocket();
  TlsSocket(const TlsSocket&) = delete;
  TlsSocket& operator=(const TlsSocket&) = delete;

  Step Handshake();
  // As many bytes as there are, but no more than fit; leaves none behind that the socket does not show.
  Step Read(char* to, size_t size, size_t* read);
  Step Write(std::string_view bytes, size_t* written);
  // Tells the other side, as far as that is possible now.
  void SayEnd();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oe
