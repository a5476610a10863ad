#include "oe_runtime/core/common/fair_shared_mutex.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <shared_mutex>
#include <thread>
#include <vector>

namespace oe::fair_shared_mutex_test {
namespace {

TEST(FairSharedMutexTest, ReadersBesideEachOtherAndAWriterAlone) {
  FairSharedMutex mutex;
  mutex.lock_shared();
  EXPECT_TRUE(mutex.try_lock_shared());
  EXPECT_FALSE(mutex.try_lock());
  mutex.unlock_shared();
  mutex.unlock_shared();
  EXPECT_TRUE(mutex.try_lock());
  EXPECT_FALSE(mutex.try_lock_shared());
  mutex.unlock();
  EXPECT_TRUE(mutex.try_lock_shared());
  mutex.unlock_shared();
}

// With a std::shared_mutex the reader that comes last is let in, and more after it, for ever.
TEST(FairSharedMutexTest, NoReaderOvertakesAWriterThatWaits) {
  FairSharedMutex mutex;
  mutex.lock_shared();
  std::atomic<bool> wrote{false};
  std::thread writer([&] {
    mutex.lock();
    wrote = true;
    mutex.unlock();
  });
  // As soon as the writer waits, no reader comes in; before that, this one goes at once.
  while (mutex.try_lock_shared()) {
    mutex.unlock_shared();
    std::this_thread::yield();
  }
  bool read = false;
  EXPECT_FALSE(mutex.lock_shared_or([&] { read = true; }));
  EXPECT_FALSE(wrote);
  mutex.unlock_shared();
  writer.join();
  EXPECT_TRUE(wrote);
  EXPECT_TRUE(read);  // after it
  EXPECT_FALSE(mutex.try_lock());
  mutex.unlock_shared();
  EXPECT_TRUE(mutex.try_lock());
  mutex.unlock();
}

TEST(FairSharedMutexTest, FirstComeFirstServedWithoutThreads) {
  FairSharedMutex mutex;
  mutex.lock();
  std::vector<int> order;
  for (const int i : {0, 1, 2}) {
    EXPECT_FALSE(mutex.lock_shared_or([&order, i] { order.push_back(i); }));
  }
  EXPECT_TRUE(order.empty());
  mutex.unlock();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2}));
  EXPECT_TRUE(mutex.lock_shared_or([] { FAIL(); }));
  for (int i = 0; i < 4; ++i) mutex.unlock_shared();
  EXPECT_TRUE(mutex.try_lock());
  mutex.unlock();
}

// Threads that read, write, try, and wait without a thread, all at once: nobody is beside a writer, nobody is
// forgotten, and the lock is free in the end.
TEST(FairSharedMutexTest, ReadersAndWritersAllAtOnce) {
  constexpr int kThreads = 6;
  constexpr int kTimes = 3000;
  FairSharedMutex mutex;
  std::array<int, 2> values{};
  std::atomic<int> torn{0};
  std::atomic<int> asked{0};
  std::atomic<int> to_give_back{0};  // shared locks that were granted to nobody's thread
  std::atomic<int> granted{0};
  const auto look = [&] { torn += values[0] != values[1] ? 1 : 0; };
  const auto give_back = [&] {
    for (int left = to_give_back; left > 0; left = to_give_back) {
      if (to_give_back.compare_exchange_strong(left, left - 1)) mutex.unlock_shared();
    }
  };
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < kTimes; ++i) {
        give_back();  // or a writer would wait for it
        const int kind = (i + thread) % 5;
        if (kind == 0) {
          while (!mutex.try_lock()) give_back();
          ++values[0];
          ++values[1];
          mutex.unlock();
        } else if (kind == 1) {
          const std::shared_lock<FairSharedMutex> lock(mutex, std::try_to_lock);
          if (lock) look();
        } else if (kind == 2) {
          ++asked;
          const auto later = [&] {
            ++granted;
            ++to_give_back;
          };
          if (mutex.lock_shared_or(later)) {
            look();
            later();
          }
        } else {
          const std::shared_lock<FairSharedMutex> lock(mutex);
          look();
        }
      }
    });
  }
  // One that really waits, so that there is a queue.
  std::atomic<bool> stop{false};
  std::thread helper([&] {
    while (!stop) give_back();
  });
  for (int i = 0; i < kTimes; ++i) {
    const std::lock_guard<FairSharedMutex> lock(mutex);
    ++values[0];
    ++values[1];
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  helper.join();
  give_back();
  EXPECT_EQ(torn, 0);
  EXPECT_EQ(granted, asked);
  EXPECT_TRUE(mutex.try_lock());
  mutex.unlock();
}

}  // namespace
}  // namespace oe::fair_shared_mutex_test
