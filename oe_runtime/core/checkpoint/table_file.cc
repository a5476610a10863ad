#include "oe_runtime/core/checkpoint/table_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>

#include "oe_runtime/core/checkpoint/open_file.h"
#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/thread_pool.h"

namespace oe {
namespace {

using nlohmann::json;

constexpr std::array<char, 8> kMagic = {'O', 'E', 'T', 'A', 'B', 'L', 'E', '\n'};
constexpr uint32_t kFull = 1;
constexpr uint32_t kIncrement = 2;
constexpr uint32_t kLargestHeader = 1U << 20;
constexpr size_t kBlockBytes = size_t{1} << 20;
constexpr size_t kLargestBlockBytes = size_t{64} << 20;
constexpr size_t kSyncsAtOnce = 8;
constexpr uint64_t kLargestRowBytes = uint64_t{16} * kLargestDim * sizeof(double);

std::string ErrnoText(int number) { return std::strerror(number); }

size_t RowBytes(const TableFileInfo& info) { return sizeof(Key) + info.row_bytes; }

size_t BlockRows(const TableFileInfo& info) { return std::max<size_t>(1, kBlockBytes / RowBytes(info)); }

uint64_t RowBytesOf(const json& header, const TableSpec& spec) {
  if (DtypeOf(spec) != Dtype::kFloat32) return header.at("row_bytes").get<uint64_t>();
  return std::min(header.at("row_floats").get<uint64_t>(), kLargestRowBytes) * sizeof(float);
}

std::string HeaderText(const TableFileInfo& info, uint64_t block_rows) {
  json header = {{"table", info.spec},      {"server", info.shard.server}, {"servers", info.shard.servers},
                 {"version", info.version}, {"rows", info.rows},           {"block_rows", block_rows}};
  if (DtypeOf(info.spec) == Dtype::kFloat32) {
    header["row_floats"] = info.row_bytes / sizeof(float);
  } else {
    header["row_bytes"] = info.row_bytes;
  }
  if (info.base) {
    header["base"] = *info.base;
    header["tombstones"] = info.tombstones;
  }
  return header.dump();
}

// Of the text of a header; `block_rows` gets how many rows a block has.
void ParseHeader(const std::string& header, bool increment, TableFileInfo* info, uint64_t* block_rows) {
  try {
    const json fields = json::parse(header);
    info->spec = Complete(fields.at("table").get<TableSpec>());
    info->shard.server = fields.at("server").get<uint32_t>();
    info->shard.servers = fields.at("servers").get<uint32_t>();
    info->version = fields.at("version").get<uint64_t>();
    info->rows = fields.at("rows").get<uint64_t>();
    info->row_bytes = RowBytesOf(fields, info->spec);
    *block_rows = fields.at("block_rows").get<uint64_t>();
    if (increment) {
      info->base = fields.at("base").get<uint64_t>();
      info->tombstones = fields.at("tombstones").get<uint64_t>();
    }
  } catch (const std::exception& error) {
    throw CheckpointError(info->file + ": its header cannot be used: " + error.what());
  }
  // The header's checksum is right, so what follows guards against a writer's mistake, not against damage.
  if (info->shard.servers == 0 || info->shard.server >= info->shard.servers ||
      info->row_bytes < info->spec.dim * WeightBytes(DtypeOf(info->spec)) ||
      info->row_bytes > kLargestRowBytes || info->row_bytes % ValueBytes(DtypeOf(info->spec)) != 0 ||
      *block_rows == 0 || *block_rows > kLargestBlockBytes / RowBytes(*info)) {
    Damaged(info->file, "its header contradicts itself");
  }
}

File Create(const std::string& file) {
  File created(::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!created.ok()) throw CheckpointError("cannot write " + file + ": " + ErrnoText(errno));
  return created;
}

// Throws CheckpointError unless the rows and tombstones of the header take `content` bytes.
void RequireContent(const TableFileInfo& info, uint64_t content) {
  const uint64_t row_bytes = RowBytes(info);
  const uint64_t most = content / sizeof(Key);
  const uint64_t of_rows = info.tombstones > most ? 0 : content - info.tombstones * sizeof(Key);
  if (info.tombstones <= most && info.rows == of_rows / row_bytes && of_rows % row_bytes == 0) return;
  Damaged(info.file, "its header promises " + std::to_string(info.rows) + " rows of " +
                         std::to_string(row_bytes) + " bytes" +
                         (info.base ? " and " + std::to_string(info.tombstones) + " tombstones" : "") +
                         ", but " + std::to_string(content) + " bytes are there");
}

}  // namespace

void WriteFully(int descriptor, const void* data, size_t size, const std::string& file) {
  const auto* from = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = ::write(descriptor, from, size);
    if (written < 0) {
      if (errno == EINTR) continue;
      throw CheckpointError("cannot write " + file + ": " + ErrnoText(errno));
    }
    from += written;
    size -= static_cast<size_t>(written);
  }
}

