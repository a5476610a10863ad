// Turns request bodies into calls of a store, and results into reply bodies. Knows no sockets.
#pragma once

#include "oe_runtime/core/server/store.h"
#include "oe_runtime/core/wire/frame.h"
#include "oe_runtime/core/wire/messages.h"

namespace oe {

// Answers one request into *reply, which lies on the connection and is used again. Throws the errors of
// Store, and ProtocolError for a body that makes no sense; then nothing has changed. kHello, kStats and
// kShutdown are the connection's own.
void Serve(Store* store, Op op, Bytes body, Buffer* reply);

}  // namespace oe
