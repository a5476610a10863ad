// What one message cannot hold goes in several, one round of messages to all servers after the other.
#pragma once

#include <cstdint>
#include <vector>

#include "oe_runtime/core/client/backend.h"

namespace oe {

using Rounds = std::vector<std::vector<ServerBatch>>;

// Of keys, counts and values, the bytes of the server that has the most.
uint64_t LargestBytes(const std::vector<ServerBatch>& batches);

// A pull may be split anywhere between rows. No server has more than `most` bytes in a round, or one row.
Rounds RoundsOfPull(const std::vector<ServerBatch>& batches, uint64_t most);

// The push of a table is one push on every server, however large; those to several tables may come one after
// the other. Throws SpecError for a table that has more than `most` bytes for one server.
Rounds RoundsOfPush(const std::vector<ServerBatch>& batches, uint64_t most);

}  // namespace oe
