#include "oe_runtime/core/wire/errors.h"

#include "oe_runtime/core/wire/error_kinds.h"

namespace oe {

ErrorCode CodeOf(const std::exception& error) {
  for (const ErrorKind& kind : kErrorKinds) {
    if (kind.is(error)) return kind.code;
  }
  return ErrorCode::kInternal;
}

std::string TornText(const std::string& reason) {
  return "a change may be in some tables or servers only: " + reason +
         "; go back to a checkpoint by recover or restore";
}

void ThrowAs(ErrorCode code, const std::string& message) {
  for (const ErrorKind& kind : kErrorKinds) {
    if (kind.code == code) kind.raise(message);
  }
  throw Error(message);
}

}  // namespace oe
