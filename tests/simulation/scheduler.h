// Runs real threads one at a time. A thread that would block passes the baton to one that the seed chooses;
// if none can run, the clock jumps to the next event. Nothing here knows of sockets or of the core.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/simulation/random.h"

namespace sim {

constexpr uint64_t kForever = UINT64_MAX;
constexpr uint64_t kMicrosecond = 1000;  // the clock counts nanoseconds
constexpr uint64_t kMillisecond = 1000 * kMicrosecond;
constexpr uint64_t kSecond = 1000 * kMillisecond;

// A lock that a task holds, and the code that took it.
struct Held {
  const void* lock;
  const void* taken_at;
};

struct Task {
  int id = 0;
  int process = 0;  // inherited by the threads that it starts
  pthread_t thread{};
  int thread_id = 0;  // the kernel's
  int baton = 0;
  bool done = false;
  int end_calls = 0;
  void* (*function)(void*) = nullptr;
  void* argument = nullptr;
  uint64_t priority = 0;
  // Of a blocked task:
  const char* waits_for = nullptr;
  const void* object = nullptr;
  std::function<bool()> ready;
  uint64_t until = kForever;
  bool timed_out = false;
  bool signalled = false;
  std::vector<Held> held;
};

struct Policy {
  uint64_t yield_every = 0;    // a lock is a point to switch with probability 1 / this; 0: never
  bool by_priority = false;    // else each task that can run is as likely
  uint64_t change_every = 50;  // by priority: one in so many switches gives a task the lowest one
  uint64_t stall_every = 0;    // one in so many locks is taken late; 0: none
  uint64_t stall = 0;          // by up to so many nanoseconds
};

// Makes the calling thread the first task.
void Start(uint64_t seed);
void SetPolicy(const Policy& policy);
// The calling thread's task; null for threads outside of the simulation.
Task* Current();
uint64_t Now();
uint64_t Switches();
uint64_t Events();
// Of all choices and of all bytes that were delivered.
uint64_t TraceHash();
void MixIntoTrace(uint64_t value);

// Returns when `ready` holds, or false at `until`. `waits_for` and `object` are for reports.
bool Block(const char* waits_for, const void* object, std::function<bool()> ready, uint64_t until = kForever);
// A point at which another task may run.
void Yield();
// The same with the policy's probability.
void YieldAtLock();
// Calls `event`, which must not block, at `at`.
void CallAt(uint64_t at, std::function<void()> event);
// Wakes one task, or all, that wait for the object.
void Signal(const void* object, bool all);

int StartThread(pthread_t* thread, const pthread_attr_t* attributes, void* (*function)(void*),
                void* argument);
void WaitForThread(pthread_t thread);

// The tasks of a process never run again. False, and nothing happens, while one of them holds a lock that
// processes share here and nowhere else.
bool EndTasks(int process);
// They do not run until `until`, as after SIGSTOP.
void StopTasks(int process, uint64_t until);

// Prints the problem and ends the run.
[[noreturn]] void FailRun(const std::string& problem);
// Prints a line of the schedule that a person reads, if notes are shown.
void Note(const std::string& line);
void ShowNotes(bool show);

// System calls and functions of libc without the simulation.
long RealSyscall(long number, long a = 0, long b = 0, long c = 0, long d = 0, long e = 0, long f = 0);
uint64_t ProcessorTime();  // of this process, in nanoseconds

}  // namespace sim
