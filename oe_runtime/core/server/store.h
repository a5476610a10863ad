// The tables of one server: what a server process serves over its socket, and what an in-process client
// calls.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "oe_runtime/core/checkpoint/table_chain.h"
#include "oe_runtime/core/common/fair_shared_mutex.h"
#include "oe_runtime/core/common/thread_pool.h"
#include "oe_runtime/core/server/pass.h"
#include "oe_runtime/core/table/table.h"

namespace oe {

// Rows of one table that a request reads (values is written) or gradients that it pushes (values is read).
template <typename Value>
struct TablePart {
  uint32_t table = 0;  // id from CreateTable
  const Key* keys = nullptr;
  size_t size = 0;
  Value* values = nullptr;  // size * dim floats, or doubles of a float64 table
  double learning_rate = 0;
  const uint32_t* counts = nullptr;  // of a push, see Table::Push
  bool packed = false;               // of a pull, see Table::Pull
};
using PullPart = TablePart<void>;
using PushPart = TablePart<const void>;

// Thread-safe; no lock is held over more than the list of tables while tables work.
struct Increment;

class Store {
 public:
  // `pool` must outlive the store. Tables of another `job` in the same storage are not this store's.
  Store(std::shared_ptr<Storage> storage, ShardInfo shard, ThreadPool* pool, std::string job = "");

  // The id of the table. The same specification again gives the same id; another one under the same name
  // throws SpecMismatch naming the first field that differs and both values.
  uint32_t CreateTable(const TableSpec& spec);
  // Removes the table of that name, or without a name all tables, from memory and storage, and returns how
  // many there were. Ids of other tables stay valid; those of removed tables throw SpecError. A request that
  // uses the table right now finishes on the old rows.
  uint64_t Drop(const std::optional<std::string>& name);
  // The same as CreateTable, but SpecError for a table that does not exist.
  uint32_t OpenTable(const TableSpec& spec) const;
  std::vector<std::string> TableNames() const;
  // Bytes of the weights or the gradient of a key, as pulls and pushes have them. Here and below, throws
  // ProtocolError for an id that CreateTable never gave.
  size_t WireBytes(uint32_t table) const;
  // The same of the optimizer's state.
  size_t StateBytes(uint32_t table) const;
  Dtype DtypeOf(uint32_t table) const;
  // Whether pushes to the table bring counts (policy/policy_spec.h).
  bool Counts(uint32_t table) const;

  void Pull(const std::vector<PullPart>& parts);
  // In two steps, for callers that must not wait: first the locks, false if they are not all there, then the
  // pull or push itself, without what Check says.
  bool LockPull(const std::vector<PullPart>& parts, Pass* pass) const;
  void PullLocked(const std::vector<PullPart>& parts);
  // Table::ReadAhead of each; values are not used.
  void ReadAhead(const std::vector<PullPart>& parts, const std::function<bool()>& wanted) const;
  bool LockPush(std::vector<uint32_t> tables, Pass* pass) const;
  void PushLocked(const std::vector<PushPart>& parts);
  // Checks every key, gradient and learning rate before any table changes. Only a storage that fills up, or
  // memory that does, can leave some tables pushed and others not; the error says so, and the store is torn.
  void Push(const std::vector<PushPart>& parts);
  // What Push checks before any table changes; throws as it does.
  void Check(const std::vector<PushPart>& parts) const;
  // Each element has the pushes of several workers to one table, in the order of their ranks: their gradients
  // and counts are summed by key, in this order, and applied as one push. The caller has LockPush() of these
  // tables.
  void PushSums(const std::vector<std::vector<PushPart>>& tables);

