#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <set>
#include <system_error>
#include <utility>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/file.h"
#include "oe_runtime/core/storage/cache_memory.h"
#include "oe_runtime/core/storage/directory_lock.h"
#include "oe_runtime/core/storage/log_pool.h"
#include "oe_runtime/core/storage/pool_identity.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr size_t kLeastSegmentBytes = size_t{64} << 10;
constexpr size_t kMostSegmentBytes = size_t{128} << 20;  // the next power of 2 has more blocks than 16 bits
constexpr size_t kLeastChunkBytes = size_t{32} << 10;

// Beyond that, rows would have no number.
uint64_t MostBytesOfRows(size_t row_bytes) {
  const uint64_t in_block = std::max<uint64_t>(1, kBlockBytes / row_bytes);
  return kMostRowsOfAStore / in_block * RoundUp(row_bytes, kBlockBytes);
}

constexpr const char* kCountsDirectory = "counts";

constexpr size_t kNameSize = 3 + 16 + 4;  // IsRowLogName()

// A device whose space a storage counts.
class CountedDevice final : public BlockDevice {
 public:
  using Take = std::function<void(size_t bytes, const std::function<void(size_t)>& map)>;
  CountedDevice(std::unique_ptr<BlockDevice> device, Take take, std::function<void(uint64_t)> give)
      : device_(std::move(device)),
        take_(std::move(take)),
        give_(std::move(give)),
        counted_(device_->size()) {}
  ~CountedDevice() override { give_(counted_); }
  CountedDevice(const CountedDevice&) = delete;
  CountedDevice& operator=(const CountedDevice&) = delete;

  std::unique_ptr<ReadQueue> NewQueue() override { return device_->NewQueue(); }
  void Write(uint64_t offset, const std::byte* data, size_t bytes) override {
    device_->Write(offset, data, bytes);
  }
  void Flush() override { device_->Flush(); }
  uint64_t size() const override { return device_->size(); }
  void Grow(uint64_t bytes) override {
    const uint64_t before = device_->size();
    if (bytes <= before) return;
    take_(bytes - before, [&](size_t more) { device_->Grow(before + more); });
    counted_ += bytes - before;
  }
  void Discard(uint64_t offset, uint64_t bytes) override { device_->Discard(offset, bytes); }
  void RequirePresent() const override { device_->RequirePresent(); }
  std::string description() const override { return device_->description(); }
  BlockDeviceStats stats() const override { return device_->stats(); }

 private:
  const std::unique_ptr<BlockDevice> device_;
  const Take take_;
  const std::function<void(uint64_t)> give_;
  std::atomic<uint64_t> counted_;
};

// Logs in the files of a directory, one per table.
class DramSsd final : public Storage {
 public:
  DramSsd(const StorageSpec& spec, const fs::path& directory)
      : Storage(spec), cache_(spec.cache_bytes), directory_(directory), lock_(directory.string()) {
    const std::vector<std::string> names = List();
    if (!spec.recover && !spec.fresh) RefuseToRemove(directory.string(), WithCheckpoints(names));
    for (const std::string& name : names) {
      if (!spec.recover || !IsWhole(name)) RemoveFile(name);
    }
    std::error_code error;
    if (fs::exists(directory_ / kCountsDirectory, error)) (void)Counts();
  }

  bool is_pmem() const override { return false; }

  std::unique_ptr<KeptRows> NewKeptRows(const PoolSpec& wanted, bool fresh, bool* opened) override {
    PoolSpec spec = wanted;
    spec.window = this->spec().kept_checkpoints;
    spec.cache = &cache_;
    *opened = false;
    const std::lock_guard<std::mutex> lock(find_mutex_);
    json identity = json::parse(spec.identity);
    identity["row_bytes"] = spec.row_bytes;
    identity["shards"] = spec.shards;
    std::string name;
    if (!fresh && this->spec().recover) name = FindLog(spec);
    *opened = !name.empty();
    uint64_t segment_bytes = 0;
    if (*opened) {
      const auto device = Open(name);
      const std::optional<RowLogSuper> super = RowLog::Peek(device.get(), LogSpec(spec, name, ""));
      if (super) {
        CheckIdentity(PathOf(name), super->identity, identity, spec.may_differ, spec.table);
        segment_bytes = super->segment_bytes;
      }
    } else {
      std::random_device random;
      char text[kNameSize + 1];
      (void)std::snprintf(text, sizeof(text), "oe-%016" PRIx64 ".log", uint64_t{random()} << 32 | random());
      name = text;
    }
    RowLogSpec log = LogSpec(spec, name, identity.dump());
    if (segment_bytes > 0) log.segment_bytes = segment_bytes;  // a log keeps those that it was made with
    const auto take = [this, table = spec.table](size_t bytes, const std::function<void(size_t)>& map) {
      Take(bytes, bytes, table, map);
    };
    auto device = Open(name);
    Count(device->size());
    {
      const std::lock_guard<std::mutex> in_use_lock(in_use_mutex_);
      in_use_.insert(name);
    }
    const auto give = [this, name](uint64_t bytes) {
      Give(bytes);
      const std::lock_guard<std::mutex> in_use_lock(in_use_mutex_);
      in_use_.erase(name);
    };
    return std::make_unique<LogPool>(
        std::make_unique<CountedDevice>(std::move(device), take, give), spec, log, !*opened,
        [this] { return LeftOnDevice(); }, [this, name] { RemoveFile(name); });
  }

