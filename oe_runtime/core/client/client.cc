#include "oe_runtime/core/client/client.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "oe_runtime/core/common/copy_row.h"
#include "oe_runtime/core/common/half_lanes.h"
#include "oe_runtime/core/common/unique.h"
#include "oe_runtime/core/optimizer/optimizer_spec.h"
#include "oe_runtime/core/policy/eviction.h"
#include "oe_runtime/core/spec/row_format.h"
#include "oe_runtime/core/table/gradients.h"
#include "oe_runtime/core/wire/errors.h"

namespace oe {
namespace {

constexpr unsigned kMostThreads = 8;
// Of rows by key that go out at once, so that pushes of others never wait for long.
constexpr size_t kAskedBytes = size_t{32} << 20;
constexpr size_t kAskedKeys = size_t{256} << 10;

// Of connecting to servers that have no room: between the tries, doubled each time, and at most.
constexpr auto kFirstConnectPause = std::chrono::milliseconds(20);
constexpr auto kLastConnectPause = std::chrono::milliseconds(640);

unsigned ThreadsOr(unsigned threads) {
  if (threads != 0) return threads;
  return std::min(kMostThreads, std::max(1U, std::thread::hardware_concurrency()));
}

// The lookups of one table touch rows that no other table's do: one piece of work for a thread.
struct SumWork {
  size_t group;
  size_t table;
  bool rounds;  // to bfloat16
};

// Where ids repeat often enough, writing every row once more costs less than a guess for each id whether it
// is the row's first.
bool Repeats(const PlannedGroup& group) { return group.inverse.size() >= 2 * group.rows; }

// `seen` as in SumByRow. Without it, nothing has begun where `fresh`.
template <typename T>
void SumTable(const BatchPlan& plan, const PlannedGroup& group, size_t table, const GradientView& of_ids,
              bool fresh, std::byte* of_rows, uint8_t* seen) {
  const auto* gradients = static_cast<const T*>(of_ids.data);
  auto* sums = reinterpret_cast<T*>(of_rows);
  const size_t dim = group.dim;
  const PlannedTable& planned = group.tables[table];
  for (uint32_t server = 0; fresh && seen == nullptr && server < plan.servers; ++server) {
    std::fill_n(sums + planned.offsets[server] * dim, plan.keys[planned.keys].on(server) * dim, T{kNoTerm});
  }
  const size_t lookups = group.lookups.size();
  for (size_t l = 0; l < lookups; ++l) {
    const PlannedLookup& lookup = group.lookups[l];
    if (lookup.table != table) continue;
    const size_t first = of_ids.by_example ? l : lookup.offset;
    SumByRow(gradients + first * dim, group.inverse.data() + lookup.offset, lookup.size, dim, sums, seen,
             of_ids.by_example ? lookups : 1);
  }
}

// For a table whose gradients travel as bfloat16: in any process, so that rows do not depend on where servers
// are.
void RoundSums(const PlannedGroup& group, const PlannedTable& planned, const BatchPlan& plan,
               std::byte* sums) {
  for (uint32_t server = 0; server < plan.servers; ++server) {
    std::byte* of_server = sums + planned.offsets[server] * group.row_bytes();
    RoundToBfloat16(reinterpret_cast<float*>(of_server), plan.keys[planned.keys].on(server) * group.dim);
  }
}

// Asks what a server will ask of its own part, so that a push is refused before any of them takes it; notes
// which are going to refuse theirs.
void CheckSums(const PlannedGroup& group, const PlannedTable& planned, const BatchPlan& plan,
               const TableSpec& spec, const std::byte* sums, std::vector<std::atomic<bool>>* refusing) {
  if (spec.nonfinite_gradients != "refuse") return;
  const ShardedKeys& keys = plan.keys[planned.keys];
  for (uint32_t server = 0; server < plan.servers; ++server) {
    const std::byte* of_server = sums + planned.offsets[server] * group.row_bytes();
    if (!AllFinite(spec, of_server, keys.on(server))) (*refusing)[server] = true;
  }
}

void RequireInRange(const TableSpec& spec, const Key* keys, size_t n) {
  if (spec.index != "array") return;
  for (size_t i = 0; i < n; ++i) {
    if (keys[i] < spec.input_dim) continue;
    throw KeyRangeError("table '" + spec.name + "': key " + std::to_string(static_cast<int64_t>(keys[i])) +
                        " is not in [0, " + std::to_string(spec.input_dim) + ")");
  }
}

// By the parts of a hash, which the threads share.
void RequireDistinct(const TableSpec& spec, const Key* keys, size_t n, ThreadPool* pool) {
  constexpr uint32_t kParts = 64;
  std::vector<std::vector<Key>> parts(kParts);
  for (std::vector<Key>& part : parts) part.reserve(n / kParts * 3 / 2 + 8);
  for (size_t i = 0; i < n; ++i) parts[server_of(keys[i], kParts, false)].push_back(keys[i]);
  std::atomic<bool> distinct{true};
  pool->ParallelFor(kParts, [&](size_t part) {
    std::vector<int32_t> inverse(parts[part].size());
    const std::vector<Key>& of_part = parts[part];
    if (FindUnique(of_part.data(), of_part.size(), inverse.data()).size() < of_part.size()) distinct = false;
  });
  if (distinct) return;
  std::vector<Key> sorted(keys, keys + n);
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  throw SpecError("table '" + spec.name + "': key " + std::to_string(static_cast<int64_t>(*twice)) +
                  " is there twice; give each key one row");
}

}  // namespace

Client::Client(unsigned threads) : pool_(ThreadsOr(threads)) {}

std::unique_ptr<Client> Client::InProcess(const StorageSpec& storage, uint32_t servers, unsigned threads) {
  std::unique_ptr<Client> client(new Client(threads));
  client->backend_ = NewLocalBackend(storage, servers, &client->pool_);
  client->servers_ = client->backend_->servers();
  return client;
}

std::unique_ptr<Client> Client::Connect(const RemoteOptions& options, unsigned threads) {
  std::unique_ptr<Client> client(new Client(threads));
  // Under a flood of connections a server closes the oldest that has not said hello yet, even if it is about
  // to: it says so, and the next try has a place of its own.
  for (auto pause = kFirstConnectPause; client->backend_ == nullptr; pause *= 2) {
    try {
      client->backend_ = NewRemoteBackend(options, &client->pool_);
    } catch (const TooManyConnections&) {
      if (pause > kLastConnectPause) throw;
      if (options.check_interrupt) options.check_interrupt();
      std::this_thread::sleep_for(pause);
    }
  }
  client->several_workers_ = options.worker.of > 1;
  client->servers_ = client->backend_->servers();
  return client;
}

uint32_t Client::CreateTable(const TableSpec& spec) {
  const TableSpec wanted = Complete(spec);
  const std::lock_guard<std::mutex> request(request_mutex_);
  Opened table{wanted, {}, PullsHalves(wanted) ? DtypeOf(wanted) : Dtype::kFloat32, Dtype::kFloat32};
  if (wanted.exchange_dtype == "bfloat16") {
    backend_->RequireHalves();
    table.pushes = Dtype::kBfloat16;
  }
  TableSpec of_servers = wanted;
  of_servers.exchange_dtype.clear();
  table.server_ids = backend_->CreateTable(of_servers);
  const std::lock_guard<std::mutex> lock(tables_mutex_);
  for (auto& [id, opened] : tables_) {
    if (opened.spec.name != wanted.name) continue;
    opened = std::move(table);  // others, if another client has dropped the table since
    return id;
  }
  tables_[next_table_] = std::move(table);
  return next_table_++;
}

const Client::Opened& Client::Get(uint32_t table) const {
  const auto found = tables_.find(table);
  if (found != tables_.end()) return found->second;
  if (table < next_table_) {
    throw SpecError("table id " + std::to_string(table) + " is of a table that this client has dropped");
  }
  throw SpecError("table id " + std::to_string(table) + " does not exist; this client has " +
                  std::to_string(tables_.size()) + " tables");
}

TableSpec Client::Spec(uint32_t table) const {
  const std::lock_guard<std::mutex> lock(tables_mutex_);
  return Get(table).spec;
}

std::optional<uint64_t> Client::Drop(const std::vector<std::string>& tables,
                                     const std::optional<std::string>& job, bool force) {
  const std::lock_guard<std::mutex> request(request_mutex_);
  ++others_;
  const std::optional<uint64_t> dropped = backend_->Drop(tables, job, force);
  if (job) return dropped;
  const std::lock_guard<std::mutex> lock(tables_mutex_);
  for (auto it = tables_.begin(); it != tables_.end();) {
    const bool gone =
        tables.empty() || std::find(tables.begin(), tables.end(), it->second.spec.name) != tables.end();
    it = gone ? tables_.erase(it) : std::next(it);
  }
  return dropped;
}

void Client::SkipTables(uint32_t next) {
  const std::lock_guard<std::mutex> lock(tables_mutex_);
  next_table_ = std::max(next_table_, next);
}

std::vector<ServerBatch> Client::Batches(const BatchPlan& plan, const std::vector<std::byte*>& groups,
                                         const std::vector<double>& learning_rates, bool push) const {
  const std::lock_guard<std::mutex> lock(tables_mutex_);
  std::vector<ServerBatch> batches(plan.servers);
  for (uint32_t server = 0; server < plan.servers; ++server) {
    ServerBatch& batch = batches[server];
    for (const ShardedKeys& keys : plan.keys) {
      batch.blocks.push_back({keys.keys.data() + keys.bounds[server], keys.on(server)});
    }
    for (size_t g = 0; g < plan.groups.size(); ++g) {
      const PlannedGroup& group = plan.groups[g];
      for (const PlannedTable& table : group.tables) {
        const Opened& opened = Get(table.table);
        batch.entries.push_back(
            {opened.server_ids[server], static_cast<uint32_t>(table.keys), learning_rates[g]});
        batch.packs.push_back(push ? opened.pushes : opened.pulls);
        batch.values.push_back(groups[g] + table.offsets[server] * group.row_bytes());
        batch.bytes.push_back(plan.keys[table.keys].on(server) * group.row_bytes());
      }
    }
  }
  return batches;
}

std::vector<std::vector<uint32_t>> Client::AddCounts(const BatchPlan& plan,
                                                     std::vector<ServerBatch>* batches) const {
  std::vector<std::vector<uint32_t>> counts(plan.groups.size());
  const std::lock_guard<std::mutex> lock(tables_mutex_);
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    const PlannedGroup& group = plan.groups[g];
    std::vector<bool> wanted(group.tables.size());
    for (size_t t = 0; t < group.tables.size(); ++t) {
      const TableSpec& spec = Get(group.tables[t].table).spec;
      wanted[t] = CountsKeys(spec.admission, spec.eviction);
      if (wanted[t]) counts[g].resize(group.rows);
    }
    for (const PlannedLookup& lookup : group.lookups) {
      if (!wanted[lookup.table]) continue;
      const int32_t* rows = group.inverse.data() + lookup.offset;
      for (size_t i = 0; i < lookup.size; ++i) ++counts[g][static_cast<size_t>(rows[i])];
    }
    for (uint32_t server = 0; server < plan.servers; ++server) {
      for (size_t t = 0; t < group.tables.size(); ++t) {
        (*batches)[server].counts.push_back(wanted[t] ? counts[g].data() + group.tables[t].offsets[server]
                                                      : nullptr);
      }
    }
  }
  return counts;
}

