#include "oe_runtime/core/front/tls_socket.h"

#include <openssl/err.h>
#include <openssl/ssl.h>

#include <asio/ssl/context.hpp>
#include <new>
#include <utility>

namespace oe {
namespace {

TlsSocket::Step StepOf(SSL* ssl, int result) {
  if (result > 0) return TlsSocket::Step::kDone;
  switch (SSL_get_error(ssl, result)) {
    case SSL_ERROR_WANT_READ:
      return TlsSocket::Step::kReadable;
    case SSL_ERROR_WANT_WRITE:
      return TlsSocket::Step::kWritable;
    default:
      return TlsSocket::Step::kEnd;
  }
}

}  // namespace

struct TlsSocket::Impl {
  std::shared_ptr<TlsContext> context;
  SSL* ssl = nullptr;
};

TlsSocket::TlsSocket(std::shared_ptr<TlsContext> context, int socket) : impl_(std::make_unique<Impl>()) {
  impl_->context = std::move(context);
  impl_->ssl = SSL_new(impl_->context->get()->native_handle());
  if (impl_->ssl == nullptr || SSL_set_fd(impl_->ssl, socket) != 1) {
    SSL_free(impl_->ssl);
    throw std::bad_alloc();
  }
}

TlsSocket::~TlsSocket() { SSL_free(impl_->ssl); }

TlsSocket::Step TlsSocket::Handshake() {
  ERR_clear_error();
  return StepOf(impl_->ssl, SSL_accept(impl_->ssl));
}

TlsSocket::Step TlsSocket::Read(char* to, size_t size, size_t* read) {
  *read = 0;
  // A whole record each time.
  while (*read == 0 || size - *read >= SSL3_RT_MAX_PLAIN_LENGTH) {
    size_t more = 0;
    ERR_clear_error();
    const Step step = StepOf(impl_->ssl, SSL_read_ex(impl_->ssl, to + *read, size - *read, &more));
    if (step != Step::kDone) return *read > 0 ? Step::kDone : step;
    *read += more;
  }
  return Step::kDone;
}

TlsSocket::Step TlsSocket::Write(std::string_view bytes, size_t* written) {
  *written = 0;
  ERR_clear_error();
  return StepOf(impl_->ssl, SSL_write_ex(impl_->ssl, bytes.data(), bytes.size(), written));
}

void TlsSocket::SayEnd() {
  ERR_clear_error();
  (void)SSL_shutdown(impl_->ssl);
}

}  // namespace oe