  // Of the counts of an admission filter, of which each push changes some, a few bytes each: in files that
  // are mapped.
  std::unique_ptr<Pool> NewPool(const PoolSpec& spec, bool fresh, bool* opened) override {
    *opened = false;
    return spec.led() ? Counts()->NewPool(spec, fresh, opened) : nullptr;
  }

  uint64_t bytes() const override {
    const std::lock_guard<std::mutex> lock(counts_mutex_);
    return Storage::bytes() + (counts_ ? counts_->bytes() : 0);
  }

  uint64_t DropUnopened(const std::string& job, const std::optional<std::string>& table) override {
    const std::lock_guard<std::mutex> lock(find_mutex_);
    uint64_t dropped = 0;
    {
      const std::lock_guard<std::mutex> counts_lock(counts_mutex_);
      if (counts_) (void)counts_->DropUnopened(job, table);
    }
    for (const std::string& name : List()) {
      if (InUse(name)) continue;
      const auto device = Open(name);
      const std::optional<RowLogSuper> super = RowLog::Peek(device.get(), LogSpec({}, name, ""));
      if (!super) continue;
      const json there = json::parse(super->identity);
      if (there.value("job", "") != job) continue;
      if (table && there.value("table", json::object()).value("name", "") != *table) continue;
      RemoveFile(name);
      ++dropped;
    }
    return dropped;
  }

 private:
  std::string PathOf(const std::string& name) const { return (directory_ / name).string(); }

  // The pools of counts, in a directory of their own. What they may have is counted by itself.
  std::shared_ptr<Storage> Counts() {
    const std::lock_guard<std::mutex> lock(counts_mutex_);
    if (!counts_) {
      StorageSpec pools{"pmem_libpmem", PathOf(kCountsDirectory), spec().capacity_bytes};
      pools.recover = spec().recover;
      pools.fresh = !spec().recover;  // without their tables, which are gone, they are of no use
      pools.kept_checkpoints = spec().kept_checkpoints;
      counts_ = OpenPools(pools);
    }
    return counts_;
  }

  uint64_t LeftOnDevice() const noexcept {
    struct statvfs device{};
    if (::statvfs(directory_.c_str(), &device) != 0) return 0;
    return std::min<uint64_t>(Left(), uint64_t{device.f_bavail} * device.f_frsize);
  }

  // What the rows may have, if the drive had nothing else.
  uint64_t DeviceBytes() const noexcept {
    if (spec().capacity_bytes > 0) return spec().capacity_bytes;
    struct statvfs device{};
    return ::statvfs(directory_.c_str(), &device) != 0 ? 0 : uint64_t{device.f_blocks} * device.f_frsize;
  }

  RowLogSpec LogSpec(const PoolSpec& table, const std::string& name, const std::string& identity) const {
    RowLogSpec log;
    log.table = table.table;
    log.where = PathOf(name);
    log.identity = identity;
    log.row_bytes = std::max<size_t>(1, table.row_bytes);
    log.window = table.window;
    log.facts_at = table.facts_at;
    log.fact_words = table.fact_words;
    // Some dozens of segments at least, and some chunks in each.
    while (spec().capacity_bytes > 0 && log.segment_bytes > kLeastSegmentBytes &&
           log.segment_bytes > spec().capacity_bytes / 64) {
      log.segment_bytes /= 2;
    }
    // Not so many that one table cannot fill the drive.
    const uint64_t most = std::min(DeviceBytes(), MostBytesOfRows(log.row_bytes));
    while (log.segment_bytes * log.MostSegments() < most && log.segment_bytes < kMostSegmentBytes) {
      log.segment_bytes *= 2;
    }
    log.chunk_bytes = std::min(log.chunk_bytes, std::max<size_t>(log.segment_bytes / 8, kLeastChunkBytes));
    log.chunk_bytes = std::max(log.chunk_bytes, 2 * RoundUp(log.row_bytes, kBlockBytes) + kBlockBytes);
    while (log.segment_bytes < 4 * log.chunk_bytes) log.segment_bytes *= 2;
    return log;
  }

