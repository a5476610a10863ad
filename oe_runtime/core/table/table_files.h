// The rows of a table in files: what is written, and what is read into which shard. The table decides when,
// holds the locks, and remembers what was saved.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/checkpoint/table_chain.h"
#include "oe_runtime/core/common/executor.h"
#include "oe_runtime/core/common/shard.h"
#include "oe_runtime/core/spec/spec.h"
#include "oe_runtime/core/storage/row_map.h"
#include "oe_runtime/core/table/reduced_weights.h"

namespace oe {

class TableFiles {
 public:
  static constexpr uint32_t kShards = 16;  // internal shards
  using RowMaps = std::array<std::unique_ptr<RowMap>, kShards>;

  // `spec` and `reduced` must outlive this. Rows have `row_bytes`, of which the maps keep the first
  // `kept_bytes`, or, if `reduced` is not nullptr, the weights as it reduces them to as many.
  // `shard_of` says the internal shard of a key, kShards for one of another server; `new_row` makes the row
  // of a key that has none.
  TableFiles(const TableSpec& spec, ShardInfo shard, size_t row_bytes, size_t kept_bytes,
             const ReducedWeights* reduced, std::function<uint32_t(Key)> shard_of,
             std::function<void(Key, std::byte*)> new_row)
      : spec_(spec),
        shard_(shard),
        row_bytes_(row_bytes),
        kept_bytes_(kept_bytes),
        reduced_(reduced),
        shard_of_(std::move(shard_of)),
        new_row_(std::move(new_row)) {}

  // Writes all rows, or with `since` an increment on the file with that checksum: what the maps note as
  // changed. The caller keeps writers away, and of rows in a log who moves them (LogPool::moves_mutex). Of a
  // damaged row a new one is written, and it is added to *damaged. Throws CheckpointError; then nothing is
  // left of the file.
  using Damaged = std::vector<std::pair<RowMap*, Key>>;
  TableFileInfo Save(const RowMaps& maps, const std::string& file, PendingFiles* files, uint64_t version,
                     std::optional<uint64_t> since, Damaged* damaged) const;

  // Adds the rows of a chain that are of this shard to maps that nobody else uses. While the rows that were
  // read are added, shard by shard, the next are read. Throws CheckpointError and StorageError.
  void LoadChain(const TableChain& chain, const RowMaps& maps, Executor* executor) const;

  // Erases and writes in place what an increment says. The caller keeps everybody away. Throws as LoadChain.
  void Apply(TableFileReader* reader, const RowMaps& maps) const;

 private:
  class Blocks;
  struct Load;
  void SaveInOrder(const RowMaps& maps, bool changed, RowLogWalk* walk, Blocks* blocks) const;
  void SaveRest(const RowMap& map, bool changed, const std::optional<std::vector<Key>>& listed,
                const RowLogWalk* walk, Blocks* blocks, const std::function<void(Key)>& damaged) const;
  bool ReadLoad(TableChainReader* reader, Load* load) const;
  void AddLoad(const Load& load, RowMap* map, uint32_t shard) const;
  const std::byte* Kept(Key key, const std::byte* row, std::byte* scratch) const;

  const TableSpec& spec_;
  const ShardInfo shard_;
  const size_t row_bytes_;
  const size_t kept_bytes_;
  const ReducedWeights* const reduced_;
  const std::function<uint32_t(Key)> shard_of_;
  const std::function<void(Key, std::byte*)> new_row_;
};

}  // namespace oe
