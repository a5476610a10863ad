#include "oe_runtime/core/common/histogram.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace oe::histogram_test {
namespace {

using std::chrono::nanoseconds;

TEST(HistogramTest, ATimeFallsIntoTheFirstBucketThatHoldsIt) {
  EXPECT_EQ(Histogram::BucketOf(0), 0U);
  for (size_t i = 0; i < Histogram::kBounds; ++i) {
    EXPECT_EQ(Histogram::BucketOf(Histogram::Bound(i)), i);
    EXPECT_EQ(Histogram::BucketOf(Histogram::Bound(i) + 1), i + 1);
  }
  EXPECT_EQ(Histogram::BucketOf(~uint64_t{0} / 2), Histogram::kBounds);
}

TEST(HistogramTest, ThreadsCountAlongsideEachOther) {
  Histogram histogram;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&histogram] {
      for (int i = 0; i < 1000; ++i) histogram.Add(nanoseconds(15'000));
    });
  }
  for (std::thread& thread : threads) thread.join();
  histogram.Add(nanoseconds(-5));  // a clock that went backwards
  EXPECT_EQ(histogram.bucket(0), 1U);
  EXPECT_EQ(histogram.bucket(1), 4000U);
  EXPECT_NEAR(histogram.sum_seconds(), 4000 * 15e-6, 1e-9);
}

}  // namespace
}  // namespace oe::histogram_test
