#include "oe_runtime/core/wire/tls.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/ssl.h>

#include <array>
#include <asio/buffer.hpp>
#include <asio/error.hpp>
#include <asio/ssl/error.hpp>
#include <cstring>

#include "oe_runtime/core/wire/errors.h"

namespace oe {
namespace {

// RFC 8446 section 4.2.11: a key belongs to one hash; this suite's is SHA-256.
constexpr char kSuite[] = "TLS_AES_128_GCM_SHA256";
constexpr std::array<unsigned char, 2> kSuiteId = {0x13, 0x01};
// RFC 9325 section 4.2, for TLS 1.2; those of 1.3 are all recommended.
constexpr char kCertificateSuites[] = "ECDHE+AESGCM:ECDHE+CHACHA20";
constexpr char kIdentity[] = "oe_runtime token v1";
using Key = std::array<unsigned char, 32>;

// HKDF (RFC 5869) with SHA-256.
Key KeyOf(const std::string& token) {
  const auto bytes = [](const char* text) { return reinterpret_cast<const unsigned char*>(text); };
  constexpr char kSalt[] = "oe_runtime";
  constexpr char kInfo[] = "tls 1.3 external psk";
  Key key{};
  size_t size = key.size();
  EVP_PKEY_CTX* const kdf = EVP_PKEY_CTX_new_id(EVP_PKEY_HKDF, nullptr);
  const bool ok = kdf != nullptr && EVP_PKEY_derive_init(kdf) > 0 &&
                  EVP_PKEY_CTX_set_hkdf_md(kdf, EVP_sha256()) > 0 &&
                  EVP_PKEY_CTX_set1_hkdf_salt(kdf, bytes(kSalt), static_cast<int>(std::strlen(kSalt))) > 0 &&
                  EVP_PKEY_CTX_set1_hkdf_key(kdf, bytes(token.data()), static_cast<int>(token.size())) > 0 &&
                  EVP_PKEY_CTX_add1_hkdf_info(kdf, bytes(kInfo), static_cast<int>(std::strlen(kInfo))) > 0 &&
                  EVP_PKEY_derive(kdf, key.data(), &size) > 0 && size == key.size();
  EVP_PKEY_CTX_free(kdf);
  if (!ok) throw Error("OpenSSL cannot derive a key with HKDF and SHA-256");
  return key;
}

// Where a context's key is found from a connection. Asio has its own use for SSL_CTX_set_app_data.
int KeyIndex() {
  static const int index = SSL_CTX_get_ex_new_index(0, nullptr, nullptr, nullptr, nullptr);
  return index;
}

// OpenSSL takes a pre-shared key as a session that both sides remember. Null when there is no memory.
SSL_SESSION* SessionOf(SSL* ssl) {
  const auto* key = static_cast<const Key*>(SSL_CTX_get_ex_data(SSL_get_SSL_CTX(ssl), KeyIndex()));
  const SSL_CIPHER* suite = SSL_CIPHER_find(ssl, kSuiteId.data());
  SSL_SESSION* session = SSL_SESSION_new();
  if (session != nullptr && key != nullptr && suite != nullptr &&
      SSL_SESSION_set1_master_key(session, key->data(), key->size()) == 1 &&
      SSL_SESSION_set_cipher(session, suite) == 1 &&
      SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) == 1) {
    return session;
  }
  SSL_SESSION_free(session);
  return nullptr;
}

int UseKey(SSL* ssl, const EVP_MD*, const unsigned char** id, size_t* size, SSL_SESSION** session) {
  *id = reinterpret_cast<const unsigned char*>(kIdentity);
  *size = std::strlen(kIdentity);
  *session = SessionOf(ssl);
  return *session != nullptr ? 1 : 0;
}

int FindKey(SSL* ssl, const unsigned char* id, size_t size, SSL_SESSION** session) {
  *session = nullptr;
  if (size != std::strlen(kIdentity) || std::memcmp(id, kIdentity, size) != 0) return 1;  // goes on without
  *session = SessionOf(ssl);
  return *session != nullptr ? 1 : 0;
}

// Where OpenSSL is a shared library, another one that was loaded before may have taken its place.
void RequireOpenSsl() {
  if (std::strstr(OpenSSL_version(OPENSSL_VERSION), "BoringSSL") == nullptr) return;
  throw Error(
      "this process has BoringSSL in the place of OpenSSL, which encryption needs; import oe_runtime "
      "before tensorflow");
}

}  // namespace

TlsMode ParseTlsMode(const std::string& text) {
  if (text == "auto") return TlsMode::kAuto;
  if (text == "on") return TlsMode::kOn;
  if (text == "off") return TlsMode::kOff;
  throw SpecError("tls is '" + text + "'; it must be auto, on or off");
}

