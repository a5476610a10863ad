#include <dlfcn.h>

#include <array>
#include <filesystem>
#include <mutex>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {
namespace {

// libmemkind (memkind(3)), loaded when it is asked for: hosts without KMEM DAX nodes need not have it.
class Library {
 public:
  using Kind = void*;  // memkind_t

  // Throws StorageError.
  static const Library& Get() {
    static const Library library;
    return library;
  }

  int (*create_pmem)(const char* directory, size_t most, Kind* kind) = nullptr;
  int (*destroy_kind)(Kind kind) = nullptr;
  int (*check_available)(Kind kind) = nullptr;
  int (*posix_memalign)(Kind kind, void** memory, size_t alignment, size_t size) = nullptr;
  void (*free)(Kind kind, void* memory) = nullptr;
  void (*error_message)(int error, char* text, size_t size) = nullptr;
  Kind dax_kmem = nullptr;

  std::string Message(int error) const {
    std::array<char, 256> text{};
    error_message(error, text.data(), text.size());
    return text.data();
  }

 private:
  Library() {
    void* library = ::dlopen("libmemkind.so.0", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      throw StorageError(
          "storage pmem_memkind needs libmemkind.so.0, which is not on this host; install the package "
          "libmemkind0 (Debian, Ubuntu) or memkind (EL)");
    }
    Load(library, "memkind_create_pmem", &create_pmem);
    Load(library, "memkind_destroy_kind", &destroy_kind);
    Load(library, "memkind_check_available", &check_available);
    Load(library, "memkind_posix_memalign", &posix_memalign);
    Load(library, "memkind_free", &free);
    Load(library, "memkind_error_message", &error_message);
    Kind* kind = nullptr;
    Load(library, "MEMKIND_DAX_KMEM", &kind);
    dax_kmem = *kind;
  }

  template <typename Pointer>
  static void Load(void* library, const char* name, Pointer* pointer) {
    *pointer = reinterpret_cast<Pointer>(::dlsym(library, name));
    if (*pointer != nullptr) return;
    throw StorageError(std::string("libmemkind on this host is too old: it has no ") + name +
                       "; storage pmem_memkind needs 1.10 or later");
  }
};

// Memory of KMEM DAX nodes, i.e. persistent memory or CXL memory as NUMA nodes: bound to the one that is
// closest to the thread that asks. Which nodes count, MEMKIND_DAX_KMEM_NODES says, or libdaxctl. Or memory of
// a file without a name in a directory, for want of such nodes. Neither outlives the process.
//
// A node that is full is found when memory is touched, by the system, which then ends the process: so
// `capacity_bytes` should be below the node's size.
class Memkind final : public Storage {
 public:
  explicit Memkind(const StorageSpec& spec) : Storage(spec) {
    if (!spec.path.empty()) {
      const int error = library_.create_pmem(UseDirectory(spec.path).c_str(), 0, &kind_);
      if (error == 0) return;
      throw StorageError("memkind cannot use the storage directory " + spec.path + ": " +
                         library_.Message(error));
    }
    kind_ = library_.dax_kmem;
    const int error = library_.check_available(kind_);
    void* probe = nullptr;  // an empty MEMKIND_DAX_KMEM_NODES passes the check
    if (error == 0 && library_.posix_memalign(kind_, &probe, kPage, kPage) == 0) {
      library_.free(kind_, probe);
      return;
    }
    throw StorageError("storage pmem_memkind finds no KMEM DAX node on this host (" +
                       (error == 0 ? "it gives no memory" : library_.Message(error)) +
                       "); bring persistent memory into that mode with 'oeprov pmem-mode system-ram', name "
                       "nodes in MEMKIND_DAX_KMEM_NODES, or give a path");
  }
  ~Memkind() override {
    if (!spec().path.empty()) (void)library_.destroy_kind(kind_);
  }

  bool is_pmem() const override { return false; }

 protected:
  std::byte* MapSegment(size_t bytes) override {
    void* memory = nullptr;
    const size_t alignment = bytes >= kHugePage ? kHugePage : kPage;
    const int error = library_.posix_memalign(kind_, &memory, alignment, bytes);
    if (error == 0) return static_cast<std::byte*>(memory);
    throw StorageError(
        "cannot get " + BytesText(bytes) + " in " + (spec().path.empty() ? "KMEM DAX nodes" : spec().path),
        error);
  }
  void UnmapSegment(std::byte* data, size_t /*bytes*/) noexcept override { library_.free(kind_, data); }

 private:
  const Library& library_ = Library::Get();
  Library::Kind kind_ = nullptr;
};

}  // namespace

std::shared_ptr<Storage> OpenMemkind(const StorageSpec& spec) {
  if (spec.recover) {
    throw SpecError(
        "storage pmem_memkind cannot recover tables; only pmem_libpmem and dram_pmem outlive a process");
  }
  return std::make_shared<Memkind>(spec);
}

}  // namespace oe
