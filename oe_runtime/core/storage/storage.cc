#include "oe_runtime/core/storage/storage.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <system_error>
#include <utility>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/storage/pool.h"

namespace oe {
namespace {

constexpr size_t kSmallestSegment = size_t{256} << 10;
constexpr size_t kLargestSegment = size_t{1} << 30;

}  // namespace

StorageFull NoNewRows(const StorageFull& full, const std::string& table, uint32_t window) {
  return StorageFull(full.what() + std::string(". Table '") + table +
                     "' takes no new rows: the slots that are free are kept for updates and evictions of its "
                     "rows (with " +
                     std::to_string(window) +
                     " kept checkpoints); evict rows, cap the table, or keep fewer checkpoints");
}

std::string BytesText(uint64_t bytes) {
  static constexpr std::array<const char*, 5> kUnits = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  std::array<char, 32> text{};
  (void)std::snprintf(text.data(), text.size(), value < 10 && unit > 0 ? "%.1f %s" : "%.0f %s", value,
                      kUnits[unit]);
  return text.data();
}

size_t NextSegment(uint64_t bytes) {
  return std::clamp(static_cast<size_t>(bytes / 8), kSmallestSegment, kLargestSegment);
}

std::shared_ptr<Storage> Storage::Open(const StorageSpec& spec) {
  const bool cached = spec.type == "dram_pmem" || spec.type == "dram_ssd";
  if (cached && spec.cache_bytes == 0) {
    throw SpecError("storage " + spec.type +
                    " needs 'cache_bytes' (--storage-cache), the DRAM for the rows that are used most");
  }
  if (!cached && spec.cache_bytes > 0) {
    throw SpecError("storage " + spec.type + " has no cache, but 'cache_bytes' is " +
                    std::to_string(spec.cache_bytes) + "; leave it out, or use dram_pmem or dram_ssd");
  }
  if (spec.recover && spec.fresh) {
    throw SpecError(
        "storage: 'recover' (--storage-recover) goes on from the tables in a directory and 'fresh' "
        "(--storage-fresh) removes them; give one of the two");
  }
  if (!spec.row_precision.empty() && !spec.weights_only) {
    throw SpecError("storage: rows that are trained cannot be kept as " + spec.row_precision +
                    "; 'row_precision' is for 'weights_only'");
  }
  if (spec.type == "dram") return OpenDram(spec);
  if (spec.type == "pmem_memkind") return OpenMemkind(spec);
  if (spec.type == "pmem_libpmem" || spec.type == "dram_pmem") return OpenPools(spec);
  if (spec.type == "dram_ssd") return OpenSsd(spec);
  throw SpecError("storage type '" + spec.type +
                  "' is not one of dram, pmem_libpmem, dram_pmem, dram_ssd, pmem_memkind");
}

std::shared_ptr<Storage> OpenDirectories::Open(
    const StorageSpec& spec, const std::function<std::shared_ptr<Storage>(const std::string&)>& open) {
  if (spec.path.empty())
    throw SpecError("storage " + spec.type + " needs a path, the directory for its files");
  if (spec.kept_checkpoints < 1 || spec.kept_checkpoints > kMostKeptCheckpoints) {
    throw SpecError("storage: 'kept_checkpoints' must be between 1 and " +
                    std::to_string(kMostKeptCheckpoints) + ", not " + std::to_string(spec.kept_checkpoints));
  }
  const std::string directory = UseDirectory(spec.path);
  const std::lock_guard<std::mutex> lock(mutex_);
  std::weak_ptr<Storage>& known = open_[directory];
  auto storage = known.lock();
  if (!storage) {
    storage = open(directory);
    known = storage;
    return storage;
  }
  const std::string is_open = "the storage directory " + spec.path + " is open in this process";
  const auto same = [&](const char* what, uint64_t there, uint64_t wanted) {
    if (there == wanted) return;
    throw StorageError(is_open + " with a " + what + " of " + std::to_string(there) + " bytes, not " +
                       std::to_string(wanted));
  };
  same("size", storage->spec().capacity_bytes, spec.capacity_bytes);
  same("cache", storage->spec().cache_bytes, spec.cache_bytes);
  if (spec.fresh && !storage->spec().fresh) {
    throw StorageError(is_open + ", so its tables are not removed; close its clients first, or drop tables");
  }
  return storage;
}

std::string UseDirectory(const std::string& path) {
  if (::mkdir(path.c_str(), 0755) != 0 && errno != EEXIST) {
    throw StorageError("cannot make the storage directory " + path +
                           "; make it (or mount the persistent memory there) first",
                       errno);
  }
  std::error_code error;
  const std::filesystem::path directory = std::filesystem::canonical(path, error);
  if (error) throw StorageError("cannot use the storage directory " + path, error.value());
  if (!std::filesystem::is_directory(directory, error)) {
    throw StorageError("the storage path " + path + " is not a directory");
  }
  return directory.string();
}

std::unique_ptr<Arena> Storage::NewArena(const std::string& owner) {
  return std::make_unique<Arena>(shared_from_this(), owner);
}

std::unique_ptr<Pool> Storage::NewPool(const PoolSpec& /*spec*/, bool /*fresh*/, bool* opened) {
  *opened = false;
  return nullptr;
}

std::unique_ptr<KeptRows> Storage::NewKeptRows(const PoolSpec& spec, bool fresh, bool* opened) {
  return NewPool(spec, fresh, opened);
}

uint64_t Storage::DropUnopened(const std::string& /*job*/, const std::optional<std::string>& /*table*/) {
  return 0;
}

uint64_t Storage::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return bytes_;
}

size_t Storage::Take(size_t least, size_t wanted, const std::string& owner,
                     const std::function<void(size_t)>& map) {
  size_t size = std::max(least, wanted);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (spec_.capacity_bytes > 0) {
    const uint64_t left = spec_.capacity_bytes > bytes_ ? spec_.capacity_bytes - bytes_ : 0;
    if (least > left) {
      throw StorageFull("storage " + (spec_.path.empty() ? spec_.type : spec_.path) + " is full: table '" +
                        owner + "' needs " + BytesText(least) + " more, " + BytesText(bytes_) + " of " +
                        BytesText(spec_.capacity_bytes) +
                        " are in use; raise the storage size of the servers or use more servers");
    }
    size = static_cast<size_t>(std::min<uint64_t>(size, left / kPage * kPage));
  }
  while (true) {
    try {
      map(size);
      bytes_ += size;
      return size;
    } catch (const StorageError& error) {
      // The device may still have room for a smaller piece.
      if (size == least) {
        const std::string what = "table '" + owner + "': " + error.what() +
                                 "; free space there, or use more servers or another storage";
        const int number = error.error_number();
        if (number == ENOSPC || number == EDQUOT) throw StorageFull(what);
        throw StorageError(what);
      }
      size = std::max(least, RoundUp(size / 2, kPage));
    }
  }
}

uint64_t Storage::Left() const {
  if (spec_.capacity_bytes == 0) return std::numeric_limits<uint64_t>::max();
  const std::lock_guard<std::mutex> lock(mutex_);
  return spec_.capacity_bytes > bytes_ ? spec_.capacity_bytes - bytes_ : 0;
}

void Storage::Count(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  bytes_ += bytes;
}

void Storage::Give(size_t bytes) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  bytes_ -= bytes;
}

}  // namespace oe
