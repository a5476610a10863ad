// Table files, and those of admission filters, on their way between this machine's disk and servers that
// cannot see it: all servers at once, chunk by chunk (the requests are in wire/messages.h). Memory is bounded
// by a few chunks per server, but for filters that are sent, which are here as a whole.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "oe_runtime/core/client/backend.h"
#include "oe_runtime/core/client/exchange.h"
#include "oe_runtime/core/common/shard.h"
#include "oe_runtime/core/common/thread_pool.h"
#include "oe_runtime/core/spec/spec.h"

namespace oe {

// One request to every server whose call is not skipped; throws for what a server refuses.
using Ask = std::function<void(Op op, std::vector<Call>* calls)>;

// The JSON of a server's reply. Throws ProtocolError naming the endpoint.
nlohmann::json ParseJsonReply(const std::string& endpoint, Bytes text);

// What a server has replied to Op::kSave: the list of files, and after a line feed those that it has not
// written, which become a pack of *contents; nullptr if none may come. Throws ProtocolError for a list that
// is not that of the server, and CheckpointError for another content than it promises.
nlohmann::json ReadSaved(const std::string& endpoint, Bytes reply, const ShardInfo& shard,
                         Contents* contents);

// Brings what every server has saved (saved[s] is its Store::Save) into the directory, which must exist; each
// file appears when all are here and their checksums were right. Throws CheckpointError naming the file, with
// nothing left behind, and ProtocolError for a list that is not that of server s.
void FetchTables(const std::vector<nlohmann::json>& saved, const std::string& directory, const Ask& ask,
                 ThreadPool* pool);

// Sends every server its keys' rows of the tables, from files that any number of servers wrote, a full save
// and its increments in order; the servers have not restored them yet when this returns. All files are
// verified before the first byte goes out. Throws CheckpointError naming the file and what is wrong.
void SendTables(const std::map<std::string, TableSpec>& tables, const std::vector<std::string>& directories,
                uint32_t servers, const Ask& ask, ThreadPool* pool);

}  // namespace oe
