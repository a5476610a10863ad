// A server of HTTP/1.1: one thread reads and writes for all connections, others compute the answers. Bodies
// are as long as their Content-Length says, or in chunks, and may be compressed; it knows nothing of what is
// asked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

namespace oe {

class TlsContext;

struct HttpRequest {
  std::string method;  // GET or POST
  std::string target;
  std::string body;
  // Bytes of the body that gzip made this one of, as it says itself; nothing if it is as it was.
  std::optional<size_t> unpacked;
  // Inference-Header-Content-Length: of the JSON at the body's beginning, before other bytes; empty if none.
  std::string json_length;
};

struct HttpReply {
  unsigned status = 200;
  std::string body;
  std::string type = "application/json";
  uint64_t examples = 0;   // that it answers, for Stats()
  size_t json_length = 0;  // as of a request; 0: the body has no other bytes behind it
};

// What clients need, which may change.
struct HttpAccess {
  std::shared_ptr<TlsContext> tls;  // of a certificate; null: connections are not encrypted
  std::string token;                // "Authorization: Bearer TOKEN"; empty: none is needed
};

struct HttpOptions {
  std::string host;
  uint16_t port = 0;
  size_t connections = 0;  // beyond, the one that has waited longest for its client is closed
  size_t requests = 0;     // POST that are computed or wait for it; more are refused with 503 at once
  // Of a body; and of all above 64 KiB that are read and answered at a time.
  size_t body_bytes = 0;
  double head_seconds = 0;      // for the head of a request; for its body, in addition to size / (1 MiB/s)
  double idle_seconds = 0;      // between requests of a connection, and for a client to read an answer
  double patience_seconds = 0;  // that a body waits for others
  unsigned threads = 0;         // that answer POST; GET has one of its own
  std::vector<std::string> open_targets;  // answered without a token
};

class HttpServer {
 public:
  // Called on several threads. An exception is answered with 500, and ends the connection.
  using Answer = std::function<HttpReply(const HttpRequest&)>;
  // Calls its argument, which answers requests until the server ends, on a thread of its own.
  using Around = std::function<void(const std::function<void()>&)>;

  // Listens; throws Error. Answers after Start().
  HttpServer(const HttpOptions& options, Answer answer, Around around);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  uint16_t port() const;
  // Counts since the creation. Thread-safe:
  //   requests.METHOD.STATUS  answers; the method is "none" for what is no request, or over the limit
  //   examples                of answers
  //   in_progress             requests that wait for an answer or are computed
  //   traffic                 bytes_in, bytes_out
  //   connections             open, accepted, and closed by the server, by reason: refused (over the limit),
  //                           displaced (by a new one), late (in the middle of a request or an answer),
  //                           handshake (of TLS, which failed)
  //   times.answer            from the last byte of a POST to its answer (see TimesOf())
  nlohmann::json Stats() const;
  // For later connections and requests. Thread-safe.
  void SetAccess(HttpAccess access);
  void Start();
  // Ends in order: for at most `seconds`, requests that were sent are answered and their connections ended,
  // and for a moment also others', because clients learn the end from the last answer. Returns when no answer
  // is computed any more, and Answer is freed.
  void Stop(double seconds);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace oe
