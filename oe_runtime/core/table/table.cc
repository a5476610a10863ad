#include "oe_runtime/core/table/table.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <utility>

#include "oe_runtime/core/common/copy_row.h"
#include "oe_runtime/core/common/unique.h"
#include "oe_runtime/core/optimizer/optimizer_spec.h"
#include "oe_runtime/core/table/content.h"
#include "oe_runtime/core/table/gradients.h"
#include "oe_runtime/core/table/reduced_weights.h"
#include "oe_runtime/core/table/row_ops.h"

namespace oe {
namespace {

constexpr size_t kPiece = 8192;       // keys of a pull that are looked up at once, at most
constexpr size_t kAheadBytes = 8192;  // of rows of a pull that are on their way,
constexpr size_t kLeastAhead = 16;    // but at least this many rows
constexpr size_t kMostAhead = 64;     // and at most
constexpr size_t kReadAtOnce = 256;   // rows that are read ahead together: a drive's queue, a push's wait

// Rows of a push that are updated at once.
struct RowGroup {
  static constexpr size_t kMost = 16;
  size_t size = 0;
  std::array<std::byte*, kMost> rows;
  std::array<Key, kMost> keys;
  std::array<uint32_t, kMost> order;
  std::array<const void*, kMost> gradients;
};
static_assert(RowGroup::kMost <= RowOps::kMostRows);

using SharedLocks = std::array<std::shared_lock<FairSharedMutex>, kShards>;  // taken in the order of shards

void Unlock(SharedLocks* locks) {
  for (std::shared_lock<FairSharedMutex>& lock : *locks) {
    if (lock.owns_lock()) lock.unlock();
  }
}

// Calls work(group) for groups of the keys from `begin` to `end` of a push, which fill(i, group) adds. While
// the rows of one group are updated, those of the next are on their way from memory.
template <typename Fill, typename Work>
void ForEachGroup(size_t begin, size_t end, const Fill& fill, const Work& work) {
  std::array<RowGroup, 2> groups;
  size_t at = begin;
  const auto fetch = [&](RowGroup* group) {
    for (group->size = 0; at < end && group->size < RowGroup::kMost; ++at) fill(at, group);
  };
  fetch(groups.data());
  for (size_t turn = 0; groups[turn].size > 0; turn ^= 1) {
    fetch(&groups[turn ^ 1]);
    work(groups[turn]);
  }
}

// A piece of a pull: its keys in the order of their internal shards, and their rows.
struct Piece {
  std::array<Key, kPiece> keys;
  std::array<uint32_t, kShards + 1> begin{};  // of the keys of each shard
  std::array<uint16_t, kPiece> places;        // among `keys`, of each key that the caller gave
  std::array<const std::byte*, kPiece> rows;  // of `keys`; nullptr: none
  SharedLocks locks;
  LogReads reads;  // of rows that are not in DRAM; within the locks
};

// Fills in the keys of a piece, each once if `once`, and their places. Returns n, or how many keys come
// before the first that `shard_of` gives no shard.
template <typename ShardOf>
size_t OrderByShard(const Key* keys, size_t n, bool once, const ShardOf& shard_of, Piece* piece) {
  std::array<Key, kPiece> distinct;
  std::array<uint16_t, kPiece> which;  // of `distinct` is each key
  const size_t count = once ? LeaveOutRepeated(keys, n, distinct.data(), which.data()) : n;
  const Key* const wanted = once ? distinct.data() : keys;
  std::array<uint8_t, kPiece> shards;
  std::array<uint32_t, kShards + 1>& begin = piece->begin;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t shard = shard_of(wanted[i]);
    if (shard == kShards) return static_cast<size_t>(std::find(keys, keys + n, wanted[i]) - keys);
    shards[i] = static_cast<uint8_t>(shard);
    ++begin[shard + 1];
  }
  for (size_t shard = 0; shard < kShards; ++shard) begin[shard + 1] += begin[shard];
  std::array<uint16_t, kPiece> places;
  std::array<uint32_t, kShards + 1> next = begin;
  for (size_t i = 0; i < count; ++i) {
    const uint32_t at = next[shards[i]]++;
    piece->keys[at] = wanted[i];
    (once ? places : piece->places)[i] = static_cast<uint16_t>(at);
  }
  for (size_t i = 0; once && i < n; ++i) piece->places[i] = places[which[i]];
  return n;
}

// Takes the locks of the shards that the piece has keys of, and looks these up. Reads begin of rows that are
// not in DRAM.
template <typename RowMaps>
void FindRows(const RowMaps& shards, Piece* piece) {
  for (size_t shard = 0; shard < kShards; ++shard) {
    const uint32_t begin = piece->begin[shard];
    const size_t size = piece->begin[shard + 1] - begin;
    if (size == 0) continue;
    piece->locks[shard] = std::shared_lock(shards[shard]->mutex());
    shards[shard]->Find(&piece->keys[begin], size, &piece->rows[begin], &piece->reads);
  }
  piece->reads.Start();
}

// Calls copy(i, row) for each of the n keys that the caller gave, in their order; for rows that are on their
// way from the drive when all others are done. Of a row, `bytes` are read.
template <typename Copy>
void CopyRows(size_t n, size_t bytes, Piece* piece, const Copy& copy) {
  const auto row_of = [&](size_t i) { return piece->rows[piece->places[i]]; };
  const auto fetch = [&](size_t i) {
    if (row_of(i) != nullptr) PrefetchRow(row_of(i), bytes);
  };
  std::vector<uint16_t> later;
  later.reserve(piece->reads.entries().size());
  const size_t ahead = std::clamp(kAheadBytes / bytes, kLeastAhead, kMostAhead);
  for (size_t i = 0; i < std::min(n, ahead); ++i) fetch(i);
  for (size_t i = 0; i < n; ++i) {
    if (i + ahead < n) fetch(i + ahead);
    const std::byte* const row = row_of(i);
    if (row == LogReads::Pending()) {
      later.push_back(static_cast<uint16_t>(i));
    } else {
      copy(i, row);
    }
  }
  if (piece->reads.entries().empty()) return;
  piece->reads.Finish();
  for (const uint16_t i : later) copy(i, row_of(i));
}

}  // namespace

