#include "oe_runtime/core/server/store.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <limits>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <utility>

#include "oe_runtime/core/checkpoint/filter_file.h"
#include "oe_runtime/core/common/params.h"
#include "oe_runtime/core/server/summed_push.h"
#include "oe_runtime/core/storage/log_pool.h"
#include "oe_runtime/core/storage/slot_store.h"
#include "oe_runtime/core/wire/errors.h"

namespace oe {
namespace {

constexpr size_t kMaxTableName = 150;  // as it stands in a file name
constexpr size_t kDroppedNames = 1000;
constexpr uint64_t kMostHeld = uint64_t{32} << 20;  // bytes of saved files in memory

void CheckPart(uint32_t part) {
  if (part < Table::kParts) return;
  throw ProtocolError("part " + std::to_string(part) + " of a table does not exist; it has " +
                      std::to_string(Table::kParts));
}

void SortDistinct(std::vector<uint32_t>* tables) {
  std::sort(tables->begin(), tables->end());
  tables->erase(std::unique(tables->begin(), tables->end()), tables->end());
}

uint64_t KeysOf(const std::vector<PushPart>& parts) {
  uint64_t keys = 0;
  for (const PushPart& part : parts) keys += part.size;
  return keys;
}

// What of this process is in memory now; 0 where /proc does not tell.
uint64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  uint64_t all = 0;
  uint64_t resident = 0;
  if (!(statm >> all >> resident)) return 0;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

// Everything that a push can get wrong but the room for new rows.
void CheckPush(const Table& table, const PushPart& part, const ShardInfo& shard, Executor* executor) {
  const TableSpec& spec = table.spec();
  table.CheckGradients(part.keys, part.size, part.values, executor);
  table.CheckLearningRate(part.learning_rate);
  const bool array = spec.index == "array";
  if (!array && shard.servers == 1) return;
  for (size_t i = 0; i < part.size; ++i) {
    const Key key = part.keys[i];
    if (array && key >= spec.input_dim) {
      throw KeyRangeError("table '" + spec.name + "': key " + std::to_string(static_cast<int64_t>(key)) +
                          " is not in [0, " + std::to_string(spec.input_dim) + ")");
    }
    if (server_of(key, shard.servers, array) != shard.server) {
      throw ProtocolError("table '" + spec.name + "': key " + std::to_string(key) + " belongs to server " +
                          std::to_string(server_of(key, shard.servers, array)) + ", not to " +
                          std::to_string(shard.server));
    }
  }
}

std::optional<uint64_t> ParseHex(const std::string& text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::string OriginOf(uint64_t checkpoint) { return "checkpoint " + std::to_string(checkpoint); }

// Only what the table has.
void AddPolicies(const Table& table, nlohmann::json* stats) {
  const TableSpec& spec = table.spec();
  const PolicyCounts counts = table.policy_counts();
  if (!spec.admission.name.empty()) {
    (*stats)["admission"] = {{"admitted_rows", counts.admitted},
                             {"refused_keys", counts.not_admitted},
                             {"filter_bytes", counts.filter_bytes},
                             {"forgotten_keys", counts.forgotten}};
  }
  for (const EvictionSpec& policy : spec.eviction) {
    nlohmann::json& of_policy = (*stats)["eviction"][policy.name];
    of_policy = {{"evicted_rows", counts.evicted.at(policy.name)}};
    if (CapsRows(policy)) of_policy["refused_keys"] = counts.no_room;
    if (UsesClock(policy)) of_policy["clock_jumps"] = counts.clock_jumps;
  }
}

void AddRoom(const Table& table, nlohmann::json* stats) {
  const std::optional<PoolRoom> room = table.room();
  if (!room) return;
  (*stats)["pool"] = {{"slots", room->slots},     {"free", room->free},         {"reserved", room->reserved},
                      {"changed", room->changed}, {"headroom", room->headroom}, {"refused", room->refused}};
}

void AddDrive(const Table& table, nlohmann::json* stats) {
  const std::optional<LogPoolStats> drive = table.drive();
  if (!drive) return;
  (*stats)["drive"] = {{"reads", drive->device.reads},
                       {"read_bytes", drive->device.read_bytes},
                       {"written_bytes", drive->device.written_bytes},
                       {"segments", drive->log.segments},
                       {"free_segments", drive->log.free_segments},
                       {"live", drive->log.live},
                       {"retired", drive->log.retired},
                       {"moved", drive->log.moved}};
}

nlohmann::json StatsOf(const Table& table, const std::string& job) {
  const CacheStats cache = table.cache();
  const Table::DamageCounts damage = table.damage_counts();
  nlohmann::json stats = {{"name", table.spec().name},
                          {"job", job},
                          {"dim", table.spec().dim},
                          {"dtype", table.spec().dtype},
                          {"state_dtype", table.spec().state_dtype},
                          {"rows", table.rows()},
                          {"bytes", table.bytes()},
                          {"index_bytes", table.index_bytes()},
                          {"version", table.version()},
                          {"cache",
                           {{"hits", cache.hits},
                            {"misses", cache.misses},
                            {"rows", cache.rows},
                            {"bytes", cache.bytes},
                            {"evictions", cache.evictions},
                            {"write_backs", cache.write_backs}}},
                          {"pushes_at_risk", table.pushes_at_risk()},
                          {"nonfinite_gradients", table.nonfinite_gradients()},
                          {"damage",
                           {{"quarantined_rows", damage.quarantined},
                            {"repaired_rows", damage.repaired},
                            {"scrubbed_rows", damage.scrubbed_rows},
                            {"scrubs", damage.scrubs}}}};
  AddPolicies(table, &stats);
  AddRoom(table, &stats);
  AddDrive(table, &stats);
  return stats;
}

// The locks keep their table, which may be dropped while they are waited for.
std::shared_ptr<FairSharedMutex> PullLockOf(const std::shared_ptr<Table>& table) {
  return {table, table->pull_lock()};
}
std::shared_ptr<FairSharedMutex> PushLockOf(const std::shared_ptr<Table>& table) {
  return {table, table->push_lock()};
}

}  // namespace

std::vector<uint32_t> TablesOf(const std::vector<PushPart>& parts) {
  std::vector<uint32_t> tables;
  tables.reserve(parts.size());
  for (const PushPart& part : parts) tables.push_back(part.table);
  return tables;
}

Store::Store(std::shared_ptr<Storage> storage, ShardInfo shard, ThreadPool* pool, std::string job)
    : storage_(std::move(storage)), shard_(shard), pool_(pool), job_(std::move(job)) {}

uint32_t Store::CreateTable(const TableSpec& spec) {
  const TableSpec wanted = Complete(spec);
  if (TableFileName(wanted.name, {}).size() > kMaxTableName) {
    throw SpecError("table '" + wanted.name + "': the name is too long to name its checkpoint file");
  }
  const std::lock_guard<std::mutex> create_lock(create_mutex_);
  {
    const std::shared_lock<std::shared_mutex> lock(mutex_);
    if (const auto id = FindTable(wanted)) return *id;
    CheckKeptCheckpoints(wanted.name);
    if (next_id_ == std::numeric_limits<uint32_t>::max()) {
      throw SpecError("table '" + wanted.name + "': this server has made 2^32 tables; start it again");
    }
  }
  // It may have rows to recover: those that use other tables meanwhile do not wait.
  std::shared_ptr<Table> table = Table::Create(wanted, storage_, shard_, job_);
  const std::vector<CheckpointInfo> recovered = table->Checkpoints();
  const std::lock_guard<std::shared_mutex> lock(mutex_);
  const std::lock_guard<std::mutex> torn_lock(torn_mutex_);
  histories_[table.get()] = {
      std::nullopt, recovered.empty() ? "an empty table" : OriginOf(recovered.back().id), 0, {}};
  tables_.emplace(next_id_, std::move(table));
  return next_id_++;
}

// Each table drops its oldest checkpoint when a new one is durable: of one that crashes in between, some
// parts have the old one and some the new one only.
void Store::CheckKeptCheckpoints(const std::string& table) const {
  const StorageSpec& storage = storage_->spec();
  const bool keeps =
      storage.type == "pmem_libpmem" || storage.type == "dram_pmem" || storage.type == "dram_ssd";
  if (!keeps || storage.kept_checkpoints > 1 || (shard_.servers == 1 && tables_.empty())) return;
  throw SpecError("table '" + table + "': its storage keeps one checkpoint ('kept_checkpoints', " +
                  "--storage-checkpoints), but " +
                  (shard_.servers > 1 ? std::to_string(shard_.servers) + " servers" : "several tables") +
                  " that crash may then have none in common; keep 2 or more");
}

uint32_t Store::OpenTable(const TableSpec& spec) const {
  const TableSpec wanted = Complete(spec);
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  if (const auto id = FindTable(wanted)) return *id;
  throw SpecError("table '" + wanted.name + "' does not exist on server " + std::to_string(shard_.server) +
                  (job_.empty() ? "" : " in job '" + job_ + "'") +
                  ", and a read-only client makes none: training does");
}

std::optional<uint32_t> Store::FindTable(const TableSpec& complete) const {
  for (const auto& [id, table] : tables_) {
    const TableSpec& present = table->spec();
    if (present.name != complete.name) continue;
    if (const auto difference = Difference(present, complete)) {
      throw SpecMismatch("table '" + complete.name + "' exists already with " + difference->field + " " +
                         difference->left + "; asked for was " + difference->right);
    }
    return id;
  }
  return std::nullopt;
}

uint64_t Store::Drop(const std::optional<std::string>& name) {
  std::vector<std::shared_ptr<Table>> dropped;
  const std::lock_guard<std::mutex> create_lock(create_mutex_);  // a table that is being made is there or not
  {
    const std::lock_guard<std::shared_mutex> lock(mutex_);
    for (auto it = tables_.begin(); it != tables_.end();) {
      const std::string& present = it->second->spec().name;
      if (name && present != *name) {
        ++it;
        continue;
      }
      dropped_.emplace(it->first, present);
      if (dropped_.size() > kDroppedNames) dropped_.erase(dropped_.begin());
      dropped.push_back(std::move(it->second));
      it = tables_.erase(it);
    }
  }
  {
    const std::lock_guard<std::mutex> lock(torn_mutex_);
    for (const auto& table : dropped) histories_.erase(table.get());
  }
  if (Tables().empty()) Mend();  // nothing is left that could be torn
  for (const auto& table : dropped) table->Drop();
  return dropped.size() + storage_->DropUnopened(job_, name);
}

std::shared_ptr<Table> Store::Get(uint32_t id) const {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  const auto found = tables_.find(id);
  if (found != tables_.end()) return found->second;
  if (id >= next_id_) {
    throw ProtocolError("table " + std::to_string(id) + " does not exist on this server; it has " +
                        std::to_string(tables_.size()));
  }
  const auto name = dropped_.find(id);
  throw SpecError("table " + (name == dropped_.end() ? std::to_string(id) : "'" + name->second + "'") +
                  " was dropped" + (job_.empty() ? "" : " from job '" + job_ + "'") +
                  " by a client: its rows are gone; create it again to go on with a new one");
}

std::vector<std::shared_ptr<Table>> Store::Tables() const {
  const std::shared_lock<std::shared_mutex> lock(mutex_);
  std::vector<std::shared_ptr<Table>> tables;
  tables.reserve(tables_.size());
  for (const auto& [id, table] : tables_) tables.push_back(table);
  return tables;
}

std::vector<std::string> Store::TableNames() const {
  std::vector<std::string> names;
  for (const auto& table : Tables()) names.push_back(table->spec().name);
  return names;
}

size_t Store::WireBytes(uint32_t table) const {
  const std::shared_ptr<Table> of = Get(table);
  const TableSpec& spec = of->spec();
  return spec.dim * ValueBytes(oe::DtypeOf(spec));
}

size_t Store::StateBytes(uint32_t table) const {
  const std::shared_ptr<Table> of = Get(table);
  return of->state_values() * ValueBytes(oe::DtypeOf(of->spec()));
}

Dtype Store::DtypeOf(uint32_t table) const { return oe::DtypeOf(Get(table)->spec()); }

bool Store::Counts(uint32_t table) const {
  const std::shared_ptr<Table> of = Get(table);
  const TableSpec& spec = of->spec();
  return CountsKeys(spec.admission, spec.eviction);
}

void Store::Tear(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(torn_mutex_);
  if (is_torn_.exchange(true)) return;
  torn_ = reason;
}

void Store::Mend() {
  const std::lock_guard<std::mutex> lock(torn_mutex_);
  is_torn_ = false;
  torn_.clear();
}

void Store::RequireIntact() const {
  if (!is_torn_.load(std::memory_order_relaxed)) return;
  const std::lock_guard<std::mutex> lock(torn_mutex_);
  if (!is_torn_) return;
  throw TornError(TornText(torn_));
}

nlohmann::json Store::Versions() const {
  nlohmann::json tables = nlohmann::json::object();
  const std::vector<std::shared_ptr<Table>> all = Tables();
  const uint64_t pushing = pushing_.load();  // before the versions: a push that ends meanwhile is in both
  // These wait for a table that is being recovered, and nobody must wait behind the mutex meanwhile.
  std::vector<uint64_t> versions;
  versions.reserve(all.size());
  for (const auto& table : all) versions.push_back(table->version());
  const std::lock_guard<std::mutex> lock(torn_mutex_);
  for (size_t i = 0; i < all.size(); ++i) {
    const auto history = histories_.find(all[i].get());
    if (history == histories_.end()) continue;  // dropped meanwhile
    const auto number = [](const std::optional<uint64_t>& one) {
      return one ? nlohmann::json(*one) : nlohmann::json();
    };
    nlohmann::json origins;
    const auto add = [&](const std::string& origin, const std::optional<uint64_t>& changes) {
      origins.push_back({origin, number(changes)});
    };
    const History& of_table = history->second;
    if (!of_table.start.empty()) add(of_table.start, of_table.changes);
    for (const auto& [id, changes] : of_table.checkpoints) add(OriginOf(id), changes);
    tables[all[i]->spec().name] = {versions[i], number(of_table.base), std::move(origins)};
  }
  return {{"torn", is_torn_ ? nlohmann::json(torn_) : nlohmann::json()},
          {"pushing", pushing},
          {"tables", std::move(tables)}};
}

void Store::PutBack(const std::vector<std::shared_ptr<Table>>& tables, const char* what,
                    const std::vector<std::string>& origins, const std::function<void(size_t)>& put) {
  std::vector<uint64_t> versions;
  for (size_t i = 0; i < tables.size(); ++i) {
    const uint64_t before = tables[i]->version();
    try {
      put(i);
      versions.push_back(tables[i]->version());
    } catch (const std::exception& problem) {
      // Most leave the table as it was; not one that comes when its rows are back (Table::KeepCap).
      if (i > 0 || tables[i]->version() != before) {
        Tear(std::string(what) + " reached " + std::to_string(i) + " of " + std::to_string(tables.size()) +
             " tables: " + problem.what());
      }
      throw;
    }
  }
  Mend();
  const std::lock_guard<std::mutex> lock(torn_mutex_);
  for (size_t i = 0; i < tables.size(); ++i) {
    const auto history = histories_.find(tables[i].get());
    if (history != histories_.end()) history->second = {versions[i], origins[i], 0, {}};
  }
}

uint64_t Store::Evict() {
  RequireIntact();
  uint64_t evicted = 0;
  for (const auto& table : Tables()) evicted += table->Evict();
  return evicted;
}

void Store::Pull(const std::vector<PullPart>& parts) {
  Pass pass;
  (void)LockPull(parts, &pass);
  PullLocked(parts);
}

bool Store::LockPull(const std::vector<PullPart>& parts, Pass* pass) const {
  std::vector<uint32_t> tables;
  tables.reserve(parts.size());
  for (const PullPart& part : parts) tables.push_back(part.table);
  SortDistinct(&tables);
  return std::all_of(tables.begin(), tables.end(),
                     [&](uint32_t table) { return pass->Take(PullLockOf(Get(table))); });
}

bool Store::LockPush(std::vector<uint32_t> tables, Pass* pass) const {
  SortDistinct(&tables);
  return std::all_of(tables.begin(), tables.end(),
                     [&](uint32_t table) { return pass->Take(PushLockOf(Get(table))); });
}

void Store::PullLocked(const std::vector<PullPart>& parts) {
  std::vector<std::shared_ptr<Table>> tables(parts.size());
  uint64_t keys = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    tables[i] = Get(parts[i].table);
    keys += parts[i].size;
  }
  pool_->ParallelFor(parts.size(), [&](size_t i) {
    tables[i]->Pull(parts[i].keys, parts[i].size, parts[i].values, pool_, Table::Lock::kHeld,
                    parts[i].packed);
  });
  pulls_.fetch_add(1, std::memory_order_relaxed);
  pulled_keys_.fetch_add(keys, std::memory_order_relaxed);
}

void Store::ReadAhead(const std::vector<PullPart>& parts, const std::function<bool()>& wanted) const {
  for (const PullPart& part : parts) {
    if (!wanted()) return;
    Get(part.table)->ReadAhead(part.keys, part.size, wanted);
  }
}

void Store::Push(const std::vector<PushPart>& parts) {
  Check(parts);
  Pass pass;
  (void)LockPush(TablesOf(parts), &pass);
  PushLocked(parts);
}

void Store::PushLocked(const std::vector<PushPart>& parts) {
  std::vector<std::shared_ptr<Table>> tables(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) tables[i] = Get(parts[i].table);
  std::atomic<size_t> pushed{0};
  const Pushing pushing = CountPush();
  try {
    pool_->ParallelFor(parts.size(), [&](size_t i) {
      const PushPart& part = parts[i];
      tables[i]->Push(part.keys, part.size, part.values, part.learning_rate, pool_, part.counts,
                      Table::Lock::kHeld);
      pushed.fetch_add(1, std::memory_order_relaxed);
    });
  } catch (const StorageError& error) {
    // No row has another value (Table::Push): what policies counted and evicted on the way tears nothing.
    if (pushed.load() == 0) throw;
    Tear(error.what());
    const std::string message = std::string(error.what()) + " (" + std::to_string(pushed.load()) + " of " +
                                std::to_string(parts.size()) +
                                " tables took this push: go on from the last checkpoint)";
    if (dynamic_cast<const StorageFull*>(&error) != nullptr) throw StorageFull(message);
    throw StorageError(message);
  } catch (const std::bad_alloc&) {
    Tear("a push ran out of memory");  // nobody knows how far it came
    throw;
  } catch (const std::exception& error) {
    if (pushed.load() > 0) Tear(error.what());
    throw;
  }
  pushes_.fetch_add(1, std::memory_order_relaxed);
  pushed_keys_.fetch_add(KeysOf(parts), std::memory_order_relaxed);
}

void Store::Check(const std::vector<PushPart>& parts) const {
  RequireIntact();
  pool_->ParallelFor(parts.size(),
                     [&](size_t i) { CheckPush(*Get(parts[i].table), parts[i], shard_, pool_); });
}

void Store::PushSums(const std::vector<std::vector<PushPart>>& tables) {
  std::vector<SummedPush> sums(tables.size());
  std::vector<PushPart> parts(tables.size());
  pool_->ParallelFor(tables.size(), [&](size_t i) {
    const uint32_t table = tables[i].front().table;
    parts[i] =
        sums[i].Sum(tables[i], Get(table)->spec().dim, DtypeOf(table) == Dtype::kFloat64, Counts(table));
  });
  Check(parts);
  PushLocked(parts);
}

Table::AssignCounts Store::Assign(uint32_t table, const Key* keys, size_t n, const void* weights,
                                  const void* states, uint64_t change, const RowStrides& strides,
                                  bool checked) {
  RequireIntact();
  const std::shared_ptr<Table> of = Get(table);
  const Pushing changing = CountPush();
  const std::shared_lock<FairSharedMutex> lock(changes_mutex_);
  Table::AssignCounts counts;
  if (n > 0) counts = of->Assign(keys, n, weights, states, pool_, strides, checked);
  if (n > 0 || change != 0) NoteChange(*of, change);
  return counts;
}

uint64_t Store::Erase(uint32_t table, const Key* keys, size_t n, uint64_t change) {
  RequireIntact();
  const std::shared_ptr<Table> of = Get(table);
  const Pushing changing = CountPush();
  const std::shared_lock<FairSharedMutex> lock(changes_mutex_);
  const uint64_t erased = n > 0 ? of->Erase(keys, n, pool_) : 0;
  if (n > 0 || change != 0) NoteChange(*of, change);
  return erased;
}

void Store::NoteChange(const Table& table, uint64_t change) {
  const std::lock_guard<std::mutex> lock(torn_mutex_);
  const auto history = histories_.find(&table);
  if (history == histories_.end()) return;  // dropped meanwhile
  const auto add = [change](std::optional<uint64_t>* sum) {
    if (change == 0) sum->reset();
    if (*sum) **sum += change;
  };
  add(&history->second.changes);
  for (auto& [id, sum] : history->second.checkpoints) add(&sum);
}

void Store::ReadRows(uint32_t table, const Key* keys, size_t n, void* weights, void* states, uint8_t* found,
                     const RowStrides& strides) const {
  Get(table)->ReadRows(keys, n, weights, states, found, pool_, strides);
}

void Store::Upkeep() noexcept {
  if (storage_->spec().cache_bytes == 0) return;
  try {
    const std::vector<std::shared_ptr<Table>> tables = Tables();
    pool_->ParallelFor(tables.size(), [&](size_t i) { tables[i]->Upkeep(pool_); });
  } catch (const std::bad_alloc&) {  // NOLINT(bugprone-empty-catch): the next push does it
  }
}

bool Store::Scrub(const std::function<bool(uint64_t bytes)>& pace) {
  for (const auto& table : Tables()) {
    Table::ScrubPosition position;
    uint64_t bytes = 0;
    while (table->Scrub(&position, &bytes)) {
      if (!pace(bytes)) return false;
    }
  }
  return true;
}

std::vector<Key> Store::Keys(uint32_t table, uint32_t part) const {
  CheckPart(part);
  return Get(table)->Keys(part);
}

uint64_t Store::CountKeys(uint32_t table, uint32_t part) const {
  CheckPart(part);
  return Get(table)->CountKeys(part);
}

// The checksum that `since` has for the table's part of this server; nothing for a table or a number of
// servers that it does not know.
std::optional<uint64_t> Store::SinceOf(const nlohmann::json& since, const std::string& table) const {
  const nlohmann::json of_table = since.value(table, nlohmann::json::array());
  if (!of_table.is_array() || of_table.size() != shard_.servers) return std::nullopt;
  const nlohmann::json& text = of_table[shard_.server];
  if (!text.is_string()) throw ProtocolError("a checksum of a table is not a text");
  return ParseHex(text.get<std::string>());
}

nlohmann::json Store::Save(const std::string& directory, const nlohmann::json& since, bool durable,
                           std::vector<std::string>* contents) const {
  RequireIntact();
  std::error_code error;
  if (!std::filesystem::is_directory(directory, error)) {
    throw CheckpointError("cannot save tables in " + directory + ": " +
                          (error ? error.message() : "Not a directory") +
                          "; make the directory where the server reaches it");
  }
  nlohmann::json saved = nlohmann::json::array();
  PendingFiles files(durable, contents != nullptr ? kMostHeld : 0);
  for (const auto& table : Tables()) {
    const std::string name = TableFileName(table->spec().name, shard_);
    const TableFileInfo info =
        table->Save(directory + "/" + name, SinceOf(since, table->spec().name), &files);
    saved.push_back({{"file", name},
                     {"table", table->spec().name},
                     {"server", shard_.server},
                     {"servers", shard_.servers},
                     {"rows", info.rows},
                     {"version", info.version},
                     {"bytes", info.bytes},
                     {"checksum", HexText(info.checksum)},
                     {"spec", table->spec()}});
    if (info.base) {
      saved.back()["base"] = HexText(*info.base);
      saved.back()["tombstones"] = info.tombstones;
    }
  }
  if (contents != nullptr) {
    if (auto held = files.TakeHeld()) {
      *contents = std::move(*held);
      return saved;
    }
  }
  files.Publish();
  for (nlohmann::json& entry : saved) {
    if (!entry["spec"].contains("admission")) continue;
    const std::string name = FilterFileName(entry["file"].get<std::string>());
    const FilterFileInfo filter = VerifyFilterFile(directory + "/" + name);
    entry["filter"] = {{"file", name}, {"bytes", filter.bytes}, {"checksum", HexText(filter.checksum)}};
  }
  if (durable) SyncDirectory(directory);
  return saved;
}

void Store::Restore(const std::vector<std::string>& directories, const std::optional<std::string>& save) {
  const Pushing changing = CountPush();
  const std::vector<std::shared_ptr<Table>> tables = Tables();
  std::vector<std::vector<TableChain>> chains;
  const std::string newest = directories.empty() ? "" : directories.back();
  std::vector<std::string> origins;
  for (const auto& table : tables) {
    const TableSpec& spec = table->spec();
    chains.push_back(FindTableChains(directories, spec.name));
    const auto infos = CheckChains(spec, table->row_bytes(), chains.back());
    // By its own files: another server, as one that came back, may have fewer tables.
    origins.push_back(save ? *save : NameOfSave(SumOfChecksums(infos), newest));
    if (spec.admission.name.empty()) continue;
    LoadFilters(Newest(chains.back()), spec, infos.front().version);
  }
  // One table is replaced only when all can be. Table::Restore verifies again while it loads, so what changes
  // on disk in between is still found, only later.
  std::vector<const std::string*> all;
  for (const auto& of_table : chains) {
    for (const TableChain& chain : of_table) {
      for (const std::string& file : chain) all.push_back(&file);
    }
  }
  pool_->ParallelFor(all.size(), [&](size_t i) { VerifyTableFile(*all[i]); });
  PutBack(tables, "a restore", origins, [&](size_t i) { tables[i]->RestoreChains(chains[i], pool_); });
}

void Store::ApplyIncrement(Increment* increment) {
  const std::vector<std::shared_ptr<Table>> tables = Tables();
  for (const auto& table : tables) {
    const auto part = increment->parts.find(table->spec().name);
    if (part == increment->parts.end()) {
      throw CheckpointError(increment->directory + ": table '" + table->spec().name + "' was not read");
    }
    if (part->second.info.base) table->CheckIncrement(part->second.info);
  }
  pool_->ParallelFor(tables.size(), [&](size_t i) {
    Increment::Part& part = increment->parts.at(tables[i]->spec().name);
    if (!part.info.base) {  // Save wrote all rows
      tables[i]->RestoreChains(FindTableChains({increment->directory}, tables[i]->spec().name));
    } else if (part.held) {
      tables[i]->ApplyIncrement(part.held.get());
    } else {
      tables[i]->ApplyIncrement(part.info.file);
    }
  });
}

void Store::Checkpoint(uint64_t id, bool wait) {
  RequireIntact();
  {
    const std::lock_guard<FairSharedMutex> lock(changes_mutex_);
    for (const auto& table : Tables()) {
      table->Checkpoint(id);
      NoteCheckpoint(*table, id);
    }
  }
  if (wait) WaitDurable();
}

void Store::NoteCheckpoint(const Table& table, uint64_t id) {
  const std::vector<CheckpointInfo> durable = table.Checkpoints();
  const std::lock_guard<std::mutex> lock(torn_mutex_);
  const auto history = histories_.find(&table);
  if (history == histories_.end()) return;  // dropped meanwhile
  auto& checkpoints = history->second.checkpoints;
  if (!durable.empty()) {
    checkpoints.erase(checkpoints.begin(), checkpoints.lower_bound(durable.front().id));
  }
  checkpoints[id] = 0;
}

void Store::WaitDurable() const {
  for (const auto& table : Tables()) table->WaitDurable();
}

std::vector<uint64_t> Store::Checkpoints() const {
  std::vector<uint64_t> common;
  bool first = true;
  for (const auto& table : Tables()) {
    std::vector<uint64_t> ids;
    for (const CheckpointInfo& checkpoint : table->Checkpoints()) {
      if (first || std::binary_search(common.begin(), common.end(), checkpoint.id)) {
        ids.push_back(checkpoint.id);
      }
    }
    common = std::move(ids);
    first = false;
  }
  return common;
}

void Store::Recover(uint64_t id) {
  const Pushing changing = CountPush();
  const std::vector<std::shared_ptr<Table>> tables = Tables();
  for (const auto& table : tables) {
    std::string ids;
    bool has = false;
    for (const CheckpointInfo& checkpoint : table->Checkpoints()) {
      has = has || checkpoint.id == id;
      ids += (ids.empty() ? "" : ", ") + std::to_string(checkpoint.id);
    }
    if (has) continue;
    throw CheckpointError("table '" + table->spec().name + "' has no checkpoint " + std::to_string(id) +
                          " in the storage of server " + std::to_string(shard_.server) +
                          (ids.empty() ? "; it has none" : "; it has " + ids));
  }
  // Each is read by several threads; the memory of one at a time.
  PutBack(tables, "a recovery", std::vector<std::string>(tables.size(), OriginOf(id)),
          [&](size_t i) { tables[i]->Recover(id); });
}

nlohmann::json Store::Stats() const {
  nlohmann::json tables = nlohmann::json::array();
  uint64_t rows_bytes = 0;
  uint64_t cache_bytes = 0;
  uint64_t index_bytes = 0;
  int64_t durable_at = std::numeric_limits<int64_t>::max();
  for (const auto& table : Tables()) {
    tables.push_back(StatsOf(*table, job_));
    const nlohmann::json& stats = tables.back();
    rows_bytes += stats.at("bytes").get<uint64_t>();
    cache_bytes += stats.at("cache").at("bytes").get<uint64_t>();
    index_bytes += stats.at("index_bytes").get<uint64_t>();
    durable_at = std::min(durable_at, table->durable_at());
  }
  if (tables.empty()) durable_at = 0;
  const bool dram = storage_->spec().type == "dram";
  return {{"index", shard_.server},
          {"count", shard_.servers},
          {"pid", getpid()},
          {"storage", storage_->spec().type},
          {"storage_checkpoints", dram ? 0 : storage_->spec().kept_checkpoints},
          {"storage_recovers", storage_->spec().recover},
          {"storage_bytes", storage_->bytes()},
          {"is_pmem", storage_->is_pmem()},
          {"threads", pool_->threads()},
          {"memory",
           {{"dram", dram ? rows_bytes : cache_bytes},
            {"pmem", dram ? 0 : rows_bytes},
            {"index", index_bytes},
            {"rss", ResidentBytes()}}},
          {"tables", std::move(tables)},
          {"pulls", {{"requests", pulls_.load()}, {"keys", pulled_keys_.load()}}},
          {"saved", durable_at},
          {"pushes", {{"requests", pushes_.load()}, {"keys", pushed_keys_.load()}}}};
}

}  // namespace oe
