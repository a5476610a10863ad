#include "oe_runtime/core/front/http_server.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <asio/buffer.hpp>
#include <asio/executor_work_guard.hpp>
#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/post.hpp>
#include <asio/steady_timer.hpp>
#include <asio/write.hpp>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <ctime>
#include <future>
#include <list>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/histogram.h"
#include "oe_runtime/core/common/same_secret.h"
#include "oe_runtime/core/front/http_chunks.h"
#include "oe_runtime/core/front/http_head.h"
#include "oe_runtime/core/front/tls_socket.h"

namespace oe {
namespace {

using asio::ip::tcp;
using Clock = std::chrono::steady_clock;

constexpr size_t kSmallBody = 64 << 10;  // bytes of a body that does not wait for others
constexpr double kSlowest = 1 << 20;     // bytes per second of a body
constexpr double kAlone = 1;        // seconds more that a body of unknown length keeps others from growing
constexpr double kLinger = 5;       // seconds for a client with an unread request to receive an answer
constexpr double kGrace = 1;        // seconds that an ending server accepts connections, unless none is open
constexpr double kHandshake = 0.2;  // seconds for connections that were being made then
constexpr size_t kRefused = 64;     // connections over the limit that are told so at a time
constexpr size_t kSmallestGzip = 18;   // bytes
constexpr size_t kLongestNumber = 19;  // digits of a length
constexpr auto kSweep = std::chrono::milliseconds(100);
constexpr int kBacklog = 4096;

Clock::duration Seconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

const char* Phrase(unsigned status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 411:
      return "Length Required";
    case 413:
      return "Content Too Large";
    case 415:
      return "Unsupported Media Type";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return "Status";
  }
}

std::string ErrorJson(const std::string& message) {
  return nlohmann::json{{"error", message}}.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

std::string Head(const HttpReply& reply, bool closes) {
  const unsigned status = reply.status;
  std::array<char, 64> date{};
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  std::strftime(date.data(), date.size(), "%a, %d %b %Y %H:%M:%S GMT", &utc);
  std::string head =
      "HTTP/1.1 " + std::to_string(status) + ' ' + Phrase(status) + "\r\nServer: oe_runtime\r\nDate: ";
  head += date.data();
  head +=
      "\r\nContent-Type: " + reply.type + "\r\nContent-Length: " + std::to_string(reply.body.size()) + "\r\n";
  if (reply.json_length != 0)
    head += "Inference-Header-Content-Length: " + std::to_string(reply.json_length) + "\r\n";
  if (status == 401) head += "WWW-Authenticate: Bearer\r\n";
  if (status == 503) head += "Retry-After: 1\r\n";
  if (closes) head += "Connection: close\r\n";
  return head += "\r\n";
}

// The token of a header "Authorization: Bearer TOKEN"; empty if it has none.
std::string TokenOf(const HttpHead& head) {
  constexpr std::string_view kScheme = "bearer ";
  const std::string text = head.authorization.value_or("");
  const bool is_bearer = text.size() > kScheme.size() &&
                         std::equal(kScheme.begin(), kScheme.end(), text.begin(), [](char wanted, char c) {
                           return c == wanted || (c >= 'A' && c <= 'Z' && c - 'A' + 'a' == wanted);
                         });
  return is_bearer ? text.substr(text.find_first_not_of(' ', kScheme.size())) : "";
}

// Drops packets with fewer hops left; 0 is none. Needs no rights, which a filter of packets may.
void SetNearest(int socket, int hops) {
  (void)setsockopt(socket, IPPROTO_IP, IP_MINTTL, &hops, sizeof hops);
  (void)setsockopt(socket, IPPROTO_IPV6, IPV6_MINHOPCOUNT, &hops, sizeof hops);
}

}  // namespace

// What is said of threads: all of it and of its connections is the loop's, unless it says otherwise.
class HttpServer::Impl {
 public:
  Impl(const HttpOptions& options, Answer answer, Around around)
      : options_(options),
        answer_(std::move(answer)),
        around_(std::move(around)),
        acceptor_(loop_),
        sweep_(loop_) {
    const std::string place = options.host + ":" + std::to_string(options.port);
    asio::error_code error;
    tcp::resolver resolver(loop_);
    const auto found =
        resolver.resolve(options.host, std::to_string(options.port), tcp::resolver::passive, error);
    if (!error && !found.empty()) {
      const tcp::endpoint address = found.begin()->endpoint();
      acceptor_.open(address.protocol(), error);
      if (!error) acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
      if (!error) acceptor_.bind(address, error);
      if (!error) acceptor_.listen(kBacklog, error);
      if (!error) acceptor_.non_blocking(true, error);
    }
    if (error || found.empty()) throw Error("cannot listen on " + place + ": " + error.message());
    port_ = acceptor_.local_endpoint().port();
  }

