#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/executor.h"
#include "oe_runtime/core/common/fair_shared_mutex.h"
#include "oe_runtime/core/common/shard.h"
#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/policy/eviction.h"
#include "oe_runtime/core/storage/row_cache.h"
#include "oe_runtime/core/storage/storage.h"
#include "oe_runtime/core/table/spec.h"

namespace oe {

class AdmissionFilter;
class Damage;
class RowOps;
struct PoolRoom;
class TableChainReader;
struct TableFileInfo;

// What the policies of a table did.
struct PolicyCounts {
  uint64_t admitted = 0;                    // rows that were made
  uint64_t not_admitted = 0;                // keys in pushes that the filter did not let in (yet)
  uint64_t no_room = 0;                     // keys in pushes that the cap did not let in
  std::map<std::string, uint64_t> evicted;  // rows by policy
  uint64_t filter_bytes = 0;                // DRAM of the filter now
  uint64_t forgotten = 0;                   // keys that the filter counted and then forgot
  uint64_t clock_jumps = 0;                 // TtlClock::jumps
};

// One server's part of an embedding table. Every method is safe to call from any thread: a pull runs beside
// pulls and pushes, pushes run beside each other (a row sees them one after the other), a save makes pushes
// wait, a restore makes everything wait only while it exchanges the content.
class Table {
 public:
  // A table in `storage`, which the tables of one server share: without rows, or, if the storage recovers and
  // has a pool of that name and `job`, with those of its newest checkpoint. Throws SpecError, StorageError
  // (also for a pool that is damaged or of another spec or shard, naming the file and the field).
  static std::unique_ptr<Table> Create(const TableSpec& spec, std::shared_ptr<Storage> storage,
                                       ShardInfo shard = {}, const std::string& job = "");
  // The same in a storage of its own (a pmem_libpmem directory is shared within the process all the same).
  static std::unique_ptr<Table> Create(const TableSpec& spec, const StorageSpec& storage,
                                       ShardInfo shard = {});

  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // Complete: every default is filled in.
  const TableSpec& spec() const { return spec_; }
  const ShardInfo& shard() const { return shard_; }

  // What Pull and Push hold shared. Whoever must not wait inside them, or wants several tables at once, takes
  // it before (the tables in one order) and says so. A save, a restore and a recovery hold them alone: the
  // first of them for as long as it writes the file.
  enum class Lock : uint8_t { kTake, kHeld };
  FairSharedMutex* pull_lock() const { return &content_mutex_; }
  FairSharedMutex* push_lock() const { return &push_mutex_; }

  // Weights and gradients are double for float64 tables and float for all others.

  // Writes the weights of n keys (duplicates allowed) to out[n * dim], row after row. Never inserts: a key
  // without a row reads its initializer's value, or the default_value of spec().admission. Throws
  // KeyRangeError (array) and SpecError for a key of another server.
  void Pull(const Key* keys, size_t n, void* out, Executor* executor = nullptr,
            Lock locked = Lock::kTake) const;

  // What spec().nonfinite_gradients says of the gradients of a push: with "refuse", throws GradientError
  // naming the key of the first with NaN or infinity. Push does not ask again, so that whoever pushes to
  // several tables can ask them all before the first one changes.
  void CheckGradients(const Key* keys, size_t n, const void* grads, Executor* executor = nullptr) const;

  // Throws SpecError for a learning rate that no push can have.
  void CheckLearningRate(double learning_rate) const;

  // Applies the optimizer to n unique keys with grads[n * dim], creating rows that are missing, unless a
  // policy of spec() refuses them. counts[i] is how often keys[i] was in the batch; without, once. Counts
  // version() up by one, also for n = 0: with several servers, each must see every push for Adam's step to
  // agree. Throws KeyRangeError, SpecError (a key of another server, a bad learning rate) and StorageError
  // (no room for new rows); then no row's value and not the version has changed, but rows may have been
  // evicted.
  void Push(const Key* keys, size_t n, const void* grads, double learning_rate, Executor* executor = nullptr,
            const uint32_t* counts = nullptr, Lock locked = Lock::kTake);

  // What became of the rows of an Assign() besides those that were written.
  struct AssignCounts {
    uint64_t created = 0;  // of those that were written: had no row before
    uint64_t evicted = 0;  // other rows, for which the cap had no room any more
    uint64_t no_room = 0;  // of the call: not written, as the cap is full of rows of the same call
  };
  // Writes the rows of n unique keys as they are: weights[n * dim], and states[n * state_values()], the
  // optimizer's state, unless it is nullptr: then rows keep theirs, and those that are missing get that of a
  // new row. Missing rows are made, whatever admission says; a cap of rows holds. For eviction, each has been
  // pushed once now. No push: version() stays. Pushes wait meanwhile. Throws KeyRangeError, SpecError (a key
  // of another server, a number that is not finite) and StorageError; then no row has other weights or state
  // than before, but rows may have been made or evicted.
  AssignCounts Assign(const Key* keys, size_t n, const void* weights, const void* states,
                      Executor* executor = nullptr);
  // Removes the rows of the keys; how many there were. Throws as Assign(); after StorageError, some are gone.
  uint64_t Erase(const Key* keys, size_t n, Executor* executor = nullptr);
  // Weights, and the optimizer's state unless `states` is nullptr, each row at one moment; found[i] is
  // whether keys[i] has a row: where it has none, they are those of a new one. Throws as Pull().
  void ReadRows(const Key* keys, size_t n, void* weights, void* states, uint8_t* found,
                Executor* executor = nullptr) const;
  // Numbers of the optimizer's state of a row.
  size_t state_values() const;