std::unique_ptr<Table> Table::Create(const TableSpec& spec, std::shared_ptr<Storage> storage, ShardInfo shard,
                                     const std::string& job) {
  if (shard.servers == 0 || shard.server >= shard.servers) {
    throw SpecError("table '" + spec.name + "': server " + std::to_string(shard.server) + " of " +
                    std::to_string(shard.servers) + " does not exist");
  }
  return std::unique_ptr<Table>(new Table(Complete(spec), std::move(storage), shard, job));
}

std::unique_ptr<Table> Table::Create(const TableSpec& spec, const StorageSpec& storage, ShardInfo shard) {
  return Create(spec, Storage::Open(storage), shard);
}

Table::Table(TableSpec spec, std::shared_ptr<Storage> storage, ShardInfo shard, std::string job)
    : spec_(std::move(spec)),
      storage_(std::move(storage)),
      shard_(shard),
      job_(std::move(job)),
      ops_(RowOps::Create(spec_)),
      eviction_(spec_.eviction, ops_->format().dtype, spec_.dim, ops_->format().facts_at),
      by_facts_(spec_.eviction, ops_->format().dtype, spec_.dim, 0),
      row_bytes_(eviction_.facts().row_bytes()),
      reduced_(ReducedWeights::Create(storage_->spec().row_precision, spec_)),
      kept_bytes_(KeptBytes()),
      is_array_(IsArray(spec_)),
      has_policies_(!spec_.admission.name.empty() || !spec_.eviction.empty()),
      default_value_(spec_.admission.name.empty() ? 0 : spec_.admission.params.at("default_value")),
      most_rows_(ShareOfCap()),
      damage_(NewDamage()),
      evicted_(spec_.eviction.size()),
      content_(NewContent(false)) {
  if (content_->kept != nullptr && content_->opened) RecoverContent(std::nullopt);
}

Table::~Table() = default;

size_t Table::KeptBytes() const {
  if (reduced_ != nullptr) return reduced_->bytes();
  return storage_->spec().weights_only ? ops_->format().weight_bytes() : row_bytes_;
}

std::shared_ptr<Damage> Table::NewDamage() const {
  const std::string table = "table '" + spec_.name + "'" + (job_.empty() ? "" : " of job '" + job_ + "'");
  if (storage_->spec().type != "dram_ssd") return std::make_shared<Damage>(table, kShards);
  return std::make_shared<Damage>(table, kShards, "the drive (`nvme smart-log`)",
                                  "it cannot be read or its checksum does not fit");
}