std::shared_ptr<PulledBatch> Client::Plan(const std::vector<IdsView>& ids,
                                          const std::vector<std::pair<uint32_t, uint32_t>>& lookups) {
  // The plan is of the tables that are looked up, in the order of their ids.
  std::map<uint32_t, uint32_t> numbers;
  for (const auto& [table, source] : lookups) numbers.emplace(table, 0);
  std::vector<TableSpec> tables;
  std::vector<uint32_t> table_ids;
  {
    const std::lock_guard<std::mutex> lock(tables_mutex_);
    for (auto& [table, number] : numbers) {
      number = static_cast<uint32_t>(tables.size());
      tables.push_back(Get(table).spec);
      table_ids.push_back(table);
    }
  }
  std::vector<std::pair<uint32_t, uint32_t>> of_plan;
  of_plan.reserve(lookups.size());
  for (const auto& [table, source] : lookups) {
    if (source >= ids.size()) {
      throw SpecError("lookup " + std::to_string(of_plan.size()) + ": ids " + std::to_string(source) +
                      " of " + std::to_string(ids.size()) + " arrays");
    }
    of_plan.emplace_back(numbers.at(table), source);
  }
  auto pulled = std::make_shared<PulledBatch>();
  pulled->client = this;
  pulled->plan = MakePlan(tables, ids, of_plan, servers_, &pool_);
  for (PlannedGroup& group : pulled->plan.groups) {
    for (PlannedTable& table : group.tables) table.table = table_ids[table.table];
    pulled->rows.push_back(backend_->NewBuffer(group.rows * group.row_bytes()));
  }
  return pulled;
}

