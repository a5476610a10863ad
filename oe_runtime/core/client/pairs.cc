#include "oe_runtime/core/client/pairs.h"

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

// Of one lookup, numbered from 0.
struct Own {
  std::vector<int32_t> rows;    // pair -> row
  std::vector<int32_t> counts;  // pair -> ids
};

Own Number(const PlannedGroup& group, size_t lookup, int32_t* of_ids) {
  Own own;
  const size_t lookups = group.lookups.size();
  const int32_t* inverse = group.inverse.data() + group.lookups[lookup].offset;
  std::vector<int32_t> numbers(group.rows, -1);
  for (size_t i = 0; i < group.lookups[lookup].size; ++i) {
    int32_t& number = numbers[static_cast<size_t>(inverse[i])];
    if (number < 0) {
      number = static_cast<int32_t>(own.rows.size());
      own.rows.push_back(inverse[i]);
      own.counts.push_back(0);
    }
    ++own.counts[static_cast<size_t>(number)];
    of_ids[i * lookups + lookup] = number;
  }
  return own;
}

}  // namespace

Pairs FindPairs(const PlannedGroup& group, ThreadPool* pool) {
  const size_t lookups = group.lookups.size();
  const size_t examples = lookups == 0 ? 0 : group.lookups[0].size;
  for (const PlannedLookup& lookup : group.lookups) {
    if (lookup.size != examples) throw SpecError("the lookups have different numbers of ids");
  }
  Pairs all;
  all.of_ids.resize(group.inverse.size());
  all.examples.resize(group.inverse.size());
  all.pairs.resize(group.inverse.size());
  std::vector<Own> own(lookups);
  pool->ParallelFor(lookups, [&](size_t l) { own[l] = Number(group, l, all.of_ids.data()); });
  std::vector<int32_t> first;  // pair of each lookup
  for (const Own& one : own) {
    first.push_back(static_cast<int32_t>(all.rows.size()));
    all.rows.insert(all.rows.end(), one.rows.begin(), one.rows.end());
    all.sizes.push_back(static_cast<int32_t>(one.rows.size()));
  }
  pool->ParallelFor(lookups, [&](size_t l) {
    std::vector<size_t> at(own[l].rows.size());  // where the next id of a pair goes
    size_t next = l * examples;
    for (size_t p = 0; p < at.size(); ++p) {
      at[p] = next;
      next += static_cast<size_t>(own[l].counts[p]);
    }
    for (size_t i = 0; i < examples; ++i) {
      int32_t& pair = all.of_ids[i * lookups + l];
      const size_t place = at[static_cast<size_t>(pair)]++;
      pair += first[l];
      all.examples[place] = static_cast<int32_t>(i);
      all.pairs[place] = pair;
    }
  });
  return all;
}

}  // namespace oe
