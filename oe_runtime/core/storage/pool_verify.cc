#include "oe_runtime/core/storage/pool_verify.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/file.h"
#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/storage/directory_lock.h"
#include "oe_runtime/core/storage/pool_format.h"
#include "oe_runtime/core/storage/row_store.h"
#include "oe_runtime/core/storage/slot_store.h"

namespace oe {
namespace {

constexpr size_t kMostRowsNamed = 20;  // of a file

// A file, to be read only.
class Mapped {
 public:
  explicit Mapped(const std::filesystem::path& path) {
    region_.name = path.filename().string();
    region_.path = path.string();
    const File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
    struct stat there{};
    if (!file.ok() || ::fstat(file.get(), &there) != 0) {
      throw StorageError("cannot read the pool file " + region_.path, errno);
    }
    if (there.st_size == 0) return;
    void* data = ::mmap(nullptr, static_cast<size_t>(there.st_size), PROT_READ, MAP_SHARED, file.get(), 0);
    if (data == MAP_FAILED) throw StorageError("cannot read the pool file " + region_.path, errno);
    region_.data = static_cast<std::byte*>(data);
    region_.size = static_cast<size_t>(there.st_size);
  }
  ~Mapped() {
    if (region_.data != nullptr) (void)::munmap(region_.data, region_.size);
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

  const Region& region() const { return region_; }

 private:
  Region region_;
};

// The files of a pool.
struct Files {
  bool super = false;
  std::vector<std::string> segments;
};

class Verifier {
 public:
  Verifier(std::filesystem::path directory, uint64_t uuid, std::vector<std::string>* problems)
      : directory_(std::move(directory)), uuid_(uuid), problems_(problems) {}

  void Run(const Files& files) {
    const std::string super = PathOf(SuperName(uuid_));
    if (!files.super) return Say(super, "is missing, so that its segments have no meaning");
    const size_t before = problems_->size();
    std::optional<SuperCopy> newest;
    try {
      newest = ReadSuper(!files.segments.empty());
    } catch (const StorageError& error) {
      problems_->emplace_back(error.what());
    }
    if (!newest) return;
    for (uint64_t number = 0; number < newest->segments; ++number) {
      const std::string name = SegmentName(uuid_, number);
      const bool there =
          std::find(files.segments.begin(), files.segments.end(), name) != files.segments.end();
      if (!there)
        Say(PathOf(name), "is missing: the pool has " + std::to_string(newest->segments) + " segments");
    }
    const KeptCheckpoint kept = newest->kept.empty() ? KeptCheckpoint{} : newest->kept.back();
    for (const std::string& name : files.segments) {
      try {
        VerifySegment(name, newest->segments, kept.epoch);
      } catch (const StorageError& error) {
        problems_->emplace_back(error.what());
      }
    }
    if (problems_->size() > before || (rows_ == kept.rows && digest_ == kept.digest)) return;
    Say(super, "is damaged: checkpoint " + std::to_string(kept.id) + " has " + std::to_string(kept.rows) +
                   " rows, but the segments beside it have " + std::to_string(rows_) +
                   (rows_ == kept.rows ? " with other checksums" : ""));
  }

 private:
  std::string PathOf(const std::string& name) const { return (directory_ / name).string(); }
  void Say(const std::string& path, const std::string& what) { problems_->push_back(path + " " + what); }

  // The newest list of checkpoints; nothing for a pool that was never finished or is damaged.
  std::optional<SuperCopy> ReadSuper(bool has_segments) {
    const Mapped file(directory_ / SuperName(uuid_));
    const std::string& path = file.region().path;
    uint64_t uuid = 0;
    std::string text;
    if (!ReadSuperHeader(file.region(), &uuid, &text, &format_)) {
      if (has_segments) Say(path, "is damaged: 'magic' is missing");
      return std::nullopt;
    }
    const nlohmann::json identity = nlohmann::json::parse(text, nullptr, false);
    if (uuid != uuid_) Say(path, "is damaged: its 'uuid' is another file's");
    const nlohmann::json row_bytes =
        identity.is_object() ? identity.value("row_bytes", nlohmann::json()) : identity;
    row_bytes_ = row_bytes.is_number_unsigned() ? row_bytes.get<uint64_t>() : 0;
    if (row_bytes_ == 0) {
      Say(path, "is damaged: 'row_bytes' is missing in its description");
      return std::nullopt;
    }
    std::optional<SuperCopy> newest;
    for (size_t i = 0; i < 2; ++i) {
      SuperCopy copy;
      if (!DecodeSuperCopy(file.region().data + kSuperTextBytes + i * kPoolPage, &copy)) continue;
      if (copy.sequence % 2 == i && (!newest || copy.sequence > newest->sequence)) newest = std::move(copy);
    }
    if (!newest) Say(path, "is damaged: the 'checksum' of both copies of its list of checkpoints is wrong");
    return newest;
  }

