// When a table is saved and restored, and its checkpoints in storage. What files hold: table_files.cc.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "oe_runtime/core/checkpoint/filter_file.h"
#include "oe_runtime/core/checkpoint/table_chain.h"
#include "oe_runtime/core/table/content.h"
#include "oe_runtime/core/table/row_ops.h"
#include "oe_runtime/core/table/table_files.h"

namespace oe {

TableFiles Table::Files() const {
  return {spec_,
          shard_,
          row_bytes_,
          kept_bytes_,
          reduced_.get(),
          [this](Key key) { return InternalShard(key); },
          [this](Key key, std::byte* row) {
            ops_->Init(key, row);
            if (has_policies_) eviction_.facts().Init(row, 0);
          }};
}

TableFileInfo Table::Save(const std::string& file, std::optional<uint64_t> since) {
  PendingFiles files;
  TableFileInfo info = Save(file, since, &files);
  files.Publish();
  return info;
}

TableFileInfo Table::Save(const std::string& file, std::optional<uint64_t> since, PendingFiles* files) {
  RequireWhole();
  WaitIdle();
  // Pulls go on; pushes wait, so that all rows are of one version and no shard needs its own lock.
  const std::unique_lock<FairSharedMutex> push_lock(push_mutex_);
  const std::shared_lock<FairSharedMutex> content_lock(content_mutex_);
  if (eviction_.sweeps() != 0) {
    for (uint32_t shard = 0; shard < kShards; ++shard) {
      SweepQuietly(shard, eviction_.sweeps(), {});
      SweepFilterQuietly(shard, eviction_.sweeps(), Content::Swept::kOfCall, {});
    }
  }
  if (content_->filter) {
    SaveFilter(*content_->filter, spec_, shard_, content_->version.load(), FilterFileName(file), files);
  }
  const bool known = std::all_of(content_->shards.begin(), content_->shards.end(),
                                 [](const auto& map) { return map->store().changes().known(); });
  if (since != content_->saved || !known) since.reset();
  TableFiles::Damaged damaged;
  TableFileInfo info;
  {
    std::unique_lock<FairSharedMutex> moves_lock;
    if (content_->kept) moves_lock = std::unique_lock(content_->kept->moves_mutex());
    info = Files().Save(content_->shards, file, files, content_->version.load(), since, &damaged);
  }
  content_->saved = info.checksum;
  content_->saved_version = info.version;
  for (const auto& map : content_->shards) map->store().changes().Start();
  try {
    for (const auto& [map, key] : damaged) {
      const RowLog::Room room = map->store().RoomFor(1, RowLog::Need::kWriteBack);
      const std::unique_lock<FairSharedMutex> lock(map->mutex());
      try {
        map->CheckRow(key);
      } catch (const StorageError&) {  // NOLINT(bugprone-empty-catch)
        // As in CheckRows(): it is noted; the file is complete.
      }
    }
  } catch (const StorageError&) {  // NOLINT(bugprone-empty-catch): there is no room to note it
  }
  return info;
}

void Table::Restore(const std::vector<std::string>& files) {
  std::vector<TableChain> chains;
  chains.reserve(files.size());
  for (const std::string& file : files) chains.push_back({file});
  RestoreChains(chains);
}

void Table::RestoreChains(const std::vector<TableChain>& chains, Executor* executor) {
  const std::vector<TableFileInfo> infos = CheckChains(spec_, row_bytes_, chains);
  // Loaded beside the present content and exchanged only when every checksum was right.
  std::shared_ptr<Content> content = NewContent(true);
  const bool same_servers = infos.front().shard.servers == shard_.servers;
  for (size_t i = 0; i < chains.size(); ++i) {
    if (same_servers && infos[i].shard.server != shard_.server) continue;  // has no key of ours
    Files().LoadChain(chains[i], content->shards, executor);
    if (same_servers) content->saved = infos[i].checksum;
  }
  content->version = infos.front().version;
  content->loaded = true;
  content->saved_version = infos.front().version;
  if (content->saved) {
    for (const auto& map : content->shards) map->store().changes().Start();
  }
  if (content->filter) {
    std::vector<std::string> saved;
    for (const TableFileInfo& info : infos) {
      if (!same_servers || info.shard.server == shard_.server) saved.push_back(info.file);
    }
    LoadFilters(saved, spec_, content->version.load(), content->filter.get(),
                [this](Key key) { return InternalShard(key); });
  }
  if (eviction_.capped() && keeps_facts()) KeepCap(content.get());
  NoteLoaded(*content);
  const std::unique_lock<FairSharedMutex> push_lock(push_mutex_);
  const std::unique_lock<FairSharedMutex> content_lock(content_mutex_);
  if (content_->kept != nullptr) content_->kept->Remove();
  if (content_->counts) content_->counts->Remove();
  content_.swap(content);
  damage_->Recovered();
}

void Table::CheckIncrement(const TableFileInfo& info) const {
  const std::shared_lock<FairSharedMutex> lock(content_mutex_);
  bool unchanged = true;
  for (const auto& map : content_->shards) unchanged = unchanged && map->store().changes().empty();
  const auto saved = content_->saved;
  if (!saved || !unchanged) {
    throw CheckpointError(info.file + ": table '" + spec_.name +
                          "' has other rows than were saved or restored last; restore it first");
  }
  CheckFollows(info, spec_, row_bytes_, shard_, *saved);
}

void Table::ApplyIncrement(const std::string& file) {
  TableFileReader reader(file);
  ApplyIncrement(&reader);
}

void Table::ApplyIncrement(TableFileReader* reader) {
  const TableFileInfo& info = reader->info();
  reader->Rewind();
  CheckIncrement(info);
  const std::unique_lock<FairSharedMutex> push_lock(push_mutex_);
  const std::unique_lock<FairSharedMutex> content_lock(content_mutex_);
  content_->saved.reset();  // until all of it is there
  Files().Apply(reader, content_->shards);
  content_->version = info.version;
  content_->saved_version = info.version;
  content_->saved = info.checksum;
}

KeptRows& Table::RequireKept() const {
  if (content_->kept != nullptr) return *content_->kept.get();
  throw SpecError("table '" + spec_.name + "': its storage is " + storage_->spec().type +
                  ", which keeps no checkpoints; save the table to a file, or use pmem_libpmem, dram_pmem or "
                  "dram_ssd");
}

void Table::Checkpoint(uint64_t id) {
  RequireWhole();
  // Pulls go on; pushes wait for the few microseconds that this takes.
  const std::unique_lock<FairSharedMutex> push_lock(push_mutex_);
  const std::shared_lock<FairSharedMutex> content_lock(content_mutex_);
  RequireKept().Checkpoint(id, content_->version.load());
}

// Nobody is to wait behind this: what is waited for stays, whatever comes in its place.
void Table::WaitDurable() const {
  std::shared_ptr<Content> content;
  {
    const std::shared_lock<FairSharedMutex> lock(content_mutex_);
    (void)RequireKept();
    content = content_;
  }
  content->kept->WaitDurable();
}

// Checkpoints so far are durable, or never will be. Beside pulls and pushes: it may be long.
void Table::WaitIdle() const noexcept {
  std::shared_ptr<Content> content;
  {
    const std::shared_lock<FairSharedMutex> lock(content_mutex_);
    content = content_;
  }
  if (content->kept != nullptr) content->kept->WaitIdle();
}

std::vector<CheckpointInfo> Table::Checkpoints() const {
  const std::shared_lock<FairSharedMutex> lock(content_mutex_);
  const KeptRows* const kept = content_->kept.get();
  return kept != nullptr ? kept->Checkpoints() : std::vector<CheckpointInfo>{};
}

int64_t Table::durable_at() const {
  const std::shared_lock<FairSharedMutex> lock(content_mutex_);
  const KeptRows* const kept = content_->kept.get();
  return kept != nullptr ? kept->durable_at() : 0;
}

uint64_t Table::pushes_at_risk() const {
  const std::shared_lock<FairSharedMutex> lock(content_mutex_);
  uint64_t kept = content_->saved_version.load();
  if (content_->kept != nullptr) {
    const std::vector<CheckpointInfo> checkpoints = content_->kept->Checkpoints();
    if (!checkpoints.empty()) kept = std::max(kept, checkpoints.back().version);
  }
  const uint64_t version = content_->version.load();
  return version - std::min(kept, version);
}

void Table::Drop() {
  const std::unique_lock<FairSharedMutex> push_lock(push_mutex_);
  const std::unique_lock<FairSharedMutex> content_lock(content_mutex_);
  if (content_->kept != nullptr) content_->kept->Remove();
  if (content_->counts) content_->counts->Remove();
}

void Table::Recover(std::optional<uint64_t> id) {
  WaitIdle();
  const std::unique_lock<FairSharedMutex> push_lock(push_mutex_);
  const std::unique_lock<FairSharedMutex> content_lock(content_mutex_);
  // The tables of a server go back together, and most are there already.
  KeptRows& rows = RequireKept();
  rows.WaitIdle();
  const std::vector<CheckpointInfo> kept = rows.Checkpoints();
  bool changed = rows.has_failed() || (content_->counts && content_->counts->has_failed());
  for (const auto& map : content_->shards) changed = changed || map->store().changed();
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
  KeptRows& rows = RequireKept();
  std::array<std::unique_ptr<Index>, kShards> indexes;
  std::vector<Index*> pointers;
  for (uint32_t i = 0; i < kShards; ++i) {
    indexes[i] = NewIndex(i);
    pointers.push_back(indexes[i].get());
  }
  const std::vector<CheckpointInfo> kept = rows.Checkpoints();
  if (!id && !kept.empty()) id = kept.back().id;
  RecoverFilter(id, [&] {
    content_->version = rows.Recover(id, pointers, {}).version;
    content_->saved.reset();
    content_->saved_version = 0;  // of another history
    for (uint32_t i = 0; i < kShards; ++i) {
      content_->shards[i] = std::make_unique<RowMap>(std::move(indexes[i]), rows.shard(i));
    }
  });
  damage_->Recovered();
  content_->hands = {};
  content_->swept = {};
  content_->loaded = true;
  if (eviction_.capped()) KeepCap(content_.get());
  NoteLoaded(*content_);
}

}  // namespace oe
