#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oe_runtime/core/common/fair_shared_mutex.h"
#include "oe_runtime/core/storage/block_device.h"
#include "oe_runtime/core/storage/kept_rows.h"
#include "oe_runtime/core/storage/log_store.h"
#include "oe_runtime/core/storage/pool.h"
#include "oe_runtime/core/storage/row_log.h"

namespace oe {

// The rows of one table in a log on a drive (row_log.h), with a cache in DRAM for each internal shard
// (log_store.h), and the thread that makes checkpoints durable, writes chunks and cleans.
class LogPool final : public KeptRows {
 public:
  // Of `table` what PoolSpec says of rows, shards, window, damage and cache; of `log` the rest. Without
  // `fresh` Recover() must follow. `left` says by about how many bytes the device may grow; `remove` removes
  // the files. Throws StorageError.
  LogPool(std::unique_ptr<BlockDevice> device, const PoolSpec& table, RowLogSpec log, bool fresh,
          std::function<uint64_t()> left, std::function<void()> remove);
  // Makes durable what Checkpoint() was called for. Rows without any checkpoint are worth nothing after this
  // and are removed.
  ~LogPool() override;
  LogPool(const LogPool&) = delete;
  LogPool& operator=(const LogPool&) = delete;

  LogStore* shard(uint32_t number) override { return shards_[number].get(); }
  void Poke() override;
  void NoteRefused() noexcept override { refused_.fetch_add(1, std::memory_order_relaxed); }
  CheckpointInfo Recover(std::optional<uint64_t> id, const std::vector<Index*>& indexes,
                         const std::function<void()>& before) override;
  void Remove() override;
  uint64_t bytes() const override { return device_->size(); }
  PoolRoom room() const override;
  std::optional<LogPoolStats> drive() const override { return LogPoolStats{log_->stats(), device_->stats()}; }
  std::string description() const { return device_->description(); }

 private:
  void PrepareClose(ClosedEpoch* closed) override;
  void CloseEpoch(ClosedEpoch* closed) override;
  void MakeDurable(const ClosedEpoch& closed) override;
  void DoChore() noexcept override;
  bool waits_for_chores() const noexcept override { return false; }
  std::vector<KeptCheckpoint> kept() const override { return log_->kept(); }

  const std::unique_ptr<BlockDevice> device_;
  const std::function<uint64_t()> left_;
  const std::function<void()> remove_files_;
  std::atomic<uint64_t> refused_{0};
  std::unique_ptr<RowLog> log_;
  std::vector<std::unique_ptr<LogStore>> shards_;
};

}  // namespace oe
