// The oracle of exactly once: with SGD at a learning rate of 1 and gradients of -1, a row counts how often
// its key was pushed, and which keys each worker pushes in each step follows from the seed.
#pragma once

#include <cstdint>
#include <vector>

#include "oe_runtime/core/client/client.h"
#include "tests/simulation/swarm.h"

namespace sim {

class Counters {
 public:
  static constexpr uint32_t kDim = 4;

  explicit Counters(const Swarm& swarm) : swarm_(swarm), after_{std::vector<uint32_t>(swarm.keys)} {}

  static oe::TableSpec Spec(uint32_t table);
  // What the worker pulls and pushes in a step, some of it twice.
  std::vector<oe::Key> Ids(uint32_t rank, uint64_t step) const;
  // From that step on a batch has the ids of so many workers.
  void SetWorkers(uint32_t workers, uint64_t from);
  // Fails the run unless the rows of these keys are those of `step` whole steps.
  void Check(const char* where, uint32_t rank, uint64_t step, const std::vector<oe::Key>& keys,
             const float* rows);

 private:
  void CountUntil(uint64_t step);

  const Swarm swarm_;
  uint32_t workers_ = 0;
  std::vector<std::vector<uint32_t>> after_;  // by steps, by key
};

}  // namespace sim
