#include "oe_runtime/core/storage/kept_rows.h"

#include <chrono>
#include <exception>
#include <utility>

#include "oe_runtime/core/common/come_after_others.h"
#include "oe_runtime/core/common/error.h"

namespace oe {

void KeptRows::Start() {
  if (spec_.background) thread_ = std::thread([this] { Run(); });
}

void KeptRows::Stop() noexcept {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    stop_ = true;
  }
  queue_changed_.notify_all();
  thread_.join();
}

void KeptRows::AskForChore() {
  {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    asked_ = true;
  }
  queue_changed_.notify_all();
}

void KeptRows::RefuseCheckpoints(const std::string& why) const {
  throw StorageError("table '" + spec_.table + "' can have no more checkpoints: " + why);
}

void KeptRows::Checkpoint(uint64_t id, uint64_t version) {
  if (has_id_ && id <= last_id_) {
    throw SpecError("table '" + spec_.table + "': checkpoint " + std::to_string(id) +
                    " is not after the last one, " + std::to_string(last_id_));
  }
  {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    if (!failure_.empty()) RefuseCheckpoints(failure_);
    ClosedEpoch& closed = queue_.emplace_back();
    closed.checkpoint.id = id;
    closed.checkpoint.version = version;
    try {
      PrepareClose(&closed);
      if (led_ != nullptr) led_->Checkpoint(id, version);
      CloseEpoch(&closed);
    } catch (...) {
      queue_.pop_back();
      throw;
    }
  }
  last_id_ = id;
  has_id_ = true;
  queue_changed_.notify_all();
}

// Led rows are made durable by the thread of their leader.
void KeptRows::Run() {
  ComeAfterOthers();
  std::unique_lock<std::mutex> lock(queue_mutex_);
  const auto has_epoch = [this] { return !spec_.led() && !queue_.empty(); };
  while (true) {
    queue_changed_.wait(lock, [&] { return stop_ || asked_ || has_epoch(); });
    if (!asked_ && !has_epoch()) return;  // it is to stop
    at_chore_ = std::exchange(asked_, false);
    if (at_chore_) {
      lock.unlock();
      DoChore();
      lock.lock();
      at_chore_ = false;
      queue_changed_.notify_all();
    }
    if (!has_epoch()) continue;
    try {
      MakeFirstDurable(&lock);
    } catch (const std::exception& error) {
      Fail(error.what());
    }
  }
}

// The first epoch of the queue, which it leaves, whatever comes of it. With queue_mutex_, which is given back
// meanwhile.
void KeptRows::MakeFirstDurable(std::unique_lock<std::mutex>* lock) {
  std::exception_ptr error;
  {
    const ClosedEpoch closed = std::move(queue_.front());
    lock->unlock();
    try {
      if (led_ != nullptr) led_->MakeDurableUpTo(closed.checkpoint.id);
      MakeDurable(closed);
    } catch (...) {
      error = std::current_exception();
    }
  }
  lock->lock();
  queue_.pop_front();
  queue_changed_.notify_all();
  if (error) std::rethrow_exception(error);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  durable_at_ = std::chrono::duration_cast<std::chrono::seconds>(now).count();
}

// For the leader of these rows: or there are no more, since one of the leader's failed.
void KeptRows::MakeDurableUpTo(uint64_t id) {
  std::unique_lock<std::mutex> lock(queue_mutex_);
  while (!queue_.empty() && queue_.front().checkpoint.id <= id) MakeFirstDurable(&lock);
}

// No checkpoint until Recover(): what comes after builds on the one that failed. With queue_mutex_.
void KeptRows::Fail(const std::string& failure) {
  failure_ = failure;
  queue_.clear();
  queue_changed_.notify_all();
  if (led_ == nullptr) return;
  const std::lock_guard<std::mutex> lock(led_->queue_mutex_);
  led_->Fail(failure);
}

void KeptRows::WaitIdle() noexcept {
  if (!spec_.background) return;
  std::unique_lock<std::mutex> lock(queue_mutex_);
  queue_changed_.wait(lock,
                      [this] { return queue_.empty() && !(waits_for_chores() && (asked_ || at_chore_)); });
}

void KeptRows::WaitDurable() {
  WaitIdle();
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  if (failure_.empty()) return;
  throw StorageError("table '" + spec_.table + "': a checkpoint could not be made durable: " + failure_);
}

bool KeptRows::has_failed() const {
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  return !failure_.empty();
}

void KeptRows::ForgetFailure() {
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  failure_.clear();
}

std::vector<CheckpointInfo> KeptRows::Checkpoints() const {
  const std::vector<KeptCheckpoint> all = kept();
  std::vector<CheckpointInfo> checkpoints;
  checkpoints.reserve(all.size());
  for (const KeptCheckpoint& kept : all) checkpoints.push_back({kept.id, kept.version, kept.rows});
  return checkpoints;
}

CacheStats KeptRows::cache_stats() {
  CacheStats sum;
  for (uint32_t i = 0; i < spec_.shards; ++i) sum += shard(i)->cache_stats();
  return sum;
}

int64_t KeptRows::durable_at() const {
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  return durable_at_;
}

}  // namespace oe
