// Threads, locks, time and random numbers of libc, by the scheduler's rules. The linker takes these
// definitions before libc's; the core is linked as it ships.
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <ctime>
#include <random>

#include "tests/simulation/processes.h"
#include "tests/simulation/real.h"
#include "tests/simulation/scheduler.h"

namespace sim {
namespace {

constexpr uint64_t kEpoch = 1700000000 * kSecond;  // the wall clock's at the clock's 0

// Over pthread_mutex_t, whose kind stays where pthread_mutex_init() has put it.
struct Mutex {
  int owner;  // the task's id + 1
  int count;
  unsigned unused;
  unsigned users;
  int kind;

  bool recursive() const { return (kind & 3) == PTHREAD_MUTEX_RECURSIVE; }
};

// Over pthread_rwlock_t.
struct RwLock {
  int writer;
  int readers;
};

Mutex* MutexAt(pthread_mutex_t* mutex) { return reinterpret_cast<Mutex*>(mutex); }
RwLock* RwLockAt(pthread_rwlock_t* lock) { return reinterpret_cast<RwLock*>(lock); }

void NoteHeld(const void* lock, const void* taken_at) { Current()->held.push_back({lock, taken_at}); }
void NoteReleased(const void* lock) {
  auto& held = Current()->held;
  const auto found =
      std::find_if(held.rbegin(), held.rend(), [lock](const Held& one) { return one.lock == lock; });
  if (found != held.rend()) held.erase(std::next(found).base());
}

uint64_t Nanoseconds(const timespec* time) {
  return static_cast<uint64_t>(time->tv_sec) * kSecond + static_cast<uint64_t>(time->tv_nsec);
}

// A point of either clock.
uint64_t ClockTime(const timespec* time) {
  const uint64_t at = Nanoseconds(time);
  return at >= kEpoch ? at - kEpoch : at;
}

// Returns when `free` holds. Before a task that Block() has woken runs, another one may have taken the lock.
template <typename Free>
void Await(const char* what, const void* lock, const Free& free) {
  while (!free()) Block(what, lock, free);
}

void Own(Mutex* mutex, int count, const void* taken_at) {
  Await("a mutex", mutex, [mutex] { return mutex->owner == 0; });
  mutex->owner = Current()->id + 1;
  mutex->count = count;
  NoteHeld(mutex, taken_at);
}

int WaitForSignal(pthread_cond_t* condition, pthread_mutex_t* locked, uint64_t until, const void* taken_at) {
  Task* const task = Current();
  Mutex* const mutex = MutexAt(locked);
  const int count = mutex->count;
  mutex->owner = 0;
  mutex->count = 0;
  NoteReleased(mutex);
  task->signalled = false;
  const bool in_time = Block("a condition", condition, [task] { return task->signalled; }, until);
  Own(mutex, count, taken_at);
  return in_time ? 0 : ETIMEDOUT;
}

Random& ProgramRandom() {
  static Random* random = nullptr;
  if (random == nullptr) random = new Random(Seed() ^ 0x70726f6772616d);
  return *random;
}

}  // namespace
}  // namespace sim

using sim::Current;
using sim::Now;

extern "C" {

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*function)(void*),
                   void* argument) noexcept {
  if (Current() == nullptr) return SIM_REAL(pthread_create)(thread, attributes, function, argument);
  return sim::StartThread(thread, attributes, function, argument);
}

int pthread_join(pthread_t thread, void** result) {
  if (Current() != nullptr) sim::WaitForThread(thread);
  return SIM_REAL(pthread_join)(thread, result);
}

int pthread_mutex_lock(pthread_mutex_t* locked) noexcept {
  if (Current() == nullptr) return SIM_REAL(pthread_mutex_lock)(locked);
  sim::Mutex* const mutex = sim::MutexAt(locked);
  if (mutex->owner == Current()->id + 1) {
    if (!mutex->recursive()) sim::FailRun("a task locks a mutex that it holds");
    ++mutex->count;
    return 0;
  }
  sim::YieldAtLock();
  sim::Own(mutex, 1, __builtin_return_address(0));
  return 0;
}

int pthread_mutex_trylock(pthread_mutex_t* locked) noexcept {
  if (Current() == nullptr) return SIM_REAL(pthread_mutex_trylock)(locked);
  sim::Mutex* const mutex = sim::MutexAt(locked);
  if (mutex->owner == Current()->id + 1 && mutex->recursive()) {
    ++mutex->count;
    return 0;
  }
  sim::YieldAtLock();
  if (mutex->owner != 0) return EBUSY;
  sim::Own(mutex, 1, __builtin_return_address(0));
  return 0;
}

