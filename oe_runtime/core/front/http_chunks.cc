#include "oe_runtime/core/front/http_chunks.h"

#include <algorithm>
#include <charconv>

namespace oe {
namespace {

constexpr size_t kLine = 256;       // bytes of a size with its extensions
constexpr size_t kTrailer = 8192;   // bytes of the fields behind the last chunk, which are dropped
constexpr size_t kSizeDigits = 15;  // hexadecimal

}  // namespace

unsigned HttpChunks::Read(std::string_view* input, size_t most, std::string* body, std::string* problem) {
  while (!input->empty() && state_ != State::kDone) {
    if (state_ == State::kData) {
      const size_t room = most - std::min(most, body->size());
      const size_t n = std::min({input->size(), room, static_cast<size_t>(left_)});
      if (n == 0) return 0;
      body->append(input->substr(0, n));
      input->remove_prefix(n);
      left_ -= n;
      if (left_ == 0) state_ = State::kDataEnd;
      continue;
    }
    if (!TakeLine(input)) {
      const bool is_trailer = state_ == State::kTrailer;
      if (line_.size() < (is_trailer ? kTrailer : kLine)) return 0;
      *problem =
          is_trailer ? "the fields behind the last chunk are too long" : "the size of a chunk is too long";
      return 400;
    }
    const unsigned refused = ReadLine(problem);
    if (refused != 0) return refused;
  }
  return 0;
}

// Adds to line_ up to its end; false if more must come.
bool HttpChunks::TakeLine(std::string_view* input) {
  const size_t most = state_ == State::kTrailer ? kTrailer : kLine;
  const size_t end = input->find('\n');
  const size_t n = std::min(end == std::string_view::npos ? input->size() : end + 1, most - line_.size());
  line_.append(input->substr(0, n));
  input->remove_prefix(n);
  return !line_.empty() && line_.back() == '\n';
}

unsigned HttpChunks::ReadLine(std::string* problem) {
  const size_t size = line_.size();
  const bool ends_well = size >= 2 && line_[size - 2] == '\r';
  line_.resize(ends_well ? size - 2 : size);
  const std::string line = std::move(line_);
  line_.clear();
  const bool has_control = std::any_of(
      line.begin(), line.end(), [](char c) { return static_cast<unsigned char>(c) < ' ' && c != '\t'; });
  if (!ends_well || has_control) {
    *problem = "a line between chunks does not end with CR LF, or has a control character";
    return 400;
  }
  switch (state_) {
    case State::kSize: {
      const std::string_view digits = std::string_view(line).substr(0, line.find_first_of("; \t"));
      const auto [after, error] = std::from_chars(digits.data(), digits.data() + digits.size(), left_, 16);
      const std::string_view more = std::string_view(line).substr(digits.size());
      const size_t extension = more.find_first_not_of(" \t");
      if (digits.empty() || digits.size() > kSizeDigits || error != std::errc() ||
          after != digits.data() + digits.size() ||
          (extension != std::string_view::npos && more[extension] != ';')) {
        *problem = "a chunk does not begin with its size in hexadecimal digits";
        return 400;
      }
      state_ = left_ == 0 ? State::kTrailer : State::kData;
      return 0;
    }
    case State::kDataEnd:
      if (!line.empty()) {
        *problem = "a chunk is longer than its size";
        return 400;
      }
      state_ = State::kSize;
      return 0;
    default:
      trailer_ += size;
      if (trailer_ > kTrailer) {
        *problem = "the fields behind the last chunk are too long";
        return 400;
      }
      if (line.empty()) state_ = State::kDone;
      return 0;
  }
}

}  // namespace oe
