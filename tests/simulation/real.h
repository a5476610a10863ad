// Functions of libc that this program defines anew, as libc has them.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

namespace sim {

template <typename Function>
Function* FindReal(const char* name) {
  void* const found = dlsym(RTLD_NEXT, name);
  if (found == nullptr) {
    std::fprintf(stderr, "simulation: libc has no %s\n", name);
    std::abort();
  }
  return reinterpret_cast<Function*>(found);
}

}  // namespace sim

// No guard of a local static: that is a lock.
#define SIM_REAL(name)                                                                \
  ([] {                                                                               \
    static decltype(&::name) real_function = nullptr;                                 \
    if (real_function == nullptr) {                                                   \
      real_function = sim::FindReal<std::remove_pointer_t<decltype(&::name)>>(#name); \
    }                                                                                 \
    return real_function;                                                             \
  }())
