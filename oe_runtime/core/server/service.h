// Turns request bodies into calls of a store, and results into reply bodies. Knows no sockets.
#pragma once

#include <functional>

#include "oe_runtime/core/server/jobs.h"
#include "oe_runtime/core/server/pass.h"
#include "oe_runtime/core/server/scratch.h"
#include "oe_runtime/core/wire/frame.h"
#include "oe_runtime/core/wire/messages.h"

namespace oe {

// The context in which a request is served.
struct Session {
  Job* job = nullptr;
  Scratch* scratch = nullptr;          // nullptr: the server has none
  uint64_t client = 0;                 // the number of the connection, from 1
  uint64_t seen = 0;                   // Fence::Change
  bool worker = false;                 // whether the client is one of the job's workers
  bool batched = false;                // whether its pushes are shares of batches of all workers
  bool reads_only = false;             // whether it said so in its hello
  uint16_t version = kOldestProtocol;  // that both sides speak (wire/frame.h)
  Jobs* jobs = nullptr;                // all of the server's
  // What the client shares (wire/shared_memory.h), which it may change at any time.
  std::byte* shared = nullptr;
  size_t shared_size = 0;
  Pass* pass = nullptr;  // of what must not wait; nullptr: it may
};

// Throws SpecError for an operation that a session that reads only may not do.
void CheckMay(const Session& session, Op op);

// Workers::Ready for what the request is; true for clients that are no workers. Throws as Serve does.
bool Ready(const Session& session, Op op, Bytes body, Workers::Resume later);

// Whether it changes tables, and its client sends it to all servers: then Cut orders it, but for the shares
// of batches, which the workers order.
bool IsOrdered(const Session& session, Op op);

// How many bytes the reply to a pull will have, without what goes to shared memory, and those that a push
// takes to widen gradients of two bytes; 0 for other requests, of which most have short replies. Throws as
// Serve does.
uint64_t ReplyBytes(const Session& session, Op op, Bytes body);

// Whether serving it may take long or wait for long, so that it needs a thread of its own: what writes or
// reads files or all rows of a table, or wants a table alone. All others are served at once, or not yet.
bool IsSlow(Op op);

enum class Served : uint8_t {
  kDone,
  kLater,  // nothing has happened; it is to be served again when session.pass is granted
  kRest,   // *rest is to be called, on a thread that may wait, before the reply goes out; it throws as Serve
};

// Answers one request that is Ready into *reply, which lies on the connection and is used again; *body may be
// taken. Throws the errors of Store, Scratch and Workers, and ProtocolError for a body that makes no sense;
// then nothing has changed. kHello, kStats, kShutdown, kShare, kSession and kReadAhead are the connection's
// own.
Served Serve(Session* session, Op op, Buffer* body, Buffer* reply, std::function<void()>* rest = nullptr);

}  // namespace oe