std::shared_ptr<PulledBatch> Client::Pull(const std::vector<IdsView>& ids,
                                          const std::vector<std::pair<uint32_t, uint32_t>>& lookups) {
  std::shared_ptr<PulledBatch> pulled = Plan(ids, lookups);
  Refresh(pulled.get());
  return pulled;
}

std::vector<ServerBatch> Client::BatchesToPull(const BatchPlan& plan, std::vector<Buffer>* rows) const {
  std::vector<std::byte*> places;
  for (Buffer& of_group : *rows) places.push_back(of_group.as<std::byte>());
  const std::vector<double> no_rates(places.size(), 0.0);
  return Batches(plan, places, no_rates, false);
}

void Client::PullInto(const BatchPlan& plan, std::vector<Buffer>* rows) {
  backend_->Pull(BatchesToPull(plan, rows));
}

void Client::Refresh(PulledBatch* batch, uint64_t staleness) {
  if (batch->client != this) throw SpecError("this batch was pulled by another client");
  // What Follow said is for one time, else each batch would keep the one before in memory.
  const std::shared_ptr<const PulledBatch> before = std::move(batch->before);
  const Overlap shared = std::move(batch->shared);
  batch->before = nullptr;
  batch->shared = {};
  const auto lacks = [&]() -> std::optional<uint64_t> {  // how many pushes, if nothing else has changed
    if (!batch->state || several_workers_ || batch->state->others != others_) return std::nullopt;
    return pushes_ - batch->state->pushes;
  };
  if (lacks().value_or(~uint64_t{0}) <= staleness) return;  // without waiting for a request on its way
  const std::lock_guard<std::mutex> request(request_mutex_);
  const Changes now{pushes_, others_};
  if (lacks().value_or(~uint64_t{0}) <= staleness) return;
  if (lacks().value_or(0) != 1 || !before || before->pushed_as != now.pushes) {
    batch->state.reset();
    PullInto(batch->plan, &batch->rows);
    batch->state = now;
    return;
  }
  std::vector<Buffer> rows;
  rows.reserve(shared.plan.groups.size());
  for (const PlannedGroup& group : shared.plan.groups)
    rows.push_back(backend_->NewBuffer(group.rows * group.row_bytes()));
  PullInto(shared.plan, &rows);
  for (size_t g = 0; g < rows.size(); ++g) {
    const size_t bytes = shared.plan.groups[g].row_bytes();
    const std::byte* from = rows[g].as<std::byte>();
    std::byte* to = batch->rows[g].as<std::byte>();
    for (const uint32_t place : shared.places[g]) {
      CopyRow(from, to + place * bytes, bytes);
      from += bytes;
    }
  }
  batch->state = now;
}

