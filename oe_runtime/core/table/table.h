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
#include "oe_runtime/core/spec/spec.h"
#include "oe_runtime/core/storage/cache_memory.h"
#include "oe_runtime/core/storage/row_log.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {

class TableFileReader;
class AdmissionFilter;
class Damage;
class KeptRows;
class LogReads;
class ReducedWeights;
class RowMap;
class RowOps;
struct LogPoolStats;
struct PoolRoom;
class TableFiles;
class PendingFiles;
struct TableFileInfo;

// What the policies of a table did.
struct PolicyCounts {
  uint64_t admitted = 0;                    // rows that were created
  uint64_t not_admitted = 0;                // keys in pushes that the filter did not admit (yet)
  uint64_t no_room = 0;                     // keys in pushes for which the cap had no room
  std::map<std::string, uint64_t> evicted;  // rows by policy
  uint64_t filter_bytes = 0;                // DRAM of the filter now
  uint64_t forgotten = 0;                   // keys that the filter counted and then forgot
  uint64_t clock_jumps = 0;                 // TtlClock::jumps
};

// Bytes from the values of one key to those of the next, of rows by key in the caller's memory; 0: they lie
// one after the other. So weights and state may be columns of one wider array.
struct RowStrides {
  size_t weights = 0;
  size_t states = 0;
};

// One server's part of an embedding table. Every method is safe to call from any thread. Pulls and pushes run
// beside each other; a row sees pushes one after the other. A save makes pushes wait. A restore makes
// everything wait only while it exchanges the content.
class Table {
 public:
  // Makes a table in `storage`, which the tables of one server share. It is empty, unless the storage
  // recovers and has a pool of that name and `job`: then it has the rows of the newest checkpoint. Throws
  // SpecError and StorageError. For a pool that is damaged, or of another spec or shard, the error names the
  // file and the field.
  static std::unique_ptr<Table> Create(const TableSpec& spec, std::shared_ptr<Storage> storage,
                                       ShardInfo shard = {}, const std::string& job = "");
  // The same in its own storage. (The tables of a process share a pmem_libpmem directory even so.)
  static std::unique_ptr<Table> Create(const TableSpec& spec, const StorageSpec& storage,
                                       ShardInfo shard = {});

  ~Table();
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;

  // Complete: every default is filled in.
  const TableSpec& spec() const { return spec_; }
  const ShardInfo& shard() const { return shard_; }

  // The locks that Pull and Push hold shared. A caller that must not wait inside them, or locks several
  // tables at once, takes them before, in one order of tables, and passes kHeld. A save, a restore and a
  // recovery hold them alone; a save does as long as it writes the file.
  enum class Lock : uint8_t { kTake, kHeld };
  FairSharedMutex* pull_lock() const { return &content_mutex_; }
  FairSharedMutex* push_lock() const { return &push_mutex_; }

  // Weights and gradients are double for float64 tables and float for all others.

  // Writes the weights of n keys (duplicates allowed) to out[n * dim], row after row. Never inserts: a key
  // without a row reads its initializer's value, or the default_value of spec().admission. Throws
  // KeyRangeError (array) and SpecError for a key of another server. `packed`: of a table of halves, as the
  // rows have them, in two bytes each.
  void Pull(const Key* keys, size_t n, void* out, Executor* executor = nullptr, Lock locked = Lock::kTake,
            bool packed = false) const;

  // For dram_ssd: reads rows from the drive that are not in DRAM, for a Pull of the same keys that comes
  // soon. Only where the keys take at most a quarter of the cache, and not while the table is saved or
  // restored. Ends early once `wanted` is false. Throws as Pull(), and StorageError if the drive is gone.
  void ReadAhead(const Key* keys, size_t n, const std::function<bool()>& wanted) const;

  // Checks the gradients of a push as spec().nonfinite_gradients says: with "refuse", throws GradientError
  // that names the key of the first with NaN or infinity. Push does not check them again, so that a caller
  // that pushes to several tables can check all of them before the first one changes.
  void CheckGradients(const Key* keys, size_t n, const void* grads, Executor* executor = nullptr) const;

