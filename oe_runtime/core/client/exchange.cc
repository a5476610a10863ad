#include "oe_runtime/core/client/exchange.h"

#include <algorithm>
#include <asio/buffer.hpp>
#include <asio/read.hpp>
#include <asio/steady_timer.hpp>
#include <asio/write.hpp>
#include <cmath>
#include <cstdio>
#include <random>

namespace oe {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(200);  // between looks at the clock and at Ctrl-C
constexpr double kMostSilence = 30;                      // seconds without a sign of a server's host
constexpr size_t kChunk = size_t{1} << 20;
// Between tries to replace a connection that broke, doubled each time, and at most.
constexpr auto kFirstReconnectPause = std::chrono::milliseconds(20);
constexpr auto kLastReconnectPause = std::chrono::milliseconds(640);

// Asio moves at most 64 KiB a call unless told otherwise.
size_t LargeReads(const asio::error_code& error, size_t) { return error ? 0 : kChunk; }

std::string Seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", seconds);
  return text;
}

}  // namespace

ServerLost Lost(const Peer& peer, const std::string& what) {
  return {peer.endpoint, "parameter server " + peer.endpoint + ": " + what +
                             "; look at its log, start it again, and resume from the last checkpoint"};
}

namespace {

// Below the first request's number: the name of this client (wire/frame.h), which is not 0.
uint64_t NewName() {
  std::random_device random;
  return uint64_t{std::uniform_int_distribution<uint32_t>(1)(random)} << 32;
}

ServerLost Broken(const Peer& peer, const asio::error_code& error) {
  return Lost(peer, "the connection broke (" + error.message() + ")");
}

// Such a server most likely runs: one that has no room for a connection may have no time to say so.
ServerLost Unanswered(const Peer& peer, const asio::error_code& error) {
  return {peer.endpoint, "parameter server " + peer.endpoint + ": it closed the connection without a word (" +
                             error.message() +
                             "); look at its log: it may have too many connections, or be going down"};
}

std::exception_ptr HandshakeError(const std::string& endpoint, const asio::error_code& error) {
  const std::string server = "server " + endpoint;
  switch (ProblemOf(error)) {
    case TlsProblem::kToken:
      return std::make_exception_ptr(
          AuthError(server + ": the token is not this server's; both sides must read the same token file"));
    case TlsProblem::kClear:
      return std::make_exception_ptr(ProtocolError(
          server + " does not encrypt; start it with --tls on, or connect with tls off (--tls off)"));
    case TlsProblem::kLimit:
      return std::make_exception_ptr(TooManyConnections(
          "too many connections at " + endpoint +
          ": the server closes those that it does not take; end clients that are not needed, start it with "
          "more --max-connections, or try again"));
    case TlsProblem::kBroken:
      return std::make_exception_ptr(ServerLost(
          endpoint, "parameter server " + endpoint + ": the connection broke in the TLS handshake (" +
                        error.message() +
                        "); look at its log: it may have too many connections; a server that does not "
                        "encrypt needs tls off (--tls off)"));
    case TlsProblem::kOther:
      break;
  }
  return std::make_exception_ptr(
      ProtocolError(server + ": the TLS handshake failed (" + error.message() +
                    "); is this an oe_runtime server of the same version, with the same token?"));
}

}  // namespace

struct Exchanger::State {
  Group* group = nullptr;
  Peer* peer = nullptr;
  Call* call = nullptr;
  Op op = Op::kError;
  uint64_t request = 0;
  HeaderBytes out{};
  HeaderBytes in{};
  Buffer busy;
  std::chrono::steady_clock::time_point heard;  // when the server last said something, or was asked
  bool writing = false;
  std::exception_ptr broken;  // why the connection is no more
  size_t breaks = 0;          // one soon after the other
  std::chrono::steady_clock::time_point first_break;
  std::chrono::steady_clock::time_point last_break;
  bool done = false;
};

Exchanger::Exchanger(asio::io_context* io, std::function<void()> check_interrupt)
    : io_(io), check_interrupt_(std::move(check_interrupt)), request_(NewName()) {}

void CloseNow(Peer* peer) {
  asio::error_code ignored;
  peer->stream.socket().shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  peer->stream.socket().close(ignored);
}

