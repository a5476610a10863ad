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
  asio::ip::tcp::endpoint address;
  bool encrypts = false;
  bool refused = false;  // nothing listened there when it was last connected to
  // The hello with which another connection goes on as this one (server/sessions.h); empty: none can.
  std::string resume;
  // What this server offered in its reply to the hello, and how much of the client's memory it sees.
  std::optional<Nonce> nonce;
  size_t shared = 0;
  bool reads_ahead = false;            // whether it takes Op::kReadAhead
  bool counts_changes = false;         // whether it takes RowsRequest::change
  bool places_rows = false;            // whether it takes RowsRequest::placed
  bool cuts = false;                   // whether it takes Op::kCut
  bool halves = false;                 // whether it takes BatchEntry::kHalves
  bool sessions = false;               // whether it takes Op::kSession
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
  // calls[i] goes to peers[i]. Returns when every server has replied; error replies are in the calls. A call
  // whose connection breaks goes on with a new one, if the server knows the client still: it is served once.
  // Throws ServerLost as soon as one connection breaks for good or one server has said nothing, neither the
  // reply nor that it is busy (Op::kBusy), for `timeout` seconds, ProtocolError for a reply that makes no
  // sense. After a throw the connections are closed: what is still under way on them would be taken for the
  // reply to the next request.
  void Run(Op op, const std::vector<std::unique_ptr<Peer>>& peers, std::vector<Call>* calls, double timeout);

 private:
  struct State;
  using Peers = std::vector<Peer*>;
  // Operations that are waited for together. Another group's handlers run meanwhile.
  struct Group {
    size_t pending = 0;        // operations under way
    std::exception_ptr error;  // the first that ended the exchange
  };
  void ConnectGroup(const Peers& peers, double timeout);
  // Notes in *done that the peer is connected.
  void Handshake(Group* group, Peer* peer, std::vector<bool>* done, size_t i);
  void RunGroup(Op op, const Peers& peers, std::vector<Call>* calls, double timeout);
  void Send(State* state);
  void Receive(State* state);
  void ReceiveBody(State* state, const FrameHeader& header);
  // The server lives, and has not forgotten the request.
  void ReceiveBusy(State* state, const FrameHeader& header);
  void Break(State* state, const asio::error_code& error);
  // Sends the call again on a new connection. Throws what it broke by if there can be none.
  void Mend(State* state);
  void Reconnect(Peer* peer, double timeout);
  void Fail(Group* group, std::exception_ptr error);
  // `mend` goes on with what has broken.
  void Wait(Group* group, const Peers& peers, double timeout, const std::function<size_t()>& first_waiting,
            const std::function<std::chrono::steady_clock::time_point(size_t)>& heard = {},
            const std::function<void()>& mend = {});
  void CloseAll(Group* group, const Peers& peers);

  asio::io_context* const io_;
  std::unique_ptr<TlsContext> tls_;  // once some peer needs it
  const std::function<void()> check_interrupt_;
  std::chrono::seconds silence_{};  // of a host, after which it is held for vanished
  double patience_ = 0;             // seconds in which a connection that broke may be replaced
  uint64_t request_;                // the last one's number (wire/frame.h)
};

ServerLost Lost(const Peer& peer, const std::string& what);

// Says the end of the stream before a reset can: a server takes that for the client's own end, not for a
// break.
void CloseNow(Peer* peer);

}  // namespace oe
