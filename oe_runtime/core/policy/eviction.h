#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "oe_runtime/core/common/dtype.h"
#include "oe_runtime/core/policy/policy_spec.h"
#include "oe_runtime/core/policy/row_facts.h"
#include "oe_runtime/core/policy/ttl_clock.h"

namespace oe {

class CapRule;
class SweepRule;

// A row begins with `dim` weights of `dtype`; the facts stand behind the optimizer's state.
struct RowShape {
  RowFacts facts;
  Dtype dtype;
  uint32_t dim;
};

// The eviction policies of one table: the facts that rows need for them, and their verdict on a row.
// Immutable.
class Eviction {
 public:
  // Which policy evicts a row, as its place in the specification of the table.
  using Reason = uint32_t;
  static constexpr Reason kNoReason = std::numeric_limits<Reason>::max();

  // `specs` complete. Rows begin with `dim` weights of `dtype` and have `bytes` bytes without the facts,
  // which the limit in bytes counts too.
  Eviction(const std::vector<EvictionSpec>& specs, Dtype dtype, uint32_t dim, size_t bytes);
  ~Eviction();
  Eviction(const Eviction&) = delete;
  Eviction& operator=(const Eviction&) = delete;

  const RowFacts& facts() const { return rows_.facts; }
  // Bit of each reason that a sweep can find.
  uint32_t sweeps() const { return sweeps_; }
  // What to sweep after push number `step`. A policy sweeps one of `parts` parts of the table in every_steps
  // pushes, then the next part. Each of these pushes sweeps a slice, so that none takes long. The slice does
  // not depend on the table: tables of any storage and number of servers have the same rows after each push.
  static constexpr uint64_t kMostSlices = 256;
  struct Turn {
    uint32_t reasons = 0;  // bits
    uint32_t part = 0;
    uint64_t slice = 0;  // of as many of the part
    uint64_t slices = 1;
  };
  std::vector<Turn> Due(uint64_t step, uint32_t parts) const;
  bool scheduled() const { return scheduled_; }

  // Whether policies of `reasons` look at the weights of rows, not only at their facts.
  bool NeedsRows(uint32_t reasons) const noexcept { return (reasons & needs_rows_) != 0; }
  // Why the row goes in push number `step` at `time`, by the policies of `reasons`; kNoReason if it stays.
  Reason Judge(const std::byte* row, uint32_t reasons, uint32_t step, TtlClock::Reading time) const noexcept;

  // Whether rows have the time of their last push.
  bool has_ttl() const { return seconds_ > 0; }
  uint32_t seconds() const { return seconds_; }  // of ttl
  // Whether rows that were not pushed for `steps` and `seconds` are evicted by the policies of `reasons`.
  bool Expired(uint32_t reasons, uint64_t steps, uint64_t seconds) const noexcept;

  bool capped() const { return cap_ != nullptr; }
  Reason cap() const { return cap_reason_; }
  // Most rows of the whole table.
  uint64_t most_rows() const;
  // Whether row `left` goes before row `right` when there is no room, in push number `step`. For capped().
  bool Before(const std::byte* left, const std::byte* right, uint32_t step) const noexcept;

 private:
  struct Sweep {
    Reason reason;
    uint64_t every;
    std::unique_ptr<const SweepRule> rule;
  };

  const RowShape rows_;
  std::vector<Sweep> by_name_;
  std::vector<const Sweep*> by_cost_;  // those that read facts alone come first
  std::unique_ptr<const CapRule> cap_;
  Reason cap_reason_ = kNoReason;
  uint32_t sweeps_ = 0;
  uint32_t needs_rows_ = 0;
  bool scheduled_ = false;
  uint32_t seconds_ = 0;
};

}  // namespace oe