bool Encrypts(TlsMode mode, const asio::ip::address& address) {
  if (mode != TlsMode::kAuto) return mode == TlsMode::kOn;
  if (address.is_v6() && address.to_v6().is_v4_mapped()) {
    return !asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6()).is_loopback();
  }
  return !address.is_loopback();
}

struct TlsContext::Impl {
  explicit Impl(asio::ssl::context::method method) : context(method) {}
  ~Impl() { OPENSSL_cleanse(key.data(), key.size()); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  Key key{};
  asio::ssl::context context;
};

TlsContext::TlsContext(Role role, const std::string& token) {
  if (token.size() < kLeastTlsToken) {
    throw SpecError("encrypted connections need a token of at least " + std::to_string(kLeastTlsToken) +
                    " bytes, and this one has " + std::to_string(token.size()) +
                    "; make one with: openssl rand -hex 32");
  }
  RequireOpenSsl();
  impl_ = std::make_unique<Impl>(role == Role::kServer ? asio::ssl::context::tlsv13_server
                                                       : asio::ssl::context::tlsv13_client);
  impl_->key = KeyOf(token);
  SSL_CTX* const ssl = impl_->context.native_handle();
  bool ok = SSL_CTX_set_ex_data(ssl, KeyIndex(), &impl_->key) == 1 &&
            SSL_CTX_set_ciphersuites(ssl, kSuite) == 1 && SSL_CTX_set_num_tickets(ssl, 0) == 1;
  SSL_CTX_set_session_cache_mode(ssl, SSL_SESS_CACHE_OFF);
  if (role == Role::kServer) {
    SSL_CTX_set_psk_find_session_callback(ssl, FindKey);
  } else {
    SSL_CTX_set_psk_use_session_callback(ssl, UseKey);
    // A server that offers a certificate instead of proving that it knows the token is refused: there is
    // no authority whose word would count.
    SSL_CTX_set_verify(ssl, SSL_VERIFY_PEER, nullptr);
  }
  if (!ok) throw Error("OpenSSL does not offer TLS 1.3 with " + std::string(kSuite));
}

TlsContext::TlsContext(const TlsCertificate& certificate) {
  RequireOpenSsl();
  impl_ = std::make_unique<Impl>(asio::ssl::context::tls_server);
  asio::ssl::context& context = impl_->context;
  SSL_CTX* const ssl = context.native_handle();
  SSL_CTX_set_options(ssl, SSL_OP_NO_COMPRESSION | SSL_OP_NO_RENEGOTIATION | SSL_OP_CIPHER_SERVER_PREFERENCE);
  SSL_CTX_set_session_cache_mode(ssl, SSL_SESS_CACHE_OFF);
  // Of an idle connection no buffers stay; a write that waited may go on elsewhere in memory.
  SSL_CTX_set_mode(
      ssl, SSL_MODE_RELEASE_BUFFERS | SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  if (SSL_CTX_set_min_proto_version(ssl, TLS1_2_VERSION) != 1 ||
      SSL_CTX_set_cipher_list(ssl, kCertificateSuites) != 1)
    throw Error("OpenSSL does not offer TLS 1.2 with " + std::string(kCertificateSuites));
  // A key with a password is refused instead of asked for at the terminal.
  SSL_CTX_set_default_passwd_cb(ssl, [](char*, int, int, void*) { return 0; });
  const auto refuse = [](const std::string& what, const asio::error_code& error) {
    const std::string said = error.message();
    throw SpecError(what + ": " + said.substr(0, said.find(" (")));
  };
  asio::error_code error;
  context.use_certificate_chain(asio::buffer(certificate.chain), error);
  if (error) refuse("the certificate", error);
  context.use_private_key(asio::buffer(certificate.key), asio::ssl::context::pem, error);
  if (error) refuse("the key", error);
}

TlsContext::~TlsContext() = default;

asio::ssl::context* TlsContext::get() { return &impl_->context; }

TlsProblem ProblemOf(const asio::error_code& error) {
  if (error.category() != asio::error::get_ssl_category()) return TlsProblem::kBroken;
  switch (ERR_GET_REASON(static_cast<unsigned long>(error.value()))) {
    case SSL_R_BINDER_DOES_NOT_VERIFY:         // a server's view
    case SSL_R_TLSV1_ALERT_DECRYPT_ERROR:      // a client's
    case SSL_R_SSLV3_ALERT_ILLEGAL_PARAMETER:  // the same from OpenSSL 1.1.1
    case SSL_R_CERTIFICATE_VERIFY_FAILED:
      return TlsProblem::kToken;
    case SSL_R_WRONG_VERSION_NUMBER:
    case SSL_R_TLSV1_ALERT_PROTOCOL_VERSION:
      return TlsProblem::kClear;
    case SSL_R_TLSV1_ALERT_ACCESS_DENIED:
      return TlsProblem::kLimit;
    default:
      return TlsProblem::kOther;
  }
}

}  // namespace oe
