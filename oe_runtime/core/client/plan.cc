#include "oe_runtime/core/client/plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <string>

#include "oe_runtime/core/wire/errors.h"

namespace oe {
namespace {

using Sources = std::vector<uint32_t>;  // the ids arrays that one table is looked up with, each once

// The unique keys of several ids arrays together. Each array was made unique already; a key may still be in
// two.
struct Merged {
  const std::vector<Key>* keys = nullptr;  // `joint`, or those of the only source
  std::vector<Key> joint;
  std::vector<std::vector<int32_t>>
      places;  // per source: place in its own keys -> place here; empty = the same
};

void Merge(const Sources& sources, const std::vector<std::vector<Key>>& uniques, Merged* merged) {
  merged->places.resize(sources.size());
  if (sources.size() == 1) {
    merged->keys = &uniques[sources[0]];
    return;
  }
  std::vector<Key> all;
  for (const uint32_t source : sources) {
    all.insert(all.end(), uniques[source].begin(), uniques[source].end());
  }
  UniqueKeys joint = FindUnique(all.data(), all.size());
  merged->joint = std::move(joint.keys);
  merged->keys = &merged->joint;
  size_t begin = 0;
  for (size_t i = 0; i < sources.size(); ++i) {
    const size_t end = begin + uniques[sources[i]].size();
    merged->places[i].assign(joint.inverse.begin() + static_cast<std::ptrdiff_t>(begin),
                             joint.inverse.begin() + static_cast<std::ptrdiff_t>(end));
    begin = end;
  }
}

// Where every unique key of one Merged went.
struct Shared {
  std::vector<uint32_t> server;  // empty with one server
  std::vector<int32_t> place;    // within its server's part; empty with one server
};

ShardedKeys ShareOut(const std::vector<Key>& keys, uint32_t servers, bool array, Shared* shared) {
  ShardedKeys result;
  result.bounds.assign(servers + 1, 0);
  if (servers == 1) {
    result.keys = keys;
    result.bounds[1] = keys.size();
    return result;
  }
  shared->server.resize(keys.size());
  shared->place.resize(keys.size());
  std::vector<int32_t> counts(servers, 0);
  for (size_t i = 0; i < keys.size(); ++i) {
    const uint32_t server = server_of(keys[i], servers, array);
    shared->server[i] = server;
    shared->place[i] = counts[server]++;
  }
  for (uint32_t s = 0; s < servers; ++s)
    result.bounds[s + 1] = result.bounds[s] + static_cast<size_t>(counts[s]);
  result.keys.resize(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    result.keys[result.bounds[shared->server[i]] + static_cast<size_t>(shared->place[i])] = keys[i];
  }
  return result;
}

void CheckRange(const TableSpec& table, const std::vector<Key>& keys) {
  for (const Key key : keys) {
    if (key < table.input_dim) continue;
    throw KeyRangeError("table '" + table.name + "': key " + std::to_string(static_cast<int64_t>(key)) +
                        " is not in [0, " + std::to_string(table.input_dim) + ")");
  }
}

// One kind of key set: which ids arrays, and how they are shared out. Tables of the same kind share the work.
struct KeySet {
  size_t merged = 0;
  bool array = false;
  Shared shared;
};

class Planner {
 public:
  Planner(const std::vector<TableSpec>& tables, const std::vector<IdsView>& ids,
          const std::vector<std::pair<uint32_t, uint32_t>>& lookups, uint32_t servers, ThreadPool* pool)
      : tables_(tables), ids_(ids), lookups_(lookups), pool_(pool) {
    plan_.servers = servers;
  }

  BatchPlan Make() {
    CollectSources();
    LayOutLookups();
    FindUniques();
    ShareOutKeys();
    LayOutRows();
    FillInverses();
    return std::move(plan_);
  }

 private:
  void CollectSources() {
    sources_.resize(tables_.size());
    uses_.assign(ids_.size(), 0);
    for (const auto& [table, source] : lookups_) {
      ++uses_[source];
      Sources& of_table = sources_[table];
      if (std::find(of_table.begin(), of_table.end(), source) == of_table.end()) of_table.push_back(source);
    }
  }

  void LayOutLookups() {
    std::map<std::pair<bool, uint32_t>, PlannedGroup> groups;  // not float64, dim
    for (size_t number = 0; number < lookups_.size(); ++number) {
      const auto& [table, source] = lookups_[number];
      const bool is_float64 = DtypeOf(tables_[table]) == Dtype::kFloat64;
      PlannedGroup& group = groups[{!is_float64, tables_[table].dim}];
      const auto same = [id = table](const PlannedTable& planned) { return planned.table == id; };
      auto planned = std::find_if(group.tables.begin(), group.tables.end(), same);
      if (planned == group.tables.end()) {
        group.tables.push_back({table, 0, {}});
        planned = std::prev(group.tables.end());
      }
      const auto place = static_cast<size_t>(planned - group.tables.begin());
      size_t offset = 0;
      if (!group.lookups.empty()) offset = group.lookups.back().offset + group.lookups.back().size;
      group.lookups.push_back({number, place, ids_[source].size, offset});
    }
    for (auto& [kind, group] : groups) {
      group.is_float64 = !kind.first;
      group.dim = kind.second;
      const size_t ids = group.lookups.back().offset + group.lookups.back().size;
      if (ids > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
        throw SpecError("a batch of " + std::to_string(ids) + " ids; at most 2^31 - 1 are allowed");
      }
      group.inverse.resize(ids);
      plan_.groups.push_back(std::move(group));
    }
  }