  uint16_t port() const { return port_; }

  void SetAccess(HttpAccess access) {  // of any thread
    asio::post(loop_, [this, access = std::move(access)]() mutable { access_ = std::move(access); });
  }

  void Start() {  // of another thread
    is_started_ = true;
    asio::post(loop_, [this] {
      Accept();
      Sweep();
    });
    Launch([](Impl* self) { self->loop_.run(); }, [](const std::function<void()>& run) { run(); });
    for (unsigned i = 0; i < options_.threads; ++i) Launch([](Impl* self) { self->work_.run(); }, around_);
    Launch([](Impl* self) { self->quick_.run(); }, around_);
  }

  void Stop(double seconds);  // of another thread

  nlohmann::json Stats() const {  // of any thread
    nlohmann::json stats = {{"requests", nlohmann::json::object()},
                            {"traffic", {{"bytes_in", bytes_in_.load()}, {"bytes_out", bytes_out_.load()}}},
                            {"times", {{"answer", TimesOf(answer_time_)}}}};
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [asked, count] : answers_)
      stats["requests"][asked.first][std::to_string(asked.second)] = count;
    stats["examples"] = examples_;
    stats["in_progress"] = in_progress_;
    stats["connections"] = {
        {"open", open_},
        {"accepted", accepted_},
        {"closed",
         {{"refused", over_limit_}, {"displaced", displaced_}, {"late", late_}, {"handshake", handshakes_}}}};
    return stats;
  }

 private:
  class Connection;
  using Shared = std::shared_ptr<Connection>;
  using Run = void (*)(Impl*);

  void Launch(Run run, const Around& around) {
    threads_.emplace_back([this, run, around] { around([&] { RunUntilStopped(this, run); }); });
  }

  // An exception that leaves a handler (memory ran out) ends that connection, not the server.
  static void RunUntilStopped(Impl* self, Run run) {
    for (;;) {
      try {
        return run(self);
      } catch (const std::exception& problem) {
        std::fprintf(stderr, "warning: a request was lost: %s\n", problem.what());
      }
    }
  }

  // Calls `function` on the loop, and returns afterwards; for other threads.
  template <typename Function>
  void OnLoop(Function function) {
    std::promise<void> done;
    asio::post(loop_, [&] {
      function();
      done.set_value();
    });
    done.get_future().wait();
  }

  // Until `seconds` are over or there is no connection.
  bool WaitUntilClosed(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, Seconds(seconds), [this] { return open_ == 0; });
  }

  void Count(uint64_t Impl::* counter, int more = 1) {
    const std::lock_guard<std::mutex> lock(mutex_);
    this->*counter += static_cast<uint64_t>(int64_t{more});
  }

  void Accept();
  asio::error_code AcceptOne();
  void Admit(tcp::socket socket);
  bool MakeRoom();
  void Sweep();
  void GrantRoom();
  bool RefuseGrowing();
  void Forget(const Shared& connection);
  void RefuseNewOnes();

  const HttpOptions options_;
  Answer answer_;
  const Around around_;
  HttpAccess access_;
  asio::io_context loop_{1};
  asio::io_context work_;
  asio::io_context quick_{1};
  const asio::executor_work_guard<asio::io_context::executor_type> of_loop_{loop_.get_executor()};
  const asio::executor_work_guard<asio::io_context::executor_type> of_work_{work_.get_executor()};
  const asio::executor_work_guard<asio::io_context::executor_type> of_quick_{quick_.get_executor()};
  tcp::acceptor acceptor_;
  asio::steady_timer sweep_;
  uint16_t port_ = 0;
  std::mutex stopping_;  // held by Stop()
  bool is_started_ = false;
  bool accepts_ = false;    // whether Accept() waits
  bool refuses_ = false;    // new connections: RefuseNewOnes()
  bool is_ending_ = false;  // each answer says that its connection ends
  bool ends_idle_ = false;  // connections between requests end
  std::unordered_set<Shared> connections_;
  size_t refused_ = 0;     // of those, the ones over the limit
  size_t body_bytes_ = 0;  // of large bodies
  std::list<std::weak_ptr<Connection>> want_room_;
  Connection* growing_ = nullptr;  // the one of those whose need is not known
  bool grants_room_ = false, frees_room_ = false;
  std::vector<char> input_ = std::vector<char>(kHttpHeadBytes);

  std::vector<std::thread> threads_;

  mutable std::mutex mutex_;  // of what follows, up to the atomics
  std::condition_variable changed_;
  size_t open_ = 0;  // connections
  uint64_t accepted_ = 0, over_limit_ = 0, displaced_ = 0, late_ = 0, handshakes_ = 0;
  uint64_t in_progress_ = 0;                                      // requests
  std::map<std::pair<std::string, unsigned>, uint64_t> answers_;  // by method and status
  uint64_t examples_ = 0;

  std::atomic<uint64_t> bytes_in_{0}, bytes_out_{0};
  Histogram answer_time_;
};