PendingFiles::~PendingFiles() {
  for (const Pending& pending : files_) (void)::unlink(pending.temporary.c_str());
}

bool PendingFiles::Hold(uint64_t bytes) {
  if (bytes > most_held_) return false;
  most_held_ -= bytes;
  return true;
}

void PendingFiles::Add(std::string content, const std::string& file) {
  held_.emplace_back(file, std::move(content));
}

std::optional<std::vector<std::string>> PendingFiles::TakeHeld() {
  if (!all_held_) return std::nullopt;
  std::vector<std::string> contents;
  contents.reserve(held_.size());
  for (auto& [file, content] : held_) contents.push_back(std::move(content));
  held_.clear();
  return contents;
}

void PendingFiles::Add(File written, const std::string& temporary, const std::string& file) {
  all_held_ = false;
  files_.push_back({std::move(written), temporary, file});
  if (files_.size() == kMost) Publish();
}

void PendingFiles::Publish() {
  for (const auto& [file, content] : std::exchange(held_, {})) {
    const std::string temporary = file + ".tmp";
    File out = Create(temporary);
    const int descriptor = out.get();
    files_.push_back({std::move(out), temporary, file});  // which goes with this, whatever happens
    WriteFully(descriptor, content.data(), content.size(), temporary);
    if (files_.size() == kMost) Publish();
  }
  if (durable_ && !files_.empty()) {
    const auto threads = static_cast<unsigned>(std::min(kSyncsAtOnce, files_.size()));
    ThreadPool(threads).ParallelFor(files_.size(), [&](size_t i) {
      if (::fsync(files_[i].written.get()) == 0) return;
      throw CheckpointError("cannot sync " + files_[i].temporary + ": " + ErrnoText(errno));
    });
  }
  for (const Pending& pending : files_) {
    if (::rename(pending.temporary.c_str(), pending.file.c_str()) == 0) continue;
    throw CheckpointError("cannot rename " + pending.temporary + " to " + pending.file + ": " +
                          ErrnoText(errno));
  }
  files_.clear();
}

void SyncDirectory(const std::string& directory) {
  const File opened(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (opened.ok() && ::fsync(opened.get()) == 0) return;
  throw CheckpointError("cannot sync the directory " + directory + ": " + ErrnoText(errno));
}

TableFileInfo ReadTableFileInfo(const std::string& file) { return TableFileReader(file).info(); }

TableFileInfo VerifyTableFile(const std::string& file) {
  TableFileReader reader(file);
  while (reader.NextBlock() > 0) {
  }
  return reader.info();
}

std::string HexText(uint64_t value) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text(16, '0');
  for (size_t i = 16; i-- > 0; value >>= 4) text[i] = kDigits[value & 15];
  return text;
}

uint64_t TableFileBytes(const TableFileInfo& info) {
  return kMagic.size() + 2 * sizeof(uint32_t) + HeaderText(info, BlockRows(info)).size() +
         2 * sizeof(uint64_t) + info.tombstones * sizeof(Key) + info.rows * RowBytes(info);
}

TableFileEncoder::TableFileEncoder(const TableFileInfo& info, Sink sink)
    : info_(info),
      sink_(std::move(sink)),
      block_rows_(BlockRows(info)),
      hash_(XXH3_createState(), XXH3_freeState) {
  if (!hash_) throw std::bad_alloc();
  (void)XXH3_64bits_reset(hash_.get());
  info_.bytes = 0;
  const std::string header = HeaderText(info_, block_rows_);
  const auto size = static_cast<uint32_t>(header.size());
  const uint32_t format = info.base ? kIncrement : kFull;
  Write(kMagic.data(), kMagic.size());
  Write(&format, sizeof(format));
  Write(&size, sizeof(size));
  Write(header.data(), header.size());
  const uint64_t checksum = XXH3_64bits_digest(hash_.get());
  Write(&checksum, sizeof(checksum));
}

void TableFileEncoder::Write(const void* data, size_t size) {
  (void)XXH3_64bits_update(hash_.get(), data, size);
  info_.bytes += size;
  sink_(data, size);
}

void TableFileEncoder::WriteBlock(const Key* keys, const std::byte* rows, size_t n) {
  Write(keys, n * sizeof(Key));
  Write(rows, n * info_.row_bytes);
}

TableFileInfo TableFileEncoder::Finish() {
  info_.checksum = XXH3_64bits_digest(hash_.get());
  const uint64_t checksum = info_.checksum;
  Write(&checksum, sizeof(checksum));
  return info_;
}

TableFileWriter::TableFileWriter(const TableFileInfo& info, PendingFiles* files)
    : file_(info.file),
      temporary_(info.file + ".tmp"),
      files_(files),
      held_(files != nullptr && files->Hold(TableFileBytes(info))),
      out_(held_ ? File() : Create(temporary_)) {
  try {
    encoder_ = std::make_unique<TableFileEncoder>(info, [this](const void* data, size_t size) {
      if (held_) {
        content_.append(static_cast<const char*>(data), size);
      } else {
        WriteFully(out_.get(), data, size, temporary_);
      }
    });
  } catch (...) {
    if (!held_) (void)::unlink(temporary_.c_str());  // no destructor runs for a constructor that throws
    throw;
  }
}

