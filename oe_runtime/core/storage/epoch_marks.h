#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "oe_runtime/core/common/prefetch.h"

namespace oe {

// Which of rows that have numbers were marked in an epoch, and in no later one. Pushes ask for random rows,
// so the marks of 32 share 8 bytes, which mostly stay in the processor's caches, and nothing needs to be
// cleared when an epoch ends.
class EpochMarks {
 public:
  // Whether number, below the size, was marked in the epoch.
  bool Has(uint32_t number, uint32_t epoch) const noexcept {
    const Group& group = groups_.data()[number / kGroup];
    return (group.marks >> number % kGroup & (group.epoch == epoch ? 1U : 0U)) != 0;
  }
  // The epoch must not be below that of any mark.
  void Set(uint32_t number, uint32_t epoch) noexcept {
    Group& group = groups_[number / kGroup];
    if (group.epoch != epoch) group = {epoch, 0};
    group.marks |= 1U << number % kGroup;
  }
  void Clear(uint32_t number) noexcept { groups_[number / kGroup].marks &= ~(1U << number % kGroup); }
  void Fetch(uint32_t number) const noexcept { Prefetch(groups_.data() + number / kGroup); }

  // Makes room for numbers below `size`; may throw std::bad_alloc, and then nothing has changed. Never
  // shrinks.
  void Grow(size_t size) {
    const size_t groups = (size + kGroup - 1) / kGroup;
    if (groups > groups_.capacity()) groups_.reserve(groups + groups / 2);
    if (groups > groups_.size()) groups_.resize(groups);
  }
  // Of memory held.
  size_t bytes() const noexcept { return groups_.capacity() * sizeof(Group); }
  static constexpr size_t BytesOf(size_t numbers) { return (numbers + kGroup - 1) / kGroup * sizeof(Group); }

 private:
  static constexpr uint32_t kGroup = 32;
  struct Group {
    uint32_t epoch = 0;
    uint32_t marks = 0;
  };

  std::vector<Group> groups_;
};

}  // namespace oe
