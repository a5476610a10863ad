// Turns request bodies into calls of a store, and results into reply bodies. Knows no sockets.
#pragma once

#include "oe_runtime/core/server/scratch.h"
#include "oe_runtime/core/server/store.h"
#include "oe_runtime/core/wire/frame.h"
#include "oe_runtime/core/wire/messages.h"

namespace oe {

// What a request is served with.
struct Session {
  Store* store = nullptr;      // that of the client's job
  Scratch* scratch = nullptr;  // nullptr: the server has none
  uint64_t client = 0;         // the number of the connection, from 1
};

// How many bytes the reply to a pull will have; 0 for other requests, of which most have short ones. Throws
// as Serve does.
uint64_t ReplyBytes(const Session& session, Op op, Bytes body);

// Answers one request into *reply, which lies on the connection and is used again. Throws the errors of
// Store and Scratch, and ProtocolError for a body that makes no sense; then nothing has changed. kHello,
// kStats and kShutdown are the connection's own.
void Serve(const Session& session, Op op, Bytes body, Buffer* reply);

}  // namespace oe
