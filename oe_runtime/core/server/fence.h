// Keeps what a client sent before its job went back to a checkpoint from changing tables after it. A request
// whose connection broke, because another server was lost, may still be read and served when the same client
// has connected anew and put the checkpoint back. How often the job had gone back when a client last looked
// is its fencing token (Gray and Cheriton, Leases, SOSP 1989; Burrows, Chubby, OSDI 2006, calls it a
// sequencer).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/fair_shared_mutex.h"
#include "oe_runtime/core/server/pass.h"

namespace oe {

// The fence of one job. Thread-safe.
class Fence {
 public:
  using Hold = std::shared_lock<FairSharedMutex>;

  // How often the job has gone back: a client that has connected or pulled since may change tables.
  uint64_t seen() const { return back_.load(); }

  // Keeps the job from going back as long as the result lives. Not recursive.
  Hold Stay() const { return Hold(mutex_); }

  // The same to change tables. Throws CheckpointError if the job went back after the client last looked, at
  // `seen`.
  Hold Change(uint64_t seen) const {
    Hold hold = Stay();
    RequireSeen(seen);
    return hold;
  }

  // The same for as long as the pass lives; false if that has to wait.
  bool Change(uint64_t seen, Pass* pass) const {
    if (!pass->Take({std::shared_ptr<void>(), &mutex_})) return false;
    RequireSeen(seen);
    return true;
  }

  // Calls `go` when there are no holds. Then, also where `go` failed, the client has seen it. Throws as
  // Change() if a newer connection than `client` has gone back: what an older one of the same client still
  // does does not keep the newer one from going back.
  void GoBack(uint64_t client, uint64_t* seen, const std::function<void()>& go) {
    const std::lock_guard<FairSharedMutex> lock(mutex_);
    if (client < newest_) RequireSeen(*seen);
    newest_ = std::max(newest_, client);
    std::exception_ptr failure;
    try {
      go();
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
    // Only now: a pull meanwhile may read old rows. Also if `go` failed, since some tables may have gone
    // back.
    *seen = back_.fetch_add(1) + 1;
    if (failure) std::rethrow_exception(failure);
  }

  // The same without going back: the pulls of other clients stay valid.
  void Alone(uint64_t seen, const std::function<void()>& go) const {
    const std::lock_guard<FairSharedMutex> lock(mutex_);
    RequireSeen(seen);
    go();
  }

 private:
  void RequireSeen(uint64_t seen) const {
    if (seen >= back_.load()) return;
    throw CheckpointError(
        "another client has put a checkpoint back since this one pulled; pull again before tables are "
        "changed");
  }

  mutable FairSharedMutex mutex_;
  std::atomic<uint64_t> back_{0};
  uint64_t newest_ = 0;  // of the connections that have gone back
};

}  // namespace oe
