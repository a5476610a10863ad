// Turns request bodies into calls of a store, and results into reply bodies. Knows no sockets.
#pragma once

#include "oe_runtime/core/server/jobs.h"
#include "oe_runtime/core/server/scratch.h"
#include "oe_runtime/core/wire/frame.h"
#include "oe_runtime/core/wire/messages.h"

namespace oe {

// What a request is served with.
struct Session {
  Job* job = nullptr;
  Scratch* scratch = nullptr;  // nullptr: the server has none
  uint64_t client = 0;         // the number of the connection, from 1
  uint64_t seen = 0;           // Fence::Change; at first the same number
  bool worker = false;         // whether the client is one of the job's workers
  bool reads_only = false;     // whether it said so in its hello
  Jobs* jobs = nullptr;        // all of the server's
  // What the client shares (wire/shared_memory.h), which it may change at any time.
  std::byte* shared = nullptr;
  size_t shared_size = 0;
};

// Throws SpecError for an operation that a session that reads only may not do.
void CheckMay(const Session& session, Op op);

// Workers::Ready for what the request is; true for clients that are no workers. Throws as Serve does.
bool Ready(const Session& session, Op op, Bytes body, Workers::Resume later);

// How many bytes the reply to a pull will have, without what goes to shared memory; 0 for other requests, of
// which most have short ones. Throws as Serve does.
uint64_t ReplyBytes(const Session& session, Op op, Bytes body);

// Answers one request that is Ready into *reply, which lies on the connection and is used again; *body may be
// taken. Throws the errors of Store, Scratch and Workers, and ProtocolError for a body that makes no sense;
// then nothing has changed. kHello, kStats, kShutdown and kShare are the connection's own.
void Serve(Session* session, Op op, Buffer* body, Buffer* reply);

}  // namespace oe
