#include <fcntl.h>
#include <libpmem.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/file.h"
#include "oe_runtime/core/storage/cache_memory.h"
#include "oe_runtime/core/storage/directory_lock.h"
#include "oe_runtime/core/storage/memory_error.h"
#include "oe_runtime/core/storage/pool.h"
#include "oe_runtime/core/storage/pool_identity.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {
namespace {

namespace fs = std::filesystem;

// The mapped regions, by their first byte.
class Mappings {
 public:
  void Add(const Region& region) {
    NoteMapping(region.data, region.size, region.path);
    const std::lock_guard<std::mutex> lock(mutex_);
    regions_[region.data] = region;
    names_.insert(region.name);
  }
  void Remove(const Region& region) {
    ForgetMapping(region.data);
    const std::lock_guard<std::mutex> lock(mutex_);
    regions_.erase(region.data);
    names_.erase(names_.find(region.name));
  }
  bool Has(const std::string& name) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return names_.count(name) > 0;
  }
  // The mapping that has `data`.
  Region Find(const std::byte* data) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::prev(regions_.upper_bound(data))->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<const std::byte*, Region> regions_;
  std::multiset<std::string> names_;  // one that is only looked at may be open already
};

// CLWB (or what the processor has) and SFENCE.
class PmemFlusher final : public Flusher {
 public:
  void Flush(const void* data, size_t size) override { ::pmem_flush(data, size); }
  void Fence() override { ::pmem_drain(); }
};

// Where the page cache is between us and the device. A call of msync writes all changed pages of its range
// and may wait for the device, so there is one a region and fence, over all that was flushed there.
class SyncFlusher final : public Flusher {
 public:
  explicit SyncFlusher(const Mappings* mappings) : mappings_(mappings) {}

  void Flush(const void* data, size_t size) override {
    const auto* begin = static_cast<const std::byte*>(data);
    if (last_ == nullptr || begin < last_->region || begin >= last_->region + last_->size) {
      const Region found = mappings_->Find(begin);
      last_ = &dirty_.try_emplace(found.data, Dirty{found.data, found.size, begin, begin, found.path})
                   .first->second;
    }
    last_->begin = std::min(last_->begin, begin);
    last_->end = std::max(last_->end, begin + size);
  }

  void Fence() override {
    for (const auto& [region, dirty] : dirty_) {
      if (::pmem_msync(dirty.begin, static_cast<size_t>(dirty.end - dirty.begin)) != 0) {
        throw StorageError("cannot sync the pool file " + dirty.path, errno);
      }
    }
    dirty_.clear();
    last_ = nullptr;
  }

 private:
  struct Dirty {
    const std::byte* region;
    size_t size;
    const std::byte* begin;
    const std::byte* end;
    std::string path;
  };

  const Mappings* const mappings_;
  std::map<const std::byte*, Dirty> dirty_;
  Dirty* last_ = nullptr;
};

// Pools in the files of a directory.
class PmemLibpmem final : public Storage, public Medium {
 public:
  PmemLibpmem(const StorageSpec& spec, const fs::path& directory)
      : Storage(spec),
        cache_(spec.cache_bytes == 0 ? nullptr : std::make_unique<CacheMemory>(spec.cache_bytes)),
        directory_(directory),
        lock_(directory.string()) {
    if (spec.recover) RemoveOrphans();
    if (spec.fresh) RemovePools();
    SyncDirectory();
    Probe();
    if (!spec.recover && !spec.fresh) {
      RefuseToRemove(directory.string(), WithCheckpoints());
      RemovePools();
    }
  }

  bool is_pmem() const override { return is_pmem_; }

  std::unique_ptr<Pool> NewPool(const PoolSpec& wanted, bool fresh, bool* opened) override {
    PoolSpec spec = wanted;
    spec.window = this->spec().kept_checkpoints + (spec.led() ? 1 : 0);
    spec.cache = spec.led() ? nullptr : cache_.get();
    *opened = false;
    if (!fresh && this->spec().recover) {
      const std::lock_guard<std::mutex> lock(find_mutex_);
      if (const auto uuid = FindPool(spec)) {
        *opened = true;
        return Pool::Open(this, *uuid, spec);
      }
    }
    return Pool::Create(this, spec);
  }

