#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace oe {

// Slots of a log whose versions only kept checkpoints need, and for each the epoch in which it was
// superseded: one bit per slot and epoch, of the segments that have such slots. Not thread-safe.
class RetiredSlots {
 public:
  explicit RetiredSlots(uint32_t segment_slots = 1) : segment_slots_(segment_slots) {}

  // A slot that is not retired. May throw std::bad_alloc, and then nothing has changed.
  void Add(uint32_t slot, uint64_t epoch) {
    std::vector<Bits>& segments = epochs_[epoch];
    const uint32_t segment = slot / segment_slots_;
    if (segment >= segments.size()) segments.resize(segment + 1);
    Bits& bits = segments[segment];
    if (!bits) {
      bits = Bits(new uint64_t[words()]());
      ++allocated_;
    }
    bits[slot % segment_slots_ / 64] |= uint64_t{1} << slot % segment_slots_ % 64;
    ++size_;
  }

  // If `from` is retired, `to` is retired in its place. May throw std::bad_alloc, and then nothing has
  // changed.
  void Move(uint32_t from, uint32_t to) {
    const uint32_t segment = from / segment_slots_;
    const uint32_t word = from % segment_slots_ / 64;
    const uint64_t bit = uint64_t{1} << from % segment_slots_ % 64;
    for (auto& [epoch, segments] : epochs_) {
      if (segment >= segments.size() || !segments[segment] || (segments[segment][word] & bit) == 0) continue;
      Add(to, epoch);  // `segments` may grow, its bits stay where they are
      segments[segment][word] &= ~bit;
      --size_;
      return;
    }
  }

  // Forgets the slots that were superseded in epochs up to `last`, and calls `forgotten` with each.
  template <typename Function>
  void ForgetUpTo(uint64_t last, const Function& forgotten) {
    while (!epochs_.empty() && epochs_.begin()->first <= last) {
      const std::vector<Bits>& segments = epochs_.begin()->second;
      for (uint32_t segment = 0; segment < segments.size(); ++segment) {
        if (!segments[segment]) continue;
        --allocated_;
        for (uint32_t word = 0; word < words(); ++word) {
          for (uint64_t left = segments[segment][word]; left != 0; left &= left - 1) {
            const auto bit = static_cast<uint32_t>(__builtin_ctzll(left));
            forgotten(segment * segment_slots_ + word * 64 + bit);
            --size_;
          }
        }
      }
      epochs_.erase(epochs_.begin());
    }
  }

  uint64_t size() const noexcept { return size_; }
  // Of memory held.
  uint64_t bytes() const noexcept {
    uint64_t bytes = allocated_ * words() * sizeof(uint64_t);
    for (const auto& [epoch, segments] : epochs_) bytes += segments.capacity() * sizeof(Bits);
    return bytes;
  }

 private:
  using Bits = std::unique_ptr<uint64_t[]>;  // a segment's

  uint32_t words() const noexcept { return (segment_slots_ + 63) / 64; }

  uint32_t segment_slots_;
  std::map<uint64_t, std::vector<Bits>> epochs_;
  uint64_t allocated_ = 0;  // segments' bits
  uint64_t size_ = 0;
};

}  // namespace oe