PoolSpec Table::NewPoolSpec() const {
  PoolSpec pool;
  pool.table = spec_.name;
  nlohmann::json table = spec_;
  table.erase("nonfinite_gradients");  // how it goes on, not what is in the rows
  pool.identity = IdentityOf(pool.kind, table);
  pool.may_differ = {"max_rows", "max_bytes"};  // the cap, which RecoverContent() keeps
  pool.damage = damage_;
  pool.row_bytes = kept_bytes_;
  if (keeps_facts()) {
    pool.facts_at = eviction_.facts().at();
    pool.fact_words = eviction_.facts().words();
  }
  pool.shards = kShards;
  pool.shard_of = [this](Key key) { return InternalShard(key); };
  return pool;
}

std::string Table::IdentityOf(const std::string& kind, const nlohmann::json& what) const {
  nlohmann::json identity = {{kind, what}, {"server", shard_.server}, {"servers", shard_.servers}};
  if (!job_.empty()) identity["job"] = job_;
  return identity.dump();
}

std::unique_ptr<Index> Table::NewIndex(uint32_t internal_shard) const {
  // Of rows on a drive, DRAM has the index and the cache, and the index is the larger one of short rows.
  const bool rows_in_log = storage_->spec().type == "dram_ssd";
  try {
    if (!is_array_) return rows_in_log ? NewCompactIndex(internal_shard) : NewHashIndex();
    return NewArrayIndex(spec_.input_dim, shard_.server + uint64_t{shard_.servers} * internal_shard,
                         uint64_t{shard_.servers} * kShards);
  } catch (const std::bad_alloc&) {
    throw StorageError("table '" + spec_.name + "': no memory for the index of 'input_dim' " +
                       std::to_string(spec_.input_dim) + "; use more servers or a hash table");
  }
}

void Table::RequireWhole() const {
  if (!storage_->spec().weights_only) return;
  throw SpecError(
      "table '" + spec_.name +
      "' has the weights of its rows only ('weights_only' of its storage), to be read and refreshed "
      "from files");
}

std::unique_ptr<Table::Content> Table::NewContent(bool fresh) const {
  auto content = std::make_unique<Content>();
  std::array<std::unique_ptr<Index>, kShards> indexes;
  for (uint32_t i = 0; i < kShards; ++i) indexes[i] = NewIndex(i);
  content->kept = storage_->NewKeptRows(NewPoolSpec(), fresh, &content->opened);
  if (!content->kept) content->arena = storage_->NewArena(spec_.name);
  for (uint32_t i = 0; i < kShards; ++i) {
    if (!content->kept) content->stores[i] = std::make_unique<ArenaRows>(content->arena.get(), kept_bytes_);
    RowStore* const store = content->kept ? content->kept->shard(i) : content->stores[i].get();
    content->shards[i] = std::make_unique<RowMap>(std::move(indexes[i]), store);
  }
  NewFilter(content.get(), fresh);
  return content;
}

void Table::RefuseKey(Key key) const {
  std::string text = std::to_string(key);
  if (key > static_cast<Key>(std::numeric_limits<int64_t>::max())) {
    text += " (" + std::to_string(static_cast<int64_t>(key)) + " as int64)";
  }
  if (is_array_ && key >= spec_.input_dim) {
    throw KeyRangeError("table '" + spec_.name + "': key " + text + " is not below its input_dim " +
                        std::to_string(spec_.input_dim));
  }
  throw SpecError("table '" + spec_.name + "': key " + text + " belongs to server " +
                  std::to_string(server_of(key, shard_.servers, is_array_)) + " of " +
                  std::to_string(shard_.servers) + ", but was sent to server " +
                  std::to_string(shard_.server));
}

// The internal shard of a key, or kShards for a key that is out of range or another server's.
uint32_t Table::InternalShard(Key key) const {
  if (is_array_) {
    if (key >= spec_.input_dim) return kShards;
    if (shard_.servers == 1) return static_cast<uint32_t>(key % kShards);
    if (key % shard_.servers != shard_.server) return kShards;
    return static_cast<uint32_t>(key / shard_.servers % kShards);
  }
  const uint64_t hash = Mix64(key);
  if (server_of_hash(hash, shard_.servers) != shard_.server) return kShards;
  return static_cast<uint32_t>(hash >> (64 - kShardBits));
}

