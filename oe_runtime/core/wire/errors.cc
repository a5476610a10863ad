#include "oe_runtime/core/wire/errors.h"

namespace oe {

ErrorCode CodeOf(const std::exception& error) {
  if (dynamic_cast<const SpecError*>(&error) != nullptr) return ErrorCode::kSpec;
  if (dynamic_cast<const SpecMismatch*>(&error) != nullptr) return ErrorCode::kSpecMismatch;
  if (dynamic_cast<const KeyRangeError*>(&error) != nullptr) return ErrorCode::kKeyRange;
  if (dynamic_cast<const StorageFull*>(&error) != nullptr) return ErrorCode::kStorageFull;
  if (dynamic_cast<const StorageError*>(&error) != nullptr) return ErrorCode::kStorage;
  if (dynamic_cast<const CheckpointError*>(&error) != nullptr) return ErrorCode::kCheckpoint;
  if (dynamic_cast<const AuthError*>(&error) != nullptr) return ErrorCode::kAuth;
  if (dynamic_cast<const ProtocolError*>(&error) != nullptr) return ErrorCode::kProtocol;
  if (dynamic_cast<const GradientError*>(&error) != nullptr) return ErrorCode::kGradient;
  if (dynamic_cast<const WorkerLost*>(&error) != nullptr) return ErrorCode::kWorker;
  if (dynamic_cast<const TooManyConnections*>(&error) != nullptr) return ErrorCode::kConnections;
  if (dynamic_cast<const TornError*>(&error) != nullptr) return ErrorCode::kTorn;
  return ErrorCode::kInternal;
}

std::string TornText(const std::string& reason) {
  return "a change may be in some tables or servers only: " + reason +
         "; go back to a checkpoint by recover or restore";
}

void ThrowAs(ErrorCode code, const std::string& message) {
  switch (code) {
    case ErrorCode::kSpec:
      throw SpecError(message);
    case ErrorCode::kSpecMismatch:
      throw SpecMismatch(message);
    case ErrorCode::kKeyRange:
      throw KeyRangeError(message);
    case ErrorCode::kStorage:
      throw StorageError(message);
    case ErrorCode::kCheckpoint:
      throw CheckpointError(message);
    case ErrorCode::kAuth:
      throw AuthError(message);
    case ErrorCode::kProtocol:
      throw ProtocolError(message);
    case ErrorCode::kGradient:
      throw GradientError(message);
    case ErrorCode::kWorker:
      throw WorkerLost(message);
    case ErrorCode::kConnections:
      throw TooManyConnections(message);
    case ErrorCode::kTorn:
      throw TornError(message);
    case ErrorCode::kStorageFull:
      throw StorageFull(message);
    case ErrorCode::kInternal:
      break;
  }
  throw Error(message);
}

}  // namespace oe
