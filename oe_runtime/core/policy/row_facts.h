#ifndef OE_CORE_POLICY_ROW_FACTS_H_
#define OE_CORE_POLICY_ROW_FACTS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace oe {

// What eviction knows of a row: words of 4 bytes behind the optimizer's state, only those that a policy of
// the table needs. So they go wherever the row goes: copies in pools, table files, recovery.
class RowFacts {
 public:
  // Rows have `row_floats` floats without the facts.
  RowFacts(size_t row_floats, bool step, bool count, bool seconds)
      : step_(step ? row_floats : kNone),
        count_(count ? row_floats + (step ? 1 : 0) : kNone),
        seconds_(seconds ? row_floats + (step ? 1 : 0) + (count ? 1 : 0) : kNone),
        words_((step ? 1U : 0U) + (count ? 1U : 0U) + (seconds ? 1U : 0U)) {}

  // Floats that a row is longer for them.
  size_t words() const { return words_; }

  // A new row, whose key was pushed `count` times before.
  void Init(float* row, uint32_t count) const noexcept {
    Set(row, step_, 0);
    Set(row, count_, count);
    Set(row, seconds_, 0);
  }
  // A push: its number, how often the key was in it, and when it was, in Unix seconds.
  void Touch(float* row, uint32_t step, uint32_t times, uint32_t seconds) const noexcept {
    Set(row, step_, step);
    Set(row, seconds_, seconds);
    if (count_ == kNone) return;
    const uint32_t room = std::numeric_limits<uint32_t>::max() - count(row);
    Set(row, count_, count(row) + (times < room ? times : room));
  }
  void SetStep(float* row, uint32_t step) const noexcept { Set(row, step_, step); }

  uint32_t step(const float* row) const noexcept { return Get(row, step_); }
  uint32_t count(const float* row) const noexcept { return Get(row, count_); }
  uint32_t seconds(const float* row) const noexcept { return Get(row, seconds_); }

 private:
  static constexpr size_t kNone = std::numeric_limits<size_t>::max();

  static uint32_t Get(const float* row, size_t at) noexcept {
    uint32_t value = 0;
    if (at != kNone) std::memcpy(&value, row + at, sizeof(value));
    return value;
  }
  static void Set(float* row, size_t at, uint32_t value) noexcept {
    if (at != kNone) std::memcpy(row + at, &value, sizeof(value));
  }

  const size_t step_;
  const size_t count_;
  const size_t seconds_;
  const size_t words_;
};

}  // namespace oe

#endif  // OE_CORE_POLICY_ROW_FACTS_H_