Table::Plan Table::MakePlan(const Key* keys, size_t n) const {
  if (n >= std::numeric_limits<uint32_t>::max()) {
    throw SpecError("table '" + spec_.name + "': " + std::to_string(n) +
                    " keys in one call; send smaller batches");
  }
  Plan plan;
  const std::unique_ptr<uint8_t[]> shard_of(new uint8_t[n]);
  std::array<size_t, kShards + 1> count{};
  for (size_t i = 0; i < n; ++i) {
    const uint32_t shard = InternalShard(keys[i]);
    shard_of[i] = static_cast<uint8_t>(shard);
    ++count[shard];
  }
  if (count[kShards] > 0) {
    for (size_t i = 0; i < n; ++i) {
      if (shard_of[i] == kShards) RefuseKey(keys[i]);
    }
  }
  for (size_t shard = 0; shard < kShards; ++shard) plan.begin[shard + 1] = plan.begin[shard] + count[shard];
  plan.keys.reset(new Key[n]);
  plan.order.reset(new uint32_t[n]);
  std::array<size_t, kShards + 1> next = plan.begin;
  for (size_t i = 0; i < n; ++i) {
    const size_t at = next[shard_of[i]]++;
    plan.keys[at] = keys[i];
    plan.order[at] = static_cast<uint32_t>(i);
  }
  return plan;
}

// Keys are looked up by internal shard, a piece of the batch at a time, and the rows copied in the order of
// the keys: what is written is then written in order.
void Table::Pull(const Key* keys, size_t n, void* out, Executor* executor, Lock locked, bool packed) const {
  std::shared_lock<FairSharedMutex> content_lock(content_mutex_, std::defer_lock);
  if (locked == Lock::kTake) content_lock.lock();
  std::atomic<size_t> refused{n};
  const size_t pieces = (n + kPiece - 1) / kPiece;
  const size_t bytes = packed ? spec_.dim * sizeof(uint16_t) : ops_->format().value_bytes();
  const auto pull = [&](size_t piece) {
    const size_t begin = n * piece / pieces;
    const size_t size = n * (piece + 1) / pieces - begin;
    const size_t good = PullPiece(keys + begin, size, static_cast<std::byte*>(out) + begin * bytes, packed);
    if (good == size) return;
    size_t first = refused.load();
    while (begin + good < first && !refused.compare_exchange_weak(first, begin + good)) {
    }
  };
  if (executor != nullptr && pieces > 1) {
    executor->ParallelFor(pieces, pull);
  } else {
    for (size_t piece = 0; piece < pieces; ++piece) pull(piece);
  }
  if (refused < n) RefuseKey(keys[refused]);
}

// n <= kPiece keys; how many come before the first that is to be refused, if there is one: then nothing was
// written.
size_t Table::PullPiece(const Key* keys, size_t n, std::byte* out, bool packed) const {
  // Read-only clients send ids without deduplication, mostly of few keys: each key is looked up once. With a
  // cache each id is, since the cache counts reads.
  const bool once = !content_->store().counts_reads() && RepeatMuch(keys, n);
  Piece piece;
  const size_t good = OrderByShard(keys, n, once, [this](Key key) { return InternalShard(key); }, &piece);
  if (good < n) return good;
  for (uint32_t shard = 0; shard < kShards; ++shard) {
    CheckUnread(shard, &piece.keys[piece.begin[shard]], piece.begin[shard + 1] - piece.begin[shard]);
  }
  FindRows(content_->shards, &piece);
  const size_t bytes = packed ? spec_.dim * sizeof(uint16_t) : ops_->format().value_bytes();
  const bool unpack = IsHalf(ops_->format().dtype) && !packed;
  const bool words = bytes % sizeof(uint32_t) == 0;
  CopyRows(n, std::min(kept_bytes_, ops_->format().state_at), &piece, [&](size_t i, const std::byte* row) {
    if (row == nullptr) {
      packed ? PackMissing(keys[i], out + i * bytes) : FillMissing(keys[i], out + i * bytes);
    } else if (reduced_ != nullptr) {
      reduced_->Read(row, out + i * bytes);
    } else if (unpack) {
      ops_->Read(row, out + i * bytes);
    } else if (words) {
      CopyRow(row, out + i * bytes, bytes);
    } else {
      std::memcpy(out + i * bytes, row, bytes);
    }
  });
  if (!piece.reads.entries().empty()) {
    Unlock(&piece.locks);
    (void)TakeIn(piece.reads, false);
  }
  return n;
}