void Client::ReadAhead(const std::vector<std::shared_ptr<PulledBatch>>& pulls) {
  std::vector<ServerBatch> all(servers_);
  for (const std::shared_ptr<PulledBatch>& pulled : pulls) {
    if (pulled->client != this) throw SpecError("this batch was pulled by another client");
    const std::vector<ServerBatch> batches = BatchesToPull(pulled->plan, &pulled->rows);
    for (uint32_t server = 0; server < servers_; ++server) {
      ServerBatch& batch = all[server];
      const auto blocks = static_cast<uint32_t>(batch.blocks.size());
      for (BatchEntry entry : batches[server].entries) {
        entry.block += blocks;
        batch.entries.push_back(entry);
      }
      batch.blocks.insert(batch.blocks.end(), batches[server].blocks.begin(), batches[server].blocks.end());
    }
  }
  const std::lock_guard<std::mutex> request(request_mutex_);
  backend_->ReadAhead(all);
}

void Client::Follow(PulledBatch* batch, std::shared_ptr<const PulledBatch> before) {
  if (batch->client != this || before->client != this) {
    throw SpecError("this batch was pulled by another client");
  }
  std::set<uint32_t> whole;
  {
    const std::lock_guard<std::mutex> lock(tables_mutex_);
    for (const auto& [id, opened] : tables_) {
      if (!opened.spec.eviction.empty()) whole.insert(id);
    }
  }
  batch->shared = FindOverlap(batch->plan, before->plan, whole, &pool_);
  batch->before = std::move(before);
}

void Client::Embeddings(const PulledBatch& batch, size_t group, void* out) {
  constexpr size_t kPieceBytes = size_t{4} << 20;  // less is copied before another thread has woken up
  const PlannedGroup& of = batch.plan.groups[group];
  const size_t ids = of.inverse.size();
  const size_t pieces = (ids * of.row_bytes() + kPieceBytes - 1) / kPieceBytes;
  pool_.ParallelFor(pieces, [&](size_t piece) {
    // In variables of its own, or the compiler would read them anew after each row.
    const size_t bytes = of.row_bytes();
    const std::byte* const rows = batch.rows[group].as<std::byte>();
    const size_t begin = ids * piece / pieces;
    const int32_t* const end = of.inverse.data() + ids * (piece + 1) / pieces;
    std::byte* to = static_cast<std::byte*>(out) + begin * bytes;
    for (const int32_t* row = of.inverse.data() + begin; row != end; ++row, to += bytes) {
      CopyRow(rows + static_cast<size_t>(*row) * bytes, to, bytes);
    }
  });
}

void Client::PoolBags(const PulledBatch& batch, size_t group, const std::vector<Bags>& bags) {
  oe::PoolBags(batch.plan.groups[group], batch.rows[group].data(), bags, &pool_);
}

