#include "oe_runtime/core/front/batch_queue.h"

#include <cstdio>
#include <exception>

namespace oe {

// Of those that wait, the thread of the first computes next, so that only it must be woken.
void BatchQueue::Run(Item* own, const Compute& compute) {
  std::unique_lock<std::mutex> lock(mutex_);
  own->until = Clock::now() + timeout_;
  waiting_.push_back(own);
  examples_ += own->examples;
  if (examples_ >= most_) WakeFirst();
  while (!own->is_done) {
    if (own->is_taken || waiting_.front() != own || computing_ == batches_) {
      own->changed.wait(lock);
      continue;
    }
    if (examples_ < most_ && Clock::now() < own->until) {
      own->changed.wait_until(lock, own->until);
      continue;
    }
    const std::vector<Item*> batch = Take();
    ++computing_;
    WakeFirst();
    lock.unlock();
    try {
      compute(batch);
    } catch (const std::exception& problem) {
      std::fprintf(stderr, "error: a batch was not computed: %s\n", problem.what());
    }
    lock.lock();
    --computing_;
    for (Item* const item : batch) {
      item->is_done = true;
      if (item != own) item->changed.notify_one();
    }
    WakeFirst();
  }
}

// The first and those of its kind that fit; others stay in their order.
std::vector<BatchQueue::Item*> BatchQueue::Take() {
  std::vector<Item*> batch;
  std::deque<Item*> others;
  size_t examples = 0;
  for (Item* const item : waiting_) {
    if (batch.empty() || (item->kind == batch.front()->kind && examples + item->examples <= most_)) {
      item->is_taken = true;
      examples += item->examples;
      batch.push_back(item);
    } else {
      others.push_back(item);
    }
  }
  waiting_.swap(others);
  examples_ -= examples;
  return batch;
}

}  // namespace oe
