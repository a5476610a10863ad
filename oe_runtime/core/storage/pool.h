#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/storage/kept_rows.h"
#include "oe_runtime/core/storage/medium.h"
#include "oe_runtime/core/storage/pool_format.h"
#include "oe_runtime/core/storage/slot_store.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {

// The rows of one table on a medium, which survive the process and a power cut at checkpoint granularity.
//
// A table is always in one open epoch. A row that is written for the first time in an epoch moves to a free
// slot, so slots of closed epochs never change. Checkpoint() closes the epoch: it hands over the lists of
// slots that were written and retired in it, and pushes go on in the next epoch while a thread
//   1. flushes rows, keys and states (epoch and checksum) of the written slots    fence
//   2. commits the checkpoint in the superblock, dropping the oldest               fence
//   3. zeroes the states of retired slots that no kept checkpoint needs            fence
//   4. then those of the tombstones that hid them                                  fence
//   5. and gives all these slots back to be used again.
// So a slot is free on the medium before anything of it is overwritten, and an epoch that the superblock does
// not have never happened. Recovery reads the metadata regions only: it keeps for each key the newest slot
// whose epoch is not newer than the chosen checkpoint's, and zeroes the states of newer ones.
//
// A pool's regions are oe-<uuid>-super.pool, two alternating copies of the superblock after a description,
// and segments oe-<uuid>-<number>.pool with a header, the metadata of their slots and their rows
// (pool_format.h).
//
// A pool that is led (KeptRows) keeps one checkpoint more, so it has all those of its leader whenever the
// power goes.
//
// Thread-safe but for what the comments exclude.
class Pool final : public KeptRows {
 public:
  // A new pool without rows, in epoch 1. Throws StorageError.
  static std::unique_ptr<Pool> Create(Medium* medium, const PoolSpec& spec);
  // Opens a pool that is there and checks everything but the slots; Recover() must follow. Changes nothing.
  // Throws StorageError naming the file and what is wrong with it.
  static std::unique_ptr<Pool> Open(Medium* medium, uint64_t uuid, const PoolSpec& spec);
  // Makes durable what Checkpoint() was called for. A pool without any checkpoint is worth nothing after this
  // and is removed.
  ~Pool() override;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  SlotStore* shard(uint32_t number) override { return shards_[number].get(); }

  // As KeptRows has it. Where it throws, nothing has changed on the medium or in the shards.
  CheckpointInfo Recover(std::optional<uint64_t> id, const std::vector<Index*>& indexes,
                         const std::function<void()>& before = {}) override;

  // Reads all rows that a key of `numbers[shard]` has and compares their checksums; throws StorageError
  // naming the file of the first that is wrong. For rows of closed epochs.
  void Verify(uint32_t shard, const std::vector<uint32_t>& numbers) const;

  void Remove() override;

  // Of all segments.
  uint64_t bytes() const override;
  // Blocks that no shard has yet, in slots: those of the segments, and those that the medium has room for.
  uint64_t slots_left() const;
  // New rows for which that many slots are enough: each takes its part of what is reserved with it.
  uint64_t RowsIn(uint64_t slots) const;
  PoolRoom room() const override;

  // For SlotStore: a block of free slots. Throws StorageError.
  SlotBlock TakeBlock();
  // The newest epoch all of whose slots have their states.
  uint64_t sealed() const noexcept { return sealed_.load(std::memory_order_acquire); }
  // The metadata of some slot that leaves the table may be wrong: the next checkpoint looks.
  void Suspect() noexcept { suspect_ = true; }
  // Counts and logs what was done about the damaged `row` of a key.
  void Report(Damage::Kind kind, Key key, const std::byte* row) noexcept;
  // Before `more` rows are given up, of which a shard has `rows`.
  void RequireFewDamaged(uint64_t more, uint64_t rows) const {
    if (spec_.damage) spec_.damage->RequireFew(more, rows);
  }

 private:
  using Slots = std::vector<std::vector<uint32_t>>;  // numbers by shard
  struct Segment {
    Region region;
    SegmentHeader header;
  };
  struct Scan;

  Pool(Medium* medium, uint64_t uuid, const PoolSpec& spec);

  // Segments (pool.cc).
  void OpenSuper();
  void OpenSegments();
  void CreateSuper();
  void Grow(size_t blocks);
  SlotBlock BlockOf(const Segment& segment, uint64_t block) const;
  [[noreturn]] void Damaged(const std::string& name, const std::string& what) const;
  void CloseRegions() noexcept;
  void RemoveRegions() noexcept;

  // Checkpoints (pool_checkpoint.cc).
  void PrepareClose(ClosedEpoch* closed) override;
  void CloseEpoch(ClosedEpoch* closed) override;
  void MakeDurable(const ClosedEpoch& closed) override;
  void DoChore() noexcept override;
  bool waits_for_chores() const noexcept override { return true; }
  std::vector<KeptCheckpoint> kept() const override;
  void Seal(const ClosedEpoch& closed);
  uint64_t CountDigest(const Slots& retired) const;
  void RequirePresent() const;
  void Commit(std::vector<KeptCheckpoint> kept);
  void Recycle();
  void Invalidate(const Slots& slots);
  SlotMeta* MetaOf(uint32_t shard, uint32_t number) const;
  const std::byte* RowOf(uint32_t shard, uint32_t number) const;

  // Recovery (pool_recovery.cc).
  void AssignBlocks(std::vector<Scan>* scans, std::vector<SlotBlock>* free_blocks) const;
  void AdviseMetas(bool in_order) const noexcept;
  void ReserveAgain();
  void ScanShard(uint32_t shard, uint32_t epoch, Index* index, Scan* scan) const;
  std::vector<SlotBlock> ScanAll(const KeptCheckpoint& chosen, const std::vector<Index*>& indexes,
                                 std::vector<Scan>* scans);
  void DiscardLater(const std::vector<KeptCheckpoint>& kept, const Slots& later, const Slots& free,
                    const std::vector<SlotBlock>& free_blocks);
  uint64_t ChangedInAnEpoch(uint32_t shard) const;

  Medium* const medium_;
  const RowLayout layout_;
  uint64_t uuid_;
  Region super_;
  std::vector<std::unique_ptr<SlotStore>> shards_;

  std::mutex grow_mutex_;  // held while a segment is made; before the next
  mutable std::mutex segments_mutex_;
  std::vector<Segment> segments_;
  std::vector<SlotBlock> free_blocks_;
  uint64_t bytes_ = 0;
  size_t low_water_ = 0;  // free blocks at which the thread is asked for a segment; 0: never

  // Of the thread that makes checkpoints durable.
  std::unique_ptr<Flusher> flusher_;
  std::vector<std::vector<SlotBlock>> blocks_;  // by shard: those of the closed epochs
  std::map<uint64_t, Slots> retired_;           // by the epoch in which they were retired
  std::map<uint64_t, Slots> tombstones_;        // by their epoch
  uint64_t digest_ = 0;                         // of the last closed epoch, see KeptCheckpoint
  std::atomic<uint64_t> sealed_{0};
  // Whether a damaged row was quarantined: its metadata, which digest_ is made of, may be wrong as well.
  std::atomic<bool> suspect_{false};
  uint64_t sequence_ = 0;        // of the newest copy of the superblock
  uint64_t least_segments_ = 0;  // that copy's

  uint64_t epoch_ = 1;                // of callers of Checkpoint(), who exclude each other
  std::vector<KeptCheckpoint> kept_;  // what the superblock says; with queue_mutex_
};

}  // namespace oe
