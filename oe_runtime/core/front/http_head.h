// The head of a request of HTTP/1.1 (RFC 9112), read strictly: what other programs may understand otherwise
// is refused, so that no proxy and this server see different requests.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace oe {

struct HttpHead {
  std::string method;
  std::string target;
  std::optional<std::string> length;          // Content-Length, as it is
  std::optional<std::string> coding;          // Transfer-Encoding, in lower case
  std::optional<std::string> content_coding;  // Content-Encoding, likewise
  std::optional<std::string> authorization;   // Authorization, as it is
  std::optional<std::string> json_length;     // Inference-Header-Content-Length, as it is
  bool is_old = false;                        // HTTP/1.0
  bool closes = false;                        // whatever else `Connection` says
  bool keeps_alive = true;
  bool expects_continue = false;
};

constexpr size_t kHttpHeadBytes = 64 << 10;
constexpr size_t kHttpFields = 100;

// How many bytes at the beginning of `text` are a whole head with its empty line; 0 if more must come.
size_t FindHttpHead(std::string_view text);

// `text` is what FindHttpHead() found. Returns 0, or the status of its refusal and why in `problem`.
unsigned ParseHttpHead(std::string_view text, HttpHead* head, std::string* problem);

}  // namespace oe