int pthread_mutex_unlock(pthread_mutex_t* locked) noexcept {
  if (Current() == nullptr) return SIM_REAL(pthread_mutex_unlock)(locked);
  sim::Mutex* const mutex = sim::MutexAt(locked);
  if (--mutex->count > 0) return 0;
  mutex->owner = 0;
  sim::NoteReleased(mutex);
  return 0;
}

int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  if (Current() == nullptr) return SIM_REAL(pthread_cond_wait)(condition, mutex);
  return sim::WaitForSignal(condition, mutex, sim::kForever, __builtin_return_address(0));
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* until) {
  if (Current() == nullptr) return SIM_REAL(pthread_cond_timedwait)(condition, mutex, until);
  return sim::WaitForSignal(condition, mutex, sim::ClockTime(until), __builtin_return_address(0));
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* until) {
  if (Current() == nullptr) return SIM_REAL(pthread_cond_clockwait)(condition, mutex, clock, until);
  return sim::WaitForSignal(condition, mutex, sim::ClockTime(until), __builtin_return_address(0));
}

int pthread_cond_signal(pthread_cond_t* condition) noexcept {
  if (Current() == nullptr) return SIM_REAL(pthread_cond_signal)(condition);
  sim::Signal(condition, false);
  return 0;
}

int pthread_cond_broadcast(pthread_cond_t* condition) noexcept {
  if (Current() == nullptr) return SIM_REAL(pthread_cond_broadcast)(condition);
  sim::Signal(condition, true);
  return 0;
}

int pthread_cond_destroy(pthread_cond_t* condition) noexcept {
  return Current() == nullptr ? SIM_REAL(pthread_cond_destroy)(condition) : 0;
}

int pthread_rwlock_rdlock(pthread_rwlock_t* locked) noexcept {
  if (Current() == nullptr) return SIM_REAL(pthread_rwlock_rdlock)(locked);
  sim::RwLock* const lock = sim::RwLockAt(locked);
  sim::YieldAtLock();
  sim::Await("a read lock", lock, [lock] { return lock->writer == 0; });
  ++lock->readers;
  sim::NoteHeld(lock, __builtin_return_address(0));
  return 0;
}

int pthread_rwlock_wrlock(pthread_rwlock_t* locked) noexcept {
  if (Current() == nullptr) return SIM_REAL(pthread_rwlock_wrlock)(locked);
  sim::RwLock* const lock = sim::RwLockAt(locked);
  sim::YieldAtLock();
  sim::Await("a write lock", lock, [lock] { return lock->writer == 0 && lock->readers == 0; });
  lock->writer = 1;
  sim::NoteHeld(lock, __builtin_return_address(0));
  return 0;
}

int pthread_rwlock_tryrdlock(pthread_rwlock_t* locked) noexcept {
  if (Current() == nullptr) return SIM_REAL(pthread_rwlock_tryrdlock)(locked);
  sim::RwLock* const lock = sim::RwLockAt(locked);
  if (lock->writer != 0) return EBUSY;
  ++lock->readers;
  sim::NoteHeld(lock, __builtin_return_address(0));
  return 0;
}

int pthread_rwlock_trywrlock(pthread_rwlock_t* locked) noexcept {
  if (Current() == nullptr) return SIM_REAL(pthread_rwlock_trywrlock)(locked);
  sim::RwLock* const lock = sim::RwLockAt(locked);
  if (lock->writer != 0 || lock->readers != 0) return EBUSY;
  lock->writer = 1;
  sim::NoteHeld(lock, __builtin_return_address(0));
  return 0;
}

int pthread_rwlock_unlock(pthread_rwlock_t* locked) noexcept {
  if (Current() == nullptr) return SIM_REAL(pthread_rwlock_unlock)(locked);
  sim::RwLock* const lock = sim::RwLockAt(locked);
  if (lock->writer != 0) {
    lock->writer = 0;
  } else {
    --lock->readers;
  }
  sim::NoteReleased(lock);
  return 0;
}

int pthread_once(pthread_once_t* once, void (*function)()) {
  constexpr int kRuns = 1;
  constexpr int kDone = 2;  // libc's
  int* const state = once;
  if (Current() == nullptr) return SIM_REAL(pthread_once)(once, function);
  sim::Await("a call of pthread_once", once, [state] { return *state != kRuns; });
  if (*state == kDone) return 0;
  *state = kRuns;
  sim::NoteHeld(once, __builtin_return_address(0));
  try {
    function();
  } catch (...) {
    *state = 0;
    sim::NoteReleased(once);
    throw;
  }
  *state = kDone;
  sim::NoteReleased(once);
  return 0;
}