void Client::SumBags(const PulledBatch& batch, size_t group, const std::vector<Bags>& bags, void* sums) {
  oe::SumBags(batch.plan.groups[group], bags, sums, &pool_);
}

void Client::Push(PulledBatch& pulled, const std::vector<GradientView>& of_ids,
                  const std::vector<double>& learning_rates, const std::vector<GradientView>& of_rows) {
  const BatchPlan& plan = pulled.plan;
  if (pulled.client != this) throw SpecError("this batch was pulled by another client");
  CheckShapes(plan, of_ids, of_rows);
  std::vector<double> rates = learning_rates;
  if (rates.size() == 1) rates.resize(plan.groups.size(), rates[0]);
  if (rates.size() != plan.groups.size()) {
    throw SpecError(std::to_string(rates.size()) + " learning rates for " +
                    std::to_string(plan.groups.size()) + " groups");
  }
  std::vector<Buffer> sums;
  std::vector<std::byte*> places;
  std::vector<bool> begun;
  std::vector<std::vector<uint8_t>> seen(plan.groups.size());  // of the rows of each group; see SumByRow
  std::vector<SumWork> work;
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    const size_t bytes = plan.groups[g].rows * plan.groups[g].row_bytes();
    sums.push_back(backend_->NewBuffer(bytes));
    places.push_back(sums.back().as<std::byte>());
    begun.push_back(!of_rows.empty() && of_rows[g].given());
    if (begun[g] && bytes > 0) std::memcpy(places[g], of_rows[g].data, bytes);
    if (!begun[g] && !Repeats(plan.groups[g])) seen[g].resize(plan.groups[g].rows);
    for (size_t t = 0; t < plan.groups[g].tables.size(); ++t) {
      const std::lock_guard<std::mutex> lock(tables_mutex_);
      work.push_back({g, t, Get(plan.groups[g].tables[t].table).pushes == Dtype::kBfloat16});
    }
  }
  std::map<uint32_t, TableSpec> tables;
  if (servers_ > 1) {  // one server refuses all of a push or nothing by itself
    const std::lock_guard<std::mutex> lock(tables_mutex_);
    for (const PlannedGroup& group : plan.groups) {
      for (const PlannedTable& table : group.tables) tables.emplace(table.table, Get(table.table).spec);
    }
  }
  std::vector<std::atomic<bool>> refusing(servers_);
  pool_.ParallelFor(work.size(), [&](size_t i) {
    const size_t g = work[i].group;
    const PlannedGroup& group = plan.groups[g];
    const PlannedTable& planned = group.tables[work[i].table];
    const auto sum = group.is_float64 ? SumTable<double> : SumTable<float>;
    uint8_t* const of_group = seen[g].empty() ? nullptr : seen[g].data();
    if (of_ids[g].given()) sum(plan, group, work[i].table, of_ids[g], !begun[g], places[g], of_group);
    if (work[i].rounds) RoundSums(group, planned, plan, places[g]);
    if (servers_ > 1) CheckSums(group, planned, plan, tables.at(planned.table), places[g], &refusing);
  });
  std::vector<ServerBatch> batches = Batches(plan, places, rates, true);
  const std::vector<std::vector<uint32_t>> counts = AddCounts(plan, &batches);
  // Those that refuse it still get it, alone: they say which gradient it was, and count it.
  if (std::any_of(refusing.begin(), refusing.end(), [](const auto& one) { return one.load(); })) {
    for (uint32_t server = 0; server < servers_; ++server) batches[server].skip = !refusing[server];
  }
  const std::lock_guard<std::mutex> request(request_mutex_);
  backend_->Push(batches);
  pulled.pushed_as = ++pushes_;
}

