// One request to every server at once, and their replies.
#pragma once

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oe_runtime/core/wire/dead_peer.h"
#include "oe_runtime/core/wire/frame.h"
#include "oe_runtime/core/wire/messages.h"
#include "oe_runtime/core/wire/shared_memory.h"
#include "oe_runtime/core/wire/stream.h"

namespace oe {

// A connection to one server.
struct Peer {
  Peer(asio::io_context* io, std::string name) : endpoint(std::move(name)), stream(io) {}
  std::string endpoint;  // "host:port", as the user gave it
  Stream stream;
  // What this server offered in its reply to the hello, and how much of the client's memory it sees.
  std::optional<Nonce> nonce;
  size_t shared = 0;
  bool reads_ahead = false;            // whether it takes Op::kReadAhead
  bool counts_changes = false;         // whether it takes RowsRequest::change
  bool places_rows = false;            // whether it takes RowsRequest::placed
  bool cuts = false;                   // whether it takes Op::kCut
  bool halves = false;                 // whether it takes BatchEntry::kHalves
  uint16_t version = kOldestProtocol;  // that both sides speak (wire/frame.h)
  HostWatch host;
};

// What goes to one server and where its reply goes.
struct Call {
  bool skip = false;  // nothing goes to this server
  std::vector<asio::const_buffer> body;
  std::vector<asio::mutable_buffer> into;  // if `exact`: filled by the reply, which must have just this size
  bool exact = false;
  Buffer reply;  // otherwise the reply's body

  bool failed = false;
  ErrorBody error;  // what the server replied, if it failed
};

// Sends and receives on all connections in parallel, on the calling thread.
class Exchanger {
 public:
  // check_interrupt: see RemoteOptions.
  Exchanger(asio::io_context* io, std::function<void()> check_interrupt);

  // Connects peers[i] to addresses[i], and encrypts what goes to those that `tls` asks it for. A peer whose
  // host vanishes later is found out within `timeout` seconds, 30 at most; one that is stopped or busy is not
  // mistaken for it. Throws ServerLost, AuthError for a
  // server with another token, ProtocolError for one that does not encrypt, SpecError for a token that is too
  // short for it.
  void Connect(const std::vector<std::unique_ptr<Peer>>& peers,
               const std::vector<asio::ip::tcp::endpoint>& addresses, TlsMode tls, const std::string& token,
               double timeout);
  // calls[i] goes to peers[i]. Returns when every server has replied; error replies are in the calls. Throws
  // ServerLost as soon as one connection breaks or one server has said nothing, neither the reply nor that it
  // is busy (Op::kBusy), for `timeout` seconds, ProtocolError for a reply that makes no sense. After a throw
  // the connections are closed: what is still under way on them would be taken for the reply to the next
  // request.
  void Run(Op op, const std::vector<std::unique_ptr<Peer>>& peers, std::vector<Call>* calls, double timeout);

 private:
  struct State;
  // Notes in *done that the peer is connected.
  void Handshake(Peer* peer, std::vector<bool>* done, size_t i);
  void Receive(State* state);
  void ReceiveBody(State* state, const FrameHeader& header);
  // The server lives, and has not forgotten the request.
  void ReceiveBusy(State* state, const FrameHeader& header);
  void Fail(std::exception_ptr error);
  void Wait(const std::vector<std::unique_ptr<Peer>>& peers, double timeout,
            const std::function<size_t()>& first_waiting,
            const std::function<std::chrono::steady_clock::time_point(size_t)>& heard = {});
  void CloseAll(const std::vector<std::unique_ptr<Peer>>& peers);

  asio::io_context* const io_;
  std::unique_ptr<TlsContext> tls_;  // once some peer needs it
  const std::function<void()> check_interrupt_;
  std::chrono::seconds silence_{};  // of a host, after which it is held for vanished
  uint64_t request_;                // the last one's number (wire/frame.h)
  size_t pending_ = 0;              // operations under way
  std::exception_ptr error_;        // the first that ended the exchange
};

ServerLost Lost(const Peer& peer, const std::string& what);

}  // namespace oe