// libstdc++ waits for futures and for the construction of local statics so.
long syscall(long number, ...) noexcept {
  va_list list;
  va_start(list, number);
  long arguments[6];
  for (long& argument : arguments) argument = va_arg(list, long);
  va_end(list);
  // NOLINTBEGIN(performance-no-int-to-ptr): as the kernel takes them
  if (Current() != nullptr && number == SYS_getrandom) {
    return getrandom(reinterpret_cast<void*>(arguments[0]), static_cast<size_t>(arguments[1]), 0);
  }
  if (Current() == nullptr || number != SYS_futex) {
    return sim::RealSyscall(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4],
                            arguments[5]);
  }
  auto* const word = reinterpret_cast<int*>(arguments[0]);
  const int operation = static_cast<int>(arguments[1]) & FUTEX_CMD_MASK;
  if (operation != FUTEX_WAIT && operation != FUTEX_WAIT_BITSET) return 0;  // the waiter looks at the word
  const int value = static_cast<int>(arguments[2]);
  const auto* const limit = reinterpret_cast<const timespec*>(arguments[3]);
  // NOLINTEND(performance-no-int-to-ptr)
  uint64_t until = sim::kForever;
  if (limit != nullptr) {
    until = operation == FUTEX_WAIT ? Now() + sim::Nanoseconds(limit) : sim::ClockTime(limit);
  }
  if (sim::Block("a futex", word, [word, value] { return *word != value; }, until)) return 0;
  errno = ETIMEDOUT;
  return -1;
}

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  if (Current() == nullptr)
    return static_cast<int>(sim::RealSyscall(SYS_clock_gettime, clock, reinterpret_cast<long>(time)));
  const bool wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
  const uint64_t now = Now() + (wall ? sim::kEpoch : 0);
  time->tv_sec = static_cast<time_t>(now / sim::kSecond);
  time->tv_nsec = static_cast<long>(now % sim::kSecond);
  return 0;
}

int gettimeofday(timeval* time, void* /*zone*/) noexcept {
  timespec now{};
  const int error = clock_gettime(CLOCK_REALTIME, &now);
  time->tv_sec = now.tv_sec;
  time->tv_usec = now.tv_nsec / 1000;
  return error;
}

time_t time(time_t* result) noexcept {
  timespec now{};
  (void)clock_gettime(CLOCK_REALTIME, &now);
  if (result != nullptr) *result = now.tv_sec;
  return now.tv_sec;
}

int nanosleep(const timespec* time, timespec* left) {
  if (Current() == nullptr) return SIM_REAL(nanosleep)(time, left);
  sim::Block("the clock", nullptr, nullptr, Now() + sim::Nanoseconds(time));
  return 0;
}

int usleep(useconds_t microseconds) {
  const timespec time{microseconds / 1000000, static_cast<long>(microseconds % 1000000) * 1000};
  return nanosleep(&time, nullptr);
}

int sched_yield() noexcept {
  if (Current() == nullptr) return SIM_REAL(sched_yield)();
  sim::Yield();
  return 0;
}

int sched_setscheduler(pid_t /*process*/, int /*policy*/, const sched_param* /*parameters*/) noexcept {
  return 0;
}
int setpriority(__priority_which_t /*which*/, id_t /*who*/, int /*priority*/) noexcept { return 0; }

pid_t getpid() noexcept {
  if (Current() == nullptr) return static_cast<pid_t>(sim::RealSyscall(SYS_getpid));
  return 10000 + Current()->process;
}

ssize_t getrandom(void* bytes, size_t size, unsigned flags) {
  if (Current() == nullptr) return SIM_REAL(getrandom)(bytes, size, flags);
  for (size_t i = 0; i < size; ++i)
    static_cast<uint8_t*>(bytes)[i] = static_cast<uint8_t>(sim::ProgramRandom().Next());
  return static_cast<ssize_t>(size);
}

int getentropy(void* bytes, size_t size) { return getrandom(bytes, size, 0) < 0 ? -1 : 0; }

}  // extern "C"

// Those of libstdc++ may ask the processor, which no system call shows.
namespace std {
void random_device::_M_init(const std::string& /*token*/) {}
void random_device::_M_init_pretr1(const std::string& /*token*/) {}
void random_device::_M_fini() {}
random_device::result_type random_device::_M_getval() {
  return static_cast<result_type>(sim::ProgramRandom().Next());
}
random_device::result_type random_device::_M_getval_pretr1() { return _M_getval(); }
}  // namespace std
