#include "oe_runtime/core/server/memory_budget.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

namespace oe::memory_budget_test {
namespace {

using Share = MemoryBudget::Share;

// Frames that ask for memory, and what they were given.
class Frames {
 public:
  explicit Frames(uint64_t limit) : budget_(limit) {}

  // Whether it was granted at once.
  bool Ask(size_t frame, uint64_t amount, char job = 'a') {
    shares_.resize(std::max(shares_.size(), frame + 1));
    auto share = budget_.Ask(&jobs_[static_cast<size_t>(job - 'a')], amount, shares_[frame],
                             [this, frame](Share later) {
                               granted_ += std::to_string(frame);
                               shares_[frame].Add(std::move(later));
                             });
    if (!share) return false;
    shares_[frame].Add(std::move(*share));
    return true;
  }
  // Which of those that waited were granted something by it.
  std::string End(size_t frame) {
    granted_.clear();
    shares_[frame].Release();
    return granted_;
  }
  MemoryBudget& budget() { return budget_; }

 private:
  MemoryBudget budget_;
  std::array<char, 26> jobs_{};
  std::vector<Share> shares_;
  std::string granted_;
};

TEST(MemoryBudgetTest, OneAtATimeGoesBeyondTheLimit) {
  Frames frames(100);
  EXPECT_TRUE(frames.Ask(0, 60));
  EXPECT_TRUE(frames.Ask(1, 60)) << "beyond the limit";
  EXPECT_TRUE(frames.Ask(1, 500)) << "as much as it needs";
  EXPECT_FALSE(frames.Ask(2, 10));
  EXPECT_FALSE(frames.Ask(3, 60));
  EXPECT_FALSE(frames.Ask(4, 60));
  EXPECT_EQ(frames.budget().waiting(), 3U);
  EXPECT_EQ(frames.End(1), "23") << "one that fits, and the next beyond the limit";
  EXPECT_EQ(frames.budget().used(), 130U);
  EXPECT_EQ(frames.End(2), "") << "there is still one beyond it";
  EXPECT_EQ(frames.End(3), "4");
  EXPECT_EQ(frames.End(0), "");
  EXPECT_EQ(frames.End(4), "");
  EXPECT_EQ(frames.budget().used(), 0U);
}

// Each holds a part and needs more: a limit that nobody may exceed would stop them all.
TEST(MemoryBudgetTest, FramesThatHoldSomeAreFinishedFirst) {
  Frames frames(100);
  for (size_t frame : {0, 1, 2, 3}) EXPECT_TRUE(frames.Ask(frame, 25));
  EXPECT_TRUE(frames.Ask(0, 25)) << "beyond the limit";
  EXPECT_FALSE(frames.Ask(4, 25)) << "a new one";
  EXPECT_FALSE(frames.Ask(1, 75));
  EXPECT_FALSE(frames.Ask(2, 75));
  EXPECT_EQ(frames.End(0), "1");
  EXPECT_EQ(frames.End(1), "2");
  EXPECT_EQ(frames.End(2), "4");
}

TEST(MemoryBudgetTest, AJobLeavesHalfToTheOthersThatWait) {
  Frames frames(100);
  EXPECT_TRUE(frames.Ask(0, 60, 'a'));
  EXPECT_TRUE(frames.Ask(1, 40, 'a')) << "all of it, while no other job wants some";
  EXPECT_TRUE(frames.Ask(2, 10, 'a')) << "beyond the limit";
  EXPECT_FALSE(frames.Ask(3, 10, 'a'));
  EXPECT_FALSE(frames.Ask(4, 20, 'a'));
  EXPECT_FALSE(frames.Ask(5, 30, 'b'));
  EXPECT_EQ(frames.End(1), "5") << "job b, though a came first";
  EXPECT_EQ(frames.End(0), "34");
}

TEST(MemoryBudgetTest, TheIdleHalfIsTakenAtOnce) {
  Frames frames(100);
  auto share = frames.budget().TryIdle(nullptr, 50);
  ASSERT_TRUE(share);
  EXPECT_FALSE(frames.budget().tight());
  EXPECT_FALSE(frames.budget().TryIdle(nullptr, 1));
  EXPECT_TRUE(frames.Ask(0, 1));
  EXPECT_TRUE(frames.budget().tight());
  share->Release();
  EXPECT_FALSE(frames.budget().TryIdle(nullptr, uint64_t{0} - 1));
  EXPECT_EQ(frames.budget().used(), 1U);
}

}  // namespace
}  // namespace oe::memory_budget_test
