#pragma once

#include <cstddef>
#include <functional>

namespace oe {

// Runs the parts of one pull or push, possibly on several threads. Tables take one as an option; a server
// gives its thread pool.
class Executor {
 public:
  virtual ~Executor() = default;
  // Calls task(0) … task(count - 1), each once, in any order, and returns when all have returned. `task` does
  // not throw. Must not deadlock when several threads call it at once.
  virtual void ParallelFor(size_t count, const std::function<void(size_t)>& task) = 0;
};

}  // namespace oe
