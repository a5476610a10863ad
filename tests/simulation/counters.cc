#include "tests/simulation/counters.h"

#include <algorithm>
#include <string>

#include "tests/simulation/disk.h"
#include "tests/simulation/processes.h"

namespace sim {

oe::TableSpec Counters::Spec(uint32_t table) const {
  oe::TableSpec spec;
  spec.name = "t" + std::to_string(table);
  spec.dim = kDim;
  spec.optimizer.name = "sgd";
  spec.initializer.name = "zeros";
  const auto number = static_cast<double>(swarm_.rule_number);
  if (swarm_.rule == Rule::kAdmit) spec.admission = {"counter", {{"filter_freq", number}}};
  if (swarm_.rule == Rule::kEvict) spec.eviction = {{"global_step", {{"steps_to_live", number}}, ""}};
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

std::vector<oe::Key> Counters::Erased(uint64_t step) const {
  std::vector<oe::Key> keys;
  if (swarm_.rule != Rule::kErase || step % swarm_.rule_number != 0) return keys;
  if (swarm_.staleness && step % swarm_.checkpoint_every != 0) return keys;
  Random random(Seed() * 1000033 + step);
  for (oe::Key key = 0; key < swarm_.keys; ++key) {
    if (random.OneIn(3)) keys.push_back(key);
  }
  return keys;
}

void Counters::Evict(uint64_t step, std::vector<Count>* counts) const {
  for (Count& count : *counts) {
    if (count.last + swarm_.rule_number < step) count.row = 0;
  }
}

void Counters::CountUntil(uint64_t step) {
  while (after_.size() <= step) {
    std::vector<Count> next = after_.back();
    std::vector<uint32_t> batch(swarm_.keys);
    for (uint32_t worker = 0; worker < workers_; ++worker) {
      for (const oe::Key id : Ids(worker, after_.size() - 1)) ++batch[id];
    }
    const uint64_t now = after_.size();
    for (uint32_t key = 0; key < swarm_.keys; ++key) {
      if (batch[key] == 0) continue;
      next[key].last = now;
      next[key].seen += batch[key];
      if (swarm_.rule != Rule::kAdmit || next[key].seen >= swarm_.rule_number) next[key].row += batch[key];
    }
    for (const oe::Key key : Erased(now)) next[key].row = 0;
    if (swarm_.rule == Rule::kEvict && now % swarm_.checkpoint_every == 0) Evict(now, &next);
    after_.push_back(std::move(next));
  }
}

void Counters::Add(uint32_t rank, uint64_t begin, uint64_t end, std::vector<uint32_t>* counts) const {
  for (uint64_t step = begin; step < end; ++step) {
    for (const oe::Key id : Ids(rank, step)) ++(*counts)[id];
  }
}

void Counters::Compare(const std::string& where, uint32_t table, const std::vector<oe::Key>& keys,
                       const float* rows, const std::vector<Bounds>& bounds) const {
  const std::string name = Spec(table).name;
  std::string excused;
  for (size_t i = 0; i < keys.size() * kDim; ++i) {
    const oe::Key key = keys[i / kDim];
    const auto [least, most] = bounds[key];
    if (rows[i] >= static_cast<float>(least) && rows[i] <= static_cast<float>(most)) continue;
    const std::string text = where + ": key " + std::to_string(key) + " of " + name + " was pushed " +
                             std::to_string(static_cast<long>(rows[i])) + " times, not " +
                             std::to_string(least) + (least == most ? "" : " to " + std::to_string(most));
    const bool counts_lost = swarm_.rule == Rule::kAdmit && CountsWereLost(name);
    if (!DisksLost() || !(counts_lost || RowWasRemoved(name, key))) throw Wrong(text, false);
    if (excused.empty()) excused = text;
  }
  if (!excused.empty()) throw Wrong(excused, true);
}

void Counters::CheckBetween(uint32_t rank, uint64_t from, uint64_t step, uint64_t to, uint32_t table,
                            const std::vector<oe::Key>& keys, const float* rows) {
  CountUntil(from);
  const uint64_t staleness = swarm_.staleness.value_or(0);
  std::vector<uint32_t> least;
  for (const Count& count : after_[from]) least.push_back(count.row);
  std::vector<uint32_t> most = least;
  for (uint32_t worker = 0; worker < workers_; ++worker) {
    const bool mine = worker == rank;
    Add(worker, from, mine ? step : step - std::min(step, staleness), &least);
    Add(worker, from, mine ? step : std::min(to, step + staleness + 1), &most);
  }
  std::vector<Bounds> bounds;
  bounds.reserve(least.size());
  for (size_t key = 0; key < least.size(); ++key) bounds.push_back({least[key], most[key]});
  Compare("pulled, worker " + std::to_string(rank) + ", step " + std::to_string(step) + " after " +
              std::to_string(from),
          table, keys, rows, bounds);
}

void Counters::Check(const char* where, uint32_t rank, uint64_t step, uint32_t table,
                     const std::vector<oe::Key>& keys, const float* rows, bool evicted) {
  CountUntil(step);
  std::vector<Count> counts = after_[step];
  if (evicted && swarm_.rule == Rule::kEvict) Evict(step, &counts);
  std::vector<Bounds> bounds;
  bounds.reserve(counts.size());
  for (const Count& count : counts) bounds.push_back({count.row, count.row});
  Compare(std::string(where) + ", worker " + std::to_string(rank) + ", step " + std::to_string(step), table,
          keys, rows, bounds);
}

}  // namespace sim
