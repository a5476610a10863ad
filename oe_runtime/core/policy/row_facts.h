#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace oe {

// What eviction knows of a row: words of 4 bytes behind the optimizer's state, only those that a policy of
// the table needs. They go where the row goes: to copies in pools, to table files, through recovery.
class RowFacts {
 public:
  // Which facts there are: the number of the last push, how often the key was pushed, the time of the last
  // push.
  struct Needs {
    bool step = false;
    bool count = false;
    bool seconds = false;

    bool any() const { return step || count || seconds; }
    void operator|=(const Needs& other) {
      step = step || other.step;
      count = count || other.count;
      seconds = seconds || other.seconds;
    }
  };

  // Rows have `bytes` bytes, a multiple of `alignment` (4 or 8), without the facts, and another multiple with
  // them.
  RowFacts(size_t bytes, size_t alignment, Needs needs)
      : begin_(bytes),
        step_(needs.step ? bytes : kNone),
        count_(needs.count ? bytes + (needs.step ? kWord : 0) : kNone),
        seconds_(needs.seconds ? bytes + (needs.step ? kWord : 0) + (needs.count ? kWord : 0) : kNone),
        end_(bytes + ((needs.step ? 1U : 0U) + (needs.count ? 1U : 0U) + (needs.seconds ? 1U : 0U)) * kWord),
        pad_(end_ % alignment == 0 ? kNone : end_) {}

  // At most so many words.
  static constexpr size_t kMost = 3;
  // Where the first one is, and how many there are.
  size_t at() const { return begin_; }
  uint32_t words() const { return static_cast<uint32_t>((end_ - begin_) / kWord); }
  // Of a row with the facts.
  size_t row_bytes() const { return end_ + (pad_ == kNone ? 0 : kWord); }

  // A new row, whose key was pushed `count` times before.
  void Init(std::byte* row, uint32_t count) const noexcept {
    Set(row, step_, 0);
    Set(row, count_, count);
    Set(row, seconds_, 0);
    Set(row, pad_, 0);
  }
  // A push: its number, how often the key was in it, and when it was, in Unix seconds.
  void Touch(std::byte* row, uint32_t step, uint32_t times, uint32_t seconds) const noexcept {
    Set(row, step_, step);
    Set(row, seconds_, seconds);
    if (count_ == kNone) return;
    const uint32_t room = std::numeric_limits<uint32_t>::max() - count(row);
    Set(row, count_, count(row) + (times < room ? times : room));
  }
  void SetStep(std::byte* row, uint32_t step) const noexcept { Set(row, step_, step); }
  void SetSeconds(std::byte* row, uint32_t seconds) const noexcept { Set(row, seconds_, seconds); }

  uint32_t step(const std::byte* row) const noexcept { return Get(row, step_); }
  uint32_t count(const std::byte* row) const noexcept { return Get(row, count_); }
  uint32_t seconds(const std::byte* row) const noexcept { return Get(row, seconds_); }

 private:
  static constexpr size_t kWord = sizeof(uint32_t);
  static constexpr size_t kNone = std::numeric_limits<size_t>::max();

  static uint32_t Get(const std::byte* row, size_t at) noexcept {
    uint32_t value = 0;
    if (at != kNone) std::memcpy(&value, row + at, sizeof(value));
    return value;
  }
  static void Set(std::byte* row, size_t at, uint32_t value) noexcept {
    if (at != kNone) std::memcpy(row + at, &value, sizeof(value));
  }

  const size_t begin_;
  const size_t step_;
  const size_t count_;
  const size_t seconds_;
  const size_t end_;
  const size_t pad_;
};

}  // namespace oe
