#include "oe_runtime/core/storage/log_pool.h"

#include <chrono>
#include <cstdio>
#include <new>
#include <shared_mutex>
#include <string>
#include <utility>

#include "oe_runtime/core/common/come_after_others.h"
#include "oe_runtime/core/common/error.h"

namespace oe {

LogPool::LogPool(std::unique_ptr<BlockDevice> device, const PoolSpec& table, RowLogSpec log, bool fresh,
                 std::function<uint64_t()> left, std::function<void()> remove)
    : device_(std::move(device)), spec_(table), left_(std::move(left)), remove_files_(std::move(remove)) {
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
  thread_ = std::thread([this] { Run(); });
}

LogPool::~LogPool() {
  {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    stop_ = true;
  }
  queue_changed_.notify_all();
  thread_.join();
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
  if (!log_->WantsTending()) return;
  {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    poked_ = true;
  }
  queue_changed_.notify_all();
}

void LogPool::Run() {
  ComeAfterOthers();
  std::unique_lock<std::mutex> lock(queue_mutex_);
  while (true) {
    queue_changed_.wait(lock, [&] { return stop_ || poked_ || !queue_.empty(); });
    const bool tend = std::exchange(poked_, false);
    const std::optional<KeptCheckpoint> job =
        queue_.empty() ? std::nullopt : std::optional<KeptCheckpoint>(queue_.front());
    if (!tend && !job) return;  // it is to stop
    lock.unlock();
    std::string failure;
    try {
      const std::shared_lock<FairSharedMutex> working(moves_mutex_);
      if (tend) log_->Tend();
      if (job) MakeDurable(*job);
    } catch (const std::exception& error) {
      failure = error.what();
    }
    lock.lock();
    if (!failure.empty() && failure_.empty() && job) failure_ = failure;
    if (job) {
      if (failure.empty()) {
        const auto now = std::chrono::system_clock::now().time_since_epoch();
        durable_at_ = std::chrono::duration_cast<std::chrono::seconds>(now).count();
        queue_.pop_front();
      } else {
        queue_.clear();  // what comes after builds on it
        if (led_ != nullptr) led_->EndCheckpoints(failure);
      }
    }
    queue_changed_.notify_all();
  }
}

void LogPool::MakeDurable(const KeptCheckpoint& checkpoint) {
  if (led_ != nullptr) led_->MakeDurableUpTo(checkpoint.id);
  for (const auto& shard : shards_) {
    size_t position = 0;
    while (shard->WriteBack(checkpoint.epoch, &position)) {
      log_->WriteChunks();
    }
  }
  device_->RequirePresent();  // as in Pool::RequirePresent()
  log_->Commit(checkpoint);
}

void LogPool::Checkpoint(uint64_t id, uint64_t version) {
  if (has_id_ && id <= last_id_) {
    throw SpecError("table '" + spec_.table + "': checkpoint " + std::to_string(id) +
                    " is not after the last one, " + std::to_string(last_id_));
  }
  KeptCheckpoint checkpoint;
  checkpoint.id = id;
  checkpoint.version = version;
  {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    const std::string failure = failure_.empty() ? log_->failure() : failure_;
    if (!failure.empty()) {
      throw StorageError("table '" + spec_.table + "' can have no more checkpoints: " + failure);
    }
    queue_.emplace_back();  // all that can throw comes first
    try {
      if (led_ != nullptr) led_->Checkpoint(id, version);
      checkpoint.epoch = log_->CloseEpoch();
    } catch (...) {
      queue_.pop_back();
      throw;
    }
    for (const auto& shard : shards_) {
      checkpoint.rows += shard->size();
      checkpoint.digest += shard->digest();
      shard->CloseEpoch();
    }
    queue_.back() = checkpoint;
  }
  last_id_ = id;
  has_id_ = true;
  queue_changed_.notify_all();
}

void LogPool::WaitDurable() {
  std::unique_lock<std::mutex> lock(queue_mutex_);
  queue_changed_.wait(lock, [this] { return queue_.empty() || !failure_.empty(); });
  if (failure_.empty()) return;
  throw StorageError("table '" + spec_.table + "': a checkpoint could not be made durable: " + failure_);
}

void LogPool::WaitIdle() noexcept {
  std::unique_lock<std::mutex> lock(queue_mutex_);
  queue_changed_.wait(lock, [this] { return queue_.empty() || !failure_.empty(); });
}

std::vector<CheckpointInfo> LogPool::Checkpoints() const {
  const std::vector<KeptCheckpoint> all = log_->kept();
  std::vector<CheckpointInfo> infos;
  infos.reserve(all.size());
  for (const KeptCheckpoint& kept : all) infos.push_back({kept.id, kept.version, kept.rows});
  return infos;
}

int64_t LogPool::durable_at() const {
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  return durable_at_;
}

CheckpointInfo LogPool::Recover(std::optional<uint64_t> id, const std::vector<Index*>& indexes,
                                const std::function<void()>& before) {
  WaitIdle();
  const std::unique_lock<FairSharedMutex> alone(moves_mutex_);
  std::vector<Index*> former;
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
    for (size_t i = 0; i < shards_.size(); ++i) (void)shards_[i]->UseIndex(former[i]);
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

CacheStats LogPool::cache_stats() const {
  CacheStats sum;
  for (const auto& shard : shards_) sum += shard->stats();
  return sum;
}

}  // namespace oe
