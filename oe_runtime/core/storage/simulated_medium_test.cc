#include "oe_runtime/core/storage/simulated_medium.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace oe::simulated_medium_test {
namespace {

// What a power cut leaves of lines that two flushers have flushed and not fenced, and stored to again.
std::vector<uint64_t> AfterPowerCut(uint64_t seed, bool lower_address_first) {
  constexpr size_t kWords = 512;
  SimulatedMedium medium(seed);
  const Region region = medium.Create("a", kWords * sizeof(uint64_t), kWords * sizeof(uint64_t), "a");
  auto* words = reinterpret_cast<uint64_t*>(region.data);
  std::unique_ptr<Flusher> first = medium.NewFlusher();
  std::unique_ptr<Flusher> second = medium.NewFlusher();
  if ((first.get() < second.get()) != lower_address_first) std::swap(first, second);
  for (Flusher* flusher : {first.get(), second.get()}) {
    const auto value = static_cast<uint64_t>(flusher == first.get() ? 1 : 2);
    for (size_t i = 0; i < kWords; ++i) flusher->Store(words + i, value);
    flusher->Flush(words, region.size);
  }
  medium.Restart(true);
  const auto* left = reinterpret_cast<const uint64_t*>(medium.Open("a").data);
  return {left, left + kWords};
}

TEST(SimulatedMediumTest, ASeedRepeatsItselfWhereverFlushersLie) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    EXPECT_EQ(AfterPowerCut(seed, true), AfterPowerCut(seed, false)) << seed;
  }
}

}  // namespace
}  // namespace oe::simulated_medium_test
