#include "oe_runtime/core/server/read_ahead.h"

#include <exception>
#include <string_view>
#include <utility>
#include <vector>

#include "oe_runtime/core/wire/messages.h"

namespace oe {
namespace {

// What tells batches apart: the keys of the table that has the most. Of small tables all batches have the
// same.
std::string_view MostKeys(Bytes body) {
  KeyBlock most;
  for (const KeyBlock& block : ParseBatch(body).blocks) {
    if (block.size > most.size) most = block;
  }
  return {reinterpret_cast<const char*>(most.keys), most.size * sizeof(Key)};
}

}  // namespace

void ReadAhead::Add(Batch batch) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stop_) return;
    if (reading_ != nullptr && reading_->client == batch.client) wanted_ = false;
    waiting_.remove_if([&](const Batch& before) { return before.client == batch.client; });
    waiting_.push_back(std::move(batch));
    if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
  }
  changed_.notify_all();
}

void ReadAhead::Pulled(uint64_t client, Bytes body) {
  const auto same = [&](const Batch& batch) {
    return batch.client == client && MostKeys(body) == MostKeys({batch.body.data(), batch.body.size()});
  };
  const std::lock_guard<std::mutex> lock(mutex_);
  if (reading_ != nullptr && same(*reading_)) wanted_ = false;
  waiting_.remove_if(same);
}

void ReadAhead::Stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    wanted_ = false;
    waiting_.clear();
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// A pull that comes says what is wrong: here it only means that nothing is read ahead.
void ReadAhead::Read(const Batch& batch) {
  try {
    const BatchView view = ParseBatch({batch.body.data(), batch.body.size()});
    std::vector<PullPart> parts;
    parts.reserve(view.entries.size());
    for (const BatchEntry& entry : view.entries) {
      const KeyBlock& block = view.blocks[entry.block];
      parts.push_back({entry.table, block.keys, block.size, nullptr, 0, nullptr});
    }
    batch.store->ReadAhead(parts, [this] {
      const std::lock_guard<std::mutex> lock(mutex_);
      return wanted_;
    });
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): see above
  }
}

void ReadAhead::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !waiting_.empty(); });
    if (stop_) return;
    const Batch batch = std::move(waiting_.front());
    waiting_.pop_front();
    reading_ = &batch;
    wanted_ = true;
    lock.unlock();
    Read(batch);
    lock.lock();
    reading_ = nullptr;
  }
}

}  // namespace oe