  // Removes the rows that global_step, l2_weight and ttl of spec() say, and returns how many. Save() does the
  // same first. So does Push() for a policy with every_steps, in a sixteenth of the table in turn every
  // every_steps pushes: a slice of it after each of them (Eviction::Due), so that no push takes long and
  // tables of any storage and any number of servers have the same rows. Pushes wait for a few thousand rows
  // at a time. Throws StorageError where the storage has no room for what must be written down of that.
  uint64_t Evict();
  // What policies did since the table was made.
  PolicyCounts policy_counts() const;
  // The clock of ttl; another one before the first push, for tests.
  void UseClock(TtlClock::Seconds wall, TtlClock::Seconds steady) {
    clock_.Use(std::move(wall), std::move(steady));
  }

  // For dram_pmem: takes rows that were read into the cache, and puts others out. To be called when a pull
  // has been answered, so that nobody waits for it; what it has not done is done in the next push.
  void Upkeep(Executor* executor = nullptr);

  // For tables in pools. Checks the rows from *position on (all zeros at first), which moves on, against
  // their checksums, and repairs or quarantines those that are damaged, which are counted and logged. To be
  // called again and again, by one thread. False after the last row, and for a table in no pool.
  struct ScrubPosition {
    uint32_t shard = 0;
    uint64_t of_shard = 0;
  };
  bool Scrub(ScrubPosition* position, uint64_t* bytes);
  struct DamageCounts {
    uint64_t quarantined = 0;    // rows that were damaged and are gone; since the table was made
    uint64_t repaired = 0;       // that were damaged, and nothing is lost
    uint64_t scrubbed_rows = 0;  // that Scrub() checked
    uint64_t scrubs = 0;         // how many times it was through with all
  };
  DamageCounts damage_counts() const;

  // The keys with a row in one of kParts parts of the table, in no order. `part` must be below kParts.
  static constexpr uint32_t kParts = 16;
  std::vector<Key> Keys(uint32_t part) const;
  uint64_t CountKeys(uint32_t part) const;

  uint64_t version() const;  // pushes so far
  // Gradients with NaN or infinity, a row each, that were refused or skipped since the table was made.
  uint64_t nonfinite_gradients() const;
  uint64_t rows() const;         // keys with a row
  uint64_t bytes() const;        // of storage
  uint64_t index_bytes() const;  // of DRAM for the index
  bool is_pmem() const;
  CacheStats cache() const;  // of dram_pmem; otherwise all 0
  // How full the pool of its rows is; nothing without one.
  std::optional<PoolRoom> room() const;
  // Of a saved row: weights, optimizer's state, facts of policies.
  size_t row_bytes() const { return row_bytes_; }

  // Evicts, then writes a self-describing table file (checkpoint/table_file.h), synced to disk, under a
  // temporary name first, and with admission a second one beside it (checkpoint/filter_file.h). With `since`,
  // the checksum of the file that was saved or restored last, it is an increment: the rows written and the
  // keys erased since. For another checksum, or where too much was erased to be remembered, it has all rows.
  // Throws CheckpointError naming the file; then nothing is left of it.
  TableFileInfo Save(const std::string& file, std::optional<uint64_t> since = std::nullopt);

  // Replaces the content with that of all chains (checkpoint/table_chain.h) of one saved table, from any
  // number of servers, with the filters beside them; takes the keys of this shard. Throws CheckpointError
  // naming the file and the field for one that is damaged, incomplete or of another table, StorageError when
  // the rows do not fit beside the present ones; then the content is as before.
  void RestoreChains(const std::vector<std::vector<std::string>>& chains, Executor* executor = nullptr);
  // The same from files that are no increments, one a server.
  void Restore(const std::vector<std::string>& files);

  // Throws CheckpointError unless the file is an increment on the present content, which is that of the last
  // Save, RestoreChains or ApplyIncrement.
  void CheckIncrement(const TableFileInfo& info) const;
  // Erases and writes in place what the increment says; of admission filters nothing. Everything waits
  // meanwhile. Throws as CheckIncrement, with the content as before; StorageError, and CheckpointError for a
  // file that is damaged, with a part of it taken, so that only a restore goes on from there.
  void ApplyIncrement(const std::string& file);

