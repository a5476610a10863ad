#include "oe_runtime/core/checkpoint/table_chain.h"

#include <algorithm>
#include <new>
#include <optional>
#include <set>
#include <utility>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/optimizer/optimizer.h"

namespace oe {
namespace {

[[noreturn]] void Refuse(const TableFileInfo& info, const std::string& field, const std::string& value,
                         const TableFileInfo& other, const std::string& other_value) {
  throw CheckpointError(info.file + ": '" + field + "' is " + value + ", but " + other.file + " has " +
                        other_value + "; they are of different checkpoints");
}

void CheckSpec(const TableFileInfo& info, const TableSpec& spec, size_t row_bytes) {
  TableSpec saved = info.spec;
  // How it goes on, not what is in the file.
  saved.nonfinite_gradients = spec.nonfinite_gradients;
  if (GoesOnFrom(saved.optimizer, spec.optimizer)) saved.optimizer = spec.optimizer;
  for (size_t i = 0; i < std::min(saved.eviction.size(), spec.eviction.size()); ++i) {
    if (saved.eviction[i].name != "cap" || spec.eviction[i].name != "cap") continue;
    saved.eviction[i].params = spec.eviction[i].params;  // how many rows; which of them go must be the same
  }
  if (const auto difference = Difference(saved, spec)) {
    std::string advice;
    if (difference->field == "dtype") advice = "--dtype " + spec.dtype;
    if (difference->field == "state_dtype") advice = "--state-dtype " + spec.state_dtype;
    if (!advice.empty()) {
      advice =
          "; set it back, or convert the checkpoint: restore(..., convert=True), or oeprov reshard "
          "CHECKPOINT "
          "--servers N " +
          advice;
    }
    throw CheckpointError(info.file + ": '" + difference->field + "' was " + difference->left +
                          " when table '" + info.spec.name + "' was saved, but table '" + spec.name +
                          "' has " + difference->right + advice);
  }
  if (info.row_bytes != row_bytes) {
    throw CheckpointError(info.file + ": 'row_bytes' is " + std::to_string(info.row_bytes) + ", but table '" +
                          spec.name + "' has " + std::to_string(row_bytes));
  }
}

// Checks that each increment of a chain follows the file before it; the newest one's header.
TableFileInfo CheckChain(const TableSpec& spec, size_t row_bytes, const TableChain& chain) {
  TableFileInfo newest;
  uint64_t rows = 0;
  for (const std::string& file : chain) {
    TableFileInfo info = ReadTableFileInfo(file);
    CheckSpec(info, spec, row_bytes);
    if (newest.file.empty() && info.base) {
      throw CheckpointError(file + " is an increment on the file with the checksum " + HexText(*info.base) +
                            ", which is missing; restore them together, the full checkpoint first");
    }
    if (!newest.file.empty() && info.base != newest.checksum) {
      throw CheckpointError(
          file +
          (info.base ? " is an increment on the file with the checksum " + HexText(*info.base)
                     : " is no increment") +
          ", but before it comes " + newest.file + ", whose checksum is " + HexText(newest.checksum));
    }
    rows += info.rows;
    newest = std::move(info);
  }
  newest.rows = rows;
  return newest;
}

}  // namespace

std::vector<std::string> Newest(const std::vector<TableChain>& chains) {
  std::vector<std::string> files;
  files.reserve(chains.size());
  for (const TableChain& chain : chains) files.push_back(chain.back());
  return files;
}

std::string NameOfSave(uint64_t checksums, const std::string& directory) {
  return "the save " + HexText(checksums) + " in " + directory;
}

uint64_t SumOfChecksums(const std::vector<TableFileInfo>& files) {
  uint64_t sum = 0;
  for (const TableFileInfo& file : files) sum += file.checksum;
  return sum;
}

void CheckFollows(const TableFileInfo& info, const TableSpec& spec, size_t row_bytes, const ShardInfo& shard,
                  uint64_t base) {
  CheckSpec(info, spec, row_bytes);
  if (info.shard.server != shard.server || info.shard.servers != shard.servers) {
    throw CheckpointError(info.file + " is of server " + std::to_string(info.shard.server) + " of " +
                          std::to_string(info.shard.servers) +
                          ", but what it shall be applied to of server " + std::to_string(shard.server) +
                          " of " + std::to_string(shard.servers));
  }
  if (info.base == base) return;
  throw CheckpointError(info.file +
                        (info.base ? " is an increment on the file with the checksum " + HexText(*info.base)
                                   : " is no increment") +
                        ", but the table has the rows of that with " + HexText(base));
}

std::vector<TableFileInfo> CheckChains(const TableSpec& spec, size_t row_bytes,
                                       const std::vector<TableChain>& chains) {
  if (chains.empty()) throw CheckpointError("table '" + spec.name + "': there is no file to restore it from");
  std::vector<TableFileInfo> infos;
  std::set<uint32_t> seen;
  for (const TableChain& chain : chains) {
    infos.push_back(CheckChain(spec, row_bytes, chain));
    const TableFileInfo& info = infos.back();
    const TableFileInfo& first = infos.front();
    if (info.shard.servers != first.shard.servers) {
      Refuse(info, "servers", std::to_string(info.shard.servers), first, std::to_string(first.shard.servers));
    }
    if (info.version != first.version) {
      Refuse(info, "version", std::to_string(info.version), first, std::to_string(first.version));
    }
    if (!seen.insert(info.shard.server).second) {
      throw CheckpointError(info.file + ": 'server' is " + std::to_string(info.shard.server) +
                            ", of which there is a file already");
    }
  }
  for (uint32_t server = 0; server < infos.front().shard.servers; ++server) {
    if (seen.count(server) == 0) {
      throw CheckpointError("table '" + spec.name + "': the file of server " + std::to_string(server) +
                            " of " + std::to_string(infos.front().shard.servers) + " is missing (beside " +
                            infos.front().file + ")");
    }
  }
  return infos;
}

TableChainReader::TableChainReader(TableChain chain) : chain_(std::move(chain)), at_(chain_.size()) {
  if (chain_.empty()) throw CheckpointError("there is no file to read a table from");
  if (chain_.size() > 1) seen_ = NewHashIndex();
  Open();
  info_ = reader_->info();
}

// The newest file that is left; what it erased is hidden in older ones. No key is a tombstone and a row of
// one file.
void TableChainReader::Open() {
  reader_ = std::make_unique<TableFileReader>(chain_[--at_]);
  if (!seen_) return;
  while (const size_t n = reader_->NextTombstones()) Hide(reader_->keys(), n);
}

void TableChainReader::Hide(const Key* keys, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    uint32_t file = kNoRow;
    seen_->Find(&keys[i], 1, &file);
    if (file != kNoRow) continue;
    try {
      seen_->Reserve(keys[i]);
    } catch (const std::bad_alloc&) {
      throw StorageError("no memory for the keys of " + reader_->info().file);
    }
    seen_->Add(keys[i], static_cast<uint32_t>(at_));
  }
}

