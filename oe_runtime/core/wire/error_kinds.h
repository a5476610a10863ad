// The classes of errors that cross the wire and reach Python, each once.
#pragma once

#include <exception>
#include <string>

#include "oe_runtime/core/wire/errors.h"

namespace oe {

struct ErrorKind {
  ErrorCode code;
  const char* name;  // in oe_runtime/errors.py
  bool (*is)(const std::exception& error);
  void (*raise)(const std::string& message);
};

template <typename Class>
constexpr ErrorKind KindOfError(ErrorCode code, const char* name) {
  return {code, name,
          [](const std::exception& error) { return dynamic_cast<const Class*>(&error) != nullptr; },
          [](const std::string& message) { throw Class(message); }};
}

// A class comes before its base.
inline constexpr ErrorKind kErrorKinds[] = {
    KindOfError<SpecError>(ErrorCode::kSpec, "SpecError"),
    KindOfError<SpecMismatch>(ErrorCode::kSpecMismatch, "SpecMismatch"),
    KindOfError<KeyRangeError>(ErrorCode::kKeyRange, "KeyRangeError"),
    KindOfError<StorageFull>(ErrorCode::kStorageFull, "StorageFull"),
    KindOfError<StorageError>(ErrorCode::kStorage, "StorageError"),
    KindOfError<CheckpointError>(ErrorCode::kCheckpoint, "CheckpointError"),
    KindOfError<AuthError>(ErrorCode::kAuth, "AuthError"),
    KindOfError<ProtocolError>(ErrorCode::kProtocol, "ProtocolError"),
    KindOfError<GradientError>(ErrorCode::kGradient, "GradientError"),
    KindOfError<WorkerLost>(ErrorCode::kWorker, "WorkerLost"),
    KindOfError<TooManyConnections>(ErrorCode::kConnections, "TooManyConnections"),
    KindOfError<TornError>(ErrorCode::kTorn, "TornError"),
    KindOfError<Error>(ErrorCode::kInternal, "OeError"),
};

}  // namespace oe
