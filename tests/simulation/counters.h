// The oracle of exactly once: with SGD at a learning rate of 1 and gradients of -1, a row counts how often
// its key was pushed, and which keys each worker pushes in each step follows from the seed.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "oe_runtime/core/client/client.h"
#include "tests/simulation/swarm.h"

namespace sim {

class Counters {
 public:
  static constexpr uint32_t kDim = 4;

  explicit Counters(const Swarm& swarm) : swarm_(swarm), after_{std::vector<Count>(swarm.keys)} {}

  oe::TableSpec Spec(uint32_t table) const;
  // What the worker pulls and pushes in a step, some of it twice.
  std::vector<oe::Key> Ids(uint32_t rank, uint64_t step) const;
  // From that step on a batch has the ids of so many workers.
  void SetWorkers(uint32_t workers, uint64_t from);
  // The keys that worker 0 erases when `step` steps are done.
  std::vector<oe::Key> Erased(uint64_t step) const;
  // A row has counted something else.
  struct Wrong : std::runtime_error {
    Wrong(const std::string& text, bool is_excused) : std::runtime_error(text), excused(is_excused) {}
    // A disk has lied and lost power, and a server has named each such row, or said that it lost the table's
    // counts of admission.
    bool excused;
  };

  // Throws Wrong unless the rows of these keys are those of `step` whole steps, and of an eviction then.
  void Check(const char* where, uint32_t rank, uint64_t step, uint32_t table,
             const std::vector<oe::Key>& keys, const float* rows, bool evicted = false);
  // The same of asynchronous workers, which have all ended step `from` and will at `to`: at least what this
  // worker has pushed and what the others must have, at most what they may have.
  void CheckBetween(uint32_t rank, uint64_t from, uint64_t step, uint64_t to, uint32_t table,
                    const std::vector<oe::Key>& keys, const float* rows);

 private:
  struct Count {
    uint32_t row = 0;   // what its row has counted
    uint32_t seen = 0;  // how often it was pushed
    uint64_t last = 0;  // the steps that were done when it was pushed last
  };

  void Evict(uint64_t step, std::vector<Count>* counts) const;
  struct Bounds {
    uint32_t least;
    uint32_t most;
  };
  // Throws Wrong unless each row has counted so much as `bounds` says of its key.
  void Compare(const std::string& where, uint32_t table, const std::vector<oe::Key>& keys, const float* rows,
               const std::vector<Bounds>& bounds) const;
  // How often a worker pushes each key in its steps from `begin` to before `end`.
  void Add(uint32_t rank, uint64_t begin, uint64_t end, std::vector<uint32_t>* counts) const;
  void CountUntil(uint64_t step);

  const Swarm swarm_;
  uint32_t workers_ = 0;
  std::vector<std::vector<Count>> after_;  // by steps, by key
};

}  // namespace sim