void Client::PullRows(uint32_t table, const Key* keys, size_t n, void* out) {
  const TableSpec spec = Spec(table);
  const bool array = spec.index == "array";
  const size_t row_bytes = spec.dim * ValueBytes(DtypeOf(spec));
  RequireInRange(spec, keys, n);
  const auto part = [&](uint32_t server, const Key* of_server, size_t count, std::byte* rows) {
    const std::lock_guard<std::mutex> lock(tables_mutex_);
    ServerBatch batch;
    batch.entries = {{Get(table).server_ids[server], 0, 0.0}};
    batch.blocks = {{of_server, count}};
    batch.values = {rows};
    batch.bytes = {count * row_bytes};
    batch.packs = {Get(table).pulls};
    return batch;
  };
  std::vector<ServerBatch> batches;
  if (servers_ == 1) {  // rows come right where they belong
    batches.push_back(part(0, keys, n, static_cast<std::byte*>(out)));
    const std::lock_guard<std::mutex> request(request_mutex_);
    return backend_->Pull(batches);
  }
  std::vector<std::vector<Key>> parts(servers_);
  std::vector<std::vector<size_t>> positions(servers_);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t server = server_of(keys[i], servers_, array);
    parts[server].push_back(keys[i]);
    positions[server].push_back(i);
  }
  std::vector<Buffer> rows;
  for (uint32_t s = 0; s < servers_; ++s) {
    rows.push_back(backend_->NewBuffer(parts[s].size() * row_bytes));
    batches.push_back(part(s, parts[s].data(), parts[s].size(), rows[s].as<std::byte>()));
  }
  {
    const std::lock_guard<std::mutex> request(request_mutex_);
    backend_->Pull(batches);
  }
  for (uint32_t s = 0; s < servers_; ++s) {
    for (size_t i = 0; i < positions[s].size(); ++i) {
      CopyRow(rows[s].as<std::byte>() + i * row_bytes,
              static_cast<std::byte*>(out) + positions[s][i] * row_bytes, row_bytes);
    }
  }
}

size_t Client::StateValues(uint32_t table) const {
  const TableSpec spec = Spec(table);
  return ValuesOf(SlotsOf(spec.optimizer, spec.dim));
}

void Client::ForEachPiece(uint32_t table, const Key* keys, size_t n, size_t bytes_of_key,
                          const std::function<void(RowsPiece*)>& work) {
  const TableSpec spec = Spec(table);
  std::vector<uint32_t> ids;
  {
    const std::lock_guard<std::mutex> lock(tables_mutex_);
    ids = Get(table).server_ids;
  }
  const size_t most = std::clamp<size_t>(kAskedBytes / bytes_of_key, 1, kAskedKeys);
  for (size_t begin = 0; begin < n; begin += most) {
    const size_t end = std::min(n, begin + most);
    RowsPiece piece;
    piece.begin = begin;
    piece.parts.resize(servers_);
    if (servers_ > 1) {
      piece.keys.resize(servers_);
      piece.positions.resize(servers_);
      for (size_t i = begin; i < end; ++i) {
        const uint32_t server = server_of(keys[i], servers_, spec.index == "array");
        piece.keys[server].push_back(keys[i]);
        piece.positions[server].push_back(i);
      }
    }
    for (uint32_t s = 0; s < servers_; ++s) {
      piece.parts[s].table = ids[s];
      piece.parts[s].keys = {keys + begin, end - begin};
      if (servers_ > 1) piece.parts[s].keys = {piece.keys[s].data(), piece.keys[s].size()};
    }
    work(&piece);
  }
}

// The values of a call in the caller's memory. Those that are assigned are not written to.
struct Client::RowColumns {
  std::byte* weights = nullptr;
  std::byte* states = nullptr;  // nullptr: neither brought nor wanted
  uint8_t* found = nullptr;
  size_t bytes = 0;  // of the weights of a key
  size_t state_bytes = 0;
  RowStrides strides;  // none is 0

  RowColumns(const void* of_weights, const void* of_states, uint8_t* of_found, const RowStrides& given,
             size_t row_bytes, size_t states_bytes)
      : weights(static_cast<std::byte*>(const_cast<void*>(of_weights))),
        states(static_cast<std::byte*>(const_cast<void*>(of_states))),
        found(of_found),
        bytes(row_bytes),
        state_bytes(of_states != nullptr ? states_bytes : 0),
        strides(given) {
    if (strides.weights == 0) strides.weights = bytes;
    if (strides.states == 0) strides.states = state_bytes;
  }
  bool dense() const {
    return strides.weights == bytes && (state_bytes == 0 || strides.states == state_bytes);
  }
};

void Client::PlaceRows(const RowColumns& columns, RowsPiece* piece, std::vector<Buffer>* memory) const {
  memory->resize(servers_);
  for (uint32_t s = 0; s < servers_; ++s) {
    ServerRows& part = piece->parts[s];
    const size_t n = part.keys.size;
    part.weights_bytes = n * columns.bytes;
    part.states_bytes = n * columns.state_bytes;
    part.with_states = columns.states != nullptr;
    if (servers_ == 1 && backend_->TakesInPlace(columns.weights, columns.dense())) {
      part.weights = columns.weights + piece->begin * columns.strides.weights;
      if (part.with_states) part.states = columns.states + piece->begin * columns.strides.states;
      if (columns.found != nullptr) part.found = columns.found + piece->begin;
      part.strides = columns.strides;
      continue;
    }
    Buffer& own = (*memory)[s];
    const size_t bytes = part.weights_bytes + part.states_bytes + n;
    if (own.capacity() < bytes) own = backend_->NewBuffer(bytes);
    part.weights = own.as<std::byte>();
    if (part.with_states) part.states = part.weights + part.weights_bytes;
    part.found = own.data() + part.weights_bytes + part.states_bytes;
  }
}

