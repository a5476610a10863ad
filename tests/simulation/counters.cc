#include "tests/simulation/counters.h"

#include <string>

#include "tests/simulation/processes.h"

namespace sim {

oe::TableSpec Counters::Spec(uint32_t table) {
  oe::TableSpec spec;
  spec.name = "t" + std::to_string(table);
  spec.dim = kDim;
  spec.optimizer.name = "sgd";
  spec.initializer.name = "zeros";
  return spec;
}

std::vector<oe::Key> Counters::Ids(uint32_t rank, uint64_t step) const {
  Random random(Seed() * 1000003 + step * 64 + rank);
  std::vector<oe::Key> ids(random.Between(1, swarm_.keys));
  for (oe::Key& id : ids) id = random.Below(swarm_.keys);
  return ids;
}

void Counters::SetWorkers(uint32_t workers, uint64_t from) {
  CountUntil(from);
  after_.resize(from + 1);
  workers_ = workers;
}

void Counters::CountUntil(uint64_t step) {
  while (after_.size() <= step) {
    std::vector<uint32_t> next = after_.back();
    for (uint32_t worker = 0; worker < workers_; ++worker) {
      for (const oe::Key id : Ids(worker, after_.size() - 1)) ++next[id];
    }
    after_.push_back(std::move(next));
  }
}

void Counters::Check(const char* where, uint32_t rank, uint64_t step, const std::vector<oe::Key>& keys,
                     const float* rows) {
  CountUntil(step);
  for (size_t i = 0; i < keys.size(); ++i) {
    for (uint32_t j = 0; j < kDim; ++j) {
      const float found = rows[i * kDim + j];
      const auto wanted = static_cast<float>(after_[step][keys[i]]);
      if (found == wanted) continue;
      FailRun(std::string(where) + ", worker " + std::to_string(rank) + ", step " + std::to_string(step) +
              ": key " + std::to_string(keys[i]) + " was pushed " + std::to_string(static_cast<long>(found)) +
              " times, not " + std::to_string(static_cast<long>(wanted)));
    }
  }
}

}  // namespace sim