void Exchanger::Fail(Group* group, std::exception_ptr error) {
  if (!group->error) group->error = std::move(error);
  io_->stop();
}

void Exchanger::CloseAll(Group* group, const Peers& peers) {
  for (Peer* const peer : peers) CloseNow(peer);
  // Every operation ends now; only then may the memory that it works on go.
  while (group->pending > 0) {
    io_->restart();
    io_->run_one();
  }
}

void Exchanger::Wait(Group* group, const Peers& peers, double timeout,
                     const std::function<size_t()>& first_waiting,
                     const std::function<std::chrono::steady_clock::time_point(size_t)>& heard,
                     const std::function<void()>& mend) {
  const auto begin = std::chrono::steady_clock::now();
  try {
    for (;;) {
      if (mend && !group->error) mend();
      if (group->pending == 0 || group->error) break;
      io_->restart();
      io_->run_for(kSlice);
      if (group->pending == 0 || group->error) continue;
      if (check_interrupt_) check_interrupt_();
      for (Peer* const peer : peers) {
        if (!peer->host.Silent(peer->stream.socket().native_handle(), silence_)) continue;
        throw Lost(*peer, "its host has not answered for " + std::to_string(silence_.count()) + " s");
      }
      // In the order of the servers: if all are silent, it is the first that is named.
      for (size_t i = first_waiting(); i < (heard ? peers.size() : first_waiting() + 1); ++i) {
        const auto since = heard ? heard(i) : begin;
        if (std::chrono::steady_clock::now() < since + std::chrono::duration<double>(timeout)) continue;
        throw Lost(*peers[i], "no answer within " + Seconds(timeout));
      }
    }
  } catch (...) {
    group->error = std::current_exception();
  }
  if (!group->error) return;
  CloseAll(group, peers);
  std::rethrow_exception(group->error);
}

void Exchanger::Connect(const std::vector<std::unique_ptr<Peer>>& peers,
                        const std::vector<asio::ip::tcp::endpoint>& addresses, TlsMode tls,
                        const std::string& token, double timeout) {
  Peers all;
  patience_ = timeout;
  silence_ = std::chrono::seconds(static_cast<int>(std::clamp(timeout, 1.0, kMostSilence)));
  for (size_t i = 0; i < peers.size(); ++i) {
    Peer* const peer = peers[i].get();
    all.push_back(peer);
    peer->address = addresses[i];
    peer->encrypts = Encrypts(tls, addresses[i].address());
    if (peer->encrypts && tls_ == nullptr) {
      if (token.empty()) {
        throw SpecError("server " + peer->endpoint +
                        " is connected to with encryption, which needs the servers' token (--token-file); "
                        "without it: --tls off on both sides");
      }
      tls_ = std::make_unique<TlsContext>(TlsContext::Role::kClient, token);
    }
  }
  ConnectGroup(all, timeout);
}

void Exchanger::ConnectGroup(const Peers& peers, double timeout) {
  Group group;
  std::vector<bool> done(peers.size(), false);
  for (size_t i = 0; i < peers.size(); ++i) {
    Peer* const peer = peers[i];
    peer->refused = false;
    ++group.pending;
    peer->stream.socket().async_connect(peer->address, [this, &group, peer, &done,
                                                        i](const asio::error_code& error) {
      --group.pending;
      peer->refused = error == asio::error::connection_refused;
      if (error) {
        return Fail(&group,
                    std::make_exception_ptr(ServerLost(
                        peer->endpoint, "no parameter server answers at " + peer->endpoint + ": " +
                                            error.message() + "; is it running, and is the port right?")));
      }
      asio::error_code ignored;
      peer->stream.socket().set_option(asio::ip::tcp::no_delay(true), ignored);
      ProbeIdlePeer(peer->stream.socket().native_handle(), silence_);
      if (peer->encrypts) return Handshake(&group, peer, &done, i);
      done[i] = true;
    });
  }
  Wait(&group, peers, timeout, [&done] {
    size_t i = 0;
    while (i + 1 < done.size() && done[i]) ++i;
    return i;
  });
}