  uint64_t DropUnopened(const std::string& job, const std::optional<std::string>& table) override {
    const std::lock_guard<std::mutex> lock(find_mutex_);
    std::set<uint64_t> pools;
    uint64_t dropped = 0;
    for (const auto& [name, uuid] : Supers()) {
      if (mappings_.Has(name)) continue;
      std::string text;
      uint64_t in_header = 0;
      const bool readable = ReadSuperHeader(*OpenRegion(this, name), &in_header, &text);
      if (!readable || mappings_.Has(name)) continue;  // by now it may be a new table's
      const nlohmann::json there = nlohmann::json::parse(text);
      if (there.value("job", "") != job) continue;
      const bool rows = there.contains("table");
      const nlohmann::json of = there.value(rows ? "table" : "counts", nlohmann::json::object());
      if (table && of.value("name", "") != *table) continue;
      pools.insert(uuid);
      dropped += rows ? 1 : 0;
    }
    oe::RemovePools(this, [&](std::optional<uint64_t> uuid) { return uuid && pools.count(*uuid) > 0; });
    return dropped;
  }

  Region Create(const std::string& name, size_t least, size_t wanted, const std::string& owner) override {
    Region region;
    Take(least, wanted, owner, [&](size_t bytes) { region = Map(name, bytes); });
    SyncDirectory();
    return region;
  }

  size_t SizeOf(const std::string& name) const override {
    std::error_code error;
    const uintmax_t bytes = fs::file_size(PathOf(name), error);
    if (error) throw StorageError("cannot read the pool file " + PathOf(name), error.value());
    return bytes;
  }

  Region Open(const std::string& name) override {
    Region region{name, PathOf(name)};
    int is_pmem = 0;
    region.data =
        static_cast<std::byte*>(::pmem_map_file(region.path.c_str(), 0, 0, 0, &region.size, &is_pmem));
    if (region.data == nullptr) {
      const int error = errno;
      if (SizeOf(name) == 0) {
        throw StorageError(
            region.path + " is damaged: it is truncated, 'bytes' are 0" +
            "; move the pool away, or start fresh (--storage-fresh), and restore from a checkpoint");
      }
      throw StorageError("cannot open the pool file " + region.path, error);
    }
    Admit(&region, is_pmem != 0);
    Count(region.size);
    return region;
  }

  void RequirePresent(const Region& region) const override {
    struct stat there{};
    const bool found = ::stat(region.path.c_str(), &there) == 0;
    if (found && there.st_dev == region.device && there.st_ino == region.inode) return;
    throw StorageError("the pool file " + region.path + (found ? " is another file now" : " is gone") +
                       ", and what its table holds ends with this process; save the tables to files, then "
                       "start fresh (--storage-fresh) and restore from these");
  }

  // On an ordinary file system a page fault reads as much around it as the device's read_ahead_kb says, often
  // megabytes for a row of 512 bytes, and memory that is short then loses as many other rows.
  void Advise(const void* data, size_t size, bool in_order) noexcept override {
    if (is_pmem_) return;
    auto* begin = static_cast<std::byte*>(const_cast<void*>(data));
    const size_t before = reinterpret_cast<uintptr_t>(begin) % kPoolPage;
    (void)::madvise(begin - before, before + size, in_order ? MADV_NORMAL : MADV_RANDOM);
  }

  void Close(const Region& region) noexcept override {
    mappings_.Remove(region);
    (void)::pmem_unmap(region.data, region.size);
    Give(region.size);
  }

  void Remove(const std::string& name) override {
    if (::unlink(PathOf(name).c_str()) != 0 && errno != ENOENT) {
      throw StorageError("cannot remove the pool file " + PathOf(name), errno);
    }
    SyncDirectory();
  }

  uint64_t Room() const noexcept override {
    struct statvfs device{};
    if (::statvfs(directory_.c_str(), &device) != 0) return 0;
    return std::min<uint64_t>(Left(), uint64_t{device.f_bavail} * device.f_frsize);
  }

  std::vector<std::string> List() const override {
    std::set<std::string> names;
    std::error_code error;
    for (fs::directory_iterator entry(directory_, error), end; !error && entry != end;
         entry.increment(error)) {
      const std::string name = entry->path().filename().string();
      if (IsPoolName(name)) names.insert(name);
    }
    if (error) throw StorageError("cannot list the storage directory " + directory_.string(), error.value());
    return {names.begin(), names.end()};
  }

  std::string PathOf(const std::string& name) const override { return (directory_ / name).string(); }

  std::unique_ptr<Flusher> NewFlusher() override {
    if (is_pmem_) return std::make_unique<PmemFlusher>();
    return std::make_unique<SyncFlusher>(&mappings_);
  }

