#include "oe_runtime/core/front/http_head.h"

#include <algorithm>
#include <utility>

namespace oe {
namespace {

bool IsOfToken(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
}

bool IsToken(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), IsOfToken);
}

std::string Lower(std::string_view text) {
  std::string lower(text);
  for (char& c : lower)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return lower;
}

std::string_view Trim(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

// Cuts off and returns what is before `end`, or all.
std::string_view Cut(std::string_view* text, std::string_view end) {
  const size_t at = text->find(end);
  const std::string_view before = text->substr(0, at);
  text->remove_prefix(at == std::string_view::npos ? text->size() : at + end.size());
  return before;
}

unsigned ParseRequestLine(std::string_view line, HttpHead* head, std::string* problem) {
  const std::string_view method = Cut(&line, " ");
  const std::string_view target = Cut(&line, " ");
  const bool is_visible =
      std::all_of(target.begin(), target.end(), [](char c) { return c > ' ' && c < '\x7f'; });
  if (!IsToken(method) || target.empty() || !is_visible || line.substr(0, 5) != "HTTP/") {
    *problem = "the first line is not METHOD TARGET HTTP/1.1";
    return 400;
  }
  if (line != "HTTP/1.1" && line != "HTTP/1.0") {
    *problem = "this server speaks HTTP/1.1";
    return 505;
  }
  head->method = method;
  head->target = target;
  head->is_old = line == "HTTP/1.0";
  head->keeps_alive = !head->is_old;
  return 0;
}

// Of a header that may come once.
unsigned Keep(const std::string& name, std::string value, std::optional<std::string>* kept,
              std::string* problem) {
  if (*kept) {
    *problem = "the request has " + name + " twice";
    return 400;
  }
  *kept = std::move(value);
  return 0;
}

unsigned ParseField(std::string_view line, HttpHead* head, std::string* problem) {
  const size_t colon = line.find(':');
  const std::string_view name = line.substr(0, colon);
  if (colon == std::string_view::npos || !IsToken(name)) {
    *problem = "a header is not NAME: VALUE";
    return 400;
  }
  const std::string_view value = Trim(line.substr(colon + 1));
  if (std::any_of(value.begin(), value.end(), [](char c) { return c == '\0' || c == '\r' || c == '\n'; })) {
    *problem = "a header has a control character";
    return 400;
  }
  const std::string lower = Lower(name);
  if (lower == "content-length") {
    return Keep("Content-Length", std::string(value), &head->length, problem);
  } else if (lower == "transfer-encoding") {
    return Keep("Transfer-Encoding", Lower(value), &head->coding, problem);
  } else if (lower == "content-encoding") {
    return Keep("Content-Encoding", Lower(value), &head->content_coding, problem);
  } else if (lower == "authorization") {
    return Keep("Authorization", std::string(value), &head->authorization, problem);
  } else if (lower == "inference-header-content-length") {
    return Keep("Inference-Header-Content-Length", std::string(value), &head->json_length, problem);
  } else if (lower == "expect") {
    head->expects_continue = !head->is_old && Lower(value) == "100-continue";
  } else if (lower == "connection") {
    const std::string options = Lower(value);
    std::string_view rest = options;
    while (!rest.empty()) {
      const std::string_view option = Trim(Cut(&rest, ","));
      if (option == "close") head->closes = true;
      if (option == "keep-alive") head->keeps_alive = true;
    }
    if (head->closes) head->keeps_alive = false;
  }
  return 0;
}

}  // namespace

size_t FindHttpHead(std::string_view text) {
  const size_t end = text.find("\r\n\r\n");
  return end == std::string_view::npos ? 0 : end + 4;
}

unsigned ParseHttpHead(std::string_view text, HttpHead* head, std::string* problem) {
  text.remove_suffix(2);  // the empty line
  unsigned refused = ParseRequestLine(Cut(&text, "\r\n"), head, problem);
  for (size_t fields = 0; refused == 0 && !text.empty(); ++fields) {
    if (fields == kHttpFields) {
      *problem = "the request has more than " + std::to_string(kHttpFields) + " headers";
      return 431;
    }
    refused = ParseField(Cut(&text, "\r\n"), head, problem);
  }
  return refused;
}

}  // namespace oe