void Table::ReadAhead(const Key* keys, size_t n, const std::function<bool()>& wanted) const {
  const Plan plan = MakePlan(keys, n);
  size_t at = 0;  // in plan.keys
  for (uint32_t shard = 0; shard < kShards && wanted();) {
    const std::shared_lock<FairSharedMutex> content_lock(content_mutex_, std::try_to_lock);
    if (!content_lock || !content_->store().pins()) return;
    SharedLocks locks;
    LogReads reads;
    const uint32_t first = shard;
    while (shard < kShards && reads.entries().size() < kReadAtOnce) {
      const RowMap& map = *content_->shards[shard];
      if (at < plan.begin[shard + 1] && !locks[shard].owns_lock()) {
        // Who waits for one that is read here must not wait for another one, too.
        locks[shard] =
            shard == first ? std::shared_lock(map.mutex()) : std::shared_lock(map.mutex(), std::try_to_lock);
        if (!locks[shard].owns_lock()) break;
      }
      const size_t left = plan.begin[shard + 1] - at;
      if (left == 0 || plan.begin[shard + 1] - plan.begin[shard] > map.store().MostReadAhead()) {
        at = plan.begin[++shard];
        continue;
      }
      at += map.ReadAhead(&plan.keys[at], left, &reads);
    }
    if (reads.entries().empty()) continue;
    reads.Run();
    Unlock(&locks);
    if (!TakeIn(reads, true)) return;
  }
}

// Rows that were read from the drive go into the cache, so that a push of them does not read them again.
// Those that cannot be read are looked after. Without a lock of a shard. False: not now.
bool Table::TakeIn(const LogReads& reads, bool ahead) const {
  const std::vector<LogReads::Entry>& entries = reads.entries();
  const std::shared_lock<FairSharedMutex> moves_lock(content_->kept->moves_mutex(), std::try_to_lock);
  if (!moves_lock) return false;  // a save needs rows to stay where they are
  RowLog::Room room;
  try {
    room = content_->store().RoomFor(2 * entries.size(), RowLog::Need::kWriteBack);
  } catch (const StorageError&) {
    return false;  // the push says it
  }
  std::vector<Key> damaged;
  for (size_t begin = 0; begin < entries.size();) {
    RowMap& map = *content_->shards[InternalShard(entries[begin].key)];
    const std::unique_lock<FairSharedMutex> lock(map.mutex());
    for (; begin < entries.size() && content_->shards[InternalShard(entries[begin].key)].get() == &map;
         ++begin) {
      if (entries[begin].error == 0) {
        map.store().Install(entries[begin].key, entries[begin].slot, reads.content(begin), ahead);
      } else {
        damaged.push_back(entries[begin].key);
      }
    }
  }
  CheckRows(damaged);
  content_->kept->Poke();
  return true;
}

// Looks after rows that are damaged or could not be read. With moves_mutex, if they are of a log, and without
// a lock of a shard. Rows stay while pushes are kept away, as by a checkpoint; where the drive does not give
// them back; and beyond the limit of Damage::RequireFew: then with a line to the standard error, the first of
// which is returned.
std::optional<std::string> Table::CheckRows(const std::vector<Key>& keys) const {
  std::optional<std::string> first;
  const auto stays = [&](const std::string& why) {
    damage_->Say(why);
    if (!first) first = why;
  };
  if (keys.empty()) return first;
  const std::shared_lock<FairSharedMutex> push_lock(push_mutex_, std::try_to_lock);
  if (!push_lock) {
    stays("table '" + spec_.name + "': " + std::to_string(keys.size()) +
          " rows are damaged, the first of them of key " + std::to_string(keys.front()) +
          ", and cannot be removed beside a checkpoint, a save or an eviction; read them again");
    return first;
  }
  try {
    const RowLog::Room room = content_->store().RoomFor(2 * keys.size(), RowLog::Need::kWriteBack);
    for (const Key key : keys) {
      RowMap& map = *content_->shards[InternalShard(key)];
      const std::unique_lock<FairSharedMutex> lock(map.mutex());
      try {
        map.CheckRow(key);
      } catch (const StorageError& error) {
        stays(error.what());
      }
    }
  } catch (const StorageError& error) {  // there is no room to note it
    stays(error.what());
  }
  return first;
}

// Before rows of a pool are read that nobody has looked at since a recovery, which reads none: what of them
// a drive has lost behind a lie would be taken for rows. Without a lock of a shard. Throws StorageError for
// damaged rows that stay.
void Table::CheckUnread(uint32_t shard, const Key* keys, size_t n) const {
  const RowMap& map = *content_->shards[shard];
  if (n == 0 || !map.store().unchecked()) return;
  std::vector<Key> damaged;
  {
    const std::shared_lock<FairSharedMutex> lock(map.mutex());
    map.FindDamaged(keys, n, &damaged);
  }
  if (const std::optional<std::string> why = CheckRows(damaged)) throw StorageError(*why);
}

