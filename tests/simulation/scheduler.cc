#include "tests/simulation/scheduler.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cinttypes>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <queue>

#include "tests/simulation/real.h"

namespace sim {
namespace {

struct Event {
  uint64_t at = 0;
  uint64_t number = 0;
  std::function<void()> call;
  bool operator<(const Event& other) const {
    return at != other.at ? at > other.at : number > other.number;  // the earliest is the top
  }
};

thread_local Task* current = nullptr;

struct Scheduler {
  std::vector<Task*> tasks;
  std::vector<Task*> runnable;
  std::vector<Task*> blocked;
  std::priority_queue<Event> events;
  std::map<int, uint64_t> stopped;  // processes, until when
  Policy policy;
  Random random;
  pthread_key_t last_key = 0;
  uint64_t now = kSecond;
  uint64_t switches = 0;
  uint64_t event_count = 0;
  uint64_t next_event = 0;
  uint64_t lowest = UINT64_MAX / 2;  // priority
  uint64_t hash = 1469598103934665603U;
  bool show = false;
};

Scheduler& State() {
  static auto* const state = new Scheduler;  // lives as long as the frozen threads
  return *state;
}

// Read by the watchdog.
Task* volatile running = nullptr;
volatile uint64_t progress = 0;

void Give(Task* task) {
  running = task;
  __atomic_store_n(&task->baton, 1, __ATOMIC_RELEASE);
  RealSyscall(SYS_futex, reinterpret_cast<long>(&task->baton), FUTEX_WAKE_PRIVATE, 1);
}

void AwaitBaton(Task* task) {
  while (__atomic_load_n(&task->baton, __ATOMIC_ACQUIRE) == 0) {
    RealSyscall(SYS_futex, reinterpret_cast<long>(&task->baton), FUTEX_WAIT_PRIVATE, 0);
  }
  __atomic_store_n(&task->baton, 0, __ATOMIC_RELAXED);
}

bool IsStopped(const Scheduler& state, const Task* task) {
  const auto found = state.stopped.find(task->process);
  return found != state.stopped.end() && state.now < found->second;
}

void WakeReady(Scheduler* state) {
  size_t kept = 0;
  for (Task* task : state->blocked) {
    bool wakes = task->ready && task->ready();
    if (!wakes && state->now >= task->until) wakes = task->timed_out = true;
    if (wakes) {
      state->runnable.push_back(task);
    } else {
      state->blocked[kept++] = task;
    }
  }
  state->blocked.resize(kept);
}

// The time of whatever happens next.
uint64_t NextTime(const Scheduler& state) {
  uint64_t at = state.events.empty() ? kForever : state.events.top().at;
  for (const Task* task : state.blocked) at = std::min(at, task->until);
  for (const Task* task : state.runnable) at = std::min(at, state.stopped.at(task->process));
  return at;
}

size_t Choose(Scheduler* state, const std::vector<size_t>& able) {
  if (!state->policy.by_priority) return able[state->random.Below(able.size())];
  size_t best = able.front();
  for (const size_t i : able) {
    if (state->runnable[i]->priority > state->runnable[best]->priority) best = i;
  }
  if (state->random.OneIn(state->policy.change_every)) state->runnable[best]->priority = state->lowest--;
  return best;
}

Task* TakeNext(Scheduler* state) {
  std::vector<size_t> able;
  for (;;) {
    while (!state->events.empty() && state->events.top().at <= state->now) {
      const auto call = state->events.top().call;
      state->events.pop();
      ++state->event_count;
      call();
    }
    WakeReady(state);
    for (size_t i = 0; i < state->runnable.size(); ++i) {
      if (!IsStopped(*state, state->runnable[i])) able.push_back(i);
    }
    if (!able.empty()) break;
    const uint64_t at = NextTime(*state);
    if (at == kForever) FailRun("deadlock: no task can run, and nothing will happen");
    state->now = std::max(state->now, at);
  }
  const size_t chosen = Choose(state, able);
  Task* const task = state->runnable[chosen];
  state->runnable.erase(state->runnable.begin() + static_cast<long>(chosen));
  return task;
}

// The calling task is runnable, blocked or done.
void Switch() {
  Scheduler& state = State();
  Task* const self = current;
  Task* const next = TakeNext(&state);
  state.now += kMicrosecond;
  ++state.switches;
  progress = state.switches;
  MixIntoTrace(static_cast<uint64_t>(next->id) << 48 ^ state.now);
  if (next == self) return;
  const bool ends = self->done;
  if (ends) current = nullptr;  // what libc still does in this thread is outside of the simulation
  Give(next);
  if (!ends) AwaitBaton(self);
}

// A destructor of thread-specific data runs after those of thread_local objects, which may lock. Libraries
// have some of their own, which lock too; libc calls all again while one of them has a value.
void EndTask(void* ends) {
  auto* const task = static_cast<Task*>(ends);
  if (++task->end_calls < 3) {
    pthread_setspecific(State().last_key, task);
    return;
  }
  task->done = true;
  Switch();
}

void* RunTask(void* argument) {
  auto* const task = static_cast<Task*>(argument);
  AwaitBaton(task);
  current = task;
  task->thread_id = static_cast<int>(RealSyscall(SYS_gettid));
  pthread_setspecific(State().last_key, task);
  return task->function(task->argument);
}

// What a thread that does not come back is in.
void PrintStack(int /*signal*/) {
  std::array<void*, 40> frames{};
  const int count = backtrace(frames.data(), static_cast<int>(frames.size()));
  backtrace_symbols_fd(frames.data(), count, STDERR_FILENO);
  _exit(3);
}

bool IsAsleep(int thread) {
  std::array<char, 64> path{};
  std::snprintf(path.data(), path.size(), "/proc/self/task/%d/stat", thread);
  const int file = static_cast<int>(
      RealSyscall(SYS_openat, AT_FDCWD, reinterpret_cast<long>(path.data()), O_RDONLY | O_CLOEXEC));
  std::array<char, 512> text{};
  const long size = RealSyscall(SYS_read, file, reinterpret_cast<long>(text.data()), text.size() - 1);
  RealSyscall(SYS_close, file);
  const auto* const end = std::find(text.begin(), text.begin() + std::max(0L, size), ')');
  return end + 2 < text.end() && (end[2] == 'S' || end[2] == 'D');
}

void* Watch(void* /*argument*/) {
  constexpr int kQuiet = 5;     // seconds
  constexpr int kEndless = 60;  // of computing
  uint64_t seen = 0;
  int quiet = 0;
  for (;;) {
    const timespec second{1, 0};
    RealSyscall(SYS_nanosleep, reinterpret_cast<long>(&second), 0);
    quiet = seen == progress ? quiet + 1 : 0;
    seen = progress;
    const int thread = running == nullptr ? 0 : running->thread_id;
    if (quiet < kQuiet || thread == 0 || (quiet < kEndless && !IsAsleep(thread))) continue;
    std::fprintf(stderr,
                 "task %d has not switched for %d real seconds: the function of libc below is a missing hook "
                 "(tests/simulation/threads.cc)\n",
                 running->id, quiet);
    RealSyscall(SYS_tgkill, RealSyscall(SYS_getpid), thread, SIGUSR2);
    const timespec while_it_prints{5, 0};
    RealSyscall(SYS_nanosleep, reinterpret_cast<long>(&while_it_prints), 0);
    _exit(3);
  }
}

// Prints all blocked tasks and what each waits for.
void PrintWaiting() {
  for (const Task* task : State().blocked) {
    std::fprintf(stderr, "  task %d of process %d waits for %s", task->id, task->process, task->waits_for);
    if (task->until != kForever)
      std::fprintf(stderr, " until %.6f s", static_cast<double>(task->until) / 1e9);
    for (const Task* other : State().tasks) {
      const auto holds = [task](const Held& one) { return one.lock == task->object; };
      if (std::none_of(other->held.begin(), other->held.end(), holds)) continue;
      std::fprintf(stderr, ", which task %d of process %d holds", other->id, other->process);
    }
    std::fputc('\n', stderr);
  }
}

}  // namespace

Task* Current() { return current; }
uint64_t Now() { return State().now; }
uint64_t Switches() { return State().switches; }
uint64_t Events() { return State().event_count; }
uint64_t TraceHash() { return State().hash; }
void SetPolicy(const Policy& policy) { State().policy = policy; }

void MixIntoTrace(uint64_t value) {
  uint64_t& hash = State().hash;
  hash = (hash ^ value) * 1099511628211U;
}

void Start(uint64_t seed) {
  Scheduler& state = State();
  state.random = Random(seed);
  pthread_key_create(&state.last_key, EndTask);
  std::signal(SIGUSR2, PrintStack);
  std::array<void*, 1> frame{};
  (void)backtrace(frame.data(), 1);  // loads what it needs
  pthread_t watchdog{};
  SIM_REAL(pthread_create)(&watchdog, nullptr, Watch, nullptr);
  auto* const first = new Task;
  first->thread = pthread_self();
  first->thread_id = static_cast<int>(RealSyscall(SYS_gettid));
  state.tasks.push_back(first);
  running = first;
  current = first;
}

bool Block(const char* waits_for, const void* object, std::function<bool()> ready, uint64_t until) {
  if (ready && ready()) return true;
  Task* const task = current;
  task->waits_for = waits_for;
  task->object = object;
  task->ready = std::move(ready);
  task->until = until;
  task->timed_out = false;
  State().blocked.push_back(task);
  Switch();
  task->ready = nullptr;
  task->object = nullptr;
  return !task->timed_out;
}

void Yield() {
  State().runnable.push_back(current);
  Switch();
}

void YieldAtLock() {
  Scheduler& state = State();
  if (state.policy.stall_every != 0 && current->process != 0 && state.random.OneIn(state.policy.stall_every))
    Block("the processor", nullptr, nullptr, state.now + state.random.Below(state.policy.stall));
  if (state.policy.yield_every != 0 && state.random.OneIn(state.policy.yield_every)) Yield();
}

void CallAt(uint64_t at, std::function<void()> event) {
  Scheduler& state = State();
  state.events.push({at, state.next_event++, std::move(event)});
}

void Signal(const void* object, bool all) {
  Scheduler& state = State();
  std::vector<Task*> waiting;
  for (Task* task : state.blocked) {
    if (task->object == object && !task->signalled) waiting.push_back(task);
  }
  if (all) {
    for (Task* task : waiting) task->signalled = true;
  } else if (!waiting.empty()) {
    waiting[state.random.Below(waiting.size())]->signalled = true;
  }
}

int StartThread(pthread_t* thread, const pthread_attr_t* attributes, void* (*function)(void*),
                void* argument) {
  Scheduler& state = State();
  auto* const task = new Task;
  task->id = static_cast<int>(state.tasks.size());
  task->process = current->process;
  task->priority = state.random.Next() / 2 + UINT64_MAX / 2;
  task->function = function;
  task->argument = argument;
  const int error = SIM_REAL(pthread_create)(&task->thread, attributes, RunTask, task);
  if (error != 0) return error;
  *thread = task->thread;
  state.tasks.push_back(task);
  state.runnable.push_back(task);
  return 0;
}

void WaitForThread(pthread_t thread) {
  const std::vector<Task*>& tasks = State().tasks;
  const auto found =
      std::find_if(tasks.rbegin(), tasks.rend(), [&](const Task* task) { return task->thread == thread; });
  if (found == tasks.rend()) return;
  Task* const task = *found;
  Block("the end of a thread", task, [task] { return task->done; });
}

// Whether other processes may take this lock, too: it is in static memory, or OpenSSL's, of whose tables all
// processes have one copy.
bool IsShared(const Held& held) {
  Dl_info info{};
  if (dladdr(held.lock, &info) != 0) return true;
  const bool named = dladdr(held.taken_at, &info) != 0 && info.dli_sname != nullptr;
  return named && std::strncmp(info.dli_sname, "CRYPTO_THREAD_", 14) == 0;
}

bool EndTasks(int process) {
  Scheduler& state = State();
  for (const Task* task : state.tasks) {
    if (task->process != process || task->done) continue;
    if (std::any_of(task->held.begin(), task->held.end(), IsShared)) return false;
  }
  const auto ends = [&](const Task* task) { return task->process == process; };
  state.runnable.erase(std::remove_if(state.runnable.begin(), state.runnable.end(), ends),
                       state.runnable.end());
  state.blocked.erase(std::remove_if(state.blocked.begin(), state.blocked.end(), ends), state.blocked.end());
  return true;
}

void StopTasks(int process, uint64_t until) { State().stopped[process] = until; }

void FailRun(const std::string& problem) {
  Note("FAILED: " + problem);
  const bool waits = problem.find("no progress") == 0 || problem.find("deadlock") == 0;
  if (State().show && waits) PrintWaiting();
  std::printf("failed trace %016" PRIx64 ": %s\n", State().hash, problem.c_str());
  std::fflush(stdout);
  _exit(1);
}

void Note(const std::string& line) {
  if (!State().show) return;
  std::fprintf(stderr, "%12.6f  %s\n", static_cast<double>(State().now) / 1e9, line.c_str());
}

void ShowNotes(bool show) { State().show = show; }

long RealSyscall(long number, long a, long b, long c, long d, long e, long f) {
  return SIM_REAL(syscall)(number, a, b, c, d, e, f);
}

uint64_t ProcessorTime() {
  timespec time{};
  RealSyscall(SYS_clock_gettime, CLOCK_PROCESS_CPUTIME_ID, reinterpret_cast<long>(&time));
  return static_cast<uint64_t>(time.tv_sec) * kSecond + static_cast<uint64_t>(time.tv_nsec);
}

}  // namespace sim
