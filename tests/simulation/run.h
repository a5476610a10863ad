// One run: the faults of a seed against a cluster and a job, then the end of all faults, and progress.
#pragma once

#include <cstdint>

namespace sim {

// In the current directory, which is empty. Prints one line, and does not return.
[[noreturn]] void RunSeed(uint64_t seed, bool show);

}  // namespace sim
