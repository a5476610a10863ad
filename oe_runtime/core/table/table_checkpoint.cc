// Tables to files and back, and checkpoints in their storage.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "oe_runtime/core/checkpoint/filter_file.h"
#include "oe_runtime/core/checkpoint/table_chain.h"
#include "oe_runtime/core/table/content.h"

namespace oe {
namespace {

// Moves the entries of rows that changed to the front; how many there are.
size_t KeepChanged(const RowMap& map, size_t n, Key* keys, uint32_t* numbers) {
  size_t kept = 0;
  for (size_t i = 0; i < n; ++i) {
    if (!map.changes().Has(map.PlaceOf(numbers[i]))) continue;
    keys[kept] = keys[i];
    numbers[kept++] = numbers[i];
  }
  return kept;
}

uint64_t CountChanged(const RowMap& map) {
  std::array<Key, 1024> keys{};
  std::array<uint32_t, 1024> numbers{};
  uint64_t position = 0;
  uint64_t count = 0;
  while (const size_t found = map.Scan(&position, keys.size(), keys.data(), numbers.data())) {
    count += KeepChanged(map, found, keys.data(), numbers.data());
  }
  return count;
}

// The keys that were erased and have no row now.
void AddTombstones(const RowMap& map, std::vector<Key>* tombstones) {
  std::vector<Key> keys = map.changes().erased();
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  for (const Key key : keys) {
    const std::byte* row = nullptr;
    map.Find(&key, 1, &row);
    if (row == nullptr) tombstones->push_back(key);
  }
}

}  // namespace

TableFileInfo Table::Save(const std::string& file, std::optional<uint64_t> since) {
  RequireWhole();
  // Pulls go on; pushes wait, so that all rows are of one version and no shard needs its own lock.
  const std::unique_lock<std::shared_mutex> push_lock(push_mutex_);
  const std::shared_lock<std::shared_mutex> content_lock(content_mutex_);
  if (eviction_.sweeps() != 0) {
    for (uint32_t shard = 0; shard < kShards; ++shard) SweepQuietly(shard, eviction_.sweeps());
  }
  if (!content_->filter) return SaveRows(file, since);
  const std::string filter_file = FilterFileName(file);
  SaveFilter(*content_->filter, spec_, shard_, content_->version.load(), filter_file);
  try {
    return SaveRows(file, since);
  } catch (...) {
    (void)::unlink(filter_file.c_str());
    throw;
  }
}

TableFileInfo Table::SaveRows(const std::string& file, std::optional<uint64_t> since) {
  TableFileInfo info;
  info.file = file;
  info.spec = spec_;
  info.shard = shard_;
  info.version = content_->version.load();
  info.row_bytes = row_bytes_;
  bool increment = since && since == content_->saved;
  for (const auto& map : content_->shards) increment = increment && map->changes().known();
  std::vector<Key> tombstones;
  for (const auto& map : content_->shards) {
    if (increment) {
      info.rows += CountChanged(*map);
      AddTombstones(*map, &tombstones);
    } else {
      info.rows += map->size();
    }
  }
  if (increment) info.base = since;
  info.tombstones = tombstones.size();

  TableFileWriter writer(info);
  writer.WriteTombstones(tombstones.data(), tombstones.size());
  const size_t block = writer.block_rows();
  const std::unique_ptr<Key[]> keys(new Key[block]);
  const std::unique_ptr<uint32_t[]> numbers(new uint32_t[block]);
  const std::unique_ptr<std::byte[]> rows(new std::byte[block * row_bytes_]);
  size_t filled = 0;
  for (const auto& map : content_->shards) {
    uint64_t position = 0;
    while (size_t found = map->Scan(&position, block - filled, &keys[filled], numbers.get())) {
      if (increment) found = KeepChanged(*map, found, &keys[filled], numbers.get());
      for (size_t i = 0; i < found; ++i) PrefetchRow(map->row(numbers[i]), row_bytes_);
      for (size_t i = 0; i < found; ++i) {
        std::memcpy(&rows[(filled + i) * row_bytes_], map->row(numbers[i]), row_bytes_);
      }
      filled += found;
      if (filled == block) {
        writer.WriteBlock(keys.get(), rows.get(), filled);
        filled = 0;
      }
    }
  }
  if (filled > 0) writer.WriteBlock(keys.get(), rows.get(), filled);
  info = writer.Finish();
  content_->saved = info.checksum;
  content_->saved_version = info.version;
  for (const auto& map : content_->shards) map->changes().Start();
  return info;
}

void Table::LoadChain(const std::vector<std::string>& chain, Content* content) const {
  TableChainReader reader(chain);
  while (const size_t n = reader.NextBlock()) {
    for (size_t i = 0; i < n; ++i) {
      const Key key = reader.keys()[i];
      const uint32_t shard = InternalShard(key);
      if (shard == kShards) {
        if (is_array_ && key >= spec_.input_dim) {
          throw CheckpointError(chain.back() + ": key " + std::to_string(key) + " is not below input_dim " +
                                std::to_string(spec_.input_dim) + "; the file is damaged");
        }
        continue;
      }
      RowMap& map = *content->shards[shard];
      uint32_t number = kNoRow;
      bool added = false;
      map.FindOrAdd(&key, 1, &number, [&](Key, std::byte* row) {
        std::memcpy(row, reader.rows() + i * row_bytes_, kept_bytes_);
        added = true;
      });
      if (!added) {
        throw CheckpointError(chain.back() + ": key " + std::to_string(key) +
                              " has a row already; the files overlap");
      }
    }
  }
}

void Table::Restore(const std::vector<std::string>& files) {
  std::vector<TableChain> chains;
  chains.reserve(files.size());
  for (const std::string& file : files) chains.push_back({file});
  RestoreChains(chains);
}

void Table::RestoreChains(const std::vector<TableChain>& chains) {
  const std::vector<TableFileInfo> infos = CheckChains(spec_, row_bytes_, chains);
  // Loaded beside the present content and exchanged only when every checksum was right.
  std::unique_ptr<Content> content = NewContent(true);
  const bool same_servers = infos.front().shard.servers == shard_.servers;
  for (size_t i = 0; i < chains.size(); ++i) {
    if (same_servers && infos[i].shard.server != shard_.server) continue;  // has no key of ours
    LoadChain(chains[i], content.get());
    if (same_servers) content->saved = infos[i].checksum;
  }
  content->version = infos.front().version;
  content->saved_version = infos.front().version;
  if (content->saved) {
    for (const auto& map : content->shards) map->changes().Start();
  }
  if (content->filter) {
    std::vector<std::string> saved;
    for (const TableFileInfo& info : infos) {
      if (!same_servers || info.shard.server == shard_.server) saved.push_back(info.file);
    }
    LoadFilters(saved, spec_, content->version.load(), content->filter.get(),
                [this](Key key) { return InternalShard(key); });
  }
  if (eviction_.capped() && kept_bytes_ == row_bytes_) KeepCap(content.get());
  const std::unique_lock<std::shared_mutex> push_lock(push_mutex_);
  const std::unique_lock<std::shared_mutex> content_lock(content_mutex_);
  if (content_->pool) content_->pool->Remove();
  if (content_->counts) content_->counts->Remove();
  content_.swap(content);
}

void Table::CheckIncrement(const TableFileInfo& info) const {
  const std::shared_lock<std::shared_mutex> lock(content_mutex_);
  bool unchanged = true;
  for (const auto& map : content_->shards) unchanged = unchanged && map->changes().empty();
  const auto saved = content_->saved;
  if (!saved || !unchanged) {
    throw CheckpointError(info.file + ": table '" + spec_.name +
                          "' has other rows than were saved or restored last; restore it first");
  }
  CheckFollows(info, spec_, row_bytes_, shard_, *saved);
}

void Table::ApplyIncrement(const std::string& file) {
  TableFileReader reader(file);
  const TableFileInfo& info = reader.info();
  CheckIncrement(info);
  const std::unique_lock<std::shared_mutex> push_lock(push_mutex_);
  const std::unique_lock<std::shared_mutex> content_lock(content_mutex_);
  content_->saved.reset();  // until all of it is there
  const auto map_of = [&](Key key) -> RowMap& {
    const uint32_t shard = InternalShard(key);
    if (shard < kShards && !(is_array_ && key >= spec_.input_dim)) return *content_->shards[shard];
    throw CheckpointError(file + ": key " + std::to_string(key) + " is not of this server's part of table '" +
                          spec_.name + "'; the file is damaged");
  };
  while (const size_t n = reader.NextTombstones()) {
    for (size_t i = 0; i < n; ++i) map_of(reader.keys()[i]).Erase(reader.keys()[i]);
  }
  while (const size_t n = reader.NextBlock()) {
    for (size_t i = 0; i < n; ++i) {
      const Key key = reader.keys()[i];
      RowMap& map = map_of(key);
      uint32_t number = kNoRow;
      map.FindOrAdd(&key, 1, &number, [](Key, std::byte*) {});
      const auto copies = map.LockCopies();
      std::memcpy(map.row(number), reader.rows() + i * row_bytes_, kept_bytes_);
    }
  }
  for (const auto& map : content_->shards) map->changes().Start();
  content_->version = info.version;
  content_->saved_version = info.version;
  content_->saved = info.checksum;
}

Pool& Table::RequirePool() const {
  if (content_->pool) return *content_->pool;
  throw SpecError("table '" + spec_.name + "': its storage is " + storage_->spec().type +
                  ", which keeps no checkpoints; save the table to a file, or use pmem_libpmem or dram_pmem");
}

void Table::Checkpoint(uint64_t id) {
  RequireWhole();
  // Pulls go on; pushes wait for the few microseconds that this takes.
  const std::unique_lock<std::shared_mutex> push_lock(push_mutex_);
  const std::shared_lock<std::shared_mutex> content_lock(content_mutex_);
  RequirePool().Checkpoint(id, content_->version.load());
}

void Table::WaitDurable() const {
  const std::shared_lock<std::shared_mutex> lock(content_mutex_);
  RequirePool().WaitDurable();
}

std::vector<CheckpointInfo> Table::Checkpoints() const {
  const std::shared_lock<std::shared_mutex> lock(content_mutex_);
  return content_->pool ? content_->pool->Checkpoints() : std::vector<CheckpointInfo>{};
}

int64_t Table::durable_at() const {
  const std::shared_lock<std::shared_mutex> lock(content_mutex_);
  return content_->pool ? content_->pool->durable_at() : 0;
}

uint64_t Table::pushes_at_risk() const {
  const std::shared_lock<std::shared_mutex> lock(content_mutex_);
  uint64_t kept = content_->saved_version.load();
  if (content_->pool) {
    const std::vector<CheckpointInfo> checkpoints = content_->pool->Checkpoints();
    if (!checkpoints.empty()) kept = std::max(kept, checkpoints.back().version);
  }
  const uint64_t version = content_->version.load();
  return version - std::min(kept, version);
}

void Table::Drop() {
  const std::unique_lock<std::shared_mutex> push_lock(push_mutex_);
  const std::unique_lock<std::shared_mutex> content_lock(content_mutex_);
  if (content_->pool) content_->pool->Remove();
  if (content_->counts) content_->counts->Remove();
}

void Table::Recover(std::optional<uint64_t> id) {
  const std::unique_lock<std::shared_mutex> push_lock(push_mutex_);
  const std::unique_lock<std::shared_mutex> content_lock(content_mutex_);
  // The tables of a server go back together, and most are there already.
  Pool& pool = RequirePool();
  pool.WaitDurable();
  const std::vector<CheckpointInfo> kept = pool.Checkpoints();
  bool changed = false;
  for (const auto& map : content_->shards) changed = changed || map->changed();
  for (uint32_t i = 0; content_->counts && i < kShards; ++i) {
    changed = changed || content_->counts->shard(i)->changed();
  }
  if (!changed && !kept.empty() && kept.back().id == id.value_or(kept.back().id) &&
      kept.back().version == content_->version.load()) {
    return;
  }
  RecoverContent(id);
}

void Table::RecoverContent(std::optional<uint64_t> id) {
  Pool& pool = RequirePool();
  std::array<std::unique_ptr<Index>, kShards> indexes;
  std::vector<Index*> pointers;
  for (uint32_t i = 0; i < kShards; ++i) {
    indexes[i] = NewIndex(i);
    pointers.push_back(indexes[i].get());
  }
  const std::vector<CheckpointInfo> kept = pool.Checkpoints();
  if (!id && !kept.empty()) id = kept.back().id;
  RecoverFilter(id, [&] {
    content_->version = pool.Recover(id, pointers).version;
    content_->saved.reset();
    content_->saved_version = 0;  // of another history
    for (uint32_t i = 0; i < kShards; ++i) {
      content_->shards[i] = std::make_unique<RowMap>(std::move(indexes[i]), pool.shard(i));
    }
  });
  content_->hands = {};
  if (eviction_.capped()) KeepCap(content_.get());
}

}  // namespace oe