  // A store is torn when a push is in some of its tables only, or in some only of the servers that share it:
  // then Push, Check, Evict, Save and Checkpoint throw TornError with the first reason, until Restore or
  // Recover has put back every table.
  void Tear(const std::string& reason);
  void Mend();
  void RequireIntact() const;
  // Says to Versions() that a push is under way, as long as it lives; within the store's life.
  struct PushEnds {
    void operator()(std::atomic<uint64_t>* pushing) const { pushing->fetch_sub(1); }
  };
  using Pushing = std::unique_ptr<std::atomic<uint64_t>, PushEnds>;
  Pushing CountPush() {
    pushing_.fetch_add(1);
    return Pushing(&pushing_);
  }
  uint64_t pushing() const { return pushing_.load(); }
  // {"torn": the reason or null, "pushing": how many pushes are under way, or recoveries and restores,
  // "tables": {name: [version, the one that Restore or Recover last put back, or null, origins]}}: what tells
  // several servers of one job whether they have the same rows. The origins of a table are [text, sum],
  // oldest first: what it started from (nothing, a checkpoint, a save) and its checkpoints since then, each
  // with the sum of all changes by Assign and Erase since; null for what is unknown. Servers that have no
  // text in common have rows of different moments.
  nlohmann::json Versions() const;
  // See Table. Keys are unique. `change` counts in Versions() once the rows are changed
  // (RowsRequest::change). Of several servers it goes to all, also to those with n = 0.
  Table::AssignCounts Assign(uint32_t table, const Key* keys, size_t n, const void* weights,
                             const void* states, uint64_t change = 0, const RowStrides& strides = {},
                             bool checked = false);
  uint64_t Erase(uint32_t table, const Key* keys, size_t n, uint64_t change = 0);
  void ReadRows(uint32_t table, const Key* keys, size_t n, void* weights, void* states, uint8_t* found,
                const RowStrides& strides = {}) const;

  // Table::Upkeep of all tables. Call it when a pull was answered.
  void Upkeep() noexcept;
  // Table::Scrub of every table, until pace(bytes) is false. `bytes` were read since the last call; pace()
  // waits as long as that may take.
  bool Scrub(const std::function<bool(uint64_t bytes)>& pace);
  // Table::Evict of every table; returns how many rows were evicted.
  uint64_t Evict();

  // See Table::Keys. Throws ProtocolError for a part that does not exist.
  std::vector<Key> Keys(uint32_t table, uint32_t part) const;
  // How many these are now. Throws as Keys().
  uint64_t CountKeys(uint32_t table, uint32_t part) const;

  // Writes one file per table into the directory, which must exist, and beside those with admission their
  // filters. Returns a JSON array of {file, table, server, servers, rows, version, bytes, checksum, spec},
  // and with a filter {filter: {file, bytes, checksum}}. With `since`, the TableChecksums of the last save,
  // the file is an increment where it can be (Table::Save); its entry has {base, tombstones} too.
  // Without `durable` a power cut may lose the files. With `contents`, files that take little memory together
  // are not written: it gets what they hold, in the order of the array, for the caller to write.
  nlohmann::json Save(const std::string& directory, const nlohmann::json& since, bool durable = true,
                      std::vector<std::string>* contents = nullptr) const;
  // Loads every table from the files that Save of any number of servers wrote: a full one and its increments,
  // in order. Verifies all files of all tables before the first table changes. Throws CheckpointError. `save`
  // names what is restored (NameOfSave) where these files are only this server's part of it; "" is unknown.
  void Restore(const std::vector<std::string>& directories, const std::optional<std::string>& save = {});

  // Brings every table from the state of the last restore, or of the last call of this, to that of a save
  // with `since` of as many servers. Checks all tables before the first one changes. Throws CheckpointError
  // for one that does not follow, StorageError where the rows do not fit; then some tables may have changed.
  void ApplyIncrement(Increment* increment);

  // Checkpoints in the storage itself (Table::Checkpoint), of all tables under one id. A push that runs
  // meanwhile may be in the checkpoint of one table and not in that of another. With `wait`, durable at
  // return.
  void Checkpoint(uint64_t id, bool wait);
  // Returns when all checkpoints so far are durable. Throws StorageError why one cannot be.
  void WaitDurable() const;
  // The ids of the durable checkpoints that every table has, ascending.
  std::vector<uint64_t> Checkpoints() const;
  // All tables go back to a checkpoint that every one of them has. Throws CheckpointError before the first
  // changes if one has not; StorageError.
  void Recover(uint64_t id);

  // JSON; oe_runtime/server/metrics.py documents it field by field.
  nlohmann::json Stats() const;

