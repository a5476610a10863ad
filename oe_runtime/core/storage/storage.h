#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "oe_runtime/core/common/pages.h"

namespace oe {

class KeptRows;
class Pool;
class StorageFull;
struct PoolSpec;

constexpr uint32_t kMostKeptCheckpoints = 64;

// Where the rows of a server live.
struct StorageSpec {
  // "dram"; "pmem_libpmem": pools in a directory; "dram_pmem": the same with a cache in DRAM; "dram_ssd":
  // logs on a drive, in files of a directory, with a cache in DRAM; "pmem_memkind": KMEM DAX NUMA nodes, or
  // with a path a file there, as memory that ends with the process.
  std::string type = "dram";
  // Of pools, logs and memkind: a directory, created if only its last part is missing.
  std::string path;
  uint64_t capacity_bytes = 0;  // most bytes for the rows of all tables; 0 = no cap
  // Pools and logs: whether tables that the directory holds are opened when they are created again, at their
  // newest checkpoint.
  bool recover = false;
  // Pools and logs: how many of the newest checkpoints of a table can be gone back to, 1 to
  // kMostKeptCheckpoints. Each costs room for the rows that changed after it. Several tables, and several
  // servers, need 2 (Store::CreateTable), to have one in common after a crash.
  uint32_t kept_checkpoints = 2;
  // dram_pmem and dram_ssd, which need it: most bytes of DRAM for the caches of all tables.
  uint64_t cache_bytes = 0;
  // Rows are their weights, without the state of optimizers and policies: for tables that are restored from
  // files and read. All else that needs a whole row is refused.
  bool weights_only = false;
  // With weights_only: "int8" or "bfloat16" keep the weights in fewer bytes (table/reduced_weights.h); "": as
  // trained. Servers refuse it. In JSON, only where it is not empty.
  std::string row_precision = "";
  // Pools and logs, not with `recover`: whether tables that the directory holds are removed, so that all
  // start empty. With neither of the two, a directory that holds a checkpoint is refused.
  bool fresh = false;
};

// A checkpoint that a table can be recovered to.
struct CheckpointInfo {
  uint64_t id = 0;       // that the caller gave it
  uint64_t version = 0;  // pushes
  uint64_t rows = 0;
};

class Arena;

// The memory of one server: its kind, its cap and, for persistent memory, its locked directory. Knows nothing
// of optimizers. Thread-safe.
class Storage : public std::enable_shared_from_this<Storage> {
 public:
  // Opens the storage. A directory of pools is locked for the life of the storage; without `recover`,
  // files of tables left in it are removed: all with `fresh`, else only if none has a checkpoint. Opening the
  // same directory again in the same process gives the same storage. Throws SpecError for a type that does
  // not exist, StorageError for a directory that cannot be used, that another live process holds (naming its
  // pid), or that holds checkpoints nobody decided on.
  static std::shared_ptr<Storage> Open(const StorageSpec& spec);

  virtual ~Storage() = default;

  // Memory for one table's rows.
  std::unique_ptr<Arena> NewArena(const std::string& owner);

  // A pool for one table's rows, or nullptr if this storage holds its tables in arenas. With `recover` in the
  // spec of the storage and unless `fresh`, the pool of that table's name that is there is opened
  // (*opened): Pool::Recover() must follow. Throws StorageError for a pool that is damaged or of other rows,
  // naming the file and the field. The storage must outlive the pool.
  virtual std::unique_ptr<Pool> NewPool(const PoolSpec& spec, bool fresh, bool* opened);

  // The same of whatever keeps a table's rows here, pool or log.
  virtual std::unique_ptr<KeptRows> NewKeptRows(const PoolSpec& spec, bool fresh, bool* opened);

  // Removes what a recovering storage still holds of the tables of a job that nobody has opened: of all, or
  // of the one of that name. How many pools of rows. Throws StorageError.
  virtual uint64_t DropUnopened(const std::string& job, const std::optional<std::string>& table);

  const StorageSpec& spec() const { return spec_; }
  // Bytes that all tables hold now, pool headers included.
  virtual uint64_t bytes() const;
  // True when the memory is persistent (DAX); a plain directory under pmem_libpmem is not.
  virtual bool is_pmem() const = 0;

 protected:
  explicit Storage(const StorageSpec& spec) : spec_(spec) {}

  // Counts and gets at least `least` bytes, about `wanted` if the cap and the device have room (multiples of
  // 4096), by `map`, which throws StorageError for more than the device has. Returns how many.
  size_t Take(size_t least, size_t wanted, const std::string& owner, const std::function<void(size_t)>& map);
  // Bytes that the cap has left; without one, the largest number.
  uint64_t Left() const;
  // Counts bytes that are there already.
  void Count(size_t bytes);
  void Give(size_t bytes) noexcept;

  // The memory of arenas: a multiple of 4096 bytes, aligned to 4096. Here, DRAM. Throws StorageError.
  virtual std::byte* MapSegment(size_t bytes);
  virtual void UnmapSegment(std::byte* data, size_t bytes) noexcept;

 private:
  friend class Arena;

  const StorageSpec spec_;
  mutable std::mutex mutex_;
  uint64_t bytes_ = 0;
};

// One table's rows in memory that ends with the process: blocks carved from segments that grow with the
// table; all of it goes back at once. Thread-safe.
class Arena {
 public:
  Arena(std::shared_ptr<Storage> storage, std::string owner);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // A block of `bytes`, 256-byte aligned, contents undefined. Throws StorageError when the storage is full.
  std::byte* Allocate(size_t bytes);

  // Bytes of storage held.
  uint64_t bytes() const;

 private:
  struct Segment {
    std::byte* data = nullptr;
    size_t size = 0;
  };

  const std::shared_ptr<Storage> storage_;
  const std::string owner_;
  mutable std::mutex mutex_;
  std::vector<Segment> segments_;
  size_t used_ = 0;  // of the last segment
  uint64_t bytes_ = 0;
};

// The kinds, for Storage::Open.
std::shared_ptr<Storage> OpenDram(const StorageSpec& spec);
std::shared_ptr<Storage> OpenPools(const StorageSpec& spec);  // pmem_libpmem, dram_pmem
std::shared_ptr<Storage> OpenMemkind(const StorageSpec& spec);
std::shared_ptr<Storage> OpenSsd(const StorageSpec& spec);  // dram_ssd

// The storages of one kind in directories that this process has open, of which each is one storage.
// Thread-safe.
class OpenDirectories {
 public:
  // The storage in the directory of the spec: what `open` makes of its canonical path, or the one that is
  // open there. Throws SpecError, and StorageError if that one is of another size or `fresh` is too late for
  // it.
  std::shared_ptr<Storage> Open(const StorageSpec& spec,
                                const std::function<std::shared_ptr<Storage>(const std::string&)>& open);

 private:
  std::mutex mutex_;
  std::map<std::string, std::weak_ptr<Storage>> open_;
};

// The canonical path of a storage directory, which is made if only its last part is missing. Throws
// StorageError.
std::string UseDirectory(const std::string& path);

// The error of a push that new rows make fail, of a table that keeps `window` checkpoints; `full` says what
// has no room.
StorageFull NoNewRows(const StorageFull& full, const std::string& table, uint32_t window);

// 1536 → "1.5 KiB".
std::string BytesText(uint64_t bytes);

// How much a table that has `bytes` should ask for next: growing by an eighth keeps both the number of
// segments and the unused part of the last one small.
size_t NextSegment(uint64_t bytes);

}  // namespace oe