void Exchanger::Handshake(Group* group, Peer* peer, std::vector<bool>* done, size_t i) {
  ++group->pending;
  peer->stream.AsyncHandshake(tls_.get(), TlsContext::Role::kClient,
                              [this, group, peer, done, i](const asio::error_code& error) {
                                --group->pending;
                                if (error) return Fail(group, HandshakeError(peer->endpoint, error));
                                (*done)[i] = true;
                              });
}

void Exchanger::Run(Op op, const std::vector<std::unique_ptr<Peer>>& peers, std::vector<Call>* calls,
                    double timeout) {
  for (const Call& call : *calls) {
    const uint64_t length = asio::buffer_size(call.body);
    if (const uint64_t most = MaxRequest(op); length > most) {
      const bool batch = op == Op::kPull || op == Op::kPush;
      throw SpecError(
          "a request of " + std::to_string(length) + " bytes to one server; at most " + std::to_string(most) +
          " are allowed" +
          (batch ? ": use smaller batches" : " for what is not rows: use fewer or smaller names"));
    }
  }
  ++request_;
  Peers all;
  all.reserve(peers.size());
  for (const auto& peer : peers) all.push_back(peer.get());
  RunGroup(op, all, calls, timeout);
}

void Exchanger::RunGroup(Op op, const Peers& peers, std::vector<Call>* calls, double timeout) {
  Group group;
  std::vector<State> states(peers.size());
  for (size_t i = 0; i < peers.size(); ++i) {
    State& state = states[i];
    state.group = &group;
    state.peer = peers[i];
    state.call = &(*calls)[i];
    state.op = op;
    state.request = request_;
    state.done = state.call->skip;
    state.heard = std::chrono::steady_clock::now();
  }
  for (State& state : states) {
    if (!state.call->skip) Send(&state);
  }
  Wait(
      &group, peers, timeout,
      [&states] {
        size_t i = 0;
        while (i + 1 < states.size() && states[i].done) ++i;
        return i;
      },
      [&states](size_t i) { return states[i].done ? std::chrono::steady_clock::now() : states[i].heard; },
      [this, &states] {
        const auto is_broken = [](const State& state) { return state.broken != nullptr; };
        for (auto found = states.begin(); found != states.end();) {
          found = std::find_if(states.begin(), states.end(), is_broken);
          if (found != states.end()) Mend(&*found);
        }
      });
}

void Exchanger::Send(State* state) {
  Stream* const stream = &state->peer->stream;
  state->out =
      EncodeHeader({state->op, state->request, asio::buffer_size(state->call->body), state->peer->version});
  std::vector<asio::const_buffer> message = {asio::buffer(state->out)};
  message.insert(message.end(), state->call->body.begin(), state->call->body.end());
  stream->Sending(asio::buffer_size(message));
  ++state->group->pending;
  state->writing = true;
  // A server that refuses a request replies and stops reading: what tells is the reply, or the end of the
  // stream, not that the rest could not be written.
  asio::async_write(*stream, message, LargeReads, [state](const asio::error_code&, size_t) {
    --state->group->pending;
    state->writing = false;
  });
  Receive(state);
}

void Exchanger::Break(State* state, const asio::error_code& error) {
  const auto why = std::make_exception_ptr(state->op == Op::kHello ? Unanswered(*state->peer, error)
                                                                   : Broken(*state->peer, error));
  if (state->peer->resume.empty() || state->op == Op::kHello || state->group->error) {
    return Fail(state->group, why);
  }
  state->broken = why;
  io_->stop();
}