// Room for so many appends to the log, if there is one, for a call on these keys. Without a lock of a shard.
// `adds`: keys without rows get some; where that has no room, there may be for those that have.
RowLog::Room Table::RoomFor(const Plan& plan, size_t appends, bool adds) const {
  RowStore& store = content_->store();
  try {
    if (adds) return store.RoomFor(appends, RowLog::Need::kNewRows);
  } catch (const StorageFull& full) {
    bool added = false;
    plan.ForEachShard(nullptr, [&](size_t begin, size_t end, size_t shard) {
      const std::shared_lock<FairSharedMutex> lock(content_->shards[shard]->mutex());
      const RowMap& map = *content_->shards[shard];
      // At the cap, each takes the place of another one.
      added = added || (map.size() < most_rows_[shard] && !map.HasAll(&plan.keys[begin], end - begin));
    });
    if (added) {
      content_->kept->NoteRefused();
      throw NoNewRows(full, spec_.name, storage_->spec().kept_checkpoints);
    }
  }
  try {
    return store.RoomFor(appends, RowLog::Need::kUpdates);
  } catch (const StorageFull&) {
    content_->kept->WaitIdle();  // a checkpoint that is being made durable gives room back
  }
  return store.RoomFor(appends, RowLog::Need::kUpdates);
}

void Table::CheckGradients(const Key* keys, size_t n, const void* grads, Executor* executor) const {
  if (spec_.nonfinite_gradients != "refuse") return;
  const size_t count = CountNonfinite(spec_, grads, n, executor);
  if (count == 0) return;
  nonfinite_gradients_ += count;
  throw Nonfinite(spec_, keys, n, grads);
}

void Table::CheckLearningRate(double learning_rate) const {
  try {
    oe::CheckLearningRate(spec_.optimizer, learning_rate);
  } catch (const SpecError& error) {
    throw SpecError("table '" + spec_.name + "': " + error.what());
  }
}

// Leaves out the rows with gradients that are not finite.
void Table::PushFinite(const Key* keys, size_t n, const std::byte* grads, double learning_rate,
                       Executor* executor, const uint32_t* counts, Lock locked) {
  const size_t bytes = ops_->format().value_bytes();
  std::vector<Key> left_keys;
  std::vector<std::byte> left_grads;
  std::vector<uint32_t> left_counts;
  for (size_t i = 0; i < n; ++i) {
    const std::byte* row = grads + i * bytes;
    if (!AllFinite(spec_, row, 1)) continue;
    left_keys.push_back(keys[i]);
    left_grads.insert(left_grads.end(), row, row + bytes);
    left_counts.push_back(counts == nullptr ? 1 : counts[i]);
  }
  Push(left_keys.data(), left_keys.size(), left_grads.data(), learning_rate, executor, left_counts.data(),
       locked);
  nonfinite_gradients_ += n - left_keys.size();
}

