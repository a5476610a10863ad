#include "oe_runtime/core/server/jobs.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <vector>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

bool MayName(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
         c == '-';
}

}  // namespace

void CheckJobName(const std::string& job) {
  if (job.size() <= 64 && std::all_of(job.begin(), job.end(), MayName)) return;
  throw SpecError("a job's name has up to 64 letters, digits, '.', '_' and '-'; this one has " +
                  (job.size() > 64 ? std::to_string(job.size()) + " bytes" : "another character"));
}

Jobs::Jobs(std::shared_ptr<Storage> storage, ShardInfo shard, ThreadPool* pool)
    : storage_(std::move(storage)), shard_(shard), pool_(pool) {
  Get("");
}

Store* Jobs::Get(const std::string& job) {
  CheckJobName(job);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = stores_.find(job);
  if (found != stores_.end()) return found->second.get();
  if (stores_.size() > kMost) {
    throw SpecError("job '" + job + "': this server has " + std::to_string(kMost) +
                    " jobs already, which is the most it takes");
  }
  return (stores_[job] = std::make_unique<Store>(storage_, shard_, pool_, job)).get();
}

nlohmann::json Jobs::Stats() const {
  std::vector<const Store*> stores;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [job, store] : stores_) stores.push_back(store.get());
  }
  nlohmann::json all = stores.front()->Stats();
  for (size_t i = 1; i < stores.size(); ++i) {
    const nlohmann::json stats = stores[i]->Stats();
    for (const nlohmann::json& table : stats["tables"]) all["tables"].push_back(table);
    for (const char* pointer : {"/memory/dram", "/memory/pmem", "/memory/index", "/pulls/requests",
                                "/pulls/keys", "/pushes/requests", "/pushes/keys"}) {
      const nlohmann::json::json_pointer field(pointer);
      all[field] = all[field].get<uint64_t>() + stats[field].get<uint64_t>();
    }
  }
  return all;
}

}  // namespace oe
