// The jobs of one server: each has tables of its own, under names of its own, in the storage that they share.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "oe_runtime/core/server/store.h"

namespace oe {

// Throws SpecError unless `job` is a job's name: up to 64 letters, digits, '.', '_' and '-'. The empty name
// is that of clients that say none.
void CheckJobName(const std::string& job);

// Thread-safe.
class Jobs {
 public:
  static constexpr size_t kMost = 1000;

  // `pool` must outlive the jobs.
  Jobs(std::shared_ptr<Storage> storage, ShardInfo shard, ThreadPool* pool);

  // The tables of a job, which stay for the life of the server. Throws SpecError for a name that cannot be
  // one and for a job more than kMost.
  Store* Get(const std::string& job);

  // As Store::Stats, of the tables of all jobs.
  nlohmann::json Stats() const;

 private:
  const std::shared_ptr<Storage> storage_;
  const ShardInfo shard_;
  ThreadPool* const pool_;

  mutable std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Store>> stores_;
};

}  // namespace oe