 private:
  // The file of a region that was just mapped.
  void Admit(Region* region, bool is_pmem) {
    struct stat there{};
    const int error = ::stat(region->path.c_str(), &there) == 0 ? 0 : errno;
    if (error == 0 && is_pmem == is_pmem_) {
      region->device = there.st_dev;
      region->inode = there.st_ino;
      Advise(region->data, region->size, false);
      return mappings_.Add(*region);
    }
    (void)::pmem_unmap(region->data, region->size);
    if (error != 0) throw StorageError("cannot use the pool file " + region->path, error);
    // How stores are made durable is the same for all regions.
    throw StorageError("the pool file " + region->path + (is_pmem ? " is" : " is not") +
                       " on persistent memory, but the storage directory " + directory_.string() +
                       (is_pmem_ ? " is" : " is not") + "; keep all files of a pool in one file system");
  }

  Region Map(const std::string& name, size_t bytes) {
    Region region{name, PathOf(name)};
    int is_pmem = 0;
    // Without PMEM_FILE_SPARSE the file's blocks are allocated here, so that a full device is an error now
    // and not a SIGBUS at some later store.
    region.data = static_cast<std::byte*>(::pmem_map_file(
        region.path.c_str(), bytes, PMEM_FILE_CREATE | PMEM_FILE_EXCL, 0600, &region.size, &is_pmem));
    if (region.data == nullptr) {
      const int error = errno;
      if (error != EEXIST) (void)::unlink(region.path.c_str());
      throw NoRoom(bytes, error);
    }
    try {
      Admit(&region, is_pmem != 0);
    } catch (const StorageError&) {
      (void)::unlink(region.path.c_str());
      throw;
    }
    return region;
  }

  StorageError NoRoom(size_t bytes, int error) const {
    return StorageError("cannot get " + BytesText(bytes) + " in the storage directory " + directory_.string(),
                        error);
  }

  // Asks the device now whether it is persistent and has room at all, not at the first push. One that is full
  // must still give back the rows that it holds.
  void Probe() {
    try {
      const std::string path = PathOf("oe-rows-probe.pool");
      size_t size = 0;
      int is_pmem = 0;
      void* data = ::pmem_map_file(path.c_str(), 2 * kPoolPage, PMEM_FILE_CREATE | PMEM_FILE_EXCL, 0600,
                                   &size, &is_pmem);
      const int error = errno;
      if (data != nullptr || error != EEXIST) (void)::unlink(path.c_str());
      if (data == nullptr) throw NoRoom(2 * kPoolPage, error);
      (void)::pmem_unmap(data, size);
      is_pmem_ = is_pmem != 0;
    } catch (const StorageError&) {
      const std::vector<std::string> names = List();
      if (names.empty()) throw;
      size_t size = 0;
      int is_pmem = 0;
      void* data = ::pmem_map_file(PathOf(names.front()).c_str(), 0, 0, 0, &size, &is_pmem);
      if (data == nullptr) throw;
      (void)::pmem_unmap(data, size);
      is_pmem_ = is_pmem != 0;
    }
  }

