#include "oe_runtime/core/storage/retired_slots.h"

#include <gtest/gtest.h>

#include <iterator>
#include <map>
#include <random>

namespace oe::retired_slots_test {
namespace {

TEST(RetiredSlotsTest, KnowsTheEpochOfEachSlotAsAMapDoes) {
  for (const uint32_t segment_slots : {1U, 63U, 64U, 1000U}) {
    std::mt19937_64 random(segment_slots);
    RetiredSlots retired(segment_slots);
    std::map<uint32_t, uint64_t> expected;
    const auto unused = [&] {
      while (true) {
        const auto slot = static_cast<uint32_t>(random() % 5000);
        if (expected.count(slot) == 0) return slot;
      }
    };
    for (uint64_t epoch = 1; epoch <= 60; ++epoch) {
      for (int i = 0; i < 50; ++i) {
        const uint32_t slot = unused();
        retired.Add(slot, epoch);
        expected[slot] = epoch;
      }
      for (int i = 0; i < 20; ++i) {
        const uint32_t to = unused();
        retired.Move(unused(), to);  // of a slot that is not retired: nothing
        const auto from = std::next(expected.begin(), static_cast<int64_t>(random() % expected.size()));
        retired.Move(from->first, to);
        expected[to] = from->second;
        expected.erase(from);
      }
      ASSERT_EQ(retired.size(), expected.size());
      if (epoch < 5 || epoch % 3 != 0) continue;
      const uint64_t last = epoch - 4;
      retired.ForgetUpTo(last, [&](uint32_t slot) {
        ASSERT_LE(expected.at(slot), last);
        expected.erase(slot);
      });
      for (const auto& [slot, then] : expected) ASSERT_GT(then, last) << slot;
      ASSERT_EQ(retired.size(), expected.size());
    }
    retired.ForgetUpTo(60, [&](uint32_t slot) { ASSERT_EQ(expected.erase(slot), 1U) << slot; });
    EXPECT_TRUE(expected.empty());
    EXPECT_EQ(retired.size(), 0U);
    EXPECT_EQ(retired.bytes(), 0U);
  }
}

TEST(RetiredSlotsTest, TakesABitPerSlotAndEpoch) {
  RetiredSlots retired(8192);
  for (uint64_t epoch = 1; epoch <= 3; ++epoch) {
    for (uint32_t slot = static_cast<uint32_t>(epoch); slot < 100 * 8192; slot += 4) retired.Add(slot, epoch);
  }
  EXPECT_LT(retired.bytes(), 3 * (100 * 8192 / 8 + 128 * sizeof(void*)) + 1);
}

}  // namespace
}  // namespace oe::retired_slots_test
