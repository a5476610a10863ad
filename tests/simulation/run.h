// One run: the faults of a seed against a cluster and a job, then the end of all faults, and progress.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "tests/simulation/swarm.h"

namespace sim {

// In the current directory, which is empty. Prints one line, and does not return.
// Of the seed's faults, only those of these numbers happen; without any list, all.
// `kinds`: as DrawSwarm() has it.
[[noreturn]] void RunSeed(uint64_t seed, bool show, const std::optional<std::set<unsigned>>& only,
                          const std::vector<Fault>& kinds);

}  // namespace sim