void Exchanger::Mend(State* state) {
  CloseNow(state->peer);
  while (state->writing) {
    io_->restart();
    io_->run_one();
  }
  const std::exception_ptr broken = std::exchange(state->broken, nullptr);
  // A connection that breaks again and again, as where a message is too large for something on its way, has
  // as long as one that cannot be made again.
  const std::chrono::duration<double> patience(patience_);
  const auto now = std::chrono::steady_clock::now();
  if (state->breaks == 0 || now > state->last_break + patience) {
    state->breaks = 0;
    state->first_break = now;
  }
  state->last_break = now;
  auto pause = kFirstReconnectPause;
  for (size_t again = 1; again < state->breaks; ++again) pause = std::min(2 * pause, kLastReconnectPause);
  for (bool waits = state->breaks++ > 0;; waits = true, pause = std::min(2 * pause, kLastReconnectPause)) {
    if (waits) {
      if (check_interrupt_) check_interrupt_();
      io_->restart();
      asio::steady_timer timer(*io_, pause);
      timer.async_wait([](const asio::error_code&) {});  // or there may be nothing to run for so long
      io_->run_for(pause);
    }
    if (state->group->error) return;  // of another server: that is the one to tell
    const std::chrono::duration<double> left =
        state->first_break + patience - std::chrono::steady_clock::now();
    try {
      Reconnect(state->peer, std::max(left.count(), 1.0));
      break;
    } catch (const ServerLost&) {
      if (state->peer->refused || left.count() < 0) std::rethrow_exception(broken);
    } catch (const TooManyConnections&) {
      if (left.count() < 0) std::rethrow_exception(broken);
    } catch (const Error&) {  // it is another server, or has forgotten this client
      std::rethrow_exception(broken);
    }
  }
  if (std::chrono::steady_clock::now() > state->first_break + patience) std::rethrow_exception(broken);
  state->heard = std::chrono::steady_clock::now();
  Send(state);
}

void Exchanger::Reconnect(Peer* peer, double timeout) {
  peer->stream.Reset();
  peer->host = {};
  ConnectGroup({peer}, timeout);
  std::vector<Call> calls(1);
  calls[0].body = {asio::buffer(peer->resume)};
  RunGroup(Op::kHello, {peer}, &calls, timeout);
  if (calls[0].failed) ThrowAs(calls[0].error.code, calls[0].error.message);
}

void Exchanger::Receive(State* state) {
  ++state->group->pending;
  asio::async_read(
      state->peer->stream, asio::buffer(state->in), [this, state](const asio::error_code& error, size_t) {
        --state->group->pending;
        if (error) return Break(state, error);
        try {
          const FrameHeader header = DecodeHeader(state->in, kMaxBody);
          if (header.op == Op::kBusy && header.request == state->request) return ReceiveBusy(state, header);
          if (header.op != state->op && header.op != Op::kError)
            throw ProtocolError("the reply is to another operation");
          // A header that the server could not read is refused under the number 0.
          const bool unread = header.op == Op::kError && header.request == 0;
          if (header.request != state->request && !unread) {
            throw ProtocolError("the reply is to another request");
          }
          ReceiveBody(state, header);
        } catch (const ProtocolError& problem) {
          Fail(state->group, std::make_exception_ptr(
                                 ProtocolError("server " + state->peer->endpoint + ": " + problem.what())));
        }
      });
}

void Exchanger::ReceiveBusy(State* state, const FrameHeader& header) {
  if (header.length > kMaxBusyBody) throw ProtocolError("it is busy at too great length");
  state->heard = std::chrono::steady_clock::now();
  state->busy.Resize(static_cast<size_t>(header.length));
  ++state->group->pending;
  asio::async_read(state->peer->stream, asio::buffer(state->busy.data(), state->busy.size()),
                   [this, state](const asio::error_code& error, size_t) {
                     --state->group->pending;
                     if (error) return Break(state, error);
                     Receive(state);
                   });
}

void Exchanger::ReceiveBody(State* state, const FrameHeader& header) {
  Call* call = state->call;
  call->failed = header.op == Op::kError;
  const auto length = static_cast<size_t>(header.length);
  std::vector<asio::mutable_buffer> into;
  if (call->exact && !call->failed) {
    into = call->into;
    if (asio::buffer_size(into) != length) {
      throw ProtocolError("a reply of " + std::to_string(length) + " bytes instead of " +
                          std::to_string(asio::buffer_size(into)));
    }
  } else {
    call->reply.Resize(length);
    into = {asio::buffer(call->reply.data(), length)};
  }
  ++state->group->pending;
  asio::async_read(
      state->peer->stream, into, LargeReads, [this, state](const asio::error_code& error, size_t) {
        --state->group->pending;
        if (error) return Break(state, error);
        state->done = true;
        if (!state->call->failed) return;
        try {
          state->call->error = ParseError({state->call->reply.data(), state->call->reply.size()});
        } catch (const ProtocolError& problem) {
          Fail(state->group, std::make_exception_ptr(
                                 ProtocolError("server " + state->peer->endpoint + ": " + problem.what())));
        }
      });
}

}  // namespace oe