class HttpServer::Impl::Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(Impl* server, tcp::socket socket) : server_(server), socket_(std::move(socket)) {}

  void Begin() {
    if (server_->access_.tls != nullptr) {
      Wait(State::kHandshake, server_->options_.head_seconds);
    } else {
      Wait(State::kIdle, server_->options_.idle_seconds);
    }
    Read();
  }

  // Answers that there are too many connections, and ends.
  void Refuse() {
    is_refused_ = true;
    if (server_->access_.tls != nullptr) return Begin();  // it could not read it yet
    RefuseFull();
  }

  bool is_idle() const { return state_ == State::kIdle || state_ == State::kHandshake; }
  bool is_refused() const { return is_refused_; }
  bool may_be_closed() const {
    return state_ == State::kHandshake || state_ == State::kIdle || state_ == State::kHead ||
           state_ == State::kBody || state_ == State::kLinger;
  }
  Clock::time_point since() const { return since_; }

  // Has room, and waits for more, which another gets before.
  bool waits_to_grow() const { return state_ == State::kRoom && room_ > 0 && server_->growing_ != this; }

  // Sends less than it has room for.
  bool is_slow(Clock::time_point now) const {
    return state_ == State::kBody && now - since_ > Seconds(kAlone + static_cast<double>(length_) / kSlowest);
  }

  void RefuseBusy() {
    RefuseUnread(503, "the server is busy with " + std::to_string(server_->body_bytes_) +
                          " bytes of other requests; send smaller ones, or retry later");
  }

  void CloseIfLate(Clock::time_point now) {
    if (state_ == State::kAnswer) {
      if (is_lost_) RefuseUnread(500, "internal error; the server's log has more");
      return;
    }
    if (now < until_) return;
    if (state_ != State::kRoom) {
      if (state_ != State::kIdle && state_ != State::kLinger) server_->Count(&Impl::late_);
      return Close();
    }
    RefuseBusy();
  }

  // Of an idle one: reads what has arrived, and no more. A client that has not asked yet has a moment for it.
  void EndInput() {
    if (!has_asked_) {
      until_ = since_ + Seconds(kGrace);
      return;
    }
    asio::error_code ignored;
    socket_.shutdown(tcp::socket::shutdown_receive, ignored);
  }

  void Close() {
    if (state_ == State::kClosed) return;
    if (state_ == State::kAnswer) server_->Count(&Impl::in_progress_, -1);
    state_ = State::kClosed;
    if (tls_) tls_->SayEnd();
    asio::error_code ignored;
    socket_.shutdown(tcp::socket::shutdown_both, ignored);
    socket_.close(ignored);
    FreeRoom();
    server_->Forget(shared_from_this());
  }

  // Takes its share of the bytes of all bodies if there is room.
  bool TakeRoom() {
    if (state_ != State::kRoom) return true;
    // One that needs more later is alone, so that no two wait for the room that the other has. Where one lost
    // that right because its client is slow, and both wait, that one goes.
    const bool may_grow = !is_whole_ && (chunks_ || request_.unpacked);
    if (may_grow && server_->growing_ != nullptr && server_->growing_ != this) return false;
    Connection* const growing = server_->growing_;
    if (may_grow) server_->growing_ = this;
    while (server_->body_bytes_ - room_ + length_ > server_->options_.body_bytes) {
      if (server_->growing_ == this && server_->RefuseGrowing()) continue;
      server_->growing_ = growing;
      return false;
    }
    server_->body_bytes_ += length_ - room_;
    room_ = length_;
    if (is_whole_) {
      Ask();
    } else {
      ReadBody();
    }
    return true;
  }

 private:
  enum class State : uint8_t { kHandshake, kIdle, kHead, kRoom, kBody, kAnswer, kWrite, kLinger, kClosed };

  void Wait(State state, double seconds) {
    state_ = state;
    since_ = Clock::now();
    until_ = since_ + Seconds(seconds);
  }

  // Waits until there is something to read, which needs no memory; or until TLS can write what it must
  // before.
  void Read(tcp::socket::wait_type until = tcp::socket::wait_read) {
    if (reads_) return;
    reads_ = true;
    socket_.async_wait(until, [self = shared_from_this()](asio::error_code error) {
      self->reads_ = false;
      if (self->state_ == State::kClosed) return;
      if (error) return self->Close();
      self->OnReadable();
    });
  }

  void OnReadable() {
    if (state_ == State::kRoom || state_ == State::kAnswer || state_ == State::kWrite) return;
    if (state_ == State::kHandshake) return Handshake();
    const size_t n = Receive();
    if (n == 0) return;
    server_->bytes_in_ += n;
    if (state_ == State::kLinger) return Read();
    const std::string_view got(server_->input_.data(), n);
    if (state_ == State::kBody) {
      if (chunks_) {
        rest_ = got;
        return ReadChunks(&*chunks_);
      }
      const size_t wanted = std::min(length_ - request_.body.size(), n);
      request_.body.append(got.substr(0, wanted));
      rest_ = got.substr(wanted);
      return ReadBody();
    }
    rest_.append(got);
    ReadHead();
  }

  // Into input_; 0 if nothing has come, or the connection has ended.
  size_t Receive() {
    size_t n = 0;
    if (tls_) {
      const TlsSocket::Step step = tls_->Read(server_->input_.data(), server_->input_.size(), &n);
      if (step != TlsSocket::Step::kDone) GoOn(step);
      return n;
    }
    asio::error_code error;
    n = socket_.read_some(asio::buffer(server_->input_), error);
    if (error == asio::error::would_block) {
      Read();
    } else if (error || n == 0) {
      Close();
    }
    return n;
  }

  // After TLS could not do what it was to do.
  void GoOn(TlsSocket::Step step) {
    if (step == TlsSocket::Step::kEnd) return Close();
    Read(step == TlsSocket::Step::kWritable ? tcp::socket::wait_write : tcp::socket::wait_read);
  }

  void Handshake() {
    if (!tls_) {
      char first = 0;
      const ssize_t n = recv(socket_.native_handle(), &first, 1, MSG_PEEK);
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Read();
      if (n < 1) return Close();
      if (first != static_cast<char>(kTlsHandshake)) {
        server_->Count(&Impl::handshakes_);
        return RefuseUnread(400, "this server takes encrypted connections only: ask https://");
      }
      tls_ = std::make_unique<TlsSocket>(server_->access_.tls, socket_.native_handle());
    }
    const TlsSocket::Step step = tls_->Handshake();
    if (step == TlsSocket::Step::kEnd) server_->Count(&Impl::handshakes_);
    if (step != TlsSocket::Step::kDone) return GoOn(step);
    if (is_refused_) return RefuseFull();
    Wait(State::kIdle, server_->options_.idle_seconds);
    if (server_->ends_idle_) EndInput();
    Read();
  }

  // Whether the token is the right one where one is needed.
  bool IsAllowed(const HttpHead& head) const {
    const HttpOptions& options = server_->options_;
    const std::string& wanted = server_->access_.token;
    return wanted.empty() || IsSameSecret(TokenOf(head), wanted) ||
           std::find(options.open_targets.begin(), options.open_targets.end(), request_.target) !=
               options.open_targets.end();
  }

  // A request begins, or goes on, in rest_.
  void ReadHead() {
    if (state_ == State::kIdle) {
      if (rest_.empty()) return Read();
      request_.method.clear();
      Wait(State::kHead, server_->options_.head_seconds);
    }
    if (rest_.compare(0, 2, "\r\n") == 0) rest_.erase(0, 2);
    const size_t size = FindHttpHead(std::string_view(rest_).substr(0, kHttpHeadBytes));
    if (size == 0) {
      if (rest_.size() < kHttpHeadBytes) return Read();
      return RefuseUnread(431, "the headers are longer than " + std::to_string(kHttpHeadBytes) + " bytes");
    }
    HttpHead head;
    std::string problem;
    const unsigned refused = ParseHttpHead(std::string_view(rest_).substr(0, size), &head, &problem);
    rest_.erase(0, size);
    if (refused != 0) return RefuseUnread(refused, problem);
    OnHead(&head);
  }

  void OnHead(HttpHead* head) {
    has_asked_ = true;
    keeps_alive_ = head->keeps_alive;
    expects_continue_ = head->expects_continue;
    request_.method = std::move(head->method);
    request_.target = std::move(head->target);
    request_.body.clear();
    request_.unpacked.reset();
    request_.json_length = head->json_length.value_or("");
    length_ = 0;
    is_whole_ = false;
    chunks_.reset();
    reading_ = {};
    if (!IsAllowed(*head))
      return RefuseUnread(401, std::string("this server needs a token, and ") +
                                   (head->authorization ? "another one was sent" : "none was sent") +
                                   ": send the header Authorization: Bearer TOKEN");
    const bool is_get = request_.method == "GET";
    if (!is_get && request_.method != "POST")
      return RefuseUnread(501, "Unsupported method ('" + request_.method + "')");
    const std::string coding = head->content_coding.value_or("");
    const bool is_gzip = coding == "gzip" || coding == "x-gzip";
    if (!is_get && !is_gzip && !coding.empty() && coding != "identity")
      return RefuseUnread(415, "the body's Content-Encoding is not gzip; send it without one, or with that");
    if (!is_get && is_gzip) request_.unpacked = 0;
    if (head->coding) {
      if (head->length || head->is_old)
        return RefuseUnread(400, "Transfer-Encoding goes neither with Content-Length nor with HTTP/1.0");
      if (*head->coding != "chunked")
        return RefuseUnread(501,
                            "the body's Transfer-Encoding is not chunked; send it without one, or with that");
      chunks_.emplace();
      length_ = std::min(kSmallBody, server_->options_.body_bytes);
      return ReadBody();
    }
    if (!head->length) {
      if (is_get) return ReadBody();
      return RefuseUnread(411, "the request has no Content-Length");
    }
    const std::string& digits = *head->length;
    if (digits.empty() || digits.find_first_not_of("0123456789") != std::string::npos)
      return RefuseUnread(411, "the request has no Content-Length");
    if (digits.size() > kLongestNumber)
      return RefuseTooLong("a number of " + std::to_string(digits.size()) + " digits of");
    length_ = std::stoull(digits);
    if (length_ > server_->options_.body_bytes) return RefuseTooLong(digits);
    if (length_ <= kSmallBody) return ReadBody();
    WaitForRoom();
  }

  void RefuseTooLong(const std::string& bytes) {
    RefuseUnread(413, "the body has " + bytes + " bytes; this server takes " +
                          std::to_string(server_->options_.body_bytes) +
                          ": send fewer examples at a time, or start it with a larger --max-body-bytes");
  }

  // For length_ bytes.
  void WaitForRoom() {
    if (state_ == State::kBody) reading_ += Clock::now() - since_;
    Wait(State::kRoom, server_->options_.patience_seconds);
    if (!TakeRoom()) server_->want_room_.push_back(weak_from_this());
  }

  void ReadBody() {
    if (state_ != State::kBody) {
      Wait(State::kBody, server_->options_.head_seconds + static_cast<double>(length_) / kSlowest);
      until_ -= reading_;
      if (!chunks_) {
        request_.body.reserve(length_);
        const size_t there = std::min(length_, rest_.size());
        request_.body.assign(rest_, 0, there);
        rest_.erase(0, there);
      }
      if (std::exchange(expects_continue_, false) &&
          (chunks_ ? rest_.empty() : request_.body.size() < length_)) {
        constexpr std::string_view kGoOn = "HTTP/1.1 100 Continue\r\n\r\n";
        asio::error_code ignored;  // a client that gets none of it sends its body after a while
        size_t written = 0;
        if (tls_) {
          (void)tls_->Write(kGoOn, &written);
        } else {
          socket_.write_some(asio::buffer(kGoOn), ignored);
        }
      }
    }
    if (chunks_) return ReadChunks(&*chunks_);
    if (request_.body.size() < length_) return Read();
    Unpack();
  }

  // A part of a body in chunks is in rest_. Its length is not known: it has room for length_ bytes, and gets
  // twice as much when they are full.
  void ReadChunks(HttpChunks* chunks) {
    std::string_view input = rest_;
    std::string problem;
    const unsigned refused = chunks->Read(&input, length_, &request_.body, &problem);
    rest_.erase(0, rest_.size() - input.size());
    if (refused != 0) return RefuseUnread(refused, problem);
    if (chunks->is_done()) return Unpack();
    if (!chunks->has_more() || request_.body.size() < length_) return Read();
    const size_t most = server_->options_.body_bytes;
    if (length_ == most) return RefuseTooLong("more than " + std::to_string(most));
    length_ = std::min(2 * length_, most);
    WaitForRoom();
  }

  // Finds out how large the body was before gzip, which are its last bytes (RFC 1952).
  void Unpack() {
    is_whole_ = true;
    if (!request_.unpacked) return Ask();
    const std::string& body = request_.body;
    if (body.size() < kSmallestGzip || body.compare(0, 2, "\x1f\x8b") != 0)
      return RefuseUnread(400, "the body is not gzip, as its Content-Encoding says");
    size_t size = 0;
    for (size_t i = 0; i < sizeof(uint32_t); ++i)
      size |= size_t{static_cast<unsigned char>(body[body.size() - sizeof(uint32_t) + i])} << (8 * i);
    request_.unpacked = size;
    if (size > server_->options_.body_bytes) return RefuseTooLong(std::to_string(size) + " uncompressed");
    length_ = std::max(size, room_);
    if (length_ <= kSmallBody || length_ == room_) return Ask();
    WaitForRoom();
  }

  void Ask() {
    StopGrowth();
    if (request_.method == "POST" && server_->in_progress_ >= server_->options_.requests)
      return Say({503, ErrorJson("the server has as many requests as may wait; retry later")}, false);
    state_ = State::kAnswer;
    since_ = Clock::now();
    server_->Count(&Impl::in_progress_);  // before its answer, which may be how many there are
    asio::post(request_.method == "GET" ? server_->quick_ : server_->work_,
               [self = shared_from_this()] { self->Answer(); });
  }

  void Answer() {  // of another thread
    try {
      HttpReply reply = server_->answer_(request_);
      asio::post(server_->loop_, [self = shared_from_this(), reply = std::move(reply)]() mutable {
        self->Say(std::move(reply), false);
      });
    } catch (const std::exception& problem) {
      std::fprintf(stderr, "error: a request was not answered: %s\n", problem.what());
      is_lost_ = true;  // the next sweep says so: memory may have run out
    }
  }

  void RefuseFull() { RefuseUnread(503, "the server has as many connections as it may have; retry later"); }

  // Ends the connection with an answer, after which the client may still send for a while.
  void RefuseUnread(unsigned status, const std::string& message) { Say({status, ErrorJson(message)}, true); }

  void CountAnswer(const HttpReply& reply) {
    const bool is_known = request_.method == "GET" || request_.method == "POST";
    const bool was_asked = state_ == State::kAnswer;
    if (was_asked && request_.method == "POST") server_->answer_time_.Add(Clock::now() - since_);
    const std::lock_guard<std::mutex> lock(server_->mutex_);
    if (was_asked) --server_->in_progress_;
    ++server_->answers_[{is_known ? request_.method : "none", reply.status}];
    server_->examples_ += reply.examples;
  }

  void Say(HttpReply reply, bool is_unread) {
    if (state_ == State::kClosed) return;
    CountAnswer(reply);
    is_unread_ = is_unread;
    const bool closes = is_unread || !keeps_alive_ || server_->is_ending_;
    Wait(State::kWrite, server_->options_.idle_seconds);
    FreeRoom();
    std::string().swap(request_.body);
    head_ = Head(reply, closes);
    if (request_.method != "HEAD") body_ = std::move(reply.body);
    if (tls_) {
      head_ += std::exchange(body_, {});
      return Write(0, closes);
    }
    const std::array<asio::const_buffer, 2> both{asio::buffer(head_), asio::buffer(body_)};
    asio::async_write(socket_, both, [self = shared_from_this(), closes](asio::error_code error, size_t n) {
      self->server_->bytes_out_ += n;
      self->Said(!error, closes);
    });
  }

  // What follows the first `done` bytes of head_, encrypted.
  void Write(size_t done, bool closes) {
    while (state_ != State::kClosed && done < head_.size()) {
      size_t n = 0;
      const TlsSocket::Step step = tls_->Write(std::string_view(head_).substr(done), &n);
      server_->bytes_out_ += n;
      done += n;
      if (step == TlsSocket::Step::kDone) continue;
      if (step == TlsSocket::Step::kEnd) break;
      return socket_.async_wait(
          step == TlsSocket::Step::kWritable ? tcp::socket::wait_write : tcp::socket::wait_read,
          [self = shared_from_this(), done, closes](asio::error_code error) {
            if (error) return self->Said(false, closes);
            self->Write(done, closes);
          });
    }
    // Later: requests that were sent one behind the other would be calls within calls.
    asio::post(server_->loop_, [self = shared_from_this(), is_whole = done == head_.size(), closes] {
      self->Said(is_whole, closes);
    });
  }

  void Said(bool is_whole, bool closes) {
    if (state_ == State::kClosed) return;
    std::string().swap(body_);
    if (tls_) std::string().swap(head_);
    if (!is_whole) return Close();
    if (closes) return Leave();
    Wait(State::kIdle, server_->options_.idle_seconds);
    if (server_->ends_idle_) EndInput();
    ReadHead();
  }

  // Ends the connection. What the client still sends is read for a while, because TCP would drop the answer
  // with it.
  void Leave() {
    asio::error_code ignored;
    if (!is_unread_ && rest_.empty() && socket_.available(ignored) == 0) return Close();
    if (tls_) tls_->SayEnd();
    socket_.shutdown(tcp::socket::shutdown_send, ignored);
    Wait(State::kLinger, kLinger);
    Read();
  }

  void StopGrowth() {
    if (server_->growing_ != this) return;
    server_->growing_ = nullptr;
    server_->GrantRoom();
  }

  void FreeRoom() {
    StopGrowth();
    if (room_ == 0) return;
    server_->body_bytes_ -= std::exchange(room_, 0);
    server_->GrantRoom();
  }

  Impl* const server_;
  tcp::socket socket_;
  std::unique_ptr<TlsSocket> tls_;  // since the handshake has begun
  State state_ = State::kIdle;
  Clock::time_point since_, until_;
  bool reads_ = false;  // whether Read() waits
  bool has_asked_ = false;
  bool is_refused_ = false;
  bool is_unread_ = false;
  std::atomic<bool> is_lost_{false};  // Answer() has failed
  bool keeps_alive_ = true;
  bool expects_continue_ = false;
  std::string rest_;  // of what was read
  HttpRequest request_;
  size_t length_ = 0;                 // of the body, or of the room for it
  bool is_whole_ = false;             // the body has been read
  std::optional<HttpChunks> chunks_;  // of the body, if it has any
  Clock::duration reading_{};         // of the body, before it waited for room
  size_t room_ = 0;                   // bytes of body_bytes_ that are its own
  std::string head_, body_;           // of the answer
};

