#include "oe_runtime/core/common/copy_row.h"

#include <gtest/gtest.h>

#include <vector>

namespace oe::copy_row_test {
namespace {

// Every length, and nothing beside the row is touched.
TEST(CopyRowTest, CopiesTheRowAndNothingElse) {
  for (size_t bytes = 0; bytes <= 400; bytes += 4) {
    std::vector<std::byte> from(bytes);
    for (size_t i = 0; i < bytes; ++i) from[i] = static_cast<std::byte>(i % 251 + 1);
    std::vector<std::byte> to(bytes + 8);
    CopyRow(from.data(), to.data() + 4, bytes);
    for (size_t i = 0; i < to.size(); ++i) {
      const bool row = i >= 4 && i < 4 + bytes;
      ASSERT_EQ(to[i], row ? from[i - 4] : std::byte{0}) << bytes << " bytes, at " << i;
    }
  }
}

}  // namespace
}  // namespace oe::copy_row_test
