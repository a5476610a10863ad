#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "oe_runtime/core/common/fair_shared_mutex.h"
#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/storage/block_device.h"
#include "oe_runtime/core/storage/damage.h"
#include "oe_runtime/core/storage/pool_format.h"
#include "oe_runtime/core/storage/row_log.h"
#include "oe_runtime/core/storage/slot_store.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {

struct PoolSpec {
  std::string table;  // its name, for messages
  // What the rows are: "table", its rows; "counts", those of its admission filter, in a pool that is led by
  // the table's. The identity has the table's name in the object of that name.
  std::string kind = "table";
  std::string identity;  // a JSON object that says whose rows they are: a pool with another one is refused
  std::vector<std::string> may_differ;  // names of its fields that do not matter
  size_t row_bytes = 0;
  size_t facts_at = 0;  // as in RowLogSpec; pools do not need them
  uint32_t fact_words = 0;
  uint32_t shards = 1;                    // internal ones
  std::function<uint32_t(Key)> shard_of;  // the shard of a key; `shards` for a key that cannot be here
  uint32_t window = 2;                    // checkpoints that are kept
  size_t block_bytes = size_t{32} << 10;
  std::shared_ptr<Damage> damage;  // where damaged rows are counted; nullptr: nowhere
  CacheMemory* cache = nullptr;    // of a cache of rows in DRAM; must outlive the pool. nullptr: without one
  // Whether checkpoints are made durable by a thread of the pool; otherwise by RunPending().
  bool background = true;

  // Of a new pool; one that is opened keeps its own.
  uint32_t format = kPoolFormat;

  bool led() const { return kind != "table"; }
};

struct LogPoolStats {
  RowLogStats log;
  BlockDeviceStats device;
};

// An epoch that a checkpoint closed, until it is durable.
struct ClosedEpoch {
  KeptCheckpoint checkpoint;
  std::vector<SlotStore::Changes> changes;  // of a pool, by shard
};

// The rows of a table in storage that keeps checkpoints: a pool (pool.h) or a log (log_pool.h). A checkpoint
// closes the open epoch and puts it into a queue, and a thread makes the epochs of the queue durable one
// after the other. Thread-safe but for what the comments exclude.
//
// Such rows may lead others (PoolSpec::led()), of what else a table must remember: a checkpoint of the leader
// is one of the led rows too, and durable there first.
class KeptRows {
 public:
  virtual ~KeptRows() = default;
  KeptRows(const KeptRows&) = delete;
  KeptRows& operator=(const KeptRows&) = delete;

  // Leads `other`, which must outlive this, from now on; nullptr: none. The caller excludes checkpoints, of
  // which none is pending.
  void Lead(KeptRows* other) { led_ = other; }

  // Closes the open epoch: takes microseconds, however many rows there are. The caller excludes writers of
  // all shards, also of the rows that these lead; `version` is theirs. Throws SpecError for an id that is not
  // above that of the last checkpoint and StorageError when an earlier checkpoint could not be made durable;
  // then nothing has changed.
  void Checkpoint(uint64_t id, uint64_t version);
  // Returns when every checkpoint so far is durable; throws StorageError why one cannot be.
  void WaitDurable();
  // The same without the error.
  void WaitIdle() noexcept;
  // Whether a checkpoint could not be made durable since the last Recover().
  bool has_failed() const;
  // Makes pending checkpoints durable in the calling thread, without PoolSpec::background.
  void RunPending() { MakeDurableUpTo(std::numeric_limits<uint64_t>::max()); }

  // Durable checkpoints that are kept, oldest first.
  std::vector<CheckpointInfo> Checkpoints() const;
  // When the newest of them became durable, Unix seconds; 0: before this object was there.
  int64_t durable_at() const;

  // Goes back to the kept checkpoint `id`, or without one to the newest, or to an empty table if there is
  // none; later checkpoints are dropped. `indexes`, one per shard and empty, get the rows. Returns what was
  // recovered. The caller excludes all use of shards. Throws StorageError for an id that is not kept and for
  // rows that are damaged. Interrupted anywhere, it can be repeated. `before` is called when all was read and
  // is intact; if it throws, nothing has changed. Allows checkpoints again after one that failed.
  virtual CheckpointInfo Recover(std::optional<uint64_t> id, const std::vector<Index*>& indexes,
                                 const std::function<void()>& before) = 0;

  // All files go with this object, whatever checkpoints there are; at once, what makes them count.
  virtual void Remove() = 0;

  // The rows of an internal shard. Recover() replaces them.
  virtual RowStore* shard(uint32_t number) = 0;
  // After a call that changed rows: the thread has work perhaps.
  virtual void Poke() {}
  // New rows were refused for lack of room (RowStore::RoomFor).
  virtual void NoteRefused() noexcept {}
  // Who moves rows outside of pushes, to frames or within a log, holds it shared; alone, who needs them to
  // stay where they are. After the locks of a table and before those of the shards.
  FairSharedMutex& moves_mutex() noexcept { return moves_mutex_; }

  // Of storage.
  virtual uint64_t bytes() const = 0;
  virtual PoolRoom room() const = 0;
  // What a log on a drive did; nullopt: there is none.
  virtual std::optional<LogPoolStats> drive() const { return std::nullopt; }
  // Of the caches of all shards.
  CacheStats cache_stats();
  const PoolSpec& spec() const { return spec_; }

 protected:
  explicit KeptRows(const PoolSpec& spec) : spec_(spec) {}
  // Starts the thread; and ends it when all is durable, before anything is taken away that it needs.
  void Start();
  void Stop() noexcept;
  // Wakes the thread for DoChore().
  void AskForChore();

  // Refuses a checkpoint, or does what of it may throw.
  virtual void PrepareClose(ClosedEpoch* closed) = 0;
  // Closes the open epoch and fills in what it was. Where it throws, nothing has changed.
  virtual void CloseEpoch(ClosedEpoch* closed) = 0;
  // In the thread, or in that of a leader.
  virtual void MakeDurable(const ClosedEpoch& closed) = 0;
  // What the thread does when it was asked to, beside checkpoints.
  virtual void DoChore() noexcept = 0;
  // Whether WaitIdle() waits for chores too.
  virtual bool waits_for_chores() const noexcept = 0;
  virtual std::vector<KeptCheckpoint> kept() const = 0;
  // To be called by Recover() at its end.
  void ForgetFailure();
  [[noreturn]] void RefuseCheckpoints(const std::string& why) const;

  const PoolSpec spec_;
  KeptRows* led_ = nullptr;

  // Of callers of Checkpoint(), who exclude each other.
  uint64_t last_id_ = 0;
  bool has_id_ = false;

  mutable std::mutex queue_mutex_;
  std::string failure_;  // why there can be no more checkpoints, until Recover()
  bool remove_ = false;
  FairSharedMutex moves_mutex_;

 private:
  void Run();
  void MakeFirstDurable(std::unique_lock<std::mutex>* lock);
  void MakeDurableUpTo(uint64_t id);
  void Fail(const std::string& failure);

  std::condition_variable queue_changed_;
  std::deque<ClosedEpoch> queue_;  // the first may be under way
  bool asked_ = false;             // for a chore
  bool at_chore_ = false;
  bool stop_ = false;
  int64_t durable_at_ = 0;
  std::thread thread_;
};

}  // namespace oe