  void SyncDirectory() const {
    const File directory(::open(directory_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!directory.ok() || ::fsync(directory.get()) != 0) {
      throw StorageError("cannot sync the storage directory " + directory_.string(), errno);
    }
  }

  // Names and uuids of all superblocks.
  std::vector<std::pair<std::string, uint64_t>> Supers() const {
    std::vector<std::pair<std::string, uint64_t>> supers;
    for (const std::string& name : List()) {
      uint64_t uuid = 0;
      bool super = false;
      if (ParsePoolName(name, &uuid, &super) && super) supers.emplace_back(name, uuid);
    }
    return supers;
  }

  // The pool of the same rows, or else one of the same table, which is going to be refused. Throws
  // StorageError for one that is damaged.
  std::optional<uint64_t> FindPool(const PoolSpec& wanted) {
    std::optional<uint64_t> found;
    int best = 0;
    for (const auto& [name, uuid] : Supers()) {
      if (mappings_.Has(name)) continue;  // of a table that is open
      const int rank = Rank(*OpenRegion(this, name), wanted);
      if (found && rank == best && rank == 3)
        RefuseTwo(PathOf(SuperName(*found)), PathOf(name), wanted.table);
      if (rank <= best) continue;
      best = rank;
      found = uuid;
    }
    return found;
  }

  // 0: another table's. 1: another part of the table. 2: the same part. 3: with a checkpoint: a power cut
  // while a table is restored from files may leave two, of which one has none.
  static int Rank(const Region& region, const PoolSpec& wanted) {
    using nlohmann::json;
    std::string text;
    uint64_t uuid = 0;
    if (!ReadSuperHeader(region, &uuid, &text)) return 0;
    const json there = json::parse(text);
    const json identity = json::parse(wanted.identity);
    if (there.value(json::json_pointer("/" + wanted.kind + "/name"), "") != wanted.table) return 0;
    if (there.value("job", "") != identity.value("job", "")) return 0;
    for (const char* field : {"server", "servers"}) {
      if (there.value(field, json()) != identity.value(field, json())) return 1;
    }
    return HasCheckpoint(region).value_or(false) ? 3 : 2;
  }

  // Nothing if neither copy of the list of checkpoints can be read.
  static std::optional<bool> HasCheckpoint(const Region& region) {
    std::optional<bool> has;
    for (size_t copy = 0; copy < 2; ++copy) {
      SuperCopy decoded;
      if (!DecodeSuperCopy(region.data + kSuperTextBytes + copy * kPoolPage, &decoded)) continue;
      has = has.value_or(false) || !decoded.kept.empty();
    }
    return has;
  }

  // Segments come when the superblock is whole, so that those of one that is not were robbed of it.
  void RefuseRobbed(const std::string& super, uint64_t uuid) const {
    for (const std::string& name : List()) {
      uint64_t of = 0;
      bool is_super = false;
      if (!ParsePoolName(name, &of, &is_super) || is_super || of != uuid) continue;
      throw StorageError(
          PathOf(super) + " is damaged: 'magic' is missing, but there is " + name +
          "; move the pool away, or start fresh (--storage-fresh), and restore from a checkpoint");
    }
  }

  // The descriptions of the tables that have checkpoints, or may have: what cannot be read is refused.
  std::vector<std::string> WithCheckpoints() {
    std::vector<std::string> texts;
    for (const auto& [name, uuid] : Supers()) {
      CheckOurs(name);
      if (SizeOf(name) == 0) {  // never finished
        RefuseRobbed(name, uuid);
        continue;
      }
      const OpenRegion region(this, name);
      uint64_t in_header = 0;
      std::string text;
      if (!ReadSuperHeader(*region, &in_header, &text)) {
        RefuseRobbed(name, uuid);
      } else if (nlohmann::json::parse(text).contains("table") &&  // counts are of no use without theirs
                 HasCheckpoint(*region).value_or(true)) {
        texts.push_back(std::move(text));
      }
    }
    return texts;
  }

  // Files of ours. One with our kind of name but other content is somebody else's: refuse.
  void CheckOurs(const std::string& name) const {
    const std::string path = PathOf(name);
    const File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
    std::array<char, 8> magic{};
    // All zeros: the power went before its header was written.
    const bool ours = file.ok() && ::read(file.get(), magic.data(), magic.size()) >= 0 &&
                      (magic == kSuperMagic || magic == kSegmentMagic || magic == std::array<char, 8>{});
    if (!ours) throw StorageError(path + " is not a pool file of this program; move it away");
  }

  void RemovePools() {
    for (const std::string& name : List()) CheckOurs(name);
    oe::RemovePools(this, [](std::optional<uint64_t> /*uuid*/) { return true; });
  }

  // Segments whose superblock is gone, and superblocks that were never finished.
  void RemoveOrphans() {
    std::set<uint64_t> pools;
    for (const auto& [name, uuid] : Supers()) {
      std::array<char, 8> magic{};
      const File file(::open(PathOf(name).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
      const ssize_t size = file.ok() ? ::read(file.get(), magic.data(), magic.size()) : -1;
      if (size < 0) throw StorageError("cannot read the pool file " + PathOf(name), errno);
      if (static_cast<size_t>(size) < magic.size() || magic == std::array<char, 8>{}) {
        RefuseRobbed(name, uuid);
        Remove(name);
      } else {
        pools.insert(uuid);
      }
    }
    for (const std::string& name : List()) {
      uint64_t uuid = 0;
      bool super = false;
      if (ParsePoolName(name, &uuid, &super) && (super || pools.count(uuid) > 0)) continue;
      CheckOurs(name);
      Remove(name);
    }
  }

  const std::unique_ptr<CacheMemory> cache_;  // of dram_pmem
  const fs::path directory_;
  const DirectoryLock lock_;  // before any use of the directory, after the last
  Mappings mappings_;
  std::mutex find_mutex_;  // held while pools are looked at that may not be open yet
  bool is_pmem_ = false;   // all regions, as Probe() found
};

OpenDirectories open_pool_directories;

}  // namespace

std::shared_ptr<Storage> OpenPools(const StorageSpec& spec) {
  return open_pool_directories.Open(
      spec, [&](const std::string& directory) { return std::make_shared<PmemLibpmem>(spec, directory); });
}

}  // namespace oe