  std::unique_ptr<BlockDevice> Open(const std::string& name) const { return OpenBlockDevice(PathOf(name)); }

  std::vector<std::string> List() const {
    std::vector<std::string> names;
    std::error_code error;
    for (fs::directory_iterator entry(directory_, error), end; !error && entry != end;
         entry.increment(error)) {
      const std::string name = entry->path().filename().string();
      if (IsRowLogName(name)) names.push_back(name);
    }
    if (error) throw StorageError("cannot list the storage directory " + directory_.string(), error.value());
    std::sort(names.begin(), names.end());
    return names;
  }

  // A log gets segments when its superblock is durable, so one without them and without that was never
  // finished.
  bool IsWhole(const std::string& name) const {
    const auto device = Open(name);
    const RowLogSpec spec = LogSpec({}, name, "");
    return device->size() > 2 * spec.super_bytes || RowLog::Peek(device.get(), spec).has_value();
  }

  // The descriptions of the tables that have checkpoints. A log that cannot be read may have some: it is
  // refused.
  std::vector<std::string> WithCheckpoints(const std::vector<std::string>& names) const {
    std::vector<std::string> texts;
    for (const std::string& name : names) {
      const auto device = Open(name);
      const std::optional<RowLogSuper> super = RowLog::Peek(device.get(), LogSpec({}, name, ""));
      if (!super && IsWhole(name)) RefuseUnreadable(name);
      if (super && !super->kept.empty()) texts.push_back(super->identity);
    }
    return texts;
  }

  [[noreturn]] void RefuseUnreadable(const std::string& name) const {
    throw StorageError(PathOf(name) +
                       " is damaged: both copies of its superblock are gone; move it away, or start fresh "
                       "(--storage-fresh), and restore from a checkpoint");
  }

  // The log of the same rows, or else one of the same table, which is going to be refused; "": there is none.
  std::string FindLog(const PoolSpec& wanted) const {
    const json identity = json::parse(wanted.identity);
    std::string found;
    int best = 0;
    for (const std::string& name : List()) {
      if (InUse(name)) continue;
      const auto device = Open(name);
      const std::optional<RowLogSuper> super = RowLog::Peek(device.get(), LogSpec(wanted, name, ""));
      if (!super) RefuseUnreadable(name);
      const json there = json::parse(super->identity, nullptr, false);
      if (!there.is_object()) continue;
      if (there.value("table", json::object()).value("name", "") != wanted.table) continue;
      if (there.value("job", "") != identity.value("job", "")) continue;
      int rank = super->kept.empty() ? 2 : 3;
      for (const char* field : {"server", "servers"}) {
        if (there.value(field, json()) != identity.value(field, json())) rank = 1;
      }
      if (rank == best && rank == 3) RefuseTwo(PathOf(found), PathOf(name), wanted.table);
      if (rank <= best) continue;
      best = rank;
      found = name;
    }
    return found;
  }

  void RemoveFile(const std::string& name) const {
    if (::unlink(PathOf(name).c_str()) != 0 && errno != ENOENT) {
      throw StorageError("cannot remove the storage file " + PathOf(name), errno);
    }
    const File directory(::open(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!directory.ok() && errno == ENOENT) return;  // the file went with it
    if (!directory.ok() || ::fsync(directory.get()) != 0) {
      throw StorageError("cannot sync the storage directory " + directory_.string(), errno);
    }
  }

  bool InUse(const std::string& name) const {
    const std::lock_guard<std::mutex> lock(in_use_mutex_);
    return in_use_.count(name) > 0;
  }

  CacheMemory cache_;
  const fs::path directory_;
  const DirectoryLock lock_;  // before any use of the directory, after the last
  mutable std::mutex counts_mutex_;
  std::shared_ptr<Storage> counts_;
  std::mutex find_mutex_;  // held while logs are looked at that may not be open yet
  mutable std::mutex in_use_mutex_;
  std::set<std::string> in_use_;  // files of tables that are open
};

OpenDirectories open_log_directories;

}  // namespace

std::shared_ptr<Storage> OpenSsd(const StorageSpec& spec) {
  return open_log_directories.Open(
      spec, [&](const std::string& directory) { return std::make_shared<DramSsd>(spec, directory); });
}

}  // namespace oe
