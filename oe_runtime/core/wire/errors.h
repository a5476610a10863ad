// Errors of the network side, and the codes under which every error crosses the wire, so that a client raises
// the same class as a table in its own process would.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

#include "oe_runtime/core/common/error.h"

namespace oe {

// A table exists already with another specification.
class SpecMismatch : public Error {
 public:
  using Error::Error;
};

// The token is not the server's.
class AuthError : public Error {
 public:
  using Error::Error;
};

// The peer sent something that this version of the protocol does not allow.
class ProtocolError : public Error {
 public:
  using Error::Error;
};

// A push is in some of the job's tables or servers only: nothing more is pushed, saved or checkpointed before
// the job has gone back.
class TornError : public Error {
 public:
  using Error::Error;
};

// A worker of the job is lost, or did not do in time what this one waits for; the message names the ranks.
class WorkerLost : public Error {
 public:
  using Error::Error;
};

// A server does not answer, or its connection broke.
class ServerLost : public Error {
 public:
  ServerLost(std::string endpoint, const std::string& message)
      : Error(message), endpoint_(std::move(endpoint)) {}
  const std::string& endpoint() const { return endpoint_; }

 private:
  std::string endpoint_;  // "host:port"
};

// A server has as many connections as it takes.
class TooManyConnections : public Error {
 public:
  using Error::Error;
};

enum class ErrorCode : uint32_t {
  kInternal = 1,
  kSpec = 2,
  kSpecMismatch = 3,
  kKeyRange = 4,
  kStorage = 5,
  kCheckpoint = 6,
  kAuth = 7,
  kProtocol = 8,
  kGradient = 9,
  kWorker = 10,
  kTorn = 11,
  kStorageFull = 13,
  kConnections = 14,
};

ErrorCode CodeOf(const std::exception& error);

// The message of a TornError.
std::string TornText(const std::string& reason);

// Throws the class that belongs to the code; an unknown code (a newer server's) becomes a plain Error.
[[noreturn]] void ThrowAs(ErrorCode code, const std::string& message);

}  // namespace oe
