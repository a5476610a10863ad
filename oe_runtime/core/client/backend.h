// The peer of a client: servers over sockets, or stores in its own process. Both do the same with the same
// messages, and throw the same errors.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "oe_runtime/core/server/store.h"
#include "oe_runtime/core/wire/buffer.h"
#include "oe_runtime/core/wire/messages.h"
#include "oe_runtime/core/wire/tls_mode.h"
#include "oe_runtime/core/wire/worker_spec.h"

namespace oe {

// What packs of saved files hold (checkpoint/table_pack.h), by name.
using Contents = std::map<std::string, std::string>;

// One server's part of a batch.
struct ServerBatch {
  std::vector<BatchEntry> entries;
  std::vector<KeyBlock> blocks;
  std::vector<std::byte*> values;       // per entry: where its rows go (pull), where its gradients are (push)
  std::vector<size_t> bytes;            // per entry: how many
  std::vector<const uint32_t*> counts;  // of a push, per entry: of its keys, or nullptr (Table::Push)
  // Per entry, the dtype of the values if they lose nothing in two bytes each, else kFloat32.
  std::vector<Dtype> packs;
  bool skip = false;  // nothing goes to this server
};

// One server's part of a request for rows by key, in the caller's memory.
struct ServerRows {
  uint32_t table = 0;  // its id there
  KeyBlock keys;
  std::byte* weights = nullptr;  // where they go (read), or where they are (assign)
  size_t weights_bytes = 0;
  bool with_states = false;  // whether the optimizer's are brought or wanted
  std::byte* states = nullptr;
  size_t states_bytes = 0;
  uint8_t* found = nullptr;  // of a read, see Table::ReadRows
  RowStrides strides;        // of values that TakesInPlace() takes
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual uint32_t servers() const = 0;
  // The table's id on each server.
  virtual std::vector<uint32_t> CreateTable(const TableSpec& spec) = 0;
  // Throws SpecError naming a server that takes no gradients of two bytes.
  virtual void RequireHalves() const {}
  // Memory for values of batches, which suits the way that they take.
  virtual Buffer NewBuffer(size_t bytes) { return Buffer(bytes); }
  // Tells those servers what is going to be pulled that read it ahead (Op::kReadAhead). Of the batches,
  // entries and blocks are used.
  virtual bool reads_ahead() const { return false; }
  virtual void ReadAhead(const std::vector<ServerBatch>& /*batches*/) {}
  // One batch per server. Returns when every server has answered.
  virtual void Pull(const std::vector<ServerBatch>& batches) = 0;
  // After a push that may have changed some of the servers only, all of them are torn (Store::Tear).
  virtual void Push(const std::vector<ServerBatch>& batches) = 0;
  // Why the servers are torn, as far as this client alone knows it: it could not tell all of them.
  virtual std::string torn() const { return ""; }
  virtual void Tear(const std::string& reason) = 0;
  // Store::Assign, Store::Erase and Store::ReadRows on every server whose part has keys; sums of all. What is
  // assigned has been checked (Table::Assign).
  virtual Table::AssignCounts Assign(const std::vector<ServerRows>& parts) = 0;
  virtual uint64_t Erase(const std::vector<ServerRows>& parts) = 0;
  virtual void ReadRows(const std::vector<ServerRows>& parts) = 0;
  // With one server, whether its part of rows by key takes values where the caller has them: one after the
  // other, if `dense`, else with RowStrides. Otherwise they are copied into or out of a NewBuffer().
  virtual bool TakesInPlace(const std::byte* values, bool dense) const = 0;
  // The keys of a part of a table on all servers (Table::Keys); ids[s] is the table's id on server s.
  virtual std::vector<Key> Keys(const std::vector<uint32_t>& ids, uint32_t part) = 0;
  // An array, see Store::Save. `since` is the directory of the last save, or empty. Every change of another
  // client (a push, rows by key, a recovery, a restore) is in it on all servers or on none, also of a
  // Checkpoint(). Both throw TornError if the servers do not have the same changes. With `contents`, files
  // that take little memory need not be written: it gets what they hold, by name.
  virtual nlohmann::json Save(const std::string& directory, const std::string& since, Contents* contents) = 0;
  virtual void Restore(const std::vector<std::string>& directories) = 0;
  // Store::ApplyIncrement, of each server.
  virtual void ApplyIncrement(std::vector<Increment>* increment) = 0;
  // As Store's, on every server; Checkpoints() are those that all servers have.
  virtual void WaitDurable() = 0;
  virtual void Checkpoint(uint64_t id, bool wait) = 0;
  virtual std::vector<uint64_t> Checkpoints() = 0;
  virtual void Recover(uint64_t id) = 0;
  // Store::Drop of tables (none named: of all) of this client's job or of `job`, on every server; how many
  // parts of tables there were, or nothing if other workers' request has dropped them. `force`: even if the
  // job has other clients.
  virtual std::optional<uint64_t> Drop(const std::vector<std::string>& tables,
                                       const std::optional<std::string>& job, bool force) = 0;
  virtual uint64_t Evict() = 0;        // Store::Evict on every server; their sum
  virtual nlohmann::json Stats() = 0;  // an array, one object per server
  // SharedValues::Exchange on the first server.
  virtual SharedReply ExchangeShared(const SharedRequest& request) = 0;
  virtual void Leave() = 0;     // this worker pushes no more: the others go on without it
  virtual void Shutdown() = 0;  // ends the servers
  virtual void Close() = 0;     // ends this client
};

// The ids that are in all of several ascending lists.
std::vector<uint64_t> CommonIds(const std::vector<std::vector<uint64_t>>& lists);

// `servers` stores in this process, over one storage.
std::unique_ptr<Backend> NewLocalBackend(const StorageSpec& storage, uint32_t servers, ThreadPool* pool);

struct RemoteOptions {
  std::vector<std::string> endpoints;  // "host:port"; the order is the servers' index
  uint32_t of = 0;                     // servers that there are, if `endpoints` are the first of them; else 0
  std::string token;
  std::string job;               // whose tables this client works on; the servers' other jobs have their own
  WorkerSpec worker;             // which of the job's workers this is
  TlsMode tls = TlsMode::kAuto;  // auto: encrypted, but for servers on loopback
  bool read_only = false;        // the servers refuse whatever would change something
  // Whether rows and gradients lie in memory that servers of this host see too, where that can be had; not
  // with TlsMode::kOn, which wants everything encrypted.
  bool share_memory = true;
  double timeout = 60;  // seconds that a server may take to answer, besides waiting for other workers
  // Whether checkpoints travel over the connections, between directories that only one side each can see.
  bool wire_checkpoints = false;
  // Called about five times per second during a wait; may throw to end it, which closes the connections.
  std::function<void()> check_interrupt;
};

// Connects and says hello to every server. Throws SpecError for endpoints that cannot be right, ServerLost,
// AuthError, ProtocolError, and CheckpointError for a server that cannot do wire_checkpoints.
std::unique_ptr<Backend> NewRemoteBackend(const RemoteOptions& options, ThreadPool* pool);

}  // namespace oe