void Table::Push(const Key* keys, size_t n, const void* gradients, double learning_rate, Executor* executor,
                 const uint32_t* counts, Lock locked) {
  RequireWhole();
  const auto* grads = static_cast<const std::byte*>(gradients);
  if (spec_.nonfinite_gradients == "skip" && !AllFinite(spec_, grads, n, executor)) {
    return PushFinite(keys, n, grads, learning_rate, executor, counts, locked);
  }
  CheckLearningRate(learning_rate);
  const Plan plan = MakePlan(keys, n);
  const std::unique_ptr<uint32_t[]> numbers(new uint32_t[n]);
  std::array<uint64_t, kShards> moves{};
  // It keeps away what exchanges the content, too.
  std::shared_lock<FairSharedMutex> push_lock(push_mutex_, std::defer_lock);
  if (locked == Lock::kTake) push_lock.lock();
  // Where a push may evict, another one must not hold numbers of rows meanwhile, nor take room while it
  // waits.
  std::unique_lock<std::mutex> lone_push_lock(lone_push_mutex_, std::defer_lock);
  if (eviction_.capped() || eviction_.scheduled()) lone_push_lock.lock();
  const RowLog::Room room = RoomFor(plan, AppendsOf(n), true);
  const Pins pins(plan, *content_, numbers.get());
  // First every row that is missing, which may fail. A row that was made has its initializer's value, the
  // same that a pull read before (or would have, but for admission), so a push that fails here has changed
  // nothing that anyone can see in a pull, but for rows that were evicted.
  plan.ForEachShard(executor, [&](size_t begin, size_t end, size_t shard) {
    RowMap& map = *content_->shards[shard];
    map.store().Upkeep();  // what nobody has done since the last pull
    const std::unique_lock<FairSharedMutex> lock(map.mutex());
    moves[shard] = map.store().moves();
    if (has_policies_)
      return AddByPolicy(plan, begin, end, static_cast<uint32_t>(shard), counts, numbers.get());
    map.FindOrAdd(&plan.keys[begin], end - begin, &numbers[begin],
                  [&](Key key, std::byte* row) { ops_->Init(key, row); });
  });
  const uint64_t step = content_->version.fetch_add(1) + 1;
  const uint32_t seconds = eviction_.has_ttl() ? clock_.Read().now : 0;
  const size_t bytes = ops_->format().value_bytes();
  plan.ForEachShard(executor, [&](size_t begin, size_t end, size_t shard) {
    RowMap& map = *content_->shards[shard];
    const std::unique_lock<FairSharedMutex> lock(map.mutex());
    if (map.store().moves() != moves[shard])
      map.store().FindAgain(&plan.keys[begin], end - begin, &numbers[begin]);
    const std::unique_lock<std::mutex> copies_lock = map.store().LockCopies();
    const auto fill = [&](size_t at, RowGroup* group) {
      if (numbers[at] == kNoRow) return;  // not admitted, or no room
      std::byte* row = map.row(numbers[at]);
      const std::byte* gradient = grads + plan.order[at] * bytes;
      PrefetchRow(row, row_bytes_);
      PrefetchRow(gradient, bytes);
      group->rows[group->size] = row;
      group->keys[group->size] = plan.keys[at];
      group->order[group->size] = plan.order[at];
      group->gradients[group->size++] = gradient;
    };
    ForEachGroup(begin, end, fill, [&](const RowGroup& group) {
      for (size_t i = 0; has_policies_ && i < group.size; ++i) {
        eviction_.facts().Touch(group.rows[i], static_cast<uint32_t>(step), TimesOf(counts, group.order[i]),
                                seconds);
      }
      ops_->Update(group.rows.data(), group.keys.data(), group.gradients.data(), group.size, learning_rate,
                   step);
    });
    map.store().Unpin(&numbers[begin], end - begin);
  });
  if (content_->kept) content_->kept->Poke();
  if (eviction_.scheduled()) SweepInTurn(step);
}

void Table::Upkeep(Executor* executor) {
  // Beside pushes; a save, a checkpoint or a restore is not waited for.
  const std::shared_lock<FairSharedMutex> push_lock(push_mutex_, std::try_to_lock);
  if (!push_lock) return;
  const std::shared_lock<FairSharedMutex> content_lock(content_mutex_, std::try_to_lock);
  if (!content_lock || content_->kept == nullptr) return;
  const auto run = [&](size_t shard) { content_->shards[shard]->store().Upkeep(); };
  if (executor != nullptr) return executor->ParallelFor(kShards, run);
  for (size_t shard = 0; shard < kShards; ++shard) run(shard);
}

// A segment of the log. Pushes, saves and checkpoints go on.
bool Table::ScrubLog(ScrubPosition* position, uint64_t* bytes) {
  RowLogWalk walk(content_->store().log(), static_cast<uint32_t>(position->of_shard), 1);
  std::vector<Key> damaged;
  uint64_t rows = 0;
  while (walk.Next()) {
    SegmentChunks& chunks = walk.chunks();
    rows += walk.live().size();
    for (const uint32_t row : walk.live()) {
      if (chunks.row(row) == nullptr) damaged.push_back(chunks.chunk().rows[row].key);
    }
  }
  *bytes = walk.read_bytes();
  position->of_shard = walk.next_segment();
  scrubbed_rows_ += rows;
  if (const std::optional<uint64_t> header = walk.BrokeOff()) {
    damage_->Say(
        "table '" + spec_.name + "': the header at byte " + std::to_string(*header) + " of " +
        content_->store().log()->spec().where +
        " is damaged or cannot be read, and the rows behind it were not checked; run `oeprov checkpoint "
        "verify` when the server has ended");
  }
  const std::shared_lock<FairSharedMutex> moves_lock(content_->kept->moves_mutex(), std::try_to_lock);
  if (moves_lock) CheckRows(damaged);
  if (*bytes > 0) return true;
  ++scrubs_;
  return false;
}

