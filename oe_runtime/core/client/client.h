// The client of one training process: ids in, rows out; gradients in. Python's Client is a thin cover over
// it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/client/backend.h"
#include "oe_runtime/core/client/bags.h"
#include "oe_runtime/core/client/gradients.h"
#include "oe_runtime/core/client/pairs.h"
#include "oe_runtime/core/client/plan.h"
#include "oe_runtime/core/wire/buffer.h"

namespace oe {

// Counts of the requests of a client that change rows.
struct Changes {
  uint64_t pushes = 0;
  uint64_t others = 0;  // restores, evictions, and others after which rows must be pulled again
};

// The result of a pull. Immutable once it is handed out, except for the rows, which belong to the caller.
struct PulledBatch {
  BatchPlan plan;
  std::vector<Buffer> rows;      // per group: rows x dim floats, or doubles
  const void* client = nullptr;  // who made it; table ids mean nothing to another

  std::optional<Changes> state;  // as of which the rows are; none before the first Refresh
  uint64_t pushed_as = 0;        // which of the client's pushes it was, from 1
  // Set by Follow: the batch that will be pushed before this one is used, and the rows that both have.
  std::shared_ptr<const PulledBatch> before;
  Overlap shared;
};

// Thread-safe: requests of several threads go out one after the other.
class Client {
 public:
  // threads: for unique and sums; 0 = one per core, at most 8.
  static std::unique_ptr<Client> InProcess(const StorageSpec& storage, uint32_t servers, unsigned threads);
  static std::unique_ptr<Client> Connect(const RemoteOptions& options, unsigned threads);

  uint32_t servers() const { return servers_; }

  // Idempotent. The id counts this client's tables from 0. Throws SpecError, SpecMismatch.
  uint32_t CreateTable(const TableSpec& spec);
  // Removes tables from the servers, of this client's job or of `job`; without names all. Ids of others stay;
  // this client's ids of those throw SpecError from then on. Refused while the job has other clients, unless
  // `force`: they get SpecError. Several workers all ask for the same; it is done once, when the last has
  // asked. How many parts of tables there were; nothing if another worker's request has dropped them.
  std::optional<uint64_t> Drop(const std::vector<std::string>& tables, const std::optional<std::string>& job,
                               bool force);
  // Gives no table an id below `next` from now on: a client that reconnects does so for those of tables that
  // were dropped, which must not reach others.
  void SkipTables(uint32_t next);
  // The specification of a table, every default filled in. Throws SpecError for an id that does not exist.
  TableSpec Spec(uint32_t table) const;

  std::shared_ptr<PulledBatch> Pull(const std::vector<IdsView>& ids,
                                    const std::vector<std::pair<uint32_t, uint32_t>>& lookups);
  // The two halves of Pull, so that a batch can be prepared while another one computes. Plan asks no server
  // and leaves the rows undefined; Refresh brings them up to date, but for the last `staleness` pushes of
  // this client. When nothing has changed since the rows were pulled but by the push of the batch that
  // `Follow` named, only the rows that both have are pulled; all of a table with eviction, where a push may
  // change others, and everything with several workers, whose pushes this client does not see. Throws
  // SpecError for another client's batch. One thread at a time may do this to one batch.
  std::shared_ptr<PulledBatch> Plan(const std::vector<IdsView>& ids,
                                    const std::vector<std::pair<uint32_t, uint32_t>>& lookups);
  void Refresh(PulledBatch* batch, uint64_t staleness = 0);
  // Whether some server reads ahead: then ReadAhead tells the servers what is going to be pulled next, after
  // what is under way, and they read its rows from the drive meanwhile. Returns at once. Nothing but time is
  // lost where it is not pulled. Another call takes the place of one that the servers have not read yet.
  // Throws SpecError for another client's batch, and what a pull would throw.
  bool reads_ahead() const { return backend_->reads_ahead(); }
  void ReadAhead(const std::vector<std::shared_ptr<PulledBatch>>& pulls);
  void Follow(PulledBatch* batch, std::shared_ptr<const PulledBatch> before);
  Pairs PairsOf(const PlannedGroup& group) { return FindPairs(group, &pool_); }
  // A row for each id of a group's lookups, in the order of its inverse: ids x dim values into `out`.
  void Embeddings(const PulledBatch& batch, size_t group, void* out);
  // See bags.h; the rows are the batch's.
  void PoolBags(const PulledBatch& batch, size_t group, const std::vector<Bags>& bags);
  void SumBags(const PulledBatch& batch, size_t group, const std::vector<Bags>& bags, void* sums);
  // A row's gradient is that of `of_rows` and of all its ids in the order of their positions; a view may be
  // missing where there is the other.
  // learning_rates: one for all, or one per group. Every server has applied its part when this returns;
  // otherwise it throws, and if some may have, TornError is all that pushes, checkpoints, saves and evictions
  // get until Restore or Recover; none has after GradientError. With several workers, synchronous: every
  // server has its part, and applies it once it has the other workers' (server/workers.h).
  void Push(PulledBatch& pulled, const std::vector<GradientView>& of_ids,
            const std::vector<double>& learning_rates, const std::vector<GradientView>& of_rows = {});
  // The rows of the keys as they come, duplicates included, into out[n * dim], doubles of a float64 table.
  // Nothing is made unique: with one server each row is copied once, if `out` is a NewBuffer() or there is no
  // connection.
  void PullRows(uint32_t table, const Key* keys, size_t n, void* out);