TableFileWriter::~TableFileWriter() {
  if (!finished_ && !held_) (void)::unlink(temporary_.c_str());
}

TableFileInfo TableFileWriter::Finish() {
  TableFileInfo info = encoder_->Finish();
  finished_ = true;
  PendingFiles alone;
  if (held_) {
    files_->Add(std::move(content_), file_);
  } else {
    (files_ != nullptr ? files_ : &alone)->Add(std::move(out_), temporary_, file_);
  }
  alone.Publish();
  return info;
}

TableFileReader::TableFileReader(OpenedTable opened)
    : hash_(XXH3_createState(), XXH3_freeState),
      of_header_(XXH3_createState(), XXH3_freeState),
      in_(std::move(opened)) {
  const std::string& file = in_.path;
  info_.file = file;
  if (!hash_ || !of_header_) throw std::bad_alloc();
  (void)XXH3_64bits_reset(hash_.get());
  info_.bytes = in_.bytes;
  std::array<char, 8> magic{};
  uint32_t format = 0;
  uint32_t size = 0;
  constexpr size_t kFixed = sizeof(magic) + sizeof(format) + sizeof(size);
  if (info_.bytes < kFixed) Damaged(file, "it has only " + std::to_string(info_.bytes) + " bytes");
  Read(magic.data(), magic.size());
  if (magic != kMagic)
    throw CheckpointError(file + " is not a table file: its first 8 bytes are not OETABLE");
  Read(&format, sizeof(format));
  if (format != kFull && format != kIncrement) {
    throw CheckpointError(file + " has the table file format " + std::to_string(format) +
                          "; this version reads 1 and 2");
  }
  Read(&size, sizeof(size));
  if (size > kLargestHeader || info_.bytes < kFixed + size + 2 * sizeof(uint64_t)) {
    Damaged(file,
            "its header has " + std::to_string(size) + " bytes, the file " + std::to_string(info_.bytes));
  }
  std::string header(size, '\0');
  Read(header.data(), size);
  const uint64_t expected = XXH3_64bits_digest(hash_.get());
  uint64_t checksum = 0;
  Read(&checksum, sizeof(checksum));
  if (checksum != expected) Damaged(file, "the checksum of its header is wrong");
  ParseHeader(header, format == kIncrement, &info_, &block_rows_);
  RequireContent(info_, info_.bytes - kFixed - size - 2 * sizeof(uint64_t));
  ReadAt(info_.bytes - sizeof(uint64_t), &info_.checksum, sizeof(uint64_t));
  header_ = at_;
  XXH3_copyState(of_header_.get(), hash_.get());
  Rewind();
  keys_.resize(std::min(block_rows_, std::max(left_, left_tombstones_)));
  rows_.resize(std::min(block_rows_, left_) * info_.row_bytes);
}

void TableFileReader::Rewind() {
  XXH3_copyState(hash_.get(), of_header_.get());
  at_ = header_;
  left_ = info_.rows;
  left_tombstones_ = info_.tombstones;
  finished_ = false;
}

void TableFileReader::ReadAt(uint64_t at, void* data, size_t size) const {
  if (!in_.file.ok()) {
    if (at > in_.content.size() || size > in_.content.size() - at) Damaged(info_.file, "it ends too early");
    std::memcpy(data, in_.content.data() + at, size);
    return;
  }
  oe::ReadAt(in_.file, info_.file, in_.offset + at, data, size);
}

void TableFileReader::Read(void* data, size_t size) {
  ReadAt(at_, data, size);
  at_ += size;
  (void)XXH3_64bits_update(hash_.get(), data, size);
}

size_t TableFileReader::NextTombstones() {
  const auto n = static_cast<size_t>(std::min(block_rows_, left_tombstones_));
  if (n == 0) return 0;
  Read(keys_.data(), n * sizeof(Key));
  left_tombstones_ -= n;
  return n;
}

size_t TableFileReader::NextBlock() {
  while (NextTombstones() > 0) {
  }
  if (left_ == 0) {
    if (finished_) return 0;
    const uint64_t expected = XXH3_64bits_digest(hash_.get());
    uint64_t checksum = 0;
    Read(&checksum, sizeof(checksum));
    if (checksum != expected) Damaged(info_.file, "its checksum is wrong");
    info_.checksum = checksum;
    finished_ = true;
    return 0;
  }
  const auto n = static_cast<size_t>(std::min(block_rows_, left_));
  Read(keys_.data(), n * sizeof(Key));
  Read(rows_.data(), n * static_cast<size_t>(info_.row_bytes));
  left_ -= n;
  return n;
}

}  // namespace oe
