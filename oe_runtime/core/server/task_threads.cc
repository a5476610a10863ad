#include "oe_runtime/core/server/task_threads.h"

#include <utility>

namespace oe {

void TaskThreads::Run(Task task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stop_) return;
  // Before the task is there, so that nothing is left of it if there is no thread.
  if (idle_ <= tasks_.size()) threads_.emplace_back([this] { Work(); });
  tasks_.push_back(std::move(task));
  changed_.notify_one();
}

void TaskThreads::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    ++idle_;
    changed_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
    --idle_;
    if (tasks_.empty()) return;
    {
      const Task task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
    }
    lock.lock();
  }
}

void TaskThreads::Stop() {
  std::vector<std::thread> threads;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    threads.swap(threads_);
  }
  changed_.notify_all();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace oe