  void FindUniques() {
    uniques_.resize(ids_.size());
    places_.resize(ids_.size());
    // What one lookup alone asks for is numbered right where its rows will be.
    for (PlannedGroup& group : plan_.groups) {
      for (const PlannedLookup& lookup : group.lookups) {
        const uint32_t source = lookups_[lookup.lookup].second;
        if (uses_[source] == 1) places_[source] = group.inverse.data() + lookup.offset;
      }
    }
    shared_places_.resize(ids_.size());
    pool_->ParallelFor(ids_.size(), [this](size_t i) {
      if (uses_[i] == 0) return;
      if (uses_[i] > 1) {
        shared_places_[i].resize(ids_[i].size);
        places_[i] = shared_places_[i].data();
      }
      uniques_[i] = FindUnique(ids_[i].data, ids_[i].size, places_[i]);
    });
    std::map<Sources, size_t> numbers;
    merged_of_.resize(tables_.size());
    for (size_t table = 0; table < tables_.size(); ++table) {
      if (sources_[table].empty()) continue;
      const auto [found, added] = numbers.emplace(sources_[table], numbers.size());
      merged_of_[table] = found->second;
      if (added) merge_sources_.push_back(sources_[table]);
    }
    merged_.resize(merge_sources_.size());
    pool_->ParallelFor(merged_.size(), [this](size_t i) { Merge(merge_sources_[i], uniques_, &merged_[i]); });
  }

  void ShareOutKeys() {
    std::map<std::pair<size_t, bool>, size_t> numbers;
    set_of_.resize(tables_.size());
    for (size_t table = 0; table < tables_.size(); ++table) {
      if (sources_[table].empty()) continue;
      const bool array = tables_[table].index == "array";
      if (array) CheckRange(tables_[table], *merged_[merged_of_[table]].keys);
      const auto [found, added] = numbers.emplace(std::pair(merged_of_[table], array), numbers.size());
      set_of_[table] = found->second;
      if (added) sets_.push_back({merged_of_[table], array, {}});
    }
    plan_.keys.resize(sets_.size());
    pool_->ParallelFor(sets_.size(), [this](size_t i) {
      plan_.keys[i] =
          ShareOut(*merged_[sets_[i].merged].keys, plan_.servers, sets_[i].array, &sets_[i].shared);
    });
  }

  void LayOutRows() {
    for (PlannedGroup& group : plan_.groups) {
      for (PlannedTable& table : group.tables) {
        table.keys = set_of_[table.table];
        table.offsets.resize(plan_.servers);
      }
      for (uint32_t server = 0; server < plan_.servers; ++server) {
        for (PlannedTable& table : group.tables) {
          table.offsets[server] = group.rows;
          group.rows += plan_.keys[table.keys].on(server);
        }
      }
    }
  }

  void FillInverses() {
    std::vector<std::pair<size_t, size_t>> work;  // group, lookup
    for (size_t g = 0; g < plan_.groups.size(); ++g) {
      for (size_t l = 0; l < plan_.groups[g].lookups.size(); ++l) work.emplace_back(g, l);
    }
    pool_->ParallelFor(work.size(), [&](size_t i) { FillInverse(work[i].first, work[i].second); });
  }

  void FillInverse(size_t group_number, size_t lookup_number) {
    PlannedGroup& group = plan_.groups[group_number];
    const PlannedLookup& lookup = group.lookups[lookup_number];
    const PlannedTable& table = group.tables[lookup.table];
    const uint32_t source = lookups_[lookup.lookup].second;
    const Sources& of_table = sources_[table.table];
    const auto which =
        static_cast<size_t>(std::find(of_table.begin(), of_table.end(), source) - of_table.begin());
    const std::vector<int32_t>& places = merged_[merged_of_[table.table]].places[which];
    const Shared& shared = sets_[set_of_[table.table]].shared;
    const int32_t* from = places_[source];
    int32_t* out = group.inverse.data() + lookup.offset;
    if (places.empty() && shared.server.empty()) {  // rows lie as the unique keys do
      const auto first = static_cast<int32_t>(table.offsets[0]);
      if (first == 0 && from == out) return;
      for (size_t i = 0; i < lookup.size; ++i) out[i] = first + from[i];
      return;
    }
    // From this source's unique keys to rows of the group; then one look-up a position.
    std::vector<int32_t> row(uniques_[source].size());
    for (size_t u = 0; u < row.size(); ++u) {
      const auto place = places.empty() ? u : static_cast<size_t>(places[u]);
      row[u] = shared.server.empty()
                   ? static_cast<int32_t>(table.offsets[0] + place)
                   : static_cast<int32_t>(table.offsets[shared.server[place]]) + shared.place[place];
    }
    for (size_t i = 0; i < lookup.size; ++i) out[i] = row[static_cast<size_t>(from[i])];
  }

