// Processes of the simulated cluster: groups of tasks that end, stop and vanish together.
#pragma once

#include <cstdint>
#include <functional>

namespace sim {

// Of this run.
uint64_t Seed();
void SetSeed(uint64_t seed);

// A host has the processes of a thousand numbers; host 0 has what is no server.
constexpr int kProcessesPerHost = 1000;
inline int HostOf(int process) { return process / kProcessesPerHost; }

// Starts `function` as the first thread of a process. Nobody joins it.
void StartProcess(int process, std::function<void()> function);

enum class End {
  kKill,    // as by kill -9: the kernel closes its connections
  kVanish,  // its host is gone: nobody hears of it until RestoreHost()
};

// Ends all threads of a process wherever they are; they never run again. Returns when it is done.
void EndProcess(int process, End end);
// The host answers again: with a reset to what it does not know.
void RestoreHost(int process);
// Nothing of it runs for so long, as after SIGSTOP.
void StopProcess(int process, uint64_t nanoseconds);

}  // namespace sim
