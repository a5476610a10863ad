#include "oe_runtime/core/table/table.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <utility>

#include "oe_runtime/core/table/content.h"
#include "oe_runtime/core/table/gradients.h"
#include "oe_runtime/core/table/row_ops.h"

namespace oe {
namespace {

constexpr size_t kBlock = RowOps::kMostRows;  // rows in flight

// Short rows are the rule, and a call of memcpy costs as much as copying one.
void CopyWords(const std::byte* from, std::byte* to, size_t bytes) {
  constexpr size_t kWord = 4;
  constexpr size_t kVector = 8 * kWord;
  if (bytes > 8 * kVector) {
    std::memcpy(to, from, bytes);
    return;
  }
  size_t i = 0;
  for (; i + kVector <= bytes; i += kVector) std::memcpy(to + i, from + i, kVector);
  for (; i < bytes; i += kWord) std::memcpy(to + i, from + i, kWord);
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
      row_bytes_(eviction_.facts().row_bytes()),
      is_array_(IsArray(spec_)),
      has_policies_(!spec_.admission.name.empty() || !spec_.eviction.empty()),
      default_value_(spec_.admission.name.empty() ? 0 : spec_.admission.params.at("default_value")),
      most_rows_(ShareOfCap()),
      clock_([] {
        const auto now = std::chrono::system_clock::now().time_since_epoch();
        return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::seconds>(now).count());
      }),
      content_(NewContent(false)) {
  if (content_->pool && content_->opened) RecoverContent(std::nullopt);
}

Table::~Table() = default;

PoolSpec Table::NewPoolSpec() const {
  PoolSpec pool;
  pool.table = spec_.name;
  nlohmann::json table = spec_;
  table.erase("nonfinite_gradients");  // how it goes on, not what is in the rows
  nlohmann::json identity = {{"table", table}, {"server", shard_.server}, {"servers", shard_.servers}};
  if (!job_.empty()) identity["job"] = job_;
  pool.identity = identity.dump();
  pool.may_differ = {"max_rows", "max_bytes"};  // the cap, which RecoverContent() keeps
  pool.row_bytes = row_bytes_;
  pool.shards = kShards;
  pool.shard_of = [this](Key key) { return InternalShard(key); };
  return pool;
}

std::unique_ptr<Index> Table::NewIndex(uint32_t internal_shard) const {
  try {
    if (!is_array_) return NewHashIndex();
    return NewArrayIndex(spec_.input_dim, shard_.server + uint64_t{shard_.servers} * internal_shard,
                         uint64_t{shard_.servers} * kShards);
  } catch (const std::bad_alloc&) {
    throw StorageError("table '" + spec_.name + "': no memory for the index of 'input_dim' " +
                       std::to_string(spec_.input_dim) + "; use more servers or a hash table");
  }
}

std::unique_ptr<Table::Content> Table::NewContent(bool fresh) const {
  auto content = std::make_unique<Content>();
  std::array<std::unique_ptr<Index>, kShards> indexes;
  for (uint32_t i = 0; i < kShards; ++i) indexes[i] = NewIndex(i);
  content->pool = storage_->NewPool(NewPoolSpec(), fresh, &content->opened);
  if (!content->pool) content->arena = storage_->NewArena(spec_.name);
  for (uint32_t i = 0; i < kShards; ++i) {
    RowStore* store = nullptr;
    if (content->pool) {
      store = content->pool->shard(i);
    } else {
      content->stores[i] = std::make_unique<ArenaRows>(content->arena.get(), row_bytes_);
      store = content->stores[i].get();
    }
    content->shards[i] = std::make_unique<RowMap>(std::move(indexes[i]), store);
  }
  content->filter = NewFilter();
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

void Table::Pull(const Key* keys, size_t n, void* out, Executor* executor) const {
  const Plan plan = MakePlan(keys, n);
  const std::shared_lock<std::shared_mutex> content_lock(content_mutex_);
  const size_t bytes = ops_->format().value_bytes();
  const size_t weights_bytes = ops_->format().state_at;
  const bool half = IsHalf(ops_->format().dtype);
  plan.ForEachShard(executor, [&](size_t begin, size_t end, size_t shard) {
    const RowMap& map = *content_->shards[shard];
    const std::shared_lock<std::shared_mutex> lock(map.mutex());
    // While the rows of one block are on their way from memory, the next block is looked up.
    std::array<std::array<const std::byte*, kBlock>, 2> blocks{};
    const auto find = [&](size_t at, std::array<const std::byte*, kBlock>& rows) {
      if (at >= end) return;
      const size_t size = std::min(kBlock, end - at);
      map.Find(&plan.keys[at], size, rows.data());
      for (size_t i = 0; i < size; ++i) {
        if (rows[i] != nullptr) PrefetchRow(rows[i], weights_bytes);
      }
    };
    find(begin, blocks[0]);
    for (size_t at = begin, turn = 0; at < end; at += kBlock, turn ^= 1) {
      find(at + kBlock, blocks[turn ^ 1]);
      const std::array<const std::byte*, kBlock>& rows = blocks[turn];
      const size_t size = std::min(kBlock, end - at);
      for (size_t i = 0; i < size; ++i) {
        std::byte* to = static_cast<std::byte*>(out) + plan.order[at + i] * bytes;
        if (rows[i] == nullptr) {
          FillMissing(plan.keys[at + i], to);
        } else if (half) {
          ops_->Read(rows[i], to);
        } else {
          CopyWords(rows[i], to, bytes);
        }
      }
    }
  });
}

void Table::CheckGradients(const Key* keys, size_t n, const void* grads, Executor* executor) const {
  if (spec_.nonfinite_gradients != "refuse") return;
  const size_t count = CountNonfinite(spec_, grads, n, executor);
  if (count == 0) return;
  nonfinite_gradients_ += count;
  throw Nonfinite(spec_, keys, n, grads);
}

// Leaves out the rows with gradients that are not finite.
void Table::PushFinite(const Key* keys, size_t n, const std::byte* grads, double learning_rate,
                       Executor* executor, const uint32_t* counts) {
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
  Push(left_keys.data(), left_keys.size(), left_grads.data(), learning_rate, executor, left_counts.data());
  nonfinite_gradients_ += n - left_keys.size();
}

void Table::Push(const Key* keys, size_t n, const void* gradients, double learning_rate, Executor* executor,
                 const uint32_t* counts) {
  const auto* grads = static_cast<const std::byte*>(gradients);
  if (spec_.nonfinite_gradients == "skip" && !AllFinite(spec_, grads, n, executor)) {
    return PushFinite(keys, n, grads, learning_rate, executor, counts);
  }
  const auto rate = static_cast<float>(learning_rate);  // to be finite in every dtype
  if (!std::isfinite(rate) || rate < 0) {
    throw SpecError("table '" + spec_.name +
                    "': the learning rate must be a finite number of at least 0, not " +
                    NumberText(learning_rate));
  }
  const Plan plan = MakePlan(keys, n);
  const std::unique_ptr<uint32_t[]> numbers(new uint32_t[n]);
  std::array<uint64_t, kShards> moves{};
  // Where a push may evict, another one must not hold numbers of rows meanwhile.
  std::shared_lock<std::shared_mutex> push_lock(push_mutex_, std::defer_lock);
  std::unique_lock<std::shared_mutex> lone_push_lock(push_mutex_, std::defer_lock);
  if (eviction_.capped() || eviction_.scheduled()) {
    lone_push_lock.lock();
  } else {
    push_lock.lock();
  }
  const std::shared_lock<std::shared_mutex> content_lock(content_mutex_);
  // First every row that is missing, which may fail. A row that was made has its initializer's value, the
  // same that a pull read before (or would have, but for admission), so a push that fails here has changed
  // nothing that anyone can see in a pull, but for rows that were evicted.
  plan.ForEachShard(executor, [&](size_t begin, size_t end, size_t shard) {
    RowMap& map = *content_->shards[shard];
    map.Upkeep();  // what nobody has done since the last pull
    const std::unique_lock<std::shared_mutex> lock(map.mutex());
    moves[shard] = map.moves();
    if (has_policies_)
      return AddByPolicy(plan, begin, end, static_cast<uint32_t>(shard), counts, numbers.get());
    map.FindOrAdd(&plan.keys[begin], end - begin, &numbers[begin],
                  [&](Key key, std::byte* row) { ops_->Init(key, row); });
  });
  const uint64_t step = content_->version.fetch_add(1) + 1;
  const auto seconds = static_cast<uint32_t>(has_policies_ ? clock_() : 0);
  const size_t bytes = ops_->format().value_bytes();
  plan.ForEachShard(executor, [&](size_t begin, size_t end, size_t shard) {
    RowMap& map = *content_->shards[shard];
    const std::unique_lock<std::shared_mutex> lock(map.mutex());
    if (map.moves() != moves[shard]) map.FindAgain(&plan.keys[begin], end - begin, &numbers[begin]);
    const std::unique_lock<std::mutex> copies_lock = map.LockCopies();
    std::array<std::byte*, kBlock> rows{};
    std::array<Key, kBlock> row_keys{};
    std::array<const void*, kBlock> of_rows{};
    for (size_t at = begin; at < end; at += kBlock) {
      size_t size = 0;
      for (size_t i = at; i < std::min(at + kBlock, end); ++i) {
        if (numbers[i] == kNoRow) continue;  // not admitted, or no room
        rows[size] = map.row(numbers[i]);
        row_keys[size] = plan.keys[i];
        of_rows[size] = grads + plan.order[i] * bytes;
        PrefetchRow(rows[size], row_bytes_);
        PrefetchRow(grads + plan.order[i] * bytes, bytes);
        if (has_policies_) {
          eviction_.facts().Touch(rows[size], static_cast<uint32_t>(step), TimesOf(counts, plan.order[i]),
                                  seconds);
        }
        ++size;
      }
      ops_->Update(rows.data(), row_keys.data(), of_rows.data(), size, learning_rate, step);
    }
  });
  if (eviction_.scheduled()) SweepInTurn(step);
}

void Table::Upkeep(Executor* executor) {
  // Beside pushes; a save, a checkpoint or a restore is not waited for.
  const std::shared_lock<std::shared_mutex> push_lock(push_mutex_, std::try_to_lock);
  if (!push_lock) return;
  const std::shared_lock<std::shared_mutex> content_lock(content_mutex_, std::try_to_lock);
  if (!content_lock || !content_->pool) return;
  const auto run = [&](size_t shard) { content_->shards[shard]->Upkeep(); };
  if (executor != nullptr) return executor->ParallelFor(kShards, run);
  for (size_t shard = 0; shard < kShards; ++shard) run(shard);
}

std::vector<Key> Table::Keys(uint32_t part) const {
  const std::shared_lock<std::shared_mutex> content_lock(content_mutex_);
  const RowMap& map = *content_->shards[part];
  const std::shared_lock<std::shared_mutex> lock(map.mutex());
  std::vector<Key> keys(map.size());
  std::vector<uint32_t> numbers(map.size());
  uint64_t position = 0;
  size_t filled = 0;
  while (filled < keys.size()) {
    filled += map.Scan(&position, keys.size() - filled, &keys[filled], &numbers[filled]);
  }
  return keys;
}

uint64_t Table::nonfinite_gradients() const { return nonfinite_gradients_; }

uint64_t Table::version() const {
  const std::shared_lock<std::shared_mutex> lock(content_mutex_);
  return content_->version.load();
}

uint64_t Table::rows() const {
  const std::shared_lock<std::shared_mutex> content_lock(content_mutex_);
  uint64_t rows = 0;
  for (const auto& map : content_->shards) {
    const std::shared_lock<std::shared_mutex> lock(map->mutex());
    rows += map->size();
  }
  return rows;
}

uint64_t Table::bytes() const {
  const std::shared_lock<std::shared_mutex> lock(content_mutex_);
  return content_->pool ? content_->pool->bytes() : content_->arena->bytes();
}

uint64_t Table::index_bytes() const {
  const std::shared_lock<std::shared_mutex> content_lock(content_mutex_);
  uint64_t bytes = 0;
  for (const auto& map : content_->shards) {
    const std::shared_lock<std::shared_mutex> lock(map->mutex());
    bytes += map->index_bytes();
  }
  return bytes;
}

CacheStats Table::cache() const {
  const std::shared_lock<std::shared_mutex> lock(content_mutex_);
  return content_->pool ? content_->pool->cache_stats() : CacheStats{};
}

bool Table::is_pmem() const { return storage_->is_pmem(); }

}  // namespace oe
