#ifndef OE_CORE_COMMON_FAIR_SHARED_MUTEX_H_
#define OE_CORE_COMMON_FAIR_SHARED_MUTEX_H_

#include <mutex>
#include <shared_mutex>

namespace oe {

// A std::shared_mutex on which a writer waits only for the readers before it: glibc lets readers that come
// later overtake it, for as long as one of them is there. Not recursive, also not for readers; whoever holds
// several takes them in one order.
class FairSharedMutex {
 public:
  void lock() {
    const std::lock_guard<std::mutex> turn(turn_);
    mutex_.lock();
  }
  void unlock() { mutex_.unlock(); }
  void lock_shared() {
    {
      const std::lock_guard<std::mutex> turn(turn_);
    }
    mutex_.lock_shared();
  }
  void unlock_shared() { mutex_.unlock_shared(); }

 private:
  std::mutex turn_;  // of a writer that waits
  std::shared_mutex mutex_;
};

}  // namespace oe

#endif  // OE_CORE_COMMON_FAIR_SHARED_MUTEX_H_
