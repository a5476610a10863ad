#include "oe_runtime/core/common/shard.h"

#include <gtest/gtest.h>

#include <random>

namespace oe::shard_test {
namespace {

TEST(ShardTest, UnmixIsTheInverseOfMix) {
  for (unsigned bit = 0; bit < 64; ++bit) {
    for (const uint64_t x : {uint64_t{1} << bit, ~(uint64_t{1} << bit), (uint64_t{1} << bit) - 1}) {
      EXPECT_EQ(Unmix64(Mix64(x)), x);
      EXPECT_EQ(Mix64(Unmix64(x)), x);
    }
  }
  std::mt19937_64 random(1);
  for (int i = 0; i < 10000; ++i) {
    const uint64_t x = random();
    EXPECT_EQ(Unmix64(Mix64(x)), x);
  }
}

}  // namespace
}  // namespace oe::shard_test