// Copies the rows of the block whose keys no newer file has.
size_t TableChainReader::TakeNew(size_t n) {
  const uint64_t bytes = reader_->info().row_bytes;
  new_keys_.clear();
  new_rows_.clear();
  for (size_t i = 0; i < n; ++i) {
    const Key key = reader_->keys()[i];
    uint32_t file = kNoRow;
    seen_->Find(&key, 1, &file);
    if (file == static_cast<uint32_t>(at_)) {
      throw CheckpointError(reader_->info().file + ": key " + std::to_string(key) + " is in it twice");
    }
    if (file != kNoRow) continue;
    const std::byte* row = reader_->rows() + i * bytes;
    new_keys_.push_back(key);
    new_rows_.insert(new_rows_.end(), row, row + bytes);
  }
  if (at_ > 0) Hide(new_keys_.data(), new_keys_.size());
  keys_ = new_keys_.data();
  rows_ = new_rows_.data();
  return new_keys_.size();
}

size_t TableChainReader::NextBlock() {
  for (;;) {
    size_t n = reader_->NextBlock();
    if (n == 0) {
      if (at_ == 0) return 0;
      Open();
      continue;
    }
    if (seen_) {
      n = TakeNew(n);
      if (n == 0) continue;
    } else {
      keys_ = reader_->keys();
      rows_ = reader_->rows();
    }
    return n;
  }
}

void AddRowsByServer(const TableChain& chain, std::vector<uint64_t>* rows) {
  TableChainReader reader(chain);
  const bool array = reader.info().spec.index == "array";
  const auto servers = static_cast<uint32_t>(rows->size());
  while (const size_t n = reader.NextBlock()) {
    for (size_t i = 0; i < n; ++i) ++(*rows)[server_of(reader.keys()[i], servers, array)];
  }
}

}  // namespace oe
