#include "oe_runtime/core/server/connection.h"

#include <sys/socket.h>

#include <asio/buffer.hpp>
#include <asio/post.hpp>
#include <asio/read.hpp>
#include <asio/write.hpp>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "oe_runtime/core/wire/dead_peer.h"

namespace oe {
namespace {

using std::chrono::steady_clock;

// A worker that was suspended (Ctrl-Z) has as long to go on before it is taken for dead.
constexpr auto kClientSilence = std::chrono::seconds(90);
constexpr auto kFarewellTime = std::chrono::seconds(2);
constexpr size_t kChunk = size_t{1} << 20;       // Asio moves at most 64 KiB a call unless told otherwise
constexpr uint64_t kSmall = uint64_t{64} << 10;  // bytes that are not worth to be accounted for

// RFC 8446 section 6.2.
constexpr uint8_t kAlertAccessDenied = 49;
constexpr uint8_t kAlertProtocolVersion = 70;

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
    : stream_(std::move(socket)),
      context_(context),
      session_{nullptr, context->scratch, context->accepted.fetch_add(1) + 1},
      deadline_(stream_.get_executor()),
      watch_(stream_.get_executor()) {
  session_.seen = session_.client;
  session_.jobs = context->jobs;
  context_->open.fetch_add(1);
}

Connection::~Connection() {
  if (greeted_) session_.job->clients.fetch_sub(1);
  if (session_.worker) session_.job->workers.End(session_.client);
  if (may_have_files_) session_.scratch->Drop(session_.client);
  if (shared_ != nullptr) context_->sharing.fetch_sub(1);
  context_->open.fetch_sub(1);
}

void Connection::Start() {
  asio::error_code ignored;
  stream_.socket().set_option(asio::ip::tcp::no_delay(true), ignored);
  NoticeDeadPeer(stream_.socket().native_handle(), kClientSilence);
  SetDeadline(context_->limits.hello, true);
  if (context_->tls != nullptr) {
    LookAtFirstByte();
  } else {
    ReadHeader();
  }
}

void Connection::StartFull() {
  SetDeadline(kFarewellTime, false);
  if (context_->tls != nullptr) return RefuseTls(Refusal::kConnections, kAlertAccessDenied);
  Refuse(Refusal::kConnections, ErrorCode::kInternal,
         "the server has " + std::to_string(context_->limits.connections) +
             " connections already, which is its limit; end clients that are not needed, or start it with "
             "more --max-connections");
}

void Connection::SetDeadline(std::chrono::milliseconds time, bool counts) {
  deadline_.expires_after(time);
  deadline_.async_wait([weak = weak_from_this(), counts](const asio::error_code& error) {
    const auto self = weak.lock();
    if (error || self == nullptr || (counts && self->greeted_)) return;
    if (counts) self->context_->refusals.Count(Refusal::kSlow);
    self->Close();
  });
}

void Connection::Watch() {
  watch_.expires_after(context_->limits.silence);
  watch_.async_wait([weak = weak_from_this()](const asio::error_code& error) {
    const auto self = weak.lock();
    if (!error && self != nullptr) self->LookAtProgress();
  });
}

void Connection::LookAtProgress() {
  if (phases_ == seen_phases_ && phase_ != Phase::kServer) {
    if (phase_ == Phase::kHeader && moved_ == 0) {
      TakeBuffers();
      body_ = Buffer();
      reply_ = Buffer();
      Buffer::FreeSpare();
    } else if (moved_ - seen_moved_ < context_->limits.least_bytes) {
      context_->refusals.Count(Refusal::kSlow);
      return Close();
    }
  }
  seen_phases_ = phases_;
  seen_moved_ = moved_;
  Watch();
}

void Connection::Enter(Phase phase) {
  phase_ = phase;
  ++phases_;
  moved_ = seen_moved_ = 0;
}

// How much Asio shall move next; what has moved is noted.
auto Connection::Moving() {
  return [this](const asio::error_code& error, size_t moved) {
    moved_ = moved;
    return error ? size_t{0} : kChunk;
  };
}

void Connection::WhenFree(Budget* budget, uint64_t amount, void (Connection::*next)(Budget::Share)) {
  auto share = budget->Ask(amount, [self = shared_from_this(), next](Budget::Share later) {
    asio::post(self->stream_.get_executor(),
               [self, next, later = std::move(later)]() mutable { (self.get()->*next)(std::move(later)); });
  });
  if (share) (this->*next)(std::move(*share));
}

// A client that does not encrypt, on a server that does, shall read why it is refused.
void Connection::LookAtFirstByte() {
  stream_.socket().async_wait(
      asio::ip::tcp::socket::wait_read, [self = shared_from_this()](const asio::error_code& error) {
        if (error) return;
        uint8_t first = 0;
        const ssize_t got =
            ::recv(self->stream_.socket().native_handle(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return self->LookAtFirstByte();
        if (got <= 0) return;
        if (first == kTlsHandshake) return self->Handshake();
        self->clear_ = true;
        self->ReadHeader();
      });
}

void Connection::Handshake() {
  stream_.AsyncHandshake(
      context_->tls, TlsContext::Role::kServer, [self = shared_from_this()](const asio::error_code& error) {
        if (!error) return self->ReadHeader();
        const TlsProblem problem = ProblemOf(error);
        if (problem == TlsProblem::kBroken) return self->Cut();
        self->context_->refusals.Count(problem == TlsProblem::kToken ? Refusal::kToken : Refusal::kHandshake);
        self->Linger();  // the alert that says so is on its way
      });
}

void Connection::KeepBuffers() {
  kept_ = body_.capacity() + reply_.capacity();
  if (context_->kept.fetch_add(kept_) + kept_ <= context_->limits.bytes) return;
  TakeBuffers();
  body_ = Buffer();
  reply_ = Buffer();
}

void Connection::TakeBuffers() { context_->kept.fetch_sub(std::exchange(kept_, 0)); }

void Connection::ReadHeader() {
  Enter(Phase::kHeader);
  KeepBuffers();
  asio::async_read(
      stream_, asio::buffer(header_bytes_), Moving(),
      [self = shared_from_this()](const asio::error_code& error, size_t got) {
        self->TakeBuffers();
        if (error && got > 0) return self->Cut();
        if (error) return self->Close();  // the client has left
        self->header_ = {};               // what a refusal of this header replies to
        const bool known = self->greeted_;
        try {
          self->header_ = DecodeHeader(self->header_bytes_, known ? kMaxBody : kMaxHelloBody);
        } catch (const NotOurs&) {
          if (self->context_->tls == nullptr && self->header_bytes_[0] == kTlsHandshake) {
            return self->RefuseTls(Refusal::kEncrypted, kAlertProtocolVersion);
          }
          self->context_->refusals.Count(Refusal::kForeign);
          return self->Close();
        } catch (const OtherVersion& problem) {
          return self->Refuse(Refusal::kVersion, ErrorCode::kProtocol, problem.what());
        } catch (const ProtocolError& problem) {
          return self->Refuse(Refusal::kMalformed, ErrorCode::kProtocol, problem.what());
        }
        if (self->clear_) {
          return self->Refuse(Refusal::kClear, ErrorCode::kProtocol,
                              "this server takes encrypted connections only; connect with tls on "
                              "(--tls on), or start it with --tls off");
        }
        self->Enter(Phase::kServer);
        if (self->header_.length <= kSmall) return self->ReadBody({});
        self->WhenFree(&self->context_->request_bytes, self->header_.length, &Connection::ReadBody);
      });
}

void Connection::ReadBody(Budget::Share share) {
  request_share_ = std::move(share);
  try {
    body_.Resize(static_cast<size_t>(header_.length));
  } catch (const std::bad_alloc&) {
    return Refuse(Refusal::kMemory, ErrorCode::kInternal, "the server has no memory for this request");
  }
  Enter(Phase::kBody);
  asio::async_read(stream_, asio::buffer(body_.data(), body_.size()), Moving(),
                   [self = shared_from_this()](const asio::error_code& error, size_t) {
                     if (error) return self->Cut();
                     self->read_ = steady_clock::now();
                     self->context_->requests.fetch_add(1, std::memory_order_relaxed);
                     self->context_->bytes_in.fetch_add(kHeaderBytes + self->body_.size(),
                                                        std::memory_order_relaxed);
                     self->Enter(Phase::kServer);
                     self->Answer();
                   });
}

void Connection::Answer() {
  try {
    if (!greeted_) return Hello();
    CheckMay(session_, header_.op);
    if (header_.op == Op::kShutdown) {
      SetReply("{}");
      return Reply(Op::kShutdown, true);
    }
    if (header_.op == Op::kStats) {
      SetReply(context_->stats());
      return Reply(Op::kStats, false);
    }
    if (header_.op == Op::kShare) {
      SetReply(Share(ParseShareRequest({body_.data(), body_.size()})) ? "true" : "false");
      return Reply(Op::kShare, false);
    }
    const bool ready =
        Ready(session_, header_.op, {body_.data(), body_.size()},
              [self = shared_from_this()](const std::exception_ptr& error) {
                asio::post(self->stream_.get_executor(), [self, error] { self->Resume(error); });
              });
    if (ready) return Admit();
  } catch (const std::exception&) {
    return AnswerFailure();
  }
  Park();
}

void Connection::Park() {
  parked_ = true;
  request_share_.Release();  // or what is waited for might not be read
  WatchForEnd();
  deadline_.expires_after(std::chrono::duration_cast<steady_clock::duration>(worker_wait_));
  deadline_.async_wait([weak = weak_from_this()](const asio::error_code& error) {
    const auto self = weak.lock();
    if (!error && self != nullptr && self->parked_) self->session_.job->workers.GiveUp(self->session_.client);
  });
}

void Connection::Resume(const std::exception_ptr& error) {
  parked_ = false;
  deadline_.cancel();
  asio::error_code ignored;
  stream_.socket().cancel(ignored);
  read_ = steady_clock::now();
  if (error == nullptr) return Admit();
  try {
    std::rethrow_exception(error);
  } catch (const std::exception&) {
    AnswerFailure();
  }
}

// A worker that ends while its request waits is lost at once.
void Connection::WatchForEnd() {
  stream_.socket().async_wait(
      asio::ip::tcp::socket::wait_read, [weak = weak_from_this()](const asio::error_code& error) {
        const auto self = weak.lock();
        if (error || self == nullptr || !self->parked_) return;
        uint8_t first = 0;
        const ssize_t got =
            ::recv(self->stream_.socket().native_handle(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return self->WatchForEnd();
        if (got <= 0) self->session_.job->workers.End(self->session_.client);
      });
}

void Connection::Admit() {
  try {
    const uint64_t bytes = ReplyBytes(session_, header_.op, {body_.data(), body_.size()});
    context_->queued.fetch_add(1, std::memory_order_relaxed);
    if (bytes <= kSmall) return AwaitSlot({});
    WhenFree(&context_->reply_bytes, bytes, &Connection::AwaitSlot);
  } catch (const std::exception&) {
    AnswerFailure();
  }
}

void Connection::AwaitSlot(Budget::Share share) {
  reply_share_ = std::move(share);
  WhenFree(&context_->slots, 1, &Connection::ServeOne);
}

void Connection::ServeOne(Budget::Share slot) {
  const auto start = steady_clock::now();
  context_->queued.fetch_sub(1, std::memory_order_relaxed);
  context_->queue_wait.Add(start - read_);
  try {
    if (header_.op == Op::kSave || header_.op == Op::kReceive) may_have_files_ = session_.scratch != nullptr;
    Serve(&session_, header_.op, &body_, &reply_);
  } catch (const std::exception&) {
    slot.Release();
    return AnswerFailure();
  }
  const auto time = steady_clock::now() - start;
  slot.Release();
  if (header_.op == Op::kPull) context_->pull_time.Add(time);
  if (header_.op == Op::kPush) context_->push_time.Add(time);
  if (header_.op == Op::kSave) {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    context_->saved.store(std::chrono::duration_cast<std::chrono::seconds>(now).count());
  }
  Reply(header_.op, false);
}

// Replies what the exception says that is being handled.
void Connection::AnswerFailure() {
  try {
    throw;
  } catch (const ProtocolError& problem) {
    Refuse(Refusal::kMalformed, ErrorCode::kProtocol, problem.what());
  } catch (const std::bad_alloc&) {
    SetReply(EncodeError({ErrorCode::kInternal, "the server is out of memory"}));
    Reply(Op::kError, false);
  } catch (const std::exception& problem) {
    SetReply(EncodeError({CodeOf(problem), problem.what()}));
    Reply(Op::kError, false);
  }
}

void Connection::Hello() {
  if (header_.op != Op::kHello) throw ProtocolError("the first request must be a hello");
  // An encrypted connection has shown already that the client knows the token.
  const oe::Hello hello = ParseHello({body_.data(), body_.size()});
  if (!stream_.encrypted() && !SameToken(hello.token, context_->token)) {
    return Refuse(Refusal::kToken, ErrorCode::kAuth,
                  "the token is not this server's; both sides must read the same token file");
  }
  session_.job = context_->jobs->Get(hello.job);
  session_.reads_only = hello.worker == kReader;
  if (!hello.worker.empty() && !session_.reads_only) {
    const WorkerSpec spec = WorkerSpecFromJsonText(hello.worker);
    session_.job->workers.Join(session_.client, spec);
    session_.worker = true;
    worker_wait_ = std::chrono::duration<double>(spec.wait);
  }
  greeted_ = true;
  session_.job->clients.fetch_add(1);
  deadline_.cancel();
  Watch();
  nlohmann::json reply = context_->hello;
  if (context_->shares) nonce_ = NewNonce();
  if (nonce_) reply["nonce"] = NonceText(*nonce_);
  SetReply(reply.dump());
  Reply(Op::kHello, false);
}

bool Connection::Share(const ShareRequest& request) {
  const uint64_t before = session_.shared_size;
  if (!nonce_ || request.size < before) return false;
  auto more = context_->shared_bytes.Try(request.size - before);
  if (!more) return false;
  std::unique_ptr<SharedMapping> mapping = SharedMapping::Open(request, *nonce_);
  if (mapping == nullptr) return false;
  if (shared_ == nullptr) context_->sharing.fetch_add(1);
  shared_ = std::move(mapping);
  shared_shares_.push_back(std::move(*more));
  session_.shared = shared_->data();
  session_.shared_size = shared_->size();
  return true;
}

void Connection::Refuse(Refusal why, ErrorCode code, const std::string& message) {
  context_->refusals.Count(why);
  SetReply(EncodeError({code, message}));
  Reply(Op::kError, true);
}

// In clear, as there are no keys yet.
void Connection::RefuseTls(Refusal why, uint8_t alert) {
  context_->refusals.Count(why);
  std::memcpy(discarded_.data(), std::array<uint8_t, 7>{21, 3, 3, 0, 2, 2, alert}.data(), 7);
  asio::async_write(stream_.socket(), asio::buffer(discarded_.data(), 7),
                    [self = shared_from_this()](const asio::error_code& error, size_t) {
                      if (!error) self->Linger();
                    });
}

void Connection::SetReply(const std::string& text) {
  reply_.Resize(text.size());
  if (!text.empty()) std::memcpy(reply_.data(), text.data(), text.size());
}

void Connection::Reply(Op op, bool last) {
  request_share_.Release();
  Enter(Phase::kReply);
  reply_header_ = EncodeHeader({op, header_.request, reply_.size()});
  context_->bytes_out.fetch_add(kHeaderBytes + reply_.size(), std::memory_order_relaxed);
  const std::array<asio::const_buffer, 2> message = {asio::buffer(reply_header_),
                                                     asio::buffer(reply_.data(), reply_.size())};
  stream_.Sending(kHeaderBytes + reply_.size());
  asio::async_write(stream_, message, Moving(),
                    [self = shared_from_this(), op, last](const asio::error_code& error, size_t) {
                      self->reply_share_.Release();
                      if (op == Op::kShutdown) self->context_->on_shutdown();
                      if (error) return;
                      if (last) {
                        self->Linger();
                      } else {
                        self->ReadHeader();
                      }
                      // The worker computes now. Its next request may be read meanwhile.
                      if (op == Op::kPull) self->session_.job->store.Upkeep();
                    });
}

// The peer has gone in the middle of a frame or handshake.
void Connection::Cut() {
  if (stream_.socket().is_open()) context_->refusals.Count(Refusal::kCut);  // otherwise it was closed here
  Close();
}

void Connection::Close() {
  asio::error_code ignored;
  stream_.socket().close(ignored);
}

// Closing while unread bytes wait would reset the connection, and the client might never see the last reply.
void Connection::Linger() {
  watch_.cancel();
  asio::error_code ignored;
  stream_.socket().shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  SetDeadline(kFarewellTime, false);
  Discard();
}

void Connection::Discard() {
  stream_.socket().async_read_some(asio::buffer(discarded_),
                                   [self = shared_from_this()](const asio::error_code& error, size_t) {
                                     if (!error) self->Discard();
                                   });
}

}  // namespace oe
