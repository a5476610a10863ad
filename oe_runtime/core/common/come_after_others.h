#pragma once

#include <sched.h>
#include <sys/resource.h>

namespace oe {

// For background threads: training and serving come before the calling thread. It takes no
// processor from one that has it when it wakes, and where all are busy it gets a tenth of one. Both are of
// the calling thread only, and always allowed.
inline void ComeAfterOthers() noexcept {
  constexpr int kNice = 10;
  const sched_param none{};
  (void)::sched_setscheduler(0, SCHED_BATCH, &none);
  (void)::setpriority(PRIO_PROCESS, 0, ::getpriority(PRIO_PROCESS, 0) + kNice);
}

}  // namespace oe
