#pragma once

#include <cstddef>
#include <string>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/wire/buffer.h"

namespace oe {

// Throws ProtocolError for JSON that nests deeper than any of ours, which have three levels: each one of
// '[[[[' takes 80 times its byte once it is parsed, and a frame of the stack when it is written. `what` is
// the JSON.
inline void CheckNesting(Bytes text, const std::string& what) {
  constexpr int kMost = 16;
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size; ++i) {
    const auto c = static_cast<char>(text.data[i]);
    if (c == '"') quoted = !quoted;
    if (quoted) {
      if (c == '\\') ++i;
    } else if (c == '[' || c == '{') {
      if (++depth > kMost) throw ProtocolError(what + " nests more than 16 JSON arrays and objects");
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
}

}  // namespace oe