  // Throws SpecError for a learning rate that no push can have.
  void CheckLearningRate(double learning_rate) const;

  // Applies the optimizer to n unique keys with grads[n * dim]. Creates missing rows, unless a policy of
  // spec() refuses them. counts[i] is how often keys[i] was in the batch; nullptr means once each. Increments
  // version(), also for n = 0: with several servers each must see every push, or Adam's steps differ. Throws
  // KeyRangeError, SpecError (a key of another server, a bad learning rate) and StorageError (no room for new
  // rows). Then neither a row's value nor the version has changed, but rows may have been evicted.
  void Push(const Key* keys, size_t n, const void* grads, double learning_rate, Executor* executor = nullptr,
            const uint32_t* counts = nullptr, Lock locked = Lock::kTake);

  // The result of an Assign().
  struct AssignCounts {
    uint64_t created = 0;  // written rows that did not exist before
    uint64_t evicted = 0;  // other rows that the cap evicted for them
    uint64_t no_room = 0;  // rows that were not written: full of rows of the call, or beyond a lowered cap
  };
  // Writes the rows of n unique keys as they are: weights[n * dim] and states[n * state_values()], the
  // optimizer's state. Without states, rows keep theirs, and missing rows get that of a new row. Creates
  // missing rows, whatever admission says; a cap of rows holds. For eviction, each row counts as pushed once
  // now. version() stays. Pushes wait meanwhile. Throws KeyRangeError, SpecError (a key of another server, a
  // number that is not finite) and StorageError. Then no row has other weights or state than before, but rows
  // may have been created or evicted. `checked`: the caller has looked for numbers that are not finite.
  AssignCounts Assign(const Key* keys, size_t n, const void* weights, const void* states,
                      Executor* executor = nullptr, const RowStrides& strides = {}, bool checked = false);
  // Removes the rows of the keys and returns how many there were. Throws as Assign(); after StorageError,
  // some are gone.
  uint64_t Erase(const Key* keys, size_t n, Executor* executor = nullptr);
  // Reads the weights, and the optimizer's state unless `states` is nullptr, each row at one moment. found[i]
  // says whether keys[i] has a row; without one, the values are those of a new row. Throws as Pull().
  void ReadRows(const Key* keys, size_t n, void* weights, void* states, uint8_t* found,
                Executor* executor = nullptr, const RowStrides& strides = {}) const;
  // How many numbers of optimizer state a row has.
  size_t state_values() const;

  // Sweeps the table: removes the rows that the policies of spec() evict, and returns how many. Save() sweeps
  // first. With every_steps, Push() sweeps a sixteenth of the table in every_steps pushes, a slice after each
  // (Eviction::Due). So no push takes long, and tables of any storage and number of servers have the same
  // rows. Pushes wait for a few thousand rows at a time. Throws StorageError where the storage has no room
  // for the tombstones.
  uint64_t Evict();
  // Counts since the table was made.
  PolicyCounts policy_counts() const;
  // The clock of ttl; another one before the first push, for tests.
  void UseClock(TtlClock::Seconds wall, TtlClock::Seconds steady) {
    clock_.Use(std::move(wall), std::move(steady));
  }

  // For dram_pmem and dram_ssd: moves rows that were read into the cache, and others out. Call it when a pull
  // has been answered, so that no client waits for it. The next push does the rest.
  void Upkeep(Executor* executor = nullptr);

  // For tables in pools and logs: checks some rows from *position on (all zeros at first) against their
  // checksums, and advances it. Damaged rows are repaired or quarantined, counted and logged. One thread
  // calls it repeatedly. False after the last row, and for a table in neither.
  struct ScrubPosition {
    uint32_t shard = 0;
    uint64_t of_shard = 0;
  };
  bool Scrub(ScrubPosition* position, uint64_t* bytes);
  struct DamageCounts {
    uint64_t quarantined = 0;    // rows that were damaged and are gone; since the table was made
    uint64_t repaired = 0;       // damaged rows of which nothing was lost
    uint64_t scrubbed_rows = 0;  // rows that Scrub() checked
    uint64_t scrubs = 0;         // how many times Scrub() checked all rows
  };
  DamageCounts damage_counts() const;

