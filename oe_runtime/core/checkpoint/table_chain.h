#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/index/index.h"

namespace oe {

// The files that hold one server's part of a table: all of its rows, then increments, each on the one before.
using TableChain = std::vector<std::string>;

// The newest file of each chain.
std::vector<std::string> Newest(const std::vector<TableChain>& chains);

// The headers of the newest file of each chain, `rows` being at most those of the chain, after checking
// that they are every server's part of one saved table whose spec is `spec` and whose rows have `row_bytes`
// bytes, and that each increment follows its base. Throws CheckpointError naming the file and the field with
// both values.
std::vector<TableFileInfo> CheckChains(const TableSpec& spec, size_t row_bytes,
                                       const std::vector<TableChain>& chains);

// Names a save, of whose newest files `checksums` is the sum, and tells it from others in the same place.
std::string NameOfSave(uint64_t checksums, const std::string& directory);
uint64_t SumOfChecksums(const std::vector<TableFileInfo>& files);

// Checks that the file of `info` is an increment on that with the checksum `base`, of the same server and of
// a table like this. Throws CheckpointError naming the file and the field with both values.
void CheckFollows(const TableFileInfo& info, const TableSpec& spec, size_t row_bytes, const ShardInfo& shard,
                  uint64_t base);

// Reads the rows that a chain leaves, block by block: the newest file first, and of older ones what no newer
// one has or erased. Memory: two blocks, and up to 24 bytes for each row and tombstone of the increments.
// Every error is a CheckpointError naming the file, but StorageError when the memory does not suffice.
class TableChainReader {
 public:
  explicit TableChainReader(TableChain chain);

  // The newest file's.
  const TableFileInfo& info() const { return info_; }

  // The next rows; 0 after the last, and then every checksum has been compared. Nothing that came before may
  // be trusted until then.
  size_t NextBlock();
  const Key* keys() const { return keys_; }
  const std::byte* rows() const { return rows_; }

 private:
  void Open();
  void Hide(const Key* keys, size_t n);
  size_t TakeNew(size_t n);

  const TableChain chain_;
  size_t at_;  // files that are not yet read, counted from the oldest
  TableFileInfo info_;
  std::unique_ptr<TableFileReader> reader_;
  std::unique_ptr<Index> seen_;  // keys of newer files, with the number of the file
  std::vector<Key> new_keys_;
  std::vector<std::byte> new_rows_;
  const Key* keys_ = nullptr;
  const std::byte* rows_ = nullptr;
};

// Adds how many of the chain's rows each of rows->size() servers would have, after comparing every checksum.
void AddRowsByServer(const TableChain& chain, std::vector<uint64_t>* rows);

}  // namespace oe
