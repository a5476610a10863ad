// Threads for what takes long or waits: each task has one at once, and the threads wait for the next ones.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace oe {

// Thread-safe. How many tasks there are at once is up to the callers.
class TaskThreads {
 public:
  using Task = std::function<void()>;

  TaskThreads() = default;
  ~TaskThreads() { Stop(); }
  TaskThreads(const TaskThreads&) = delete;
  TaskThreads& operator=(const TaskThreads&) = delete;

  // Tasks must not throw. After Stop(), nothing happens.
  void Run(Task task);
  // Returns when all tasks have ended.
  void Stop();

 private:
  void Work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  size_t idle_ = 0;  // threads that wait for a task
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace oe
