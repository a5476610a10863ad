#include "oe_runtime/core/front/batch_queue.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <thread>
#include <vector>

namespace oe::batch_queue_test {
namespace {

// Computes items of these sizes and kinds, each on a thread; the number of examples of each batch.
std::vector<size_t> Compute(BatchQueue* queue, const std::vector<std::pair<size_t, int64_t>>& items) {
  std::mutex mutex;
  std::vector<size_t> batches;
  std::vector<std::thread> threads;
  for (const auto& [examples, kind] : items) {
    threads.emplace_back([&, examples = examples, kind = kind] {
      BatchQueue::Item own;
      own.examples = examples;
      own.kind = {kind};
      queue->Run(&own, [&](const std::vector<BatchQueue::Item*>& batch) {
        size_t sum = 0;
        for (const BatchQueue::Item* item : batch) {
          EXPECT_EQ(item->kind, batch.front()->kind);
          sum += item->examples;
        }
        const std::lock_guard<std::mutex> lock(mutex);
        batches.push_back(sum);
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::sort(batches.begin(), batches.end());
  return batches;
}

TEST(BatchQueueTest, ThoseThatWaitAreComputedTogether) {
  BatchQueue queue(8, std::chrono::hours(1), 1);
  EXPECT_EQ(Compute(&queue, {{1, 0}, {2, 0}, {3, 0}, {2, 0}}), std::vector<size_t>{8});
}

TEST(BatchQueueTest, NobodyWaitsLongerThanTheTimeout) {
  BatchQueue queue(100, std::chrono::milliseconds(1), 4);
  const std::vector<size_t> batches = Compute(&queue, {{1, 0}, {2, 0}, {3, 0}});
  size_t sum = 0;
  for (const size_t batch : batches) sum += batch;
  EXPECT_EQ(sum, 6U);
}

TEST(BatchQueueTest, BatchesAreOfOneKindAndNoLargerThanTheMost) {
  for (const auto timeout : {std::chrono::microseconds(0), std::chrono::microseconds(500)}) {
    BatchQueue queue(4, timeout, 2);
    std::vector<std::pair<size_t, int64_t>> items;
    for (int64_t i = 0; i < 60; ++i) items.emplace_back(static_cast<size_t>(i % 4 + 1), i % 3);
    const std::vector<size_t> batches = Compute(&queue, items);
    size_t sum = 0;
    for (const size_t batch : batches) sum += batch;
    EXPECT_EQ(sum, 150U);
    EXPECT_LE(batches.back(), 4U);
  }
}

TEST(BatchQueueTest, AFailureEndsTheWaitOfAll) {
  BatchQueue queue(2, std::chrono::hours(1), 1);
  std::atomic<int> returned{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&] {
      BatchQueue::Item own;
      own.examples = 1;
      queue.Run(&own, [](const std::vector<BatchQueue::Item*>&) { throw std::bad_alloc(); });
      ++returned;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(returned, 2);
}

}  // namespace
}  // namespace oe::batch_queue_test