  // Checkpoints in the storage itself, for pmem_libpmem and dram_pmem; for others all but Checkpoints() throw
  // SpecError. What an admission filter counted is part of them.
  //
  // Marks the present content as checkpoint `id` (above that of the last one). Pulls do not wait, pushes for
  // microseconds; durable soon after. Throws SpecError, and StorageError when an earlier checkpoint could
  // not be made durable.
  void Checkpoint(uint64_t id);
  // Returns when all checkpoints so far are durable; throws StorageError why one cannot be.
  void WaitDurable() const;
  // Durable checkpoints that are kept (StorageSpec::kept_checkpoints), oldest first.
  std::vector<CheckpointInfo> Checkpoints() const;
  // When the newest of them became durable, Unix seconds; 0: before this table was made, or there is none.
  int64_t durable_at() const;
  // Pushes that are in no such checkpoint and in no file: what would be lost with this process.
  uint64_t pushes_at_risk() const;
  // The table is nobody's any more: what its storage would keep of it beyond this object is gone, at once.
  void Drop();
  // Goes back to the checkpoint `id`, or without one to the newest (an empty table, if there is none). Later
  // checkpoints and pushes are gone. Where the storage has no counts of a filter for that checkpoint, because
  // their files were taken away or an earlier version made it, they begin at zero. Everything waits
  // meanwhile. Throws StorageError for a checkpoint that is not kept or a pool that is damaged; then the
  // content is as before.
  void Recover(std::optional<uint64_t> id);

 private:
  struct Content;
  struct Plan;

  Table(TableSpec spec, std::shared_ptr<Storage> storage, ShardInfo shard, std::string job);
  PoolSpec NewPoolSpec() const;
  std::string IdentityOf(const std::string& kind, const nlohmann::json& what) const;
  std::unique_ptr<Index> NewIndex(uint32_t internal_shard) const;
  std::unique_ptr<Content> NewContent(bool fresh) const;
  void RecoverContent(std::optional<uint64_t> id);
  Pool& RequirePool() const;
  void RequireWhole() const;
  Plan MakePlan(const Key* keys, size_t n) const;
  size_t PullPiece(const Key* keys, size_t n, std::byte* out) const;
  uint32_t InternalShard(Key key) const;
  [[noreturn]] void RefuseKey(Key key) const;
  void PushFinite(const Key* keys, size_t n, const std::byte* grads, double learning_rate, Executor* executor,
                  const uint32_t* counts, Lock locked);

  // Policies (table_policy.cc).
  static uint32_t TimesOf(const uint32_t* counts, uint32_t at) {
    return counts == nullptr ? 1 : std::max<uint32_t>(1, counts[at]);
  }
  PoolSpec CountsPoolSpec() const;
  void NewFilter(Content* content, bool fresh) const;
  void RecoverFilter(std::optional<uint64_t> id, const std::function<void()>& recover_rows);
  std::array<uint64_t, kParts> ShareOfCap() const;
  void FillMissing(Key key, std::byte* out) const;
  void AddByPolicy(const Plan& plan, size_t begin, size_t end, uint32_t shard, const uint32_t* counts,
                   uint32_t* numbers);
  void AddAssigned(const Plan& plan, size_t begin, size_t end, uint32_t shard, uint32_t* numbers,
                   AssignCounts* counts);
  bool EvictOne(Content* content, uint32_t shard, uint32_t step);
  void KeepCap(Content* content);
  bool Sweep(uint32_t shard, uint32_t reasons, const Index::Range& range, uint64_t* position);
  void SweepQuietly(uint32_t shard, uint32_t reasons, const Index::Range& range);
  void SweepInTurn(uint64_t step);
  bool SweepFilter(uint32_t shard, uint32_t reasons);
  void NoteLoaded(const Content& content);

  TableFileInfo SaveRows(const std::string& file, std::optional<uint64_t> since);
  struct Load;
  bool ReadLoad(TableChainReader* reader, Load* load) const;
  void AddLoad(const Load& load, uint32_t shard, Content* content) const;
  void LoadChain(const std::vector<std::string>& chain, Content* content, Executor* executor) const;

  const TableSpec spec_;
  const std::shared_ptr<Storage> storage_;
  const ShardInfo shard_;
  const std::string job_;
  const std::unique_ptr<const RowOps> ops_;
  const Eviction eviction_;
  const size_t row_bytes_;
  const size_t kept_bytes_;  // of these, from the first on: what the storage has
  const bool is_array_;
  const bool has_policies_;
  const double default_value_;                    // of keys that are not admitted
  const std::array<uint64_t, kParts> most_rows_;  // of each internal shard
  mutable TtlClock clock_;
  const std::shared_ptr<Damage> damage_;

  std::atomic<uint64_t> admitted_{0};
  std::atomic<uint64_t> not_admitted_{0};
  std::atomic<uint64_t> no_room_{0};
  std::vector<std::atomic<uint64_t>> evicted_;  // by Eviction::Reason
  std::atomic<uint64_t> scrubbed_rows_{0};
  std::atomic<uint64_t> scrubs_{0};
  mutable std::atomic<uint64_t> nonfinite_gradients_{0};
  // In this order. Shared: pushes; exclusive: Save, Checkpoint, a slice of Evict, and what exchanges
  // content_.
  mutable FairSharedMutex push_mutex_;
  std::mutex lone_push_mutex_;             // of pushes that may evict, which run one by one
  mutable FairSharedMutex content_mutex_;  // shared: use of content_; exclusive: its exchange
  std::shared_ptr<Content> content_;
};

}  // namespace oe
