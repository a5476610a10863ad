#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oe_runtime/core/common/params.h"

namespace oe {

// Which keys get a row. DeepRec's feature filters
// (https://deeprec.readthedocs.io/en/latest/Feature-Filter.html) with their parameters:
//
//   counter  filter_freq, max_keys (1e8): how many keys of the whole table are counted at a time, at most
//   cbf      filter_freq (1 to 255), max_element_size, false_positive_probability; for hash tables
//
// and for both `default_value` (0.0; DeepRec's default_value_no_permission), the value of a key without a
// row. A push counts a key once for each time it was in the batch; a pull does not count. The push that
// brings the count to filter_freq creates the row with the initializer's value, and updates it.
//
// A counter forgets keys. When max_keys are counted, a new key replaces the least recently pushed of a few
// others. A sweep forgets keys that were not pushed for as long as global_step or ttl let a row live, or at
// most for twice as long. A forgotten key begins at zero again.
struct AdmissionSpec {
  std::string name;  // empty: every key gets a row
  Params params;
};

// Which rows are evicted:
//
//   global_step  steps_to_live: rows whose last push is more than steps_to_live pushes of the table ago
//   l2_weight    threshold: rows with half the sum of squared weights below it, which is DeepRec's rule
//   ttl          seconds: rows that were not pushed for longer, by the server's clock
//   cap          max_rows, or max_bytes of rows with state and facts, and policy "lru" or "lfu": rows that
//                make room for new ones
//
// The first three also take every_steps (0: never), see Table::Evict.
struct EvictionSpec {
  std::string name;
  Params params;
  std::string policy;  // of cap
};

// Fill in every default. `hash` says whether it is a hash table. Throw SpecError naming the field and the
// value.
AdmissionSpec Complete(const AdmissionSpec& spec, bool hash);
// Sorted by name; each may come once.
std::vector<EvictionSpec> Complete(const std::vector<EvictionSpec>& specs);

// Whether pushes must say how often each key was in the batch.
bool CountsKeys(const AdmissionSpec& admission, const std::vector<EvictionSpec>& eviction);

// Whether the policy bounds the number of rows, and whether it reads the clock.
bool CapsRows(const EvictionSpec& spec);
bool UsesClock(const EvictionSpec& spec);

}  // namespace oe
