// Tables to files and back, and checkpoints in their storage.
#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/table/content.h"

namespace oe {

TableFileInfo Table::Save(const std::string& file) const {
  // Pulls go on; pushes wait, so that all rows are of one version and no shard needs its own lock.
  const std::unique_lock<std::shared_mutex> push_lock(push_mutex_);
  const std::shared_lock<std::shared_mutex> content_lock(content_mutex_);
  TableFileInfo info;
  info.file = file;
  info.spec = spec_;
  info.shard = shard_;
  info.version = content_->version.load();
  info.row_floats = row_floats_;
  for (const auto& map : content_->shards) info.rows += map->size();

  TableFileWriter writer(info);
  const size_t block = writer.block_rows();
  const std::unique_ptr<Key[]> keys(new Key[block]);
  const std::unique_ptr<uint32_t[]> numbers(new uint32_t[block]);
  const std::unique_ptr<float[]> rows(new float[block * row_floats_]);
  size_t filled = 0;
  for (const auto& map : content_->shards) {
    uint64_t position = 0;
    while (const size_t found = map->Scan(&position, block - filled, &keys[filled], numbers.get())) {
      for (size_t i = 0; i < found; ++i) PrefetchRow(map->row(numbers[i]), row_floats_);
      for (size_t i = 0; i < found; ++i) {
        std::memcpy(&rows[(filled + i) * row_floats_], map->row(numbers[i]), row_floats_ * sizeof(float));
      }
      filled += found;
      if (filled == block) {
        writer.WriteBlock(keys.get(), rows.get(), filled);
        filled = 0;
      }
    }
  }
  if (filled > 0) writer.WriteBlock(keys.get(), rows.get(), filled);
  return writer.Finish();
}

void Table::LoadFile(const std::string& file, Content* content) const {
  TableFileReader reader(file);
  while (const size_t n = reader.NextBlock()) {
    for (size_t i = 0; i < n; ++i) {
      const Key key = reader.keys()[i];
      const uint32_t shard = InternalShard(key);
      if (shard == kShards) {
        if (IsArray(spec_) && key >= spec_.input_dim) {
          throw CheckpointError(file + ": key " + std::to_string(key) + " is not below input_dim " +
                                std::to_string(spec_.input_dim) + "; the file is damaged");
        }
        continue;
      }
      RowMap& map = *content->shards[shard];
      uint32_t number = kNoRow;
      bool added = false;
      map.FindOrAdd(&key, 1, &number, [&](Key, float* row) {
        std::memcpy(row, reader.rows() + i * row_floats_, row_floats_ * sizeof(float));
        added = true;
      });
      if (!added) {
        throw CheckpointError(file + ": key " + std::to_string(key) +
                              " has a row already; the files overlap");
      }
    }
  }
}

void Table::Restore(const std::vector<std::string>& files) {
  const std::vector<TableFileInfo> infos = CheckTableFiles(spec_, row_floats_, files);
  // Loaded beside the present content and exchanged only when every checksum was right.
  std::unique_ptr<Content> content = NewContent(true);
  const bool same_servers = infos.front().shard.servers == shard_.servers;
  for (const TableFileInfo& info : infos) {
    if (same_servers && info.shard.server != shard_.server) continue;  // has no key of ours
    LoadFile(info.file, content.get());
  }
  content->version = infos.front().version;
  const std::unique_lock<std::shared_mutex> push_lock(push_mutex_);
  const std::unique_lock<std::shared_mutex> content_lock(content_mutex_);
  if (content_->pool) content_->pool->Remove();
  content_.swap(content);
}

Pool& Table::RequirePool() const {
  if (content_->pool) return *content_->pool;
  throw SpecError("table '" + spec_.name + "': its storage is " + storage_->spec().type +
                  ", which keeps no checkpoints; save the table to a file, or use pmem_libpmem");
}

void Table::Checkpoint(uint64_t id) {
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

void Table::Recover(std::optional<uint64_t> id) {
  const std::unique_lock<std::shared_mutex> push_lock(push_mutex_);
  const std::unique_lock<std::shared_mutex> content_lock(content_mutex_);
  // The tables of a server go back together, and most are there already.
  Pool& pool = RequirePool();
  pool.WaitDurable();
  const std::vector<CheckpointInfo> kept = pool.Checkpoints();
  bool changed = false;
  for (const auto& map : content_->shards) changed = changed || map->changed();
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
  content_->version = pool.Recover(id, pointers).version;
  for (uint32_t i = 0; i < kShards; ++i) {
    content_->shards[i] = std::make_unique<RowMap>(std::move(indexes[i]), pool.shard(i));
  }
}

}  // namespace oe
