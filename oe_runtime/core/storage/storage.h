#ifndef OE_CORE_STORAGE_STORAGE_H_
#define OE_CORE_STORAGE_STORAGE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace oe {

// Where the rows of a server live.
struct StorageSpec {
  std::string type = "dram";    // "dram" or "pmem_libpmem"
  std::string path;             // pmem_libpmem: a directory, created if only its last part is missing
  uint64_t capacity_bytes = 0;  // most bytes for the rows of all tables; 0 = no cap
};

// A piece of memory of a storage, 256-byte aligned.
struct Segment {
  std::byte* data = nullptr;  // the usable part
  size_t size = 0;
  void* mapping = nullptr;  // all of it, for the storage's own use
  size_t mapped = 0;
  std::string file;  // empty for DRAM
};

class Arena;

// The memory of one server: its kind, its cap and, for persistent memory, its locked directory. Knows nothing
// of rows, keys or optimizers. Thread-safe.
class Storage : public std::enable_shared_from_this<Storage> {
 public:
  // Opens the storage. A pmem_libpmem directory is locked for the life of the storage; pool files left in it
  // by a server that died are removed (they are scratch: the truth after a crash is the checkpoint). Opening
  // the same directory again in the same process gives the same storage. Throws SpecError for a type that
  // does not exist, StorageError for a directory that cannot be used or that another live process holds
  // (naming its pid).
  static std::shared_ptr<Storage> Open(const StorageSpec& spec);

  virtual ~Storage() = default;

  // Memory for one table's rows. `description` (JSON) goes into the header of every pool file of it.
  std::unique_ptr<Arena> NewArena(const std::string& owner, const std::string& description);

  const StorageSpec& spec() const { return spec_; }
  // Bytes that all arenas hold now, pool headers included.
  uint64_t bytes() const;
  // True when the memory is persistent (DAX); a plain directory under pmem_libpmem is not.
  virtual bool is_pmem() const = 0;

 protected:
  explicit Storage(const StorageSpec& spec) : spec_(spec) {}

 private:
  friend class Arena;

  // What a segment costs beside its usable bytes.
  virtual size_t overhead() const = 0;
  // Maps `bytes` (a multiple of 4096, overhead included) or throws StorageError.
  virtual Segment Map(size_t bytes, const std::string& description) = 0;
  virtual void Unmap(const Segment& segment) noexcept = 0;

  // Gets a segment with at least `minimum` usable bytes, about `wanted` if the cap and the device have room.
  Segment Take(size_t minimum, size_t wanted, const std::string& owner, const std::string& description);
  void Give(const Segment& segment) noexcept;

  const StorageSpec spec_;
  mutable std::mutex mutex_;
  uint64_t bytes_ = 0;
};

// One table's memory: blocks carved from segments that grow with the table; all of it goes back at once.
// Thread-safe.
class Arena {
 public:
  Arena(std::shared_ptr<Storage> storage, std::string owner, std::string description);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // A block of `bytes`, 256-byte aligned, contents undefined. Throws StorageError when the storage is full.
  std::byte* Allocate(size_t bytes);

  // Bytes of storage held.
  uint64_t bytes() const;

 private:
  const std::shared_ptr<Storage> storage_;
  const std::string owner_;
  const std::string description_;
  mutable std::mutex mutex_;
  std::vector<Segment> segments_;
  size_t used_ = 0;  // of the last segment
  uint64_t bytes_ = 0;
};

// The two kinds, for Storage::Open.
std::shared_ptr<Storage> OpenDram(const StorageSpec& spec);
std::shared_ptr<Storage> OpenPmemLibpmem(const StorageSpec& spec);

// 1536 → "1.5 KiB".
std::string BytesText(uint64_t bytes);

}  // namespace oe

#endif  // OE_CORE_STORAGE_STORAGE_H_
