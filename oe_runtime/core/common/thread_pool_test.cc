#include "oe_runtime/core/common/thread_pool.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace oe::thread_pool_test {
namespace {

TEST(ThreadPoolTest, EveryIndexOnce) {
  for (const unsigned threads : {1U, 2U, 4U}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (const size_t count : {size_t{0}, size_t{1}, size_t{3}, size_t{1000}}) {
      std::vector<std::atomic<int>> calls(count);
      pool.ParallelFor(count, [&](size_t i) { calls[i].fetch_add(1); });
      for (const auto& call : calls) EXPECT_EQ(call.load(), 1);
    }
  }
}

TEST(ThreadPoolTest, LowestFailureIsThrownAfterAllHaveRun) {
  for (const unsigned threads : {1U, 3U}) {
    ThreadPool pool(threads);
    std::atomic<int> runs{0};
    try {
      pool.ParallelFor(50, [&](size_t i) {
        runs.fetch_add(1);
        if (i % 10 == 7) throw std::runtime_error(std::to_string(i));
      });
      FAIL() << "no error";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "7");
    }
    EXPECT_EQ(runs.load(), 50);
  }
}

TEST(ThreadPoolTest, CallersFromManyThreadsAndFromWithin) {
  ThreadPool pool(3);
  std::atomic<size_t> sum{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        pool.ParallelFor(8, [&](size_t) { pool.ParallelFor(8, [&](size_t i) { sum.fetch_add(i); }); });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum.load(), size_t{4} * 50 * 8 * 28);
}

}  // namespace
}  // namespace oe::thread_pool_test