void HttpServer::Impl::Accept() {
  accepts_ = true;
  acceptor_.async_wait(tcp::acceptor::wait_read, [this](asio::error_code error) {
    accepts_ = false;  // until the next sweep where memory or descriptors have run out
    while (!error) error = AcceptOne();
    if (error == asio::error::would_block) Accept();
  });
}

// Returns would_block if there is none.
asio::error_code HttpServer::Impl::AcceptOne() {
  asio::error_code error;
  tcp::socket socket = acceptor_.accept(error);
  if (error == asio::error::connection_aborted) return {};
  if (error == asio::error::no_descriptors && MakeRoom()) return {};
  if (!error) Admit(std::move(socket));
  return error;
}

void HttpServer::Impl::Admit(tcp::socket socket) {
  asio::error_code ignored;
  if (refuses_) SetNearest(socket.native_handle(), 0);
  socket.non_blocking(true, ignored);
  socket.set_option(tcp::no_delay(true), ignored);
  if (connections_.size() - refused_ >= options_.connections) (void)MakeRoom();
  const bool is_refused = connections_.size() - refused_ >= options_.connections;
  Count(&Impl::accepted_);
  if (is_refused) Count(&Impl::over_limit_);
  if (is_refused && refused_ == kRefused) return;
  const Shared connection = std::make_shared<Connection>(this, std::move(socket));
  connections_.insert(connection);
  if (is_refused) {
    ++refused_;
    return connection->Refuse();
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++open_;
  }
  connection->Begin();
}

