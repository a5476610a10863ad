#include <fcntl.h>
#include <libpmem.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <system_error>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/file.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {
namespace {

namespace fs = std::filesystem;

constexpr std::array<char, 8> kMagic = {'O', 'E', 'P', 'O', 'O', 'L', '\n', '\0'};
constexpr size_t kHeaderBytes = 4096;
constexpr const char* kLockName = "oe.lock";
constexpr const char* kPoolPrefix = "oe-rows-";
constexpr const char* kPoolSuffix = ".pool";

// The first page of every pool file: magic, u32 format, u32 size of the JSON, u64 XXH3-64 of the JSON, JSON.
struct PoolHeader {
  std::array<char, 8> magic;
  uint32_t format;
  uint32_t text_size;
  uint64_t checksum;
};
constexpr uint32_t kFormat = 1;

bool IsPoolName(const std::string& name) {
  const std::string prefix = kPoolPrefix;
  const std::string suffix = kPoolSuffix;
  return name.size() > prefix.size() + suffix.size() && name.compare(0, prefix.size(), prefix) == 0 &&
         name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0;
}

// The lock of a directory: a file with flock, which the system drops when its holder dies.
class DirectoryLock {
 public:
  explicit DirectoryLock(const fs::path& directory) : path_(directory / kLockName) {
    while (true) {
      file_ = File(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
      if (!file_.ok()) {
        throw StorageError("cannot write in the storage directory " + directory.string() +
                               "; give one that this user may write in",
                           errno);
      }
      if (::flock(file_.get(), LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK) throw StorageError("cannot lock " + path_.string(), errno);
        std::array<char, 32> pid{};
        const ssize_t size = ::pread(file_.get(), pid.data(), pid.size() - 1, 0);
        const long holder = size > 0 ? std::strtol(pid.data(), nullptr, 10) : 0;
        throw StorageError("the storage directory " + directory.string() + " is in use by " +
                           (holder > 0 ? "process " + std::to_string(holder) : "another process") +
                           "; stop it or give another directory");
      }
      // A holder that left may have removed the file between our open and our lock: then it locks nothing.
      struct stat ours{};
      struct stat there{};
      if (::fstat(file_.get(), &ours) == 0 && ::stat(path_.c_str(), &there) == 0 &&
          ours.st_ino == there.st_ino && ours.st_dev == there.st_dev) {
        break;
      }
    }
    const std::string pid = std::to_string(::getpid()) + "\n";
    if (::ftruncate(file_.get(), 0) != 0 ||
        ::pwrite(file_.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
      const int error = errno;
      (void)::unlink(path_.c_str());
      throw StorageError("cannot write " + path_.string(), error);
    }
  }
  ~DirectoryLock() { (void)::unlink(path_.c_str()); }
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  const fs::path path_;
  File file_;
};

class PmemLibpmem final : public Storage {
 public:
  PmemLibpmem(const StorageSpec& spec, const fs::path& directory)
      : Storage(spec), directory_(directory), lock_(directory) {
    RemoveStalePools();
    // Asks the device now whether it is persistent and has room at all, not at the first push.
    const Segment probe = Map(2 * kHeaderBytes, "{}");
    Unmap(probe);
  }

  bool is_pmem() const override { return is_pmem_; }

 private:
  size_t overhead() const override { return kHeaderBytes; }

  Segment Map(size_t bytes, const std::string& description) override {
    const std::string number = std::to_string(next_++);
    const fs::path file =
        directory_ /
        (kPoolPrefix + std::string(number.size() < 6 ? 6 - number.size() : 0, '0') + number + kPoolSuffix);
    size_t mapped = 0;
    int is_pmem = 0;
    // Without PMEM_FILE_SPARSE the file's blocks are allocated here, so that a full device is an error now
    // and not a SIGBUS at some later store.
    void* mapping =
        ::pmem_map_file(file.c_str(), bytes, PMEM_FILE_CREATE | PMEM_FILE_EXCL, 0600, &mapped, &is_pmem);
    if (mapping == nullptr) {
      const int error = errno;
      if (error != EEXIST) (void)::unlink(file.c_str());
      throw StorageError(
          "cannot get " + BytesText(bytes) + " in the storage directory " + directory_.string(), error);
    }
    is_pmem_ = is_pmem != 0;
    WriteHeader(mapping, bytes, description);
    return {static_cast<std::byte*>(mapping) + kHeaderBytes, mapped - kHeaderBytes, mapping, mapped,
            file.string()};
  }

  void Unmap(const Segment& segment) noexcept override {
    (void)::pmem_unmap(segment.mapping, segment.mapped);
    (void)::unlink(segment.file.c_str());
  }

  void WriteHeader(void* mapping, size_t bytes, const std::string& description) const {
    nlohmann::json fields = {{"pid", ::getpid()}, {"bytes", bytes}};
    fields["table"] = nlohmann::json::parse(description, nullptr, false);
    std::string text = fields.dump();
    if (sizeof(PoolHeader) + text.size() > kHeaderBytes) {
      fields.erase("table");  // a very long name
      text = fields.dump();
    }
    PoolHeader header{kMagic, kFormat, static_cast<uint32_t>(text.size()),
                      XXH3_64bits(text.data(), text.size())};
    auto* page = static_cast<std::byte*>(mapping);
    std::memcpy(page + sizeof(header), text.data(), text.size());
    std::memcpy(page, &header, sizeof(header));
    if (is_pmem_) {
      ::pmem_persist(page, kHeaderBytes);
    } else {
      (void)::pmem_msync(page, kHeaderBytes);
    }
  }

  // Files of a server that died. A file with our kind of name but other content is somebody else's: refuse.
  void RemoveStalePools() const {
    std::error_code error;
    for (fs::directory_iterator entry(directory_, error), end; !error && entry != end;
         entry.increment(error)) {
      if (!IsPoolName(entry->path().filename().string())) continue;
      const fs::path& path = entry->path();
      const File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
      std::array<char, 8> magic{};
      // All zeros: its server died before it wrote the header.
      const bool ours = file.ok() && ::read(file.get(), magic.data(), magic.size()) >= 0 &&
                        (magic == kMagic || magic == std::array<char, 8>{});
      if (!ours) {
        throw StorageError(path.string() + " is not a pool file of this program; move it away");
      }
      if (::unlink(path.c_str()) != 0)
        throw StorageError("cannot remove the stale pool file " + path.string(), errno);
    }
    if (error) throw StorageError("cannot list the storage directory " + directory_.string(), error.value());
  }

  const fs::path directory_;
  const DirectoryLock lock_;  // before any use of the directory, after the last
  uint64_t next_ = 0;
  std::atomic<bool> is_pmem_{false};
};

std::mutex open_mutex;
std::map<std::string, std::weak_ptr<Storage>> open_directories;

}  // namespace

std::shared_ptr<Storage> OpenPmemLibpmem(const StorageSpec& spec) {
  if (spec.path.empty())
    throw SpecError("storage pmem_libpmem needs a path, the directory for its pool files");
  if (::mkdir(spec.path.c_str(), 0755) != 0 && errno != EEXIST) {
    throw StorageError("cannot make the storage directory " + spec.path +
                           "; make it (or mount the persistent memory there) first",
                       errno);
  }
  std::error_code error;
  const fs::path directory = fs::canonical(spec.path, error);
  if (error) throw StorageError("cannot use the storage directory " + spec.path, error.value());
  if (!fs::is_directory(directory, error)) {
    throw StorageError("the storage path " + spec.path + " is not a directory");
  }
  const std::lock_guard<std::mutex> lock(open_mutex);
  std::weak_ptr<Storage>& known = open_directories[directory.string()];
  if (auto storage = known.lock()) {
    if (storage->spec().capacity_bytes != spec.capacity_bytes) {
      throw StorageError("the storage directory " + spec.path + " is open in this process with a size of " +
                         std::to_string(storage->spec().capacity_bytes) + " bytes, not " +
                         std::to_string(spec.capacity_bytes));
    }
    return storage;
  }
  auto storage = std::make_shared<PmemLibpmem>(spec, directory);
  known = storage;
  return storage;
}

}  // namespace oe