  const std::vector<TableSpec>& tables_;
  const std::vector<IdsView>& ids_;
  const std::vector<std::pair<uint32_t, uint32_t>>& lookups_;
  ThreadPool* pool_;
  BatchPlan plan_;

  std::vector<Sources> sources_;  // per table
  // Per ids array:
  std::vector<size_t> uses_;  // lookups
  std::vector<std::vector<Key>> uniques_;
  std::vector<int32_t*> places_;                     // position -> place in `uniques_`: in a group's inverse
  std::vector<std::vector<int32_t>> shared_places_;  // or, with several lookups, here
  std::vector<Sources> merge_sources_;
  std::vector<Merged> merged_;
  std::vector<size_t> merged_of_;  // per table
  std::vector<KeySet> sets_;
  std::vector<size_t> set_of_;  // per table
};

// Where the rows of an overlap lie in the groups of the plan. positions[i] are those of the keys of set i
// among the plan's on their server.
void FindPlaces(const BatchPlan& plan, const std::vector<std::vector<uint32_t>>& positions,
                Overlap* overlap) {
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    PlannedGroup& part = overlap->plan.groups[g];
    std::vector<uint32_t>& places = overlap->places.emplace_back();
    for (PlannedTable& table : part.tables) table.offsets.resize(plan.servers);
    for (size_t server = 0; server < plan.servers; ++server) {
      for (PlannedTable& table : part.tables) {
        table.offsets[server] = part.rows;
        const ShardedKeys& common = overlap->plan.keys[table.keys];
        part.rows += common.on(server);
        const auto of_whole =
            std::find_if(plan.groups[g].tables.begin(), plan.groups[g].tables.end(),
                         [&](const PlannedTable& planned) { return planned.table == table.table; });
        const auto first = static_cast<uint32_t>(of_whole->offsets[server]);
        for (size_t k = common.bounds[server]; k < common.bounds[server + 1]; ++k) {
          places.push_back(first + positions[table.keys][k]);
        }
      }
    }
  }
}

}  // namespace

BatchPlan MakePlan(const std::vector<TableSpec>& tables, const std::vector<IdsView>& ids,
                   const std::vector<std::pair<uint32_t, uint32_t>>& lookups, uint32_t servers,
                   ThreadPool* pool) {
  constexpr size_t kFewIds = 8192;  // planned before another thread has woken up
  static ThreadPool* const caller = new ThreadPool(1);
  size_t total = 0;
  for (const IdsView& view : ids) total += view.size;
  return Planner(tables, ids, lookups, servers, total < kFewIds ? caller : pool).Make();
}

Overlap FindOverlap(const BatchPlan& plan, const BatchPlan& other, const std::set<uint32_t>& whole,
                    ThreadPool* pool) {
  // Tables that share their keys in both plans share the work.
  constexpr size_t kAll = ~size_t{0};
  std::map<std::pair<size_t, size_t>, size_t> numbers;
  std::vector<std::pair<size_t, size_t>> pairs;  // keys of this plan, keys of the other (or kAll)
  Overlap overlap;
  overlap.plan.servers = plan.servers;
  for (const PlannedGroup& group : plan.groups) {
    PlannedGroup& part = overlap.plan.groups.emplace_back();
    part.dim = group.dim;
    part.is_float64 = group.is_float64;
    for (const PlannedTable& table : group.tables) {
      size_t keys = whole.count(table.table) > 0 ? kAll : kAll - 1;
      for (const PlannedGroup& other_group : other.groups) {
        for (const PlannedTable& other_table : other_group.tables) {
          if (other_table.table == table.table && keys != kAll) keys = other_table.keys;
        }
      }
      if (keys == kAll - 1) continue;  // not pushed
      const auto [found, added] = numbers.emplace(std::pair(table.keys, keys), numbers.size());
      if (added) pairs.emplace_back(table.keys, keys);
      part.tables.push_back({table.table, found->second, {}});
    }
  }
  overlap.plan.keys.resize(pairs.size());
  std::vector<std::vector<uint32_t>> positions(pairs.size());
  pool->ParallelFor(pairs.size(), [&](size_t i) {
    const ShardedKeys& keys = plan.keys[pairs[i].first];
    ShardedKeys& common = overlap.plan.keys[i];
    std::vector<uint8_t> is_common(keys.keys.size(), pairs[i].second == kAll);
    if (pairs[i].second != kAll) MarkCommon(keys.keys, other.keys[pairs[i].second].keys, &is_common);
    common.bounds.push_back(0);
    for (size_t server = 0; server < plan.servers; ++server) {
      for (size_t k = keys.bounds[server]; k < keys.bounds[server + 1]; ++k) {
        if (is_common[k] == 0) continue;
        common.keys.push_back(keys.keys[k]);
        positions[i].push_back(static_cast<uint32_t>(k - keys.bounds[server]));
      }
      common.bounds.push_back(common.keys.size());
    }
  });
  FindPlaces(plan, positions, &overlap);
  return overlap;
}

}  // namespace oe
