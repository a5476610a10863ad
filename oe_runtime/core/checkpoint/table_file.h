#ifndef OE_CORE_CHECKPOINT_TABLE_FILE_H_
#define OE_CORE_CHECKPOINT_TABLE_FILE_H_

#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "oe_runtime/core/common/file.h"
#include "oe_runtime/core/common/shard.h"
#include "oe_runtime/core/table/spec.h"

namespace oe {

// A table file: one server's part of one table. Little-endian, no padding:
//
//   "OETABLE\n"           8 bytes
//   format version        u32 (1)
//   header size           u32
//   header                JSON: {"table": spec, "server", "servers", "version", "rows", "row_floats",
//   "block_rows"} header checksum       u64, XXH3-64 of all bytes before it blocks                of
//   block_rows rows, the last one shorter: keys (u64 each), then the rows (row_floats
//                         float32 each: weights, then the optimizer's slots)
//   checksum              u64, XXH3-64 of all bytes before it
//
// The size of the file follows from the header. Rows are in no particular order.
struct TableFileInfo {
  std::string file;
  TableSpec spec;
  ShardInfo shard;
  uint64_t version = 0;  // pushes when it was saved
  uint64_t rows = 0;
  uint64_t row_floats = 0;
  uint64_t bytes = 0;     // of the file
  uint64_t checksum = 0;  // the last 8 bytes; from ReadTableFileInfo not compared with the content
};

// Reads and checks the header and the size. Throws CheckpointError naming the file and what is wrong with it.
TableFileInfo ReadTableFileInfo(const std::string& file);

// Reads everything and compares the checksum too.
TableFileInfo VerifyTableFile(const std::string& file);

// The headers of `files`, after checking that they are every server's file of one saved table whose spec is
// `spec` and whose rows have `row_floats` floats. Throws CheckpointError naming the file and the field with
// both values.
std::vector<TableFileInfo> CheckTableFiles(const TableSpec& spec, size_t row_floats,
                                           const std::vector<std::string>& files);

// Writes `info.file` (its spec, shard, version, rows and row_floats must be set) block by block under the
// name
// `<file>.tmp`; Finish() syncs it and gives it its name. Without Finish() the destructor removes it.
class TableFileWriter {
 public:
  explicit TableFileWriter(const TableFileInfo& info);
  ~TableFileWriter();
  TableFileWriter(const TableFileWriter&) = delete;
  TableFileWriter& operator=(const TableFileWriter&) = delete;

  // Rows that every block but the last must have.
  size_t block_rows() const { return block_rows_; }
  void WriteBlock(const Key* keys, const float* rows, size_t n);
  TableFileInfo Finish();

 private:
  void Write(const void* data, size_t size);

  TableFileInfo info_;
  const std::string temporary_;
  const size_t block_rows_;
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> hash_;
  File out_;
  bool finished_ = false;
};

// Reads a table file block by block; memory stays at one block. Every error is a CheckpointError naming the
// file.
class TableFileReader {
 public:
  // Checks the header and the size.
  explicit TableFileReader(const std::string& file);

  const TableFileInfo& info() const { return info_; }

  // Reads the next block; 0 rows after the last, and then the checksum has been compared. Nothing that came
  // before may be trusted until then.
  size_t NextBlock();
  const Key* keys() const { return keys_.data(); }
  const float* rows() const { return rows_.data(); }

 private:
  void Read(void* data, size_t size);

  TableFileInfo info_;
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> hash_;
  File in_;
  uint64_t block_rows_ = 0;
  uint64_t left_ = 0;  // rows not yet read
  bool finished_ = false;
  std::vector<Key> keys_;
  std::vector<float> rows_;
};

}  // namespace oe

#endif  // OE_CORE_CHECKPOINT_TABLE_FILE_H_
