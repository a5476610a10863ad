#include "tests/simulation/processes.h"

#include <thread>
#include <utility>

#include "tests/simulation/network.h"
#include "tests/simulation/scheduler.h"

namespace sim {
namespace {

uint64_t seed_of_run = 0;

}  // namespace

uint64_t Seed() { return seed_of_run; }
void SetSeed(uint64_t seed) { seed_of_run = seed; }

void StartProcess(int process, std::function<void()> function) {
  const int mine = std::exchange(Current()->process, process);
  std::thread(std::move(function)).detach();
  Current()->process = mine;
}

void EndProcess(int process, End end) {
  while (!EndTasks(process))
    Block("a lock that processes share here", nullptr, nullptr, Now() + kMillisecond);
  DropSockets(process, end == End::kVanish);
}

void RestoreHost(int process) { AnswerForHost(process); }

void StopProcess(int process, uint64_t nanoseconds) { StopTasks(process, Now() + nanoseconds); }

}  // namespace sim
