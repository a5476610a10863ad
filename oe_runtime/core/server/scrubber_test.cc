#include "oe_runtime/core/server/scrubber.h"

#include <gtest/gtest.h>

#include <future>
#include <new>
#include <string>

#include "oe_runtime/core/common/error.h"

namespace oe::scrubber_test {
namespace {

TEST(ScrubberTest, APassThatThrowsIsSaidOncePerReasonAndTheNextOneBegins) {
  testing::internal::CaptureStderr();
  int passes = 0;
  std::promise<void> ended;
  {
    Scrubber scrubber(
        [&](const auto& pace) {
          switch (++passes) {
            case 1:
            case 2:
              throw StorageError("the drive is gone");
            case 3:
              throw std::bad_alloc();
            case 4:
              (void)pace(1);
              return;
            case 5:
              throw StorageError("the drive is gone");
            case 6:
              ended.set_value();
              return;
            default:
              return;
          }
        },
        1000, 0);
    ended.get_future().wait();
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "server: cannot check the rows of all tables: the drive is gone; trying again\n"
            "server: cannot check the rows of all tables: std::bad_alloc; trying again\n"
            "server: cannot check the rows of all tables: the drive is gone; trying again\n");
}

}  // namespace
}  // namespace oe::scrubber_test