void Client::CopyRows(const RowColumns& columns, const RowsPiece& piece, Way way) {
  constexpr size_t kAtOnce = 4096;  // keys
  for (uint32_t s = 0; s < servers_; ++s) {
    const ServerRows& part = piece.parts[s];
    const size_t n = part.keys.size;
    if (servers_ == 1 && part.strides.weights != 0) continue;  // they lie where the caller has them
    pool_.ParallelFor((n + kAtOnce - 1) / kAtOnce, [&](size_t chunk) {
      for (size_t i = chunk * kAtOnce; i < std::min(n, (chunk + 1) * kAtOnce); ++i) {
        const size_t at = servers_ == 1 ? piece.begin + i : piece.positions[s][i];
        const auto copy = [&](std::byte* callers, std::byte* servers, size_t bytes) {
          std::memcpy(way == Way::kToCaller ? callers : servers, way == Way::kToCaller ? servers : callers,
                      bytes);
        };
        copy(columns.weights + at * columns.strides.weights, part.weights + i * columns.bytes, columns.bytes);
        if (columns.state_bytes > 0) {
          copy(columns.states + at * columns.strides.states, part.states + i * columns.state_bytes,
               columns.state_bytes);
        }
        if (way == Way::kToCaller) columns.found[at] = part.found[i];
      }
    });
  }
}

uint64_t Client::MostRows(uint32_t table) const {
  const TableSpec spec = Spec(table);
  const RowFormat format = FormatOf(spec);
  return Eviction(spec.eviction, format.dtype, format.dim, format.facts_at).most_rows();
}

void Client::CheckRows(uint32_t table, const Key* keys, size_t n, const void* weights, const void* states,
                       const RowStrides& strides) {
  const TableSpec spec = Spec(table);
  RequireInRange(spec, keys, n);
  if (n > MostRows(table)) {
    throw SpecError("table '" + spec.name + "': " + std::to_string(n) + " rows are more than the " +
                    std::to_string(MostRows(table)) +
                    " of its 'eviction' cap; raise the cap, or assign fewer");
  }
  RefuseNonfinite(spec, keys, n, weights, spec.dim, "row", strides.weights, &pool_);
  if (states == nullptr) return;
  RefuseNonfinite(spec, keys, n, states, StateValues(table), "optimizer's state", strides.states, &pool_);
}

Table::AssignCounts Client::Assign(uint32_t table, const Key* keys, size_t n, const void* weights,
                                   const void* states, const RowStrides& strides) {
  const TableSpec spec = Spec(table);
  CheckRows(table, keys, n, weights, states, strides);
  RequireDistinct(spec, keys, n, &pool_);
  const size_t unit = ValueBytes(DtypeOf(spec));
  const RowColumns columns(weights, states, nullptr, strides, spec.dim * unit, StateValues(table) * unit);
  Table::AssignCounts sum;
  size_t sent = 0;
  std::vector<Buffer> memory;
  const auto assign = [&](RowsPiece* piece) {
    PlaceRows(columns, piece, &memory);
    CopyRows(columns, *piece, Way::kToServers);
    const std::lock_guard<std::mutex> request(request_mutex_);
    ++others_;
    const Table::AssignCounts counts = backend_->Assign(piece->parts);
    sum.created += counts.created;
    sum.evicted += counts.evicted;
    sum.no_room += counts.no_room;
    for (const ServerRows& part : piece->parts) sent += part.keys.size;
  };
  try {
    ForEachPiece(table, keys, n, sizeof(Key) + columns.bytes + columns.state_bytes, assign);
  } catch (const StorageError& error) {
    if (sent == 0) throw;
    throw StorageError(std::string(error.what()) + " (" + std::to_string(sent) + " of " + std::to_string(n) +
                       " rows were assigned before)");
  }
  return sum;
}

uint64_t Client::Erase(uint32_t table, const Key* keys, size_t n) {
  RequireInRange(Spec(table), keys, n);
  uint64_t erased = 0;
  ForEachPiece(table, keys, n, sizeof(Key), [&](RowsPiece* piece) {
    const std::lock_guard<std::mutex> request(request_mutex_);
    ++others_;
    erased += backend_->Erase(piece->parts);
  });
  return erased;
}