  // Rows as they are (Table::Assign): weights[n * dim], and states[n * state_values] of the optimizer unless
  // it is nullptr. Goes out in pieces of bounded size. All keys and values are checked first: throws
  // KeyRangeError and SpecError (a key twice, a number that is not finite) before anything changes; after
  // another error some of the rows may have been written, and the message says how many.
  Table::AssignCounts Assign(uint32_t table, const Key* keys, size_t n, const void* weights,
                             const void* states, const RowStrides& strides = {});
  // What Assign() checks before anything changes, but for keys that are there twice; throws as it does.
  void CheckRows(uint32_t table, const Key* keys, size_t n, const void* weights, const void* states,
                 const RowStrides& strides = {});
  // The most rows that an eviction cap lets a table have.
  uint64_t MostRows(uint32_t table) const;
  // Removes rows; how many of the keys had one.
  uint64_t Erase(uint32_t table, const Key* keys, size_t n);
  // See Table::ReadRows; duplicates allowed. From one server, values that lie one after the other come right
  // where they belong.
  void ReadRows(uint32_t table, const Key* keys, size_t n, void* weights, void* states, uint8_t* found,
                const RowStrides& strides = {});
  // Numbers of the optimizer's state that a row of the table has.
  size_t StateValues(uint32_t table) const;

  // Memory that servers on this host write to, too.
  Buffer NewBuffer(size_t bytes) { return backend_->NewBuffer(bytes); }

  // All keys of a table that have a row, in no order.
  std::vector<Key> Keys(uint32_t table);
  // Those of one of Table::kParts parts.
  std::vector<Key> Keys(uint32_t table, uint32_t part);

  // See Backend::Save.
  nlohmann::json Save(const std::string& directory, const std::string& since = "",
                      Contents* contents = nullptr);
  void Restore(const std::vector<std::string>& directories);
  void Restore(const std::string& directory) { Restore(std::vector<std::string>{directory}); }
  // Store::ApplyIncrement; for a client in one process.
  void ApplyIncrement(std::vector<Increment>* increment);
  // Why the job is torn, as far as only this client knows it; a new one has to be told (Store::Tear).
  std::string torn();
  void Tear(const std::string& reason);
  // Checkpoints in the storage of the servers (Store::Checkpoint).
  void Checkpoint(uint64_t id, bool wait);
  // Those that every table of every server has, ascending.
  std::vector<uint64_t> Checkpoints();
  // All go back to `id`, or without one to the newest that all have. Throws CheckpointError if there is none.
  uint64_t Recover(std::optional<uint64_t> id);
  // Table::Evict of every table on every server; how many rows went.
  uint64_t Evict();
  nlohmann::json Stats();
  // SharedValues::Exchange (server/shared_values.h) on the first server.
  SharedReply ExchangeShared(const SharedRequest& request);
  // Of a job with several workers: this one pushes no more, and the others' batches are complete without it.
  void Leave();
  void Shutdown();
  void Close();

 private:
  explicit Client(unsigned threads);
  // The entries of every server in the order of the groups; `values` points into the given array of each
  // group.
  std::vector<ServerBatch> Batches(const BatchPlan& plan, const std::vector<std::byte*>& groups,
                                   const std::vector<double>& learning_rates, bool push) const;
  // Adds to `batches` how often each key is in the lookups, for the tables that count; returns what they
  // point to.
  std::vector<std::vector<uint32_t>> AddCounts(const BatchPlan& plan,
                                               std::vector<ServerBatch>* batches) const;

  // The keys from `begin` on of a call for rows by key: each server's part of them, without values.
  struct RowsPiece {
    size_t begin = 0;
    std::vector<ServerRows> parts;
    // Of several servers; with one, its part is the caller's keys as they come.
    std::vector<std::vector<Key>> keys;
    std::vector<std::vector<size_t>> positions;  // of the keys in the call
  };
  // Calls `work` for one piece of the keys after the other.
  void ForEachPiece(uint32_t table, const Key* keys, size_t n, size_t bytes_of_key,
                    const std::function<void(RowsPiece*)>& work);
  // Between the caller's memory and the parts of a piece: those whose values cannot go from or to where the
  // caller has them get memory of their own, which `CopyRows` fills from there, or copies there.
  struct RowColumns;
  void PlaceRows(const RowColumns& columns, RowsPiece* piece, std::vector<Buffer>* memory) const;
  enum class Way : uint8_t { kToServers, kToCaller };
  void CopyRows(const RowColumns& columns, const RowsPiece& piece, Way way);
  std::vector<ServerBatch> BatchesToPull(const BatchPlan& plan, std::vector<Buffer>* rows) const;
  void PullInto(const BatchPlan& plan, std::vector<Buffer>* rows);  // under request_mutex_

  ThreadPool pool_;
  std::unique_ptr<Backend> backend_;
  uint32_t servers_ = 0;
  bool several_workers_ = false;
  std::mutex request_mutex_;  // one request at a time
  // Changed under request_mutex_.
  std::atomic<uint64_t> pushes_{0};
  std::atomic<uint64_t> others_{0};

  struct Opened {
    TableSpec spec;
    std::vector<uint32_t> server_ids;  // per server
    Dtype pulls = Dtype::kFloat32;     // ServerBatch::packs of a pull
    Dtype pushes = Dtype::kFloat32;    // and of a push
  };
  // Under tables_mutex_. Throws SpecError for an id that was never given, or whose table was dropped.
  const Opened& Get(uint32_t table) const;

  mutable std::mutex tables_mutex_;
  std::map<uint32_t, Opened> tables_;  // by id
  uint32_t next_table_ = 0;            // ids are not used again
};

}  // namespace oe
