// The jobs of one server: each has tables of its own, under names of its own, in the storage that they share.
#pragma once

#include <atomic>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/server/budget.h"
#include "oe_runtime/core/server/cut.h"
#include "oe_runtime/core/server/fence.h"
#include "oe_runtime/core/server/shared_values.h"
#include "oe_runtime/core/server/slots.h"
#include "oe_runtime/core/server/store.h"
#include "oe_runtime/core/server/workers.h"

namespace oe {

// Throws SpecError unless `job` is a job's name: up to 64 letters, digits, '.', '_' and '-'. The empty name
// is that of clients that say none.
void CheckJobName(const std::string& job);

struct Job {
  Job(std::shared_ptr<Storage> storage, ShardInfo shard, ThreadPool* pool, const std::string& name,
      Budget* held, const Workers::Post* post)
      : store(std::move(storage), shard, pool, name),
        workers(name, &store, &fence, held, post),
        shared(held) {}
  Store store;
  Fence fence;
  Cut cut;
  Workers workers;
  SharedValues shared;
  std::atomic<uint32_t> clients{0};  // that are connected
  Slots::Owner serving;              // requests of its clients that are served,
  Slots::Owner slow;                 // and those that have a thread of their own
};

// Thread-safe.
class Jobs {
 public:
  static constexpr size_t kMost = 1000;

  // `pool` must outlive the jobs. `held_bytes` bounds what waits for other workers or is
  // shared by them, and `post` runs tasks for
  // Workers (workers.h); without it they run at once.
  Jobs(std::shared_ptr<Storage> storage, ShardInfo shard, ThreadPool* pool,
       uint64_t held_bytes = std::numeric_limits<uint64_t>::max(), Workers::Post post = nullptr);

  // The tables and workers of a job, which stay for the life of the server. Throws SpecError for a name that
  // cannot be one and for a job more than kMost.
  Job* Get(const std::string& job);

  // As Store::Stats, of the tables of all jobs; and "workers", Workers::Stats of the jobs that have some.
  nlohmann::json Stats() const;

  // Store::Scrub of all jobs.
  void Scrub(const std::function<bool(uint64_t bytes)>& pace);

  // Workers::Stop of all jobs.
  void Stop();

 private:
  std::vector<Job*> All() const;

  const std::shared_ptr<Storage> storage_;
  const ShardInfo shard_;
  ThreadPool* const pool_;
  Budget held_;
  const Workers::Post post_;

  mutable std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Job>> jobs_;
};

}  // namespace oe
