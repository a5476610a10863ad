#include "oe_runtime/core/server/connection.h"

#include <sys/socket.h>

#include <algorithm>
#include <asio/buffer.hpp>
#include <asio/post.hpp>
#include <asio/read.hpp>
#include <asio/write.hpp>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "oe_runtime/core/common/same_secret.h"
#include "oe_runtime/core/wire/dead_peer.h"

namespace oe {
namespace {

using std::chrono::steady_clock;

// A worker that was suspended (Ctrl-Z) has as long to go on before it is taken for dead.
constexpr auto kClientSilence = std::chrono::seconds(90);
constexpr auto kFarewellTime = std::chrono::seconds(2);
constexpr size_t kChunk = size_t{1} << 20;       // Asio moves at most 64 KiB a call unless told otherwise
constexpr uint64_t kSmall = uint64_t{64} << 10;  // bytes that are not worth to be accounted for
constexpr uint64_t kFirst = uint64_t{1} << 20;   // that a body is given memory for before any of it is there
constexpr unsigned kLooks = 8;                   // at the progress of a peer, in the time it may be silent

// RFC 8446 section 6.2.
constexpr uint8_t kAlertAccessDenied = 49;
constexpr uint8_t kAlertProtocolVersion = 70;

// Whether the connection broke on its way, as after a reset: the client may be there. An end of the stream is
// the client's own, also if it was killed; its kernel then refuses what is written. Who was silent until the
// connection timed out has been waited for.
bool IsBreak(const asio::error_code& error) {
  return error == asio::error::connection_reset || error == asio::error::host_unreachable ||
         error == asio::error::network_unreachable || error == asio::error::network_down ||
         error == asio::error::network_reset || error == asio::error::connection_aborted;
}

// A fatal TLS alert, in clear.
std::array<uint8_t, 7> FatalAlert(uint8_t alert) { return {21, 3, 3, 0, 2, 2, alert}; }

}  // namespace

Connection::Connection(asio::ip::tcp::socket socket, ConnectionContext* context)
    : stream_(std::move(socket)),
      context_(context),
      session_(std::make_shared<OpenSession>()),
      deadline_(stream_.get_executor()),
      watch_(stream_.get_executor()),
      pass_([this] {
        return [self = shared_from_this()] {
          asio::post(self->stream_.get_executor(), [self] { self->PassGranted(); });
        };
      }),
      busy_timer_(stream_.get_executor()) {
  session_->client = context->accepted.fetch_add(1) + 1;
  session_->scratch = context->scratch;
  session_->jobs = context->jobs;
  session_->pass = &pass_;
  session_->sharing = &context->sharing;
  context_->open.fetch_add(1);
  context_->arrivals.fetch_add(1);
}

Connection::~Connection() {
  LetGo();
  context_->kept.fetch_sub(kept_);
  if (client_) context_->clients.fetch_sub(1);
  if (!greeted_) context_->arrivals.fetch_sub(1);
  context_->open.fetch_sub(1);
}

void Connection::Start() {
  asio::error_code ignored;
  stream_.socket().set_option(asio::ip::tcp::no_delay(true), ignored);
  ProbeIdlePeer(stream_.socket().native_handle(), kClientSilence);
  EndSilentPeer(stream_.socket().native_handle(), kClientSilence);
  SetDeadline(context_->limits.hello, true);
  if (context_->tls != nullptr) {
    LookAtFirstByte();
  } else {
    ReadHeader();
  }
}

// The session stays for a while where the connection broke.
void Connection::LetGo() {
  if (session_->name.empty()) return session_.reset();
  const std::string name = session_->name;
  const auto time = context_->sessions.Release(std::move(session_), broken_);
  if (!time) return;
  try {
    const auto timer = std::make_shared<asio::steady_timer>(stream_.get_executor());
    timer->expires_after(std::chrono::duration_cast<steady_clock::duration>(*time));
    timer->async_wait([timer, name, sessions = &context_->sessions](const asio::error_code& error) {
      if (!error) sessions->Expire(name);
    });
  } catch (const std::bad_alloc&) {
    context_->sessions.Expire(name, true);
  }
}

// The client has connected again.
Sessions::Fence Connection::NewFence() {
  return [weak = weak_from_this()] {
    const auto self = weak.lock();
    if (self == nullptr) return;
    asio::post(self->stream_.get_executor(), [self] {
      self->fenced_ = true;
      self->Withdraw();
      self->Close();
    });
  };
}

// A request that waits for other workers is not served: its client sends it again.
void Connection::Withdraw() {
  if (parked_ && session_->job->workers.Withdraw(session_->client)) withdrawn_ = true;
}

// The connection of a worker has ended while its request waits.
void Connection::EndParked() {
  if (!parked_ || fenced_) return;
  if (broken_ && !session_->name.empty()) return Withdraw();
  session_->job->workers.End(session_->client);
}

void Connection::NoteBreak(const asio::error_code& error) { broken_ = broken_ || IsBreak(error); }

void Connection::PushOut() {
  asio::post(stream_.get_executor(), [self = shared_from_this()] {
    if (self->greeted_) return;
    if (self->refused_) return self->Close();  // which was told why already
    self->CountRefusal(Refusal::kConnections);
    // As much as fits into the socket at once, and no waiting for the peer: its place is needed now.
    const auto send = [&self](const void* data, size_t size) {
      (void)!::send(self->stream_.socket().native_handle(), data, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    };
    if (self->context_->tls == nullptr) {
      const std::string error =
          EncodeError({ErrorCode::kConnections,
                       "too many connections that do not say hello: this one was closed "
                       "for a newer one; try again"});
      const HeaderBytes header = EncodeHeader({Op::kError, 0, error.size(), kOldestProtocol});
      const std::string frame = std::string(header.begin(), header.end()) + error;
      send(frame.data(), frame.size());
    } else if (!self->handshaken_) {
      const auto alert = FatalAlert(kAlertAccessDenied);
      send(alert.data(), alert.size());
    }
    self->Close();
  });
}

void Connection::CountRefusal(Refusal why) {
  asio::error_code error;
  const asio::ip::tcp::endpoint peer = stream_.socket().remote_endpoint(error);
  context_->refusals.Count(
      why, error ? "a connection" : peer.address().to_string() + " port " + std::to_string(peer.port()));
}

void Connection::SetDeadline(std::chrono::milliseconds time, bool counts) {
  deadline_.expires_after(time);
  deadline_.async_wait([weak = weak_from_this(), counts](const asio::error_code& error) {
    const auto self = weak.lock();
    if (error || self == nullptr || (counts && self->greeted_)) return;
    if (counts) self->CountRefusal(Refusal::kSlow);
    self->Close();
  });
}

void Connection::Watch() {
  watch_.expires_after(context_->limits.silence / kLooks);
  watch_.async_wait([weak = weak_from_this()](const asio::error_code& error) {
    const auto self = weak.lock();
    if (!error && self != nullptr) self->LookAtProgress();
  });
}

void Connection::LookAtProgress() {
  if (phases_ != seen_phases_ || phase_ == Phase::kServer) {
    looks_ = 0;
    window_moved_ = moved_;
  } else if (++looks_; phase_ == Phase::kHeader && moved_ == 0) {
    if (looks_ == kLooks) {
      DropBuffers();
      Buffer::FreeSpare();
    }
  } else {
    const uint64_t held = request_share_.amount() + reply_share_.amount();
    const uint64_t least = std::max(context_->limits.least_bytes, held / ServerLimits::kTurnover);
    const bool needed = (request_share_.amount() > 0 && context_->request_bytes.tight()) ||
                        (reply_share_.amount() > 0 && context_->reply_bytes.tight());
    const bool stalls = needed && moved_ - seen_moved_ < least / kLooks;
    if (stalls || (looks_ >= kLooks && moved_ - window_moved_ < least)) {
      CountRefusal(Refusal::kSlow);
      return Close();
    }
    if (looks_ >= kLooks) {
      looks_ = 0;
      window_moved_ = moved_;
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

// How much Asio shall move next; what has moved is noted, with what has moved in this phase before.
auto Connection::Moving(size_t before) {
  return [this, before](const asio::error_code& error, size_t moved) {
    moved_ = before + moved;
    return error ? size_t{0} : kChunk;
  };
}

void Connection::WhenSlot(Slots* slots, Slots::Owner* owner, void (Connection::*next)(Slots::Share)) {
  auto slot = slots->Ask(owner, [self = shared_from_this(), next](Slots::Share later) {
    asio::post(self->stream_.get_executor(),
               [self, next, later = std::move(later)]() mutable { (self.get()->*next)(std::move(later)); });
  });
  if (slot) return (this->*next)(std::move(*slot));
  Waits("its turn among other requests");
}

void Connection::WhenFree(MemoryBudget* memory, uint64_t amount, const MemoryBudget::Share& held,
                          void (Connection::*next)(MemoryBudget::Share)) {
  auto share =
      memory->Ask(session_->job, amount, held, [self = shared_from_this(), next](MemoryBudget::Share later) {
        asio::post(self->stream_.get_executor(), [self, next, later = std::move(later)]() mutable {
          (self.get()->*next)(std::move(later));
        });
      });
  if (share) return (this->*next)(std::move(*share));
  Enter(Phase::kServer);
  Waits("memory of the server that other requests have");
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
        self->handshaken_ = !error;
        if (!error) return self->ReadHeader();
        const TlsProblem problem = ProblemOf(error);
        if (problem == TlsProblem::kBroken) return self->Cut();
        self->CountRefusal(problem == TlsProblem::kToken ? Refusal::kToken : Refusal::kHandshake);
        self->Linger();  // the alert that says so is on its way
      });
}

void Connection::KeepBuffers() {
  const uint64_t size = body_.capacity() + reply_.capacity();
  const uint64_t more = size - std::exchange(kept_, size);  // modulo 2^64, where it is less
  if (context_->kept.fetch_add(more) + more > context_->limits.bytes) DropBuffers();
}

void Connection::DropBuffers() {
  body_ = Buffer();
  reply_ = Buffer();
  context_->kept.fetch_sub(std::exchange(kept_, 0));
}

void Connection::ReadHeader() {
  Enter(Phase::kHeader);
  KeepBuffers();
  asio::async_read(
      stream_, asio::buffer(header_bytes_), Moving(),
      [self = shared_from_this()](const asio::error_code& error, size_t got) {
        if (error) self->NoteBreak(error);
        if (!error) self->broken_ = false;
        if (error && got > 0) return self->Cut();
        if (error) return self->Close();  // the client has left
        // What a refusal of this header replies to.
        self->header_ = {Op::kError, 0, 0, self->session_->version};
        const bool known = self->greeted_;
        try {
          self->header_ = DecodeHeader(self->header_bytes_, known ? kMaxBody : kMaxHelloBody);
        } catch (const NotOurs&) {
          if (self->context_->tls == nullptr && self->header_bytes_[0] == kTlsHandshake) {
            return self->RefuseTls(Refusal::kEncrypted, kAlertProtocolVersion);
          }
          self->CountRefusal(Refusal::kForeign);
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
        const uint64_t length = self->header_.length;
        if (const uint64_t most = MaxRequest(self->header_.op); length > most) {
          return self->Refuse(Refusal::kMalformed, ErrorCode::kProtocol,
                              "a request of " + std::to_string(length) + " bytes for operation " +
                                  std::to_string(static_cast<int>(self->header_.op)) + "; at most " +
                                  std::to_string(most) + " are allowed");
        }
        self->arrived_ = 0;
        // A push of a worker waits for those of the others, so that these must not wait for it to end.
        const Op op = self->header_.op;
        const bool changes =
            op == Op::kAssign || op == Op::kErase || (op == Op::kPush && !self->session_->worker);
        if (changes && known) {
          self->pushing_ = self->session_->job->store.CountPush();
        }
        if (length <= kSmall) return self->ReadBody({});
        // Memory that is there already is charged at once.
        const uint64_t first = std::min(length, std::max<uint64_t>(kFirst, self->body_.capacity()));
        self->WhenFree(&self->context_->request_bytes, first, self->request_share_, &Connection::ReadBody);
      });
}

void Connection::ReadBody(MemoryBudget::Share share) {
  request_share_.Add(std::move(share));
  const uint64_t length = header_.length;
  const auto until =
      static_cast<size_t>(length <= kSmall ? length : std::min(length, request_share_.amount()));
  try {
    if (arrived_ == 0) {
      body_.Resize(until);
    } else {
      body_.Grow(until, arrived_);
    }
  } catch (const std::bad_alloc&) {
    return Refuse(Refusal::kMemory, ErrorCode::kInternal, "the server has no memory for this request");
  }
  if (phase_ != Phase::kBody) {
    Enter(Phase::kBody);
    moved_ = seen_moved_ = arrived_;
  }
  asio::async_read(stream_, asio::buffer(body_.data() + arrived_, until - arrived_), Moving(arrived_),
                   [self = shared_from_this()](const asio::error_code& error, size_t got) {
                     if (error) {
                       self->NoteBreak(error);
                       return self->Cut();
                     }
                     self->arrived_ += got;
                     if (self->arrived_ < self->header_.length) return self->ReadMore();
                     self->read_ = steady_clock::now();
                     self->context_->requests.fetch_add(1, std::memory_order_relaxed);
                     self->context_->bytes_in.fetch_add(kHeaderBytes + self->body_.size(),
                                                        std::memory_order_relaxed);
                     self->Enter(Phase::kServer);
                     self->Answer();
                   });
}

void Connection::ReadMore() {
  MemoryBudget* const memory = &context_->request_bytes;
  const uint64_t rest = header_.length - arrived_;
  if (auto all = memory->TryIdle(session_->job, rest)) return ReadBody(std::move(*all));
  WhenFree(memory, std::min<uint64_t>(rest, arrived_), request_share_, &Connection::ReadBody);
}

void Connection::Answer() {
  try {
    if (!greeted_) return Hello();
    if (session_->has_answered(header_.request)) return AnswerAgain();
    CheckMay(*session_, header_.op);
    if (header_.op == Op::kShutdown) {
      SetReply("{}");
      return Reply(Op::kShutdown, true);
    }
    if (header_.op == Op::kStats) {
      return WhenSlot(&context_->slow_slots, &context_->stats_slots, &Connection::ServeStats);
    }
    if (header_.op == Op::kShare) {
      SetReply(Share(ParseShareRequest({body_.data(), body_.size()})) ? "true" : "false");
      return Reply(Op::kShare, false);
    }
    if (header_.op == Op::kSession) {
      context_->sessions.Open(session_, NewFence());
      SetReply(nlohmann::json(session_->name).dump());
      return Reply(Op::kSession, false);
    }
    if (header_.op == Op::kReadAhead) {
      TakeReadAhead();
      return Reply(Op::kReadAhead, false);
    }
    const bool ready =
        Ready(*session_, header_.op, {body_.data(), body_.size()},
              [self = shared_from_this()](const std::exception_ptr& error) {
                asio::post(self->stream_.get_executor(), [self, error] { self->Resume(error); });
              });
    if (ready) return AwaitCut();
  } catch (const std::exception&) {
    return AnswerFailure();
  }
  Park();
}

// It was served on an earlier connection, whose reply has not arrived.
void Connection::AnswerAgain() {
  SetReply(session_->answer.body);
  const bool failed = session_->answer.op == Op::kError;
  Reply(failed ? Op::kError : header_.op, false);
}

void Connection::TakeReadAhead() {
  const Bytes request{body_.data(), body_.size()};
  (void)ReplyBytes(*session_, Op::kPull, request);  // throws for what a pull could not have
  const BatchView view = ParseBatch(request);
  if (view.rest.size != 0) {
    throw ProtocolError("keys to read ahead with " + std::to_string(view.rest.size) + " bytes too many");
  }
  reply_.Resize(0);
  if (context_->read_ahead == nullptr || context_->request_bytes.tight()) return;
  // A copy, so that the buffer stays the connection's.
  ReadAhead::Batch batch{session_->client, &session_->job->store, Buffer(request.size),
                         std::move(request_share_)};
  std::memcpy(batch.body.data(), request.data, request.size);
  context_->read_ahead->Add(std::move(batch));
}

void Connection::Park() {
  parked_ = true;
  Waits("other workers");
  pushing_.reset();          // those that it waits for must not wait for it to end
  request_share_.Release();  // or what is waited for might not be read
  WatchForEnd();
  deadline_.expires_after(std::chrono::duration_cast<steady_clock::duration>(session_->worker_wait));
  deadline_.async_wait([weak = weak_from_this()](const asio::error_code& error) {
    const auto self = weak.lock();
    if (!error && self != nullptr && self->parked_)
      self->session_->job->workers.GiveUp(self->session_->client);
  });
}

void Connection::Resume(const std::exception_ptr& error) {
  parked_ = false;
  deadline_.cancel();
  // Of a busy frame that is on its way a part may be out. What WatchForEnd() waits for then comes with the
  // next request, and is ignored.
  asio::error_code ignored;
  if (!saying_busy_) stream_.socket().cancel(ignored);
  read_ = steady_clock::now();
  if (error == nullptr) return AwaitCut();
  try {
    std::rethrow_exception(error);
  } catch (const std::exception&) {
    AnswerFailure();
  }
}

// A worker that ends while its request waits is lost at once; one whose connection breaks is away.
void Connection::WatchForEnd() {
  stream_.socket().async_wait(
      asio::ip::tcp::socket::wait_read, [weak = weak_from_this()](const asio::error_code& error) {
        const auto self = weak.lock();
        if (error || self == nullptr || !self->parked_) return;
        uint8_t first = 0;
        const ssize_t got =
            ::recv(self->stream_.socket().native_handle(), &first, 1, MSG_PEEK | MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return self->WatchForEnd();
        self->broken_ = self->broken_ || (got < 0 && IsBreak({errno, asio::error::get_system_category()}));
        if (got > 0) return;
        // A reset is told once: perhaps to the write of a busy frame, and then this is no end of the stream.
        self->end_seen_ = self->saying_busy_;
        if (!self->end_seen_) self->EndParked();
      });
}

void Connection::Admit() {
  try {
    // How many there are may have to wait for a recovery.
    if (header_.op == Op::kKeys) {
      return WhenSlot(&context_->slow_slots, &session_->job->slow, &Connection::CountKeys);
    }
    const Bytes body{body_.data(), body_.size()};
    reply_bytes_ = ReplyBytes(*session_, header_.op, body);
    if (header_.op == Op::kPull && context_->read_ahead != nullptr) {
      context_->read_ahead->Pulled(session_->client, body);
    }
    AwaitMemory();
  } catch (const std::exception&) {
    AnswerFailure();
  }
}

void Connection::AwaitMemory() {
  const uint64_t bytes = reply_bytes_;
  slow_slot_.Release();  // of CountKeys(): who has memory may wait for it
  context_->queued.fetch_add(1, std::memory_order_relaxed);
  if (bytes <= kSmall) return AwaitSlot({});
  WhenFree(&context_->reply_bytes, bytes, {}, &Connection::AwaitSlot);
}

void Connection::AwaitSlot(MemoryBudget::Share share) {
  reply_share_ = std::move(share);
  if (IsSlow(header_.op)) {
    return WhenSlot(&context_->slow_slots, &session_->job->slow, &Connection::ServeSlow);
  }
  WhenSlot(&context_->slots, &session_->job->serving, &Connection::ServeOne);
}

void Connection::ServeOne(Slots::Share slot) {
  const auto start = steady_clock::now();
  context_->queued.fetch_sub(1, std::memory_order_relaxed);
  context_->queue_wait.Add(start - read_);
  try {
    served_since_ = start;
    const Served served = Serve(session_.get(), header_.op, &body_, &reply_, &rest_);
    if (served == Served::kLater) return AwaitPass();
    pass_.Release();
    slot.Release();
    if (served == Served::kRest) {
      return WhenSlot(&context_->slow_slots, &session_->job->slow, &Connection::ServeRest);
    }
  } catch (const std::exception&) {
    pass_.Release();
    slot.Release();
    return AnswerFailure();
  }
  const auto time = steady_clock::now() - start;
  if (header_.op == Op::kPull) context_->pull_time.Add(time);
  if (header_.op == Op::kPush) context_->push_time.Add(time);
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
    ErrorCode code = CodeOf(problem);
    // The class that a client of the version before knows.
    if (code == ErrorCode::kStorageFull && session_->version < kVersion6) code = ErrorCode::kStorage;
    SetReply(EncodeError({code, problem.what()}));
    Reply(Op::kError, false);
  }
}

void Connection::Hello() {
  if (header_.op != Op::kHello) throw ProtocolError("the first request must be a hello");
  // An encrypted connection has shown already that the client knows the token.
  const oe::Hello hello = ParseHello({body_.data(), body_.size()});
  if (!stream_.encrypted() && !IsSameSecret(hello.token, context_->token)) {
    return Refuse(Refusal::kToken, ErrorCode::kAuth,
                  "the token is not this server's; both sides must read the same token file");
  }
  if (hello.version < kOldestProtocol) {
    throw ProtocolError("hello: version " + std::to_string(hello.version) + " is below " +
                        std::to_string(kOldestProtocol));
  }
  understands_busy_ = hello.version >= kVersion6;
  if (!hello.session.empty()) return GoOn(hello.session);
  if (!client_) {
    if (context_->clients.fetch_add(1) >= context_->limits.connections) {
      context_->clients.fetch_sub(1);
      return Refuse(Refusal::kConnections, ErrorCode::kConnections,
                    "too many connections: the server has its limit of " +
                        std::to_string(context_->limits.connections) +
                        "; end clients that are not needed, or start it with more --max-connections");
    }
    client_ = true;
  }
  session_->version = std::min(hello.version, kProtocolVersion);
  session_->job = context_->jobs->Get(hello.job);
  session_->seen = session_->job->fence.seen();
  session_->reads_only = hello.worker == kReader;
  if (!hello.worker.empty() && !session_->reads_only) {
    const WorkerSpec spec = WorkerSpecFromJsonText(hello.worker);
    session_->job->workers.Join(session_->client, spec);
    session_->worker = true;
    session_->batched = spec.synchronous;
    session_->worker_wait = std::chrono::duration<double>(spec.wait);
  }
  session_->greeted = true;
  session_->job->clients.fetch_add(1);
  session_->job->cut.Join(session_->client, header_.request);
  if (context_->shares) session_->nonce = NewNonce();
  Greet();
}

void Connection::Greet() {
  greeted_ = true;
  context_->arrivals.fetch_sub(1);
  deadline_.cancel();
  Watch();
  nlohmann::json reply = context_->hello;
  reply["version"] = session_->version;
  if (session_->nonce) reply["nonce"] = NonceText(*session_->nonce);
  SetReply(reply.dump());
  Reply(Op::kHello, false);
}

// With the session that the client had on an earlier connection, once that serves nothing any more.
void Connection::GoOn(const std::string& name) {
  deadline_.cancel();
  Waits("its earlier connection to end");
  const auto granted = [self = shared_from_this()](Sessions::SessionPtr session) {
    asio::post(self->stream_.get_executor(), [self, session = std::move(session)]() mutable {
      self->session_ = std::move(session);
      self->session_->pass = &self->pass_;
      self->broken_ = true;                  // until the client has shown that it is there
      self->context_->clients.fetch_add(1);  // in place of the earlier one's
      self->client_ = true;
      self->Greet();
    });
  };
  if (context_->sessions.Claim(name, NewFence(), granted)) return;
  SetReply(
      EncodeError({ErrorCode::kWorker,
                   "this server knows nothing of the connection that broke: it was started again, or that "
                   "was more than " +
                       std::to_string(Sessions::kAway.count()) + " s ago"}));
  Reply(Op::kError, true);
}

bool Connection::Share(const ShareRequest& request) {
  const uint64_t before = session_->shared_size;
  if (!session_->nonce || request.size < before) return false;
  auto more = context_->shared_bytes.Try(request.size - before);
  if (!more) return false;
  std::unique_ptr<SharedMapping> mapping = SharedMapping::Open(request, *session_->nonce);
  if (mapping == nullptr) return false;
  if (session_->mapping == nullptr) context_->sharing.fetch_add(1);
  session_->mapping = std::move(mapping);
  session_->mapping_shares.push_back(std::move(*more));
  session_->shared = session_->mapping->data();
  session_->shared_size = session_->mapping->size();
  return true;
}

void Connection::Refuse(Refusal why, ErrorCode code, const std::string& message) {
  CountRefusal(why);
  SetReply(EncodeError({code, message}));
  Reply(Op::kError, true);
}

// In clear, as there are no keys yet.
void Connection::RefuseTls(Refusal why, uint8_t alert) {
  CountRefusal(why);
  refused_ = true;
  std::memcpy(discarded_.data(), FatalAlert(alert).data(), 7);
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
  pushing_.reset();
  if (greeted_ && !last && !withdrawn_) session_->NoteAnswer(header_.request, header_.op, op, reply_);
  withdrawn_ = false;
  if (greeted_ && IsOrdered(*session_, header_.op))
    session_->job->cut.End(session_->client, op != Op::kError);
  refused_ = refused_ || last;
  Enter(Phase::kReply);
  if (saying_busy_) {
    reply_after_ = {op, last};
  } else {
    SendReply(op, last);
  }
}

void Connection::SendReply(Op op, bool last) {
  reply_header_ = EncodeHeader({op, header_.request, reply_.size(), header_.version});
  context_->bytes_out.fetch_add(kHeaderBytes + reply_.size(), std::memory_order_relaxed);
  const std::array<asio::const_buffer, 2> message = {asio::buffer(reply_header_),
                                                     asio::buffer(reply_.data(), reply_.size())};
  stream_.Sending(kHeaderBytes + reply_.size());
  asio::async_write(stream_, message, Moving(),
                    [self = shared_from_this(), op, last](const asio::error_code& error, size_t) {
                      self->reply_share_.Release();
                      if (op == Op::kShutdown) self->context_->on_shutdown();
                      if (error) return self->NoteBreak(error);
                      if (last) {
                        self->Linger();
                      } else {
                        self->ReadHeader();
                      }
                      // The worker computes now. Its next request may be read meanwhile.
                      if (op == Op::kPull) self->session_->job->store.Upkeep();
                    });
}

// The peer has gone in the middle of a frame or handshake.
void Connection::Cut() {
  if (stream_.socket().is_open()) CountRefusal(Refusal::kCut);  // otherwise it was closed here
  Close();
}

void Connection::Close() {
  asio::error_code ignored;
  stream_.socket().close(ignored);
}

// Closing while unread bytes wait would reset the connection, and the client might never see the last reply.
void Connection::Linger() {
  refused_ = true;
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
