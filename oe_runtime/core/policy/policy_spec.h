#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oe_runtime/core/common/params.h"

namespace oe {

// Which keys get a row. DeepRec's feature filters
// (https://deeprec.readthedocs.io/en/latest/Feature-Filter.html) with their parameters:
//
//   counter  filter_freq, max_keys (1e8): most keys of the whole table that are counted at a time
//   cbf      filter_freq (1 to 255), max_element_size, false_positive_probability; for hash tables
//
// and for both `default_value` (0.0; DeepRec's default_value_no_permission), which a key without a row reads.
// A key counts when it is pushed, once for each time it was in the batch; pulls do not count. The push with
// which its count reaches filter_freq makes its row, with the initializer's value, and updates it.
//
// A counter forgets keys: where max_keys are counted, of a few others the one that was pushed least lately;
// and with the evictions, those that were not pushed for as long as global_step or ttl let a row live, or at
// most twice as long. Such a key begins at zero again.
struct AdmissionSpec {
  std::string name;  // empty: every key gets a row
  Params params;
};

// Which rows go:
//
//   global_step  steps_to_live: rows that were not pushed in the last so many pushes of the table
//   l2_weight    threshold: rows of which half the sum of the squared weights is below it, DeepRec's rule
//   ttl          seconds: rows that were not pushed for longer, by the server's clock
//   cap          max_rows or max_bytes (of rows: weights, optimizer's state and what policies add), and
//                policy "lru" or "lfu": rows that make place for new ones
//
// The first three take every_steps (0: never) too, see Table::Evict.
struct EvictionSpec {
  std::string name;
  Params params;
  std::string policy;  // of cap
};

// With every default filled in. `hash`: whether it is a hash table. Throw SpecError naming the field and the
// value.
AdmissionSpec Complete(const AdmissionSpec& spec, bool hash);
// In the order of their names, of which each may come once.
std::vector<EvictionSpec> Complete(const std::vector<EvictionSpec>& specs);

// Whether pushes must say how often each key was in the batch.
bool CountsKeys(const AdmissionSpec& admission, const std::vector<EvictionSpec>& eviction);

// Whether the policy bounds the number of rows, and whether it reads the clock.
bool CapsRows(const EvictionSpec& spec);
bool UsesClock(const EvictionSpec& spec);

}  // namespace oe