  const Storage& storage() const { return *storage_; }
  const ShardInfo& shard() const { return shard_; }
  unsigned threads() const { return pool_->threads(); }

 private:
  struct History {
    using Changes = std::optional<uint64_t>;  // the sum of their numbers; nullopt: not all had one
    std::optional<uint64_t> base;             // the version that was last put back
    std::string start;                        // what the table started from; empty: unknown
    Changes changes = 0;                      // since then
    // Since then, but those that no server can come back with any more; and the changes after each.
    std::map<uint64_t, Changes> checkpoints;
  };

  std::shared_ptr<Table> Get(uint32_t id) const;
  void CheckKeptCheckpoints(const std::string& table) const;
  std::optional<uint32_t> FindTable(const TableSpec& complete) const;
  std::vector<std::shared_ptr<Table>> Tables() const;
  std::optional<uint64_t> SinceOf(const nlohmann::json& since, const std::string& table) const;

  const std::shared_ptr<Storage> storage_;
  const ShardInfo shard_;
  ThreadPool* const pool_;
  const std::string job_;

  // Restores every table from its origin, one after the other, by put(i); if one fails after others, the
  // store is torn.
  void PutBack(const std::vector<std::shared_ptr<Table>>& tables, const char* what,
               const std::vector<std::string>& origins, const std::function<void(size_t)>& put);
  void NoteCheckpoint(const Table& table, uint64_t id);
  void NoteChange(const Table& table, uint64_t change);

  // Shared: a change of rows by key; exclusive: a checkpoint, which has both the rows and the change or none.
  FairSharedMutex changes_mutex_;
  std::mutex create_mutex_;          // held to make or drop tables, which may take long; before the other
  mutable std::shared_mutex mutex_;  // guards these, not the tables
  std::map<uint32_t, std::shared_ptr<Table>> tables_;  // by id
  // Never an earlier one: a client that holds the id of a dropped table must not reach another table by it.
  uint32_t next_id_ = 0;
  std::map<uint32_t, std::string> dropped_;  // names of the newest dropped tables, for messages

  std::atomic<bool> is_torn_{false};
  std::atomic<uint64_t> pushing_{0};
  mutable std::mutex torn_mutex_;
  std::string torn_;  // why
  std::map<const Table*, History> histories_;

  std::atomic<uint64_t> pulls_{0};
  std::atomic<uint64_t> pulled_keys_{0};
  std::atomic<uint64_t> pushes_{0};
  std::atomic<uint64_t> pushed_keys_{0};
};

// One server's files of a save with `since`, verified. Small ones are held, others are read again.
struct Increment {
  std::string directory;
  struct Part {
    TableFileInfo info;
    std::unique_ptr<TableFileReader> held;
  };
  std::map<std::string, Part> parts;  // by table
};

// Throws CheckpointError for a file that is missing or damaged, and for a row that tables of such a
// StorageSpec::row_precision cannot keep.
Increment ReadIncrement(const std::string& directory, const std::vector<std::string>& tables,
                        const ShardInfo& shard, const std::string& row_precision = "");

// For Store::LockPush.
std::vector<uint32_t> TablesOf(const std::vector<PushPart>& parts);

// "server-0-of-3.wide%2Femb.oet": the name of a table in a file name has only letters, digits, '_' and '-',
// and %XX for anything else.
std::string TableFileName(const std::string& table, const ShardInfo& shard);

// All files of the table in the directory, in the order of their servers. Throws CheckpointError when there
// is none, when some server's is missing, or when there are files of several server counts.
std::vector<std::string> FindTableFiles(const std::string& directory, const std::string& table);

// The chains (checkpoint/table_chain.h) that end in the files of the last directory; the bases of increments
// lie in the directories before it, which are in the order of their saves. Throws CheckpointError as above.
std::vector<TableChain> FindTableChains(const std::vector<std::string>& directories,
                                        const std::string& table);

// Of the files that a directory has of these tables, the checksums by table and server, for Store::Save.
nlohmann::json TableChecksums(const std::string& directory, const std::vector<std::string>& tables);

}  // namespace oe