  // The keys with a row in one of kParts parts of the table, in no order. `part` must be below kParts.
  static constexpr uint32_t kParts = 16;
  std::vector<Key> Keys(uint32_t part) const;
  uint64_t CountKeys(uint32_t part) const;

  uint64_t version() const;  // pushes so far
  // Rows of gradients with NaN or infinity that were refused or skipped since the table was made.
  uint64_t nonfinite_gradients() const;
  uint64_t rows() const;         // keys with a row
  uint64_t bytes() const;        // of storage
  uint64_t index_bytes() const;  // of DRAM for the index, and for what a log knows of its rows
  bool is_pmem() const;
  CacheStats cache() const;  // of dram_pmem and dram_ssd; otherwise all 0
  // How full the pool or log of its rows is; nullopt without one.
  std::optional<PoolRoom> room() const;
  // What its log on a drive did since the table was made; nullopt without one.
  std::optional<LogPoolStats> drive() const;
  // The size of a saved row: weights, optimizer's state, facts of policies.
  size_t row_bytes() const { return row_bytes_; }

  // Sweeps, then writes a self-describing table file (checkpoint/table_file.h): under a temporary name first,
  // synced to disk. With admission, a filter file stands beside it (checkpoint/filter_file.h). With `since`,
  // the checksum of the file that was saved or restored last, it writes an increment: the rows written and
  // the keys erased since. For another checksum, or where too many keys were erased to be remembered, it
  // writes all rows. Throws CheckpointError naming the file; then no file is left.
  TableFileInfo Save(const std::string& file, std::optional<uint64_t> since = std::nullopt);
  // Leaves its files to `files`. If these are not published, the next Save() must not be `since` them.
  TableFileInfo Save(const std::string& file, std::optional<uint64_t> since, PendingFiles* files);

  // Replaces the content with that of all chains (checkpoint/table_chain.h) of one saved table, from any
  // number of servers, with the filters beside them. Takes the keys of this shard. Throws CheckpointError
  // naming the file and the field for a file that is damaged, incomplete or of another table, and
  // StorageError when the rows do not fit beside the present ones. Then the content is as before.
  void RestoreChains(const std::vector<std::vector<std::string>>& chains, Executor* executor = nullptr);
  // The same from full files, one per server.
  void Restore(const std::vector<std::string>& files);

  // Throws CheckpointError unless the file is an increment on the present content: the content after the last
  // Save, RestoreChains or ApplyIncrement.
  void CheckIncrement(const TableFileInfo& info) const;
  // Erases and writes the rows of an increment in place. Admission filters stay as they are. Everything waits
  // meanwhile. Throws as CheckIncrement, with the content as before. Throws StorageError, and CheckpointError
  // for a damaged file, with a part of it applied: then only a restore helps.
  void ApplyIncrement(const std::string& file);
  void ApplyIncrement(TableFileReader* reader);

  // Checkpoints in the storage itself, for pmem_libpmem, dram_pmem and dram_ssd. For other storages all but
  // Checkpoints() throw SpecError. The counts of an admission filter are part of a checkpoint.
  //
  // Marks the present content as checkpoint `id`, which is above that of the last one. Pulls do not wait;
  // pushes wait for microseconds. The checkpoint becomes durable soon after. Throws SpecError, and
  // StorageError when an earlier checkpoint could not be made durable.
  void Checkpoint(uint64_t id);
  // Returns when all checkpoints so far are durable. Throws StorageError if one cannot become durable.
  void WaitDurable() const;
  // The durable checkpoints that are kept (StorageSpec::kept_checkpoints), oldest first.
  std::vector<CheckpointInfo> Checkpoints() const;
  // When the newest of them became durable, in Unix seconds; 0 if that was before this table was made, or if
  // there is none.
  int64_t durable_at() const;
  // Pushes since the last checkpoint or file: what is lost if this process ends now.
  uint64_t pushes_at_risk() const;
  // Removes what the storage would keep of the table beyond this object.
  void Drop();
  // Goes back to the checkpoint `id`, or without `id` to the newest (without any, to an empty table). Later
  // checkpoints and pushes are gone. The counts of a filter begin at zero where the storage has none for that
  // checkpoint: their files were removed, or an earlier version made it. Everything waits meanwhile. Throws
  // StorageError for a checkpoint that is not kept and for a damaged pool; then the content is as before.
  void Recover(std::optional<uint64_t> id);

