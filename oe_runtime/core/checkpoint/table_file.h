#pragma once

#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/checkpoint/table_pack.h"
#include "oe_runtime/core/common/file.h"
#include "oe_runtime/core/common/shard.h"
#include "oe_runtime/core/spec/spec.h"

namespace oe {

// A table file: one server's part of one table, or (format 2, an increment) what changed in it since another
// file of the same server. Little-endian, no padding:
//
//   "OETABLE\n"           8 bytes
//   format                u32, 1 (all rows) or 2 (an increment)
//   header size           u32
//   header                JSON: {"table": spec, "server", "servers", "version", "rows", "row_bytes",
//                         "block_rows"} (for float32, "row_floats", a quarter, instead of row_bytes: the
//                         first version of this reader knew no other dtype), and in an increment "base", the
//                         checksum of the file that it follows, and "tombstones", how many keys were erased
//                         since
//   header checksum       u64, XXH3-64 of all bytes before it
//   tombstones            u64 each: keys of the base that may have a row there and have none now
//   blocks                of block_rows rows, the last one shorter: keys (u64 each), then the rows
//                         (row_bytes each: spec/row_format.h)
//   checksum              u64, XXH3-64 of all bytes before it
//
// The size of the file follows from the header. Rows are in no particular order. Files without a base are
// written in format 1, which the first version of this reader knew.
struct TableFileInfo {
  std::string file;
  TableSpec spec;
  ShardInfo shard;
  uint64_t version = 0;  // pushes when it was saved
  uint64_t rows = 0;     // in the file
  uint64_t row_bytes = 0;
  std::optional<uint64_t> base;  // of an increment: the checksum of the file that it follows
  uint64_t tombstones = 0;       // of an increment: keys erased since
  uint64_t bytes = 0;            // of the file
  uint64_t checksum = 0;         // the last 8 bytes; from ReadTableFileInfo not compared with the content
};

// Reads and checks the header and the size. Throws CheckpointError naming the file and what is wrong with it.
TableFileInfo ReadTableFileInfo(const std::string& file);

// Reads everything and compares the checksum too.
TableFileInfo VerifyTableFile(const std::string& file);

// What errors say of a file without a base that is missing or another one: its checksum in hexadecimal
// digits.
std::string HexText(uint64_t value);

// Writes all of it; the CheckpointError of a failure names `file`.
void WriteFully(int descriptor, const void* data, size_t size, const std::string& file);

// Files that were written under temporary names and get their own together, up to 64 at once. None has its
// name before all of them are durable; the names are durable after SyncDirectory(). What is not published is
// removed.
class PendingFiles {
 public:
  // Without `durable` a power cut may lose them. Table files of up to `most_held` bytes together stay in
  // memory.
  explicit PendingFiles(bool durable = true, uint64_t most_held = 0)
      : durable_(durable), most_held_(most_held) {}
  ~PendingFiles();
  PendingFiles(const PendingFiles&) = delete;
  PendingFiles& operator=(const PendingFiles&) = delete;

  // Whether a table file of so many bytes is to be added as its content.
  bool Hold(uint64_t bytes);
  void Add(std::string content, const std::string& file);
  // Publishes all when they are so many.
  void Add(File written, const std::string& temporary, const std::string& file);
  // The contents, in the order in which they were added, if all files are held; they are not published then.
  std::optional<std::vector<std::string>> TakeHeld();
  // Syncs several at once, because a file system commits them together, then renames them in the order in
  // which they were added.
  void Publish();

 private:
  struct Pending {
    File written;
    std::string temporary;
    std::string file;
  };
  static constexpr size_t kMost = 64;  // each is an open file

  const bool durable_;
  uint64_t most_held_;
  bool all_held_ = true;
  std::vector<std::pair<std::string, std::string>> held_;  // file and content
  std::vector<Pending> files_;
};

// Makes the names of the files in a directory durable.
void SyncDirectory(const std::string& directory);

// How many bytes the file of `info` (everything but file, bytes and checksum must be set) will have.
uint64_t TableFileBytes(const TableFileInfo& info);

// Turns a table into the bytes of its file, in order and block by block; `sink` takes them.
class TableFileEncoder {
 public:
  using Sink = std::function<void(const void* data, size_t size)>;
  // Begins with the header. Of `info` everything but file, bytes and checksum must be set.
  TableFileEncoder(const TableFileInfo& info, Sink sink);

  // Rows that every block but the last must have.
  size_t block_rows() const { return block_rows_; }
  // All info.tombstones of them, before the first block.
  void WriteTombstones(const Key* keys, size_t n) { Write(keys, n * sizeof(Key)); }
  void WriteBlock(const Key* keys, const std::byte* rows, size_t n);
  // Ends with the checksum; bytes and checksum of the result are set.
  TableFileInfo Finish();

 private:
  void Write(const void* data, size_t size);

  TableFileInfo info_;
  const Sink sink_;
  const size_t block_rows_;
  std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> hash_;
};

// Writes `info.file` under the name `<file>.tmp`, or into memory if `files` holds it; Finish() adds it to
// `files`, or publishes it. Without Finish() the destructor removes it.
class TableFileWriter {
 public:
  explicit TableFileWriter(const TableFileInfo& info, PendingFiles* files = nullptr);
  ~TableFileWriter();
  TableFileWriter(const TableFileWriter&) = delete;
  TableFileWriter& operator=(const TableFileWriter&) = delete;

  size_t block_rows() const { return encoder_->block_rows(); }
  void WriteTombstones(const Key* keys, size_t n) { encoder_->WriteTombstones(keys, n); }
  void WriteBlock(const Key* keys, const std::byte* rows, size_t n) { encoder_->WriteBlock(keys, rows, n); }
  TableFileInfo Finish();

 private:
  const std::string file_;
  const std::string temporary_;
  PendingFiles* const files_;
  const bool held_;
  std::string content_;
  File out_;
  std::unique_ptr<TableFileEncoder> encoder_;
  bool finished_ = false;
};

// Reads a table file block by block; memory stays at one block. Every error is a CheckpointError naming the
// file.
class TableFileReader {
 public:
  // Checks the header and the size.
  explicit TableFileReader(const std::string& file) : TableFileReader(OpenTable(file)) {}
  explicit TableFileReader(OpenedTable opened);

  const TableFileInfo& info() const { return info_; }

  // Reads the next tombstones into keys(); 0 after the last. Before the first block, which passes over the
  // rest.
  size_t NextTombstones();
  // Reads the next block; 0 rows after the last, and then the checksum has been compared. Nothing that came
  // before may be trusted until then.
  size_t NextBlock();
  const Key* keys() const { return keys_.data(); }
  const std::byte* rows() const { return rows_.data(); }
  // Begins again after the header, which is not read again.
  void Rewind();

 private:
  using Hash = std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)>;
  void Read(void* data, size_t size);
  void ReadAt(uint64_t at, void* data, size_t size) const;

  TableFileInfo info_;
  Hash hash_;
  Hash of_header_;
  const OpenedTable in_;
  uint64_t at_ = 0;      // in the file, of what is read next
  uint64_t header_ = 0;  // bytes before tombstones and rows
  uint64_t block_rows_ = 0;
  uint64_t left_tombstones_ = 0;  // not yet read
  uint64_t left_ = 0;             // rows not yet read
  bool finished_ = false;
  std::vector<Key> keys_;
  std::vector<std::byte> rows_;
};

}  // namespace oe
