// Encryption of connections. Between workers and servers: TLS 1.3 with a key that both sides derive from the
// token, so that there are no certificates to make or to spread. Each side proves to the other that it knows
// the token, which never crosses the wire; keys of a connection are its own and are forgotten with it
// (psk_dhe_ke, RFC 8446 section 2.2), so that a token that leaks later opens no recorded traffic. With
// clients of other programs, over HTTP: a certificate.
#pragma once

#include <asio/error_code.hpp>
#include <asio/ip/address.hpp>
#include <asio/ssl/context.hpp>
#include <cstdint>
#include <memory>
#include <string>

#include "oe_runtime/core/wire/tls_mode.h"

namespace oe {

// Whether connections to, or from, a peer at this address are encrypted: auto leaves only loopback in clear.
bool Encrypts(TlsMode mode, const asio::ip::address& address);

// An attacker who sees a handshake can try tokens at leisure, so a short one does not do (RFC 9257
// section 4.1).
constexpr size_t kLeastTlsToken = 16;

// The first byte of a client's handshake (a record of type handshake); frames begin with kMagic.
constexpr uint8_t kTlsHandshake = 0x16;

// Both in PEM: a certificate with those of its issuers after it, and its key without a password.
struct TlsCertificate {
  std::string chain;
  std::string key;
};

class TlsContext {
 public:
  enum class Role : uint8_t { kServer, kClient };
  // Throws SpecError for a token of fewer than kLeastTlsToken bytes.
  TlsContext(Role role, const std::string& token);
  // Of a server for TLS 1.2 or later. Throws SpecError, which says what is wrong with which part.
  explicit TlsContext(const TlsCertificate& certificate);
  ~TlsContext();
  TlsContext(const TlsContext&) = delete;
  TlsContext& operator=(const TlsContext&) = delete;

  asio::ssl::context* get();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Why a handshake failed, as far as OpenSSL's error tells.
enum class TlsProblem : uint8_t {
  kToken,  // the other side has another token
  kClear,  // it does not encrypt
  kLimit,  // a server that has too many connections
  kBroken,
  kOther
};
TlsProblem ProblemOf(const asio::error_code& error);

}  // namespace oe
