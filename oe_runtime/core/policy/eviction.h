#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "oe_runtime/core/common/dtype.h"
#include "oe_runtime/core/policy/policy_spec.h"
#include "oe_runtime/core/policy/row_facts.h"
#include "oe_runtime/core/policy/ttl_clock.h"

namespace oe {

// The eviction policies of one table: what they must know of a row, and what they say of one. Immutable.
class Eviction {
 public:
  enum Reason : uint32_t { kGlobalStep, kL2Weight, kTtl, kCap, kNoReason };
  static constexpr std::array<const char*, kNoReason> kNames = {"global_step", "l2_weight", "ttl", "cap"};

  // `specs` complete. Rows begin with `dim` weights of `dtype` and have `bytes` bytes without the facts,
  // which the limit in bytes counts too.
  Eviction(const std::vector<EvictionSpec>& specs, Dtype dtype, uint32_t dim, size_t bytes);

  const RowFacts& facts() const { return facts_; }
  // Bit of each reason that a sweep can find.
  uint32_t sweeps() const { return sweeps_; }
  // What is to be swept after push number `step`: of each policy one of `parts` parts of the table after the
  // other, every every_steps pushes the next. A part is swept in slices, each after another one of these
  // pushes, so that none of them takes long. Which slice it is does not depend on the table: so tables of any
  // storage and any number of servers have the same rows after every push.
  static constexpr uint64_t kMostSlices = 256;
  struct Turn {
    uint32_t reasons = 0;  // bits
    uint32_t part = 0;
    uint64_t slice = 0;  // of as many of the part
    uint64_t slices = 1;
  };
  std::vector<Turn> Due(uint64_t step, uint32_t parts) const;
  bool scheduled() const { return every_[kGlobalStep] + every_[kL2Weight] + every_[kTtl] > 0; }

  // Why the row goes in push number `step` at `time`, by the policies of `reasons`; kNoReason if it stays.
  Reason Judge(const std::byte* row, uint32_t reasons, uint32_t step, TtlClock::Reading time) const noexcept;

  bool has_ttl() const { return (sweeps_ & (1U << kTtl)) != 0; }
  uint32_t seconds() const { return seconds_; }  // of ttl
  // How long rows live without a push, by the policies of `reasons`: whether as much has gone by.
  bool Expired(uint32_t reasons, uint64_t steps, uint64_t seconds) const noexcept {
    return ((reasons & (1U << kGlobalStep)) != 0 && steps > steps_to_live_) ||
           ((reasons & (1U << kTtl)) != 0 && seconds > seconds_);
  }

  bool capped() const { return most_rows_ < std::numeric_limits<uint64_t>::max(); }
  // Most rows of the whole table.
  uint64_t most_rows() const { return most_rows_; }
  // Whether row `left` goes before row `right` when there is no room, in push number `step`.
  bool Before(const std::byte* left, const std::byte* right, uint32_t step) const noexcept;

 private:
  double SquaresOf(const std::byte* row) const noexcept;

  RowFacts facts_;
  const Dtype dtype_;
  const uint32_t dim_;
  uint32_t sweeps_ = 0;
  std::array<uint64_t, kNoReason> every_{};
  uint32_t steps_to_live_ = 0;
  float threshold_ = 0;
  uint32_t seconds_ = 0;
  uint64_t most_rows_ = std::numeric_limits<uint64_t>::max();
  bool lfu_ = false;
};

}  // namespace oe
