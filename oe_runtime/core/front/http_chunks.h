// A body in chunks (RFC 9112, 7.1), read strictly like the head.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace oe {

class HttpChunks {
 public:
  // Moves the data at the beginning of `input` to the end of `body`, up to `most` bytes of it, and removes
  // from `input` all that was read. Returns 0, or the status of its refusal and why in `problem`.
  unsigned Read(std::string_view* input, size_t most, std::string* body, std::string* problem);

  // The body is complete; `input` is what follows it.
  bool is_done() const { return state_ == State::kDone; }
  // More data of it is to come.
  bool has_more() const { return state_ == State::kData; }

 private:
  enum class State : uint8_t { kSize, kData, kDataEnd, kTrailer, kDone };

  bool TakeLine(std::string_view* input);
  unsigned ReadLine(std::string* problem);

  State state_ = State::kSize;
  std::string line_;
  uint64_t left_ = 0;   // of the chunk
  size_t trailer_ = 0;  // bytes of it
};

}  // namespace oe