void Client::ReadRows(uint32_t table, const Key* keys, size_t n, void* weights, void* states, uint8_t* found,
                      const RowStrides& strides) {
  const TableSpec spec = Spec(table);
  RequireInRange(spec, keys, n);
  const size_t unit = ValueBytes(DtypeOf(spec));
  const RowColumns columns(weights, states, found, strides, spec.dim * unit, StateValues(table) * unit);
  std::vector<Buffer> memory;
  const auto read = [&](RowsPiece* piece) {
    PlaceRows(columns, piece, &memory);
    {
      const std::lock_guard<std::mutex> request(request_mutex_);
      backend_->ReadRows(piece->parts);
    }
    CopyRows(columns, *piece, Way::kToCaller);
  };
  ForEachPiece(table, keys, n, sizeof(Key) + columns.bytes + columns.state_bytes + 1, read);
}

nlohmann::json Client::Save(const std::string& directory, const std::string& since, Contents* contents) {
  const std::lock_guard<std::mutex> request(request_mutex_);
  ++others_;
  return backend_->Save(directory, since, contents);
}

std::string Client::torn() {
  const std::lock_guard<std::mutex> request(request_mutex_);
  return backend_->torn();
}

void Client::Tear(const std::string& reason) {
  const std::lock_guard<std::mutex> request(request_mutex_);
  backend_->Tear(reason);
}

void Client::Restore(const std::vector<std::string>& directories) {
  const std::lock_guard<std::mutex> request(request_mutex_);
  ++others_;
  backend_->Restore(directories);
}

void Client::ApplyIncrement(std::vector<Increment>* increment) {
  const std::lock_guard<std::mutex> request(request_mutex_);
  backend_->ApplyIncrement(increment);
}

std::vector<Key> Client::Keys(uint32_t table) {
  std::vector<Key> all;
  for (uint32_t part = 0; part < Table::kParts; ++part) {
    const std::vector<Key> keys = Keys(table, part);
    all.insert(all.end(), keys.begin(), keys.end());
  }
  return all;
}

std::vector<Key> Client::Keys(uint32_t table, uint32_t part) {
  (void)Spec(table);  // the table exists
  std::vector<uint32_t> ids;
  {
    const std::lock_guard<std::mutex> lock(tables_mutex_);
    ids = Get(table).server_ids;
  }
  const std::lock_guard<std::mutex> request(request_mutex_);
  return backend_->Keys(ids, part);
}

void Client::Checkpoint(uint64_t id, bool wait) {
  const std::lock_guard<std::mutex> lock(request_mutex_);
  ++others_;
  // Each table drops its oldest checkpoint when a new one is durable: where some are ahead of others, they
  // might have none in common any more.
  backend_->WaitDurable();
  backend_->Checkpoint(id, wait);
}

std::vector<uint64_t> Client::Checkpoints() {
  const std::lock_guard<std::mutex> lock(request_mutex_);
  return backend_->Checkpoints();
}

uint64_t Client::Recover(std::optional<uint64_t> id) {
  const std::lock_guard<std::mutex> lock(request_mutex_);
  std::vector<uint64_t> common = backend_->Checkpoints();
  const auto found = [&] { return std::binary_search(common.begin(), common.end(), *id); };
  if (id && !several_workers_ && !found()) {  // it may be becoming durable
    try {
      backend_->WaitDurable();
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): then it is not there, which is said below
    }
    common = backend_->Checkpoints();
  }
  const uint64_t chosen = id.value_or(common.empty() ? 0 : common.back());
  if (!std::binary_search(common.begin(), common.end(), chosen)) {
    std::string ids;
    for (const uint64_t one : common) ids += (ids.empty() ? "" : ", ") + std::to_string(one);
    throw CheckpointError((id ? "not every table of every server has checkpoint " + std::to_string(*id)
                              : "there is no checkpoint that every table of every server has") +
                          (ids.empty() ? "" : "; all have " + ids) +
                          "; restore from a directory, or begin anew");
  }
  ++others_;
  backend_->Recover(chosen);
  return chosen;
}

nlohmann::json Client::Stats() {
  const std::lock_guard<std::mutex> request(request_mutex_);
  return backend_->Stats();
}

uint64_t Client::Evict() {
  const std::lock_guard<std::mutex> request(request_mutex_);
  ++others_;
  return backend_->Evict();
}

SharedReply Client::ExchangeShared(const SharedRequest& request) {
  const std::lock_guard<std::mutex> lock(request_mutex_);
  return backend_->ExchangeShared(request);
}

void Client::Leave() {
  const std::lock_guard<std::mutex> request(request_mutex_);
  backend_->Leave();
}

void Client::Shutdown() {
  const std::lock_guard<std::mutex> request(request_mutex_);
  backend_->Shutdown();
}

void Client::Close() {
  const std::lock_guard<std::mutex> request(request_mutex_);
  backend_->Close();
}

}  // namespace oe