  void VerifySegment(const std::string& name, uint64_t least_segments, uint64_t epoch) {
    files_.push_back(std::make_unique<Mapped>(directory_ / name));
    const Region& region = files_.back()->region();
    SegmentHeader header{};
    if (!ReadSegmentHeader(region, &header)) {
      // A later one may be there without: the power went while it was made.
      for (uint64_t number = 0; number < least_segments; ++number) {
        if (name == SegmentName(uuid_, number)) Say(region.path, "is damaged: 'magic' is missing");
      }
      return;
    }
    const auto check = [&](const char* field, uint64_t is, uint64_t wanted) {
      if (is == wanted) return true;
      Say(region.path, "is damaged: '" + std::string(field) + "' is " + std::to_string(is) + " instead of " +
                           std::to_string(wanted));
      return false;
    };
    if (name != SegmentName(header.uuid, header.number)) {
      return Say(region.path, "is damaged: by its header it is " + SegmentName(header.uuid, header.number));
    }
    if (!check("format", header.format, format_)) return;
    if (!check("row_bytes", header.row_bytes, row_bytes_)) return;
    const RowLayout layout = RowLayout::InPool(format_, row_bytes_, header.block_bytes);
    if (!check("block_rows", header.block_rows, layout.block_rows()) ||
        !check("block_bytes", header.block_bytes, layout.block_bytes)) {
      return;
    }
    const SegmentHeader expected = MakeSegmentHeader(format_, uuid_, header.number, region.size, row_bytes_,
                                                     header.block_rows, header.block_bytes);
    if (!check("blocks", header.blocks, expected.blocks)) return;
    VerifyRows(region, header, layout, epoch);
  }

  void VerifyRows(const Region& region, const SegmentHeader& header, const RowLayout& layout,
                  uint64_t epoch) {
    const auto* metas = reinterpret_cast<const SlotMeta*>(region.data + kPoolPage);
    size_t wrong = 0;
    for (uint64_t slot = 0; slot < header.blocks * header.block_rows; ++slot) {
      const SlotMeta& meta = metas[slot];
      if (meta.state == 0 || EpochOf(meta.state) > epoch) continue;  // of no checkpoint
      const std::byte* block = region.data + header.rows_offset + (slot >> layout.shift) * layout.block_bytes;
      const std::byte* row = block + layout.Offset(static_cast<uint32_t>(slot) & (layout.block_rows() - 1));
      const uint64_t state = IsTombstone(meta.state)
                                 ? TombstoneState(EpochOf(meta.state), meta.key)
                                 : SlotState(EpochOf(meta.state), meta.key, row, layout.row_bytes);
      Count(&meta);
      if (state == meta.state || ++wrong > kMostRowsNamed) continue;
      Say(region.path,
          "is damaged: the checksum of the row of key " + std::to_string(meta.key) + " is wrong");
    }
    if (wrong > kMostRowsNamed) {
      Say(region.path, "is damaged: " + std::to_string(wrong) + " rows in all have a wrong checksum");
    }
  }

  // Of each key the newest slot counts, as in Pool::Recover.
  void Count(const SlotMeta* meta) {
    uint32_t found = kNoRow;
    index_->Find(&meta->key, 1, &found);
    const uint64_t old = found == kNoRow ? 0 : slots_[found]->state;
    if (found != kNoRow && !Newer(meta->state, old)) return;
    if (found == kNoRow) {
      index_->Reserve(meta->key);
      index_->Add(meta->key, static_cast<uint32_t>(slots_.size()));
      slots_.push_back(meta);
    } else {
      slots_[found] = meta;
    }
    if (old != 0 && !IsTombstone(old)) {
      --rows_;
      digest_ -= SlotDigest(meta->key, old);
    }
    if (!IsTombstone(meta->state)) {
      ++rows_;
      digest_ += SlotDigest(meta->key, meta->state);
    }
  }

  const std::filesystem::path directory_;
  const uint64_t uuid_;
  std::vector<std::string>* const problems_;
  uint32_t format_ = kPoolFormat;
  uint64_t row_bytes_ = 0;
  std::vector<std::unique_ptr<Mapped>> files_;
  const std::unique_ptr<Index> index_ = NewHashIndex();
  std::vector<const SlotMeta*> slots_;  // by the number that the index has
  uint64_t rows_ = 0;
  uint64_t digest_ = 0;
};

}  // namespace

std::vector<std::string> VerifyPools(const std::string& directory) {
  const DirectoryLock lock(directory);
  std::map<uint64_t, Files> pools;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    uint64_t uuid = 0;
    bool super = false;
    if (!ParsePoolName(name, &uuid, &super)) continue;
    if (super) {
      pools[uuid].super = true;
    } else {
      pools[uuid].segments.push_back(name);
    }
  }
  if (error) throw StorageError("cannot list the storage directory " + directory, error.value());
  std::vector<std::string> problems;
  for (auto& [uuid, files] : pools) {
    std::sort(files.segments.begin(), files.segments.end());
    Verifier(directory, uuid, &problems).Run(files);
  }
  return problems;
}

}  // namespace oe