// Closes the connection that has waited longest for its client; false if there is none.
bool HttpServer::Impl::MakeRoom() {
  Shared oldest;
  for (const Shared& connection : connections_) {
    if (connection->is_refused() || !connection->may_be_closed()) continue;
    if (oldest == nullptr || connection->since() < oldest->since()) oldest = connection;
  }
  if (oldest == nullptr) return false;
  Count(&Impl::displaced_);
  oldest->Close();
  return true;
}

void HttpServer::Impl::Forget(const Shared& connection) {
  connections_.erase(connection);
  if (connection->is_refused()) {
    --refused_;
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  --open_;
  changed_.notify_all();
}

void HttpServer::Impl::Sweep() {
  sweep_.expires_after(kSweep);
  sweep_.async_wait([this](asio::error_code error) {
    if (!error) Sweep();
  });
  if (!accepts_ && acceptor_.is_open()) Accept();
  const Clock::time_point now = Clock::now();
  const std::vector<Shared> all(connections_.begin(), connections_.end());
  for (const Shared& connection : all) connection->CloseIfLate(now);
  if (growing_ == nullptr) return;
  if (growing_->is_slow(now)) {
    growing_ = nullptr;
    GrantRoom();
  } else {
    (void)growing_->TakeRoom();  // of those that it waits for, one may wait since
  }
}

// To whom it suffices, first come, first served: nobody waits for those that need more.
void HttpServer::Impl::GrantRoom() {
  frees_room_ = true;
  if (std::exchange(grants_room_, true)) return;  // one that got room has freed some
  struct Reset {
    bool* flag;
    ~Reset() { *flag = false; }
  } const reset{&grants_room_};
  while (std::exchange(frees_room_, false)) {
    for (auto one = want_room_.begin(); one != want_room_.end() && body_bytes_ < options_.body_bytes;) {
      const Shared next = one->lock();
      one = next == nullptr || next->TakeRoom() ? want_room_.erase(one) : std::next(one);
    }
  }
}

// Ends a connection that has room and waits for more; false if there is none.
bool HttpServer::Impl::RefuseGrowing() {
  for (const std::weak_ptr<Connection>& one : want_room_) {
    const Shared connection = one.lock();
    if (connection == nullptr || !connection->waits_to_grow()) continue;
    connection->RefuseBusy();
    return true;
  }
  return false;
}

// Drops packets that would begin a connection, so that none is made, and reset, between the last accept and
// the end: none have been sent from nearer than here. The last packet of a connection that is being made
// still ends that, and the connection has the same bound until Admit().
void HttpServer::Impl::RefuseNewOnes() {
  refuses_ = true;
  SetNearest(acceptor_.native_handle(), UINT8_MAX);
}

void HttpServer::Impl::Stop(double seconds) {
  Answer freed;  // when nothing is held
  const std::lock_guard<std::mutex> lock(stopping_);
  if (!std::exchange(is_started_, false)) {
    asio::error_code ignored;
    acceptor_.close(ignored);
    answer_.swap(freed);
    return;
  }
  const Clock::time_point until = Clock::now() + Seconds(seconds);
  OnLoop([this] { is_ending_ = true; });
  if (seconds > 0) {
    (void)WaitUntilClosed(std::min(seconds, kGrace));
    OnLoop([this] { RefuseNewOnes(); });
    std::this_thread::sleep_for(Seconds(std::min(seconds, kHandshake)));
  }
  const auto close_all = [this](bool also_busy) {
    const std::vector<Shared> all(connections_.begin(), connections_.end());
    for (const Shared& connection : all) {
      if (also_busy) {
        connection->Close();
      } else if (connection->is_idle()) {
        connection->EndInput();
      }
    }
  };
  OnLoop([this, &close_all] {
    while (!AcceptOne()) {
    }
    asio::error_code ignored;
    acceptor_.close(ignored);
    ends_idle_ = true;
    close_all(false);
  });
  if (seconds > 0) (void)WaitUntilClosed(std::chrono::duration<double>(until - Clock::now()).count());
  OnLoop([&close_all] { close_all(true); });
  work_.stop();
  quick_.stop();
  loop_.stop();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  answer_.swap(freed);
}

HttpServer::HttpServer(const HttpOptions& options, Answer answer, Around around)
    : impl_(std::make_unique<Impl>(options, std::move(answer), std::move(around))) {}
HttpServer::~HttpServer() { impl_->Stop(0); }
uint16_t HttpServer::port() const { return impl_->port(); }
nlohmann::json HttpServer::Stats() const { return impl_->Stats(); }
void HttpServer::SetAccess(HttpAccess access) { impl_->SetAccess(std::move(access)); }
void HttpServer::Start() { impl_->Start(); }
void HttpServer::Stop(double seconds) { impl_->Stop(seconds); }

}  // namespace oe