 private:
  struct Content;
  struct Pins;
  struct Plan;

  Table(TableSpec spec, std::shared_ptr<Storage> storage, ShardInfo shard, std::string job);
  std::shared_ptr<Damage> NewDamage() const;
  PoolSpec NewPoolSpec() const;
  std::string IdentityOf(const std::string& kind, const nlohmann::json& what) const;
  std::unique_ptr<Index> NewIndex(uint32_t internal_shard) const;
  std::unique_ptr<Content> NewContent(bool fresh) const;
  void RecoverContent(std::optional<uint64_t> id);
  KeptRows& RequireKept() const;
  void WaitIdle() const noexcept;
  RowLog::Room RoomFor(const Plan& plan, size_t appends, bool adds) const;
  // Of a push of n keys to a log: each row is written at most twice, and so is each of the two that the cap
  // may evict for it, once as a tombstone.
  size_t AppendsOf(size_t n) const { return (eviction_.capped() ? 6 : 2) * n; }
  bool TakeIn(const LogReads& reads, bool ahead) const;
  std::optional<std::string> CheckRows(const std::vector<Key>& keys) const;
  void CheckUnread(uint32_t shard, const Key* keys, size_t n) const;
  bool ScrubLog(ScrubPosition* position, uint64_t* bytes);
  void RequireWhole() const;
  bool keeps_facts() const { return reduced_ == nullptr && kept_bytes_ == row_bytes_; }
  size_t KeptBytes() const;
  Plan MakePlan(const Key* keys, size_t n) const;
  size_t PullPiece(const Key* keys, size_t n, std::byte* out, bool packed) const;
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
  void PackMissing(Key key, std::byte* out) const;
  void AddByPolicy(const Plan& plan, size_t begin, size_t end, uint32_t shard, const uint32_t* counts,
                   uint32_t* numbers);
  void AddAssigned(const Plan& plan, size_t begin, size_t end, uint32_t shard, uint32_t* numbers,
                   AssignCounts* counts);
  bool EvictOne(Content* content, uint32_t shard, uint32_t step);
  using Facts = std::array<uint32_t, RowFacts::kMost>;
  void CopyFacts(const RowMap& map, const uint32_t* numbers, size_t n, Facts* facts) const;
  static const std::byte* RowOf(const Facts& facts) {
    return reinterpret_cast<const std::byte*>(facts.data());
  }
  void KeepCap(Content* content);
  static RowLog::Room RoomToEvict(const RowMap& map, size_t rows);
  bool Sweep(uint32_t shard, uint32_t reasons, const Index::Range& range, uint64_t* position);
  void SweepQuietly(uint32_t shard, uint32_t reasons, const Index::Range& range);
  void SweepFilterQuietly(uint32_t shard, uint32_t reasons, uint32_t sweep, const Index::Range& places);
  void SweepInTurn(uint64_t step);
  bool SweepFilter(uint32_t shard, uint32_t reasons, uint32_t sweep, Index::Range places);
  bool HasSmallFilter(uint32_t shard) const;
  void NoteLoaded(const Content& content);

  TableFiles Files() const;

  const TableSpec spec_;
  const std::shared_ptr<Storage> storage_;
  const ShardInfo shard_;
  const std::string job_;
  const std::unique_ptr<const RowOps> ops_;
  const Eviction eviction_;
  const Eviction by_facts_;  // the same for rows that are nothing but their facts
  const size_t row_bytes_;
  const std::unique_ptr<const ReducedWeights> reduced_;  // nullptr: as in files
  // Of what the storage keeps: the first bytes of a row in files, or its weights as reduced_ has them.
  const size_t kept_bytes_;
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
