#include "oe_runtime/core/storage/log_pool.h"

#include <cstdio>
#include <new>
#include <shared_mutex>
#include <string>
#include <utility>

#include "oe_runtime/core/common/error.h"

namespace oe {

LogPool::LogPool(std::unique_ptr<BlockDevice> device, const PoolSpec& table, RowLogSpec log, bool fresh,
                 std::function<uint64_t()> left, std::function<void()> remove)
    : KeptRows(table), device_(std::move(device)), left_(std::move(left)), remove_files_(std::move(remove)) {
  log.relocate = [this](Key key, uint32_t slot, const std::function<uint32_t()>& move) {
    shards_[spec_.shard_of(key)]->Relocate(key, slot, move);
  };
  log.damage = table.damage;
  log_ = fresh ? RowLog::Create(device_.get(), log) : RowLog::Open(device_.get(), log);
  if (!log_) {
    throw StorageError(log.where +
                       " is damaged: both copies of its superblock are gone; move it away, or start fresh "
                       "(--storage-fresh), and restore from a checkpoint");
  }
  for (uint32_t i = 0; i < spec_.shards; ++i) {
    shards_.push_back(std::make_unique<LogStore>(log_.get(), device_.get(), spec_.cache, spec_.damage.get()));
  }
  Start();
}

LogPool::~LogPool() {
  Stop();
  if (remove_ || !log_->kept().empty()) return;
  try {
    Remove();
  } catch (const std::exception& error) {  // what stays has no checkpoint, so nobody takes it for rows
    (void)std::fprintf(stderr, "warning: table '%s': %s\n", spec_.table.c_str(), error.what());
  }
}

void LogPool::Remove() {
  remove_ = true;
  remove_files_();
}

void LogPool::Poke() {
  if (log_->WantsTending()) AskForChore();
}

void LogPool::DoChore() noexcept {
  try {
    const std::shared_lock<FairSharedMutex> working(moves_mutex_);
    log_->Tend();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // The next Reserve() or checkpoint meets it.
  }
}

void LogPool::PrepareClose(ClosedEpoch* /*closed*/) {
  const std::string failure = log_->failure();
  if (!failure.empty()) RefuseCheckpoints(failure);
}

void LogPool::CloseEpoch(ClosedEpoch* closed) {
  closed->checkpoint.epoch = log_->CloseEpoch();
  for (const auto& shard : shards_) {
    closed->checkpoint.rows += shard->size();
    closed->checkpoint.digest += shard->digest();
    shard->CloseEpoch();
  }
}

void LogPool::MakeDurable(const ClosedEpoch& closed) {
  const std::shared_lock<FairSharedMutex> working(moves_mutex_);
  for (const auto& shard : shards_) {
    size_t position = 0;
    while (shard->WriteBack(closed.checkpoint.epoch, &position)) log_->WriteChunks();
  }
  device_->RequirePresent();  // as in Pool::RequirePresent()
  log_->Commit(closed.checkpoint);
}

CheckpointInfo LogPool::Recover(std::optional<uint64_t> id, const std::vector<Index*>& indexes,
                                const std::function<void()>& before) {
  WaitIdle();
  if (has_failed()) device_->RequirePresent();
  const std::unique_lock<FairSharedMutex> alone(moves_mutex_);
  std::vector<std::unique_ptr<Index>> former;
  former.reserve(shards_.size());
  for (const auto& shard : shards_) former.push_back(shard->UseIndex(nullptr));
  const auto index_of = [&](Key key) {
    const uint32_t shard = spec_.shard_of(key);
    if (shard < indexes.size()) return indexes[shard];
    throw StorageError(
        log_->spec().where + " is damaged: key " + std::to_string(key) +
        " is of another server; move it away, or start fresh (--storage-fresh), and restore from a "
        "checkpoint");
  };
  KeptCheckpoint kept;
  try {
    kept = log_->Recover(id, index_of, before);
  } catch (...) {  // everything is as it was
    for (size_t i = 0; i < shards_.size(); ++i) (void)shards_[i]->UseIndex(std::move(former[i]));
    try {
      throw;
    } catch (const std::bad_alloc&) {
      throw StorageError(log_->spec().where + ": no memory for the index of its rows; use more servers");
    }
  }
  for (size_t i = 0; i < shards_.size(); ++i) {
    std::array<Key, 1024> keys{};
    std::array<uint32_t, 1024> slots{};
    uint64_t position = 0;
    uint64_t rows = 0;
    uint64_t digest = 0;
    while (const size_t found = indexes[i]->Scan(&position, keys.size(), keys.data(), slots.data())) {
      rows += found;
      for (size_t at = 0; at < found; ++at) digest += RowLog::KeyDigest(keys[at]);
    }
    shards_[i]->SetRows(rows, digest);
  }
  last_id_ = kept.id;
  has_id_ = kept.epoch > 0;
  ForgetFailure();
  return {kept.id, kept.version, kept.rows};
}

PoolRoom LogPool::room() const {
  const RowLogRoom of_log = log_->room(left_());
  PoolRoom room;
  room.slots = of_log.slots;
  room.free = of_log.free;
  room.reserved = of_log.reserved;
  room.changed = of_log.changed;
  room.headroom = of_log.headroom;
  room.refused = refused_;
  return room;
}

}  // namespace oe
