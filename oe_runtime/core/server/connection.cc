#include "oe_runtime/core/server/connection.h"

#include <asio/buffer.hpp>
#include <asio/read.hpp>
#include <asio/write.hpp>
#include <chrono>
#include <cstring>
#include <new>

#include "oe_runtime/core/wire/dead_peer.h"

namespace oe {
namespace {

constexpr auto kHelloTime = std::chrono::seconds(10);
// A worker that was suspended (Ctrl-Z) has as long to go on before it is taken for dead.
constexpr auto kClientSilence = std::chrono::seconds(90);
constexpr auto kFarewellTime = std::chrono::seconds(2);
constexpr size_t kChunk = size_t{1} << 20;

// Asio moves at most 64 KiB a call unless told otherwise.
size_t LargeChunks(const asio::error_code& error, size_t) { return error ? 0 : kChunk; }

// Takes as long for a wrong token as for the right one.
bool SameToken(const std::string& given, const std::string& wanted) {
  volatile unsigned char different = given.size() == wanted.size() ? 0 : 1;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const char c = given.empty() ? '\0' : given[i % given.size()];
    different = static_cast<unsigned char>(different | static_cast<unsigned char>(c ^ wanted[i]));
  }
  return different == 0;
}

}  // namespace

Connection::Connection(asio::ip::tcp::socket socket, ConnectionContext* context)
    : socket_(std::move(socket)),
      context_(context),
      session_{context->store, context->scratch, context->accepted.fetch_add(1) + 1},
      deadline_(socket_.get_executor()) {
  context_->open.fetch_add(1);
}

Connection::~Connection() {
  if (may_have_files_) session_.scratch->Drop(session_.client);
  context_->open.fetch_sub(1);
}

void Connection::Start() {
  asio::error_code ignored;
  socket_.set_option(asio::ip::tcp::no_delay(true), ignored);
  NoticeDeadPeer(socket_.native_handle(), kClientSilence);
  deadline_.expires_after(kHelloTime);
  deadline_.async_wait([self = shared_from_this()](const asio::error_code& error) {
    if (error) return;
    asio::error_code unused;
    self->context_->refused_frames.fetch_add(1);
    self->socket_.close(unused);
  });
  ReadHeader();
}

void Connection::ReadHeader() {
  asio::async_read(socket_, asio::buffer(header_bytes_),
                   [self = shared_from_this()](const asio::error_code& error, size_t) {
                     if (error) {
                       self->deadline_.cancel();
                       return;  // the client has left
                     }
                     self->header_ = {};  // what a refusal of this header replies to
                     try {
                       self->header_ =
                           DecodeHeader(self->header_bytes_, self->greeted_ ? kMaxBody : kMaxHelloBody);
                       self->ReadBody();
                     } catch (const NotOurs&) {
                       self->context_->refused_frames.fetch_add(1);
                       self->deadline_.cancel();
                     } catch (const ProtocolError& problem) {
                       self->Refuse(ErrorCode::kProtocol, problem.what());
                     } catch (const std::bad_alloc&) {
                       self->Refuse(ErrorCode::kInternal, "the server has no memory for this request");
                     }
                   });
}

void Connection::ReadBody() {
  body_.Resize(static_cast<size_t>(header_.length));
  asio::async_read(socket_, asio::buffer(body_.data(), body_.size()), LargeChunks,
                   [self = shared_from_this()](const asio::error_code& error, size_t) {
                     if (error) {
                       self->deadline_.cancel();
                       return;
                     }
                     self->context_->requests.fetch_add(1, std::memory_order_relaxed);
                     self->context_->bytes_in.fetch_add(kHeaderBytes + self->body_.size(),
                                                        std::memory_order_relaxed);
                     self->Answer();
                   });
}

void Connection::Answer() {
  try {
    if (!greeted_) return Hello();
    if (header_.op == Op::kShutdown) {
      SetReply("{}");
      return Reply(Op::kShutdown, true);
    }
    if (header_.op == Op::kStats) {
      SetReply(context_->stats());
      return Reply(Op::kStats, false);
    }
    if (header_.op == Op::kSave || header_.op == Op::kReceive) may_have_files_ = session_.scratch != nullptr;
    Serve(session_, header_.op, {body_.data(), body_.size()}, &reply_);
    Reply(header_.op, false);
  } catch (const ProtocolError& problem) {
    Refuse(ErrorCode::kProtocol, problem.what());
  } catch (const std::exception& problem) {
    const ErrorCode code = CodeOf(problem);
    const std::string what = dynamic_cast<const std::bad_alloc*>(&problem) != nullptr
                                 ? "the server is out of memory"
                                 : problem.what();
    SetReply(EncodeError({code, what}));
    Reply(Op::kError, false);
  }
}

void Connection::Hello() {
  if (header_.op != Op::kHello) throw ProtocolError("the first request must be a hello");
  if (!SameToken(ParseHello({body_.data(), body_.size()}).token, context_->token)) {
    context_->refused_tokens.fetch_add(1);
    return Refuse(ErrorCode::kAuth,
                  "the token is not this server's; both sides must read the same token file");
  }
  greeted_ = true;
  deadline_.cancel();
  SetReply(context_->hello);
  Reply(Op::kHello, false);
}

void Connection::Refuse(ErrorCode code, const std::string& message) {
  if (code != ErrorCode::kAuth) context_->refused_frames.fetch_add(1);
  SetReply(EncodeError({code, message}));
  Reply(Op::kError, true);
}

void Connection::SetReply(const std::string& text) {
  reply_.Resize(text.size());
  if (!text.empty()) std::memcpy(reply_.data(), text.data(), text.size());
}

void Connection::Reply(Op op, bool last) {
  reply_header_ = EncodeHeader({op, header_.request, reply_.size()});
  context_->bytes_out.fetch_add(kHeaderBytes + reply_.size(), std::memory_order_relaxed);
  const std::array<asio::const_buffer, 2> message = {asio::buffer(reply_header_),
                                                     asio::buffer(reply_.data(), reply_.size())};
  asio::async_write(socket_, message, LargeChunks,
                    [self = shared_from_this(), op, last](const asio::error_code& error, size_t) {
                      if (op == Op::kShutdown) self->context_->on_shutdown();
                      if (error) return;
                      if (last) {
                        self->Linger();
                      } else {
                        self->ReadHeader();
                      }
                    });
}

// Closing while unread bytes wait would reset the connection, and the client might never see the last reply.
void Connection::Linger() {
  asio::error_code ignored;
  socket_.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  deadline_.expires_after(kFarewellTime);
  deadline_.async_wait([self = shared_from_this()](const asio::error_code& error) {
    asio::error_code unused;
    if (!error) self->socket_.close(unused);
  });
  Discard();
}

void Connection::Discard() {
  socket_.async_read_some(asio::buffer(discarded_),
                          [self = shared_from_this()](const asio::error_code& error, size_t) {
                            if (error) {
                              self->deadline_.cancel();
                            } else {
                              self->Discard();
                            }
                          });
}

}  // namespace oe
