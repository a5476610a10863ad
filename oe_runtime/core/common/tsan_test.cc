// What ThreadSanitizer cannot see in code that it did not compile.
#include <gtest/gtest.h>

#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#ifdef OE_SANITIZE_THREAD
// libstdc++, which is not instrumented, counts the holders of an exception: that the last of them destroys it
// after the others have read it is invisible.
// liburing maps and unmaps its rings by system calls of its own: the ring of a thread may lie where the one
// of a thread that has ended lay. Each is used by its thread only.
extern "C" const char* __tsan_default_suppressions() {  // NOLINT(bugprone-reserved-identifier)
  return "race:std::__exception_ptr::exception_ptr::_M_release\n"
         "race:anon_inode:[io_uring]\n";
}
#endif

namespace oe::tsan_test {
namespace {

TEST(TsanTest, ThreadsMayShareAnException) {
  for (int turn = 0; turn < 100; ++turn) {
    auto error = std::make_exception_ptr(std::runtime_error("read by one, destroyed by another"));
    std::string read;
    std::thread reader([&read, error]() mutable {
      try {
        std::rethrow_exception(std::exchange(error, nullptr));
      } catch (const std::exception& caught) {
        read = caught.what();
      }
    });
    error = nullptr;
    reader.join();
    EXPECT_EQ(read, "read by one, destroyed by another");
  }
}

}  // namespace
}  // namespace oe::tsan_test
