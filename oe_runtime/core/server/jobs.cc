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

Jobs::Jobs(std::shared_ptr<Storage> storage, ShardInfo shard, ThreadPool* pool, uint64_t held_bytes,
           Workers::Post post)
    : storage_(std::move(storage)),
      shard_(shard),
      pool_(pool),
      held_(held_bytes),
      post_(post ? std::move(post) : [](const std::function<void()>& task) { task(); }) {
  Get("");
}

Job* Jobs::Get(const std::string& job) {
  CheckJobName(job);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = jobs_.find(job);
  if (found != jobs_.end()) return found->second.get();
  if (jobs_.size() > kMost) {
    throw SpecError("job '" + job + "': this server has " + std::to_string(kMost) +
                    " jobs already, which is the most it takes");
  }
  return (jobs_[job] = std::make_unique<Job>(storage_, shard_, pool_, job, &held_, &post_)).get();
}

std::vector<Job*> Jobs::All() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Job*> all;
  all.reserve(jobs_.size());
  for (const auto& [name, job] : jobs_) all.push_back(job.get());
  return all;
}

nlohmann::json Jobs::Stats() const {
  const std::vector<Job*> jobs = All();
  nlohmann::json all = jobs.front()->store.Stats();
  all["workers"] = nlohmann::json::array();
  for (const Job* job : jobs) {
    if (nlohmann::json workers = job->workers.Stats(); !workers.is_null()) {
      all["workers"].push_back(std::move(workers));
    }
    if (job == jobs.front()) continue;
    const nlohmann::json stats = job->store.Stats();
    for (const nlohmann::json& table : stats["tables"]) all["tables"].push_back(table);
    for (const char* pointer : {"/memory/dram", "/memory/pmem", "/memory/index", "/pulls/requests",
                                "/pulls/keys", "/pushes/requests", "/pushes/keys"}) {
      const nlohmann::json::json_pointer field(pointer);
      all[field] = all[field].get<uint64_t>() + stats[field].get<uint64_t>();
    }
    all["saved"] = std::max(all["saved"].get<int64_t>(), stats["saved"].get<int64_t>());
  }
  return all;
}

void Jobs::Scrub(const std::function<bool(uint64_t bytes)>& pace) {
  for (Job* job : All()) {
    if (!job->store.Scrub(pace)) return;
  }
}

void Jobs::Stop() {
  for (Job* job : All()) {
    job->workers.Stop();
    job->cut.Stop();
  }
}

}  // namespace oe