bool Table::Scrub(ScrubPosition* position, uint64_t* bytes) {
  *bytes = 0;
  {
    const std::shared_lock<FairSharedMutex> content_lock(content_mutex_, std::try_to_lock);
    if (!content_lock) return true;
    if (content_->store().log() != nullptr) return ScrubLog(position, bytes);
  }
  // Beside pushes; a save, a checkpoint or a restore is not waited for.
  const std::shared_lock<FairSharedMutex> push_lock(push_mutex_, std::try_to_lock);
  if (!push_lock) return true;
  const std::shared_lock<FairSharedMutex> content_lock(content_mutex_, std::try_to_lock);
  if (!content_lock) return true;
  if (!content_->kept) return false;
  uint64_t rows = 0;
  if (!content_->shards[position->shard]->store().Scrub(&position->of_shard, &rows)) {
    ++position->shard;
    position->of_shard = 0;
  }
  scrubbed_rows_ += rows;
  *bytes = rows * (kept_bytes_ + sizeof(SlotMeta));
  if (position->shard < kShards) return true;
  ++scrubs_;
  return false;
}

Table::DamageCounts Table::damage_counts() const {
  return {damage_->quarantined(), damage_->repaired(), scrubbed_rows_, scrubs_};
}

std::vector<Key> Table::Keys(uint32_t part) const {
  const std::shared_lock<FairSharedMutex> content_lock(content_mutex_);
  const RowMap& map = *content_->shards[part];
  const std::shared_lock<FairSharedMutex> lock(map.mutex());
  std::vector<Key> keys(map.size());
  std::array<uint32_t, 1024> numbers{};
  uint64_t position = 0;
  size_t filled = 0;
  while (filled < keys.size()) {
    const size_t most = std::min(numbers.size(), keys.size() - filled);
    filled += map.Scan(&position, most, &keys[filled], numbers.data());
  }
  return keys;
}

uint64_t Table::CountKeys(uint32_t part) const {
  const std::shared_lock<FairSharedMutex> content_lock(content_mutex_);
  const RowMap& map = *content_->shards[part];
  const std::shared_lock<FairSharedMutex> lock(map.mutex());
  return map.size();
}

uint64_t Table::nonfinite_gradients() const { return nonfinite_gradients_; }

uint64_t Table::version() const {
  const std::shared_lock<FairSharedMutex> lock(content_mutex_);
  return content_->version.load();
}

uint64_t Table::rows() const {
  const std::shared_lock<FairSharedMutex> content_lock(content_mutex_);
  uint64_t rows = 0;
  for (const auto& map : content_->shards) {
    const std::shared_lock<FairSharedMutex> lock(map->mutex());
    rows += map->size();
  }
  return rows;
}

uint64_t Table::bytes() const {
  const std::shared_lock<FairSharedMutex> lock(content_mutex_);
  const uint64_t counts = content_->counts ? content_->counts->bytes() : 0;
  const KeptRows* const kept = content_->kept.get();
  return counts + (kept != nullptr ? kept->bytes() : content_->arena->bytes());
}

uint64_t Table::index_bytes() const {
  const std::shared_lock<FairSharedMutex> content_lock(content_mutex_);
  uint64_t bytes = 0;
  for (const auto& map : content_->shards) {
    const std::shared_lock<FairSharedMutex> lock(map->mutex());
    bytes += map->index_bytes();
  }
  const std::optional<LogPoolStats> of_drive = content_->kept ? content_->kept->drive() : std::nullopt;
  if (of_drive) bytes += of_drive->log.memory_bytes;
  return bytes;
}

CacheStats Table::cache() const {
  const std::shared_lock<FairSharedMutex> lock(content_mutex_);
  return content_->kept ? content_->kept->cache_stats() : CacheStats{};
}

std::optional<PoolRoom> Table::room() const {
  const std::shared_lock<FairSharedMutex> content_lock(content_mutex_);
  if (!content_->kept) return std::nullopt;
  return content_->kept->room();
}

std::optional<LogPoolStats> Table::drive() const {
  const std::shared_lock<FairSharedMutex> lock(content_mutex_);
  return content_->kept ? content_->kept->drive() : std::nullopt;
}

bool Table::is_pmem() const { return storage_->is_pmem(); }

}  // namespace oe
