#include "oe_runtime/core/storage/storage.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/storage/cache_memory.h"
#include "oe_runtime/core/storage/pool.h"
#include "oe_runtime/core/storage/row_store.h"
#include "oe_runtime/core/storage/test_storage.h"

namespace oe::storage_test {
namespace {

std::vector<std::string> FilesIn(const std::string& directory) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    names.insert(entry.path().filename().string());
  }
  return {names.begin(), names.end()};
}

// Rows of one size in a storage of any kind.
class Rows {
 public:
  static PoolSpec Spec(const std::string& table, size_t row_bytes, const std::string& more = "") {
    PoolSpec spec;
    spec.table = table;
    spec.identity = R"({"table": {"name": ")" + table + '"' + more + "}}";
    spec.row_bytes = row_bytes;
    spec.shard_of = [](Key) { return 0U; };
    return spec;
  }
  Rows(Storage* storage, const std::string& table, size_t row_bytes, const std::string& more = "") {
    bool opened = true;
    pool_ = storage->NewPool(Spec(table, row_bytes, more), false, &opened);
    EXPECT_FALSE(opened);
    if (pool_) {
      store_ = pool_->shard(0);
      return;
    }
    arena_ = storage->NewArena(table);
    arena_rows_ = std::make_unique<ArenaRows>(arena_.get(), row_bytes);
    store_ = arena_rows_.get();
  }

  // Throws StorageError.
  std::byte* Add() {
    store_->Reserve();
    return store_->row(store_->Add(store_->size()));
  }
  RowStore* operator->() { return store_; }
  Pool* pool() { return pool_.get(); }
  uint64_t bytes() const { return pool_ ? pool_->bytes() : arena_->bytes(); }

 private:
  std::unique_ptr<Arena> arena_;
  std::unique_ptr<ArenaRows> arena_rows_;
  std::unique_ptr<Pool> pool_;
  RowStore* store_ = nullptr;
};

class StorageTest : public testing::TestWithParam<const char*> {
 protected:
  StorageSpec Spec(uint64_t capacity = 0) const {
    return TestStorage(GetParam(), directory_.path(), capacity);
  }

  TestDirectory directory_;
};

TEST_P(StorageTest, RowsOfAnySizeAreDisjointAndStay) {
  const auto storage = Storage::Open(Spec());
  for (const size_t floats : {size_t{1}, size_t{9}, size_t{18}, size_t{64}, size_t{130}, size_t{200000}}) {
    Rows rows(storage.get(), "t", floats * sizeof(float));
    std::vector<float*> places;
    const uint32_t count = floats > 1000 ? 5 : 5000;
    for (uint32_t i = 0; i < count; ++i) {
      places.push_back(reinterpret_cast<float*>(rows.Add()));
      std::fill_n(places[i], floats, static_cast<float>(i));
    }
    EXPECT_EQ(rows->size(), count);
    for (uint32_t i = 0; i < count; ++i) {
      ASSERT_EQ(reinterpret_cast<float*>(rows->row(i)), places[i]);
      ASSERT_EQ(std::count(places[i], places[i] + floats, static_cast<float>(i)), floats);
    }
  }
}

// What a server reports as the memory of its rows.
TEST(StorageInDramTest, AnArenaOfAnySizeHasLittleThatNoBlockUses) {
  constexpr uint64_t kMiB = uint64_t{1} << 20;
  constexpr uint64_t kBlock = uint64_t{32} << 10;
  const auto storage = Storage::Open(StorageSpec{});
  const auto arena = storage->NewArena("t");
  for (uint64_t used = kBlock; used <= 600 * kMiB; used += kBlock) {
    (void)arena->Allocate(kBlock);
    if (used < 16 * kMiB) continue;
    ASSERT_LE(arena->bytes(), used + used / 50 + 2 * kMiB) << used;
    // Up to there a segment is one huge page, and the smaller ones before have room for no block more.
    if (used > 18 * kMiB && used <= 128 * kMiB) {
      ASSERT_EQ(arena->bytes(), RoundUp(used, 2 * kMiB)) << used;
    }
  }
}

TEST_P(StorageTest, BlocksAreAlignedAndLittleIsWasted) {
  const auto storage = Storage::Open(Spec());
  const uint64_t before = storage->bytes();
  constexpr size_t kBytes = 100096;  // a multiple of 256
  Rows rows(storage.get(), "t", kBytes);
  for (int i = 0; i < 100; ++i) ASSERT_EQ(reinterpret_cast<uintptr_t>(rows.Add()) % 256, 0U);
  EXPECT_GE(rows.bytes(), 100 * kBytes);
  EXPECT_LE(rows.bytes(), 100 * kBytes * 3 / 2);
  EXPECT_GE(storage->bytes(), rows.bytes());
  EXPECT_LE(storage->bytes() - before, rows.bytes() + kSuperBytes);
}

TEST_P(StorageTest, TheCapIsOneForAllTablesAndComesBack) {
  constexpr uint64_t kCap = uint64_t{2} << 20;
  const auto storage = Storage::Open(Spec(kCap));
  auto first = std::make_unique<Rows>(storage.get(), "first", size_t{100} << 10);
  Rows second(storage.get(), "second", size_t{100} << 10);
  for (int i = 0; i < 10; ++i) (void)first->Add();
  const std::string message = MessageOf<StorageError>([&] {
    while (true) (void)second.Add();
  });
  EXPECT_NE(message.find("is full: table 'second' needs 1"), std::string::npos) << message;
  EXPECT_NE(message.find("of 2.0 MiB are in use; raise the storage size"), std::string::npos) << message;
  EXPECT_GT(storage->bytes(), kCap * 8 / 10) << "gave up with room left";
  EXPECT_LE(storage->bytes(), kCap);
  first.reset();
  EXPECT_NE(second.Add(), nullptr);
}

INSTANTIATE_TEST_SUITE_P(Kinds, StorageTest, testing::ValuesIn(kStorageTypesInMemory),
                         [](const auto& kind) { return std::string(kind.param); });

TEST(MemkindStorageTest, SaysWhatIsMissing) {
  const TestDirectory directory;
  const auto message = [](const std::string& path, bool recover) {
    return MessageOf<Error>([&] { (void)Storage::Open({"pmem_memkind", path, 0, recover}); });
  };
  EXPECT_EQ(message(directory.file("a/b"), false).substr(0, 33), "cannot make the storage directory");
  EXPECT_EQ(message(directory.path(), true),
            "storage pmem_memkind cannot recover tables; only pmem_libpmem and dram_pmem outlive a process");
  ::setenv("MEMKIND_DAX_KMEM_NODES", "", 1);  // NOLINT(concurrency-mt-unsafe)
  if (std::filesystem::exists("/sys/bus/dax/drivers/kmem")) GTEST_SKIP() << "there may be KMEM DAX nodes";
  const std::string none = message("", false);
  EXPECT_NE(none.find("finds no KMEM DAX node on this host ("), std::string::npos) << none;
  EXPECT_NE(none.find("oeprov pmem-mode system-ram"), std::string::npos) << none;
}

TEST(MemkindStorageTest, LeavesNothingInItsDirectory) {
  const TestDirectory directory;
  const auto storage = Storage::Open({"pmem_memkind", directory.path(), 0});
  Rows rows(storage.get(), "t", 1000);
  EXPECT_NE(rows.Add(), nullptr);
  EXPECT_FALSE(storage->is_pmem());
  EXPECT_TRUE(FilesIn(directory.path()).empty());
}

// Caches share one limit: who comes later gets as much as those who were first.
TEST(CacheMemoryTest, ATableBelowItsShareTakesMemoryFromOneAbove) {
  constexpr size_t kBlock = 4096;
  CacheMemory memory(10 * kBlock);
  memory.Join();
  std::vector<std::byte*> first;
  while (std::byte* block = memory.Take(kBlock, 0, first.size() * kBlock)) first.push_back(block);
  EXPECT_EQ(first.size(), 10U);
  EXPECT_FALSE(memory.Owes(first.size() * kBlock)) << "nobody else asks";
  memory.Join();
  std::vector<std::byte*> second;
  for (int turn = 0; turn < 100; ++turn) {
    if (std::byte* block = memory.Take(kBlock, 0, second.size() * kBlock)) second.push_back(block);
    if (memory.Owes(first.size() * kBlock)) {
      memory.Give(first.back(), kBlock, 0);
      first.pop_back();
      EXPECT_EQ(memory.Take(kBlock, 0, first.size() * kBlock), nullptr) << "it is kept for the other";
    }
    ASSERT_LE(memory.bytes(), memory.limit());
  }
  EXPECT_EQ(first.size(), 5U);
  EXPECT_EQ(second.size(), 5U);
  EXPECT_FALSE(memory.Owes(second.size() * kBlock));
}

TEST(PmemStorageTest, SmallRowsDoNotStraddleLines) {
  for (size_t bytes = 4; bytes <= 1024; bytes += 4) {
    const RowLayout layout = RowLayout::InLines(bytes, size_t{32} << 10);
    size_t last = 0;
    for (uint32_t i = 0; i < layout.block_rows(); ++i) {
      const size_t begin = layout.Offset(i);
      ASSERT_GE(begin, i > 0 ? last + bytes : 0);
      ASSERT_EQ(begin / 256 + (bytes - 1) / 256, (begin + bytes - 1) / 256) << bytes << " row " << i;
      last = begin;
    }
    ASSERT_LE(last + bytes, layout.block_bytes);
    ASSERT_LE(layout.block_bytes, std::max(size_t{32} << 10, (bytes + 255) / 256 * 256));
  }
}

TEST(PmemStorageTest, FilesDescribeThemselvesAndGoOnCloseWithoutACheckpoint) {
  const TestDirectory directory;
  {
    const auto storage = Storage::Open({"pmem_libpmem", directory.path(), 0});
    Rows rows(storage.get(), "t", 1000, R"(, "dim": 9)");
    (void)rows.Add();
    const auto files = FilesIn(directory.path());
    ASSERT_EQ(files.size(), 3U);
    EXPECT_EQ(files[0].substr(19), "-000000.pool");
    EXPECT_EQ(files[1], files[0].substr(0, 19) + "-super.pool");
    EXPECT_EQ(files[2], "oe.lock");
    EXPECT_EQ(ReadAll(directory.file(files[0])).compare(0, 7, "OESLOTS"), 0);
    const std::string content = ReadAll(directory.file(files[1]));
    EXPECT_EQ(content.compare(0, 6, "OEPOOL"), 0);
    EXPECT_NE(content.find(R"("table":{"dim":9,"name":"t"})"), std::string::npos);
    EXPECT_EQ(std::stol(ReadAll(directory.file("oe.lock"))), ::getpid());
  }
  EXPECT_TRUE(FilesIn(directory.path()).empty());
}

TEST(PmemStorageTest, OneStoragePerDirectoryAndProcess) {
  const TestDirectory directory;
  const auto first = Storage::Open({"pmem_libpmem", directory.path(), 0});
  EXPECT_EQ(Storage::Open({"pmem_libpmem", directory.path() + "/.", 0}), first);
  EXPECT_THROW((void)Storage::Open({"pmem_libpmem", directory.path(), 4096}), StorageError);
}

TEST(PmemStorageTest, RefusesADirectoryThatALiveProcessHolds) {
  const TestDirectory directory;
  int ready[2];
  int done[2];
  ASSERT_EQ(::pipe(ready), 0);
  ASSERT_EQ(::pipe(done), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::close(done[1]);
    const auto storage = Storage::Open({"pmem_libpmem", directory.path(), 0});
    Rows rows(storage.get(), "t", 1000);
    (void)rows.Add();
    char byte = 'r';
    (void)!::write(ready[1], &byte, 1);
    (void)!::read(done[0], &byte, 1);
    ::_exit(0);  // without destructors, as a killed server
  }
  ::close(done[0]);
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  const auto open = [&] { return Storage::Open({"pmem_libpmem", directory.path(), 0}); };
  EXPECT_EQ(MessageOf<StorageError>(open), "the storage directory " + directory.path() +
                                               " is in use by process " + std::to_string(child) +
                                               "; stop it or give another directory");
  EXPECT_EQ(FilesIn(directory.path()).size(), 3U) << "the holder's files were touched";
  ::close(done[1]);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_EQ(FilesIn(directory.path()).size(), 3U);
  {
    const auto storage = open();  // the holder is dead: its files are stale
    EXPECT_EQ(FilesIn(directory.path()), std::vector<std::string>{"oe.lock"});
  }
  EXPECT_TRUE(FilesIn(directory.path()).empty());
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(PmemStorageTest, LeavesForeignFilesAlone) {
  const TestDirectory directory;
  WriteAll(directory.file("notes.txt"), "mine");
  WriteAll(directory.file("oe-rows-000009.pool"), std::string(100, '\0'));
  {
    const auto storage = Storage::Open({"pmem_libpmem", directory.path(), 0});
  }
  EXPECT_EQ(FilesIn(directory.path()), std::vector<std::string>{"notes.txt"});
  WriteAll(directory.file("oe-rows-000009.pool"), "somebody's data");
  const std::string message =
      MessageOf<StorageError>([&] { (void)Storage::Open({"pmem_libpmem", directory.path(), 0}); });
  EXPECT_NE(message.find("oe-rows-000009.pool is not a pool file"), std::string::npos) << message;
  EXPECT_EQ(ReadAll(directory.file("oe-rows-000009.pool")), "somebody's data");
  EXPECT_FALSE(std::filesystem::exists(directory.file("oe.lock")));
}

TEST(PmemStorageTest, AFullDeviceIsAnErrorAndNotASignal) {
  const TestDirectory directory;
  const auto storage = Storage::Open({"pmem_libpmem", directory.path(), 0});
  Rows small(storage.get(), "t", 290000);
  Rows large(storage.get(), "t", 400000);
  // A limit on file sizes stands in for the full device: allocating the blocks of a larger file fails.
  struct rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  struct rlimit limit = before;
  limit.rlim_cur = 300000;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_NE(small.Add(), nullptr) << "did not try a smaller piece";
  const std::string message = MessageOf<StorageError>([&] { (void)large.Add(); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  (void)std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("table 't': cannot get 3"), std::string::npos) << message;
  EXPECT_NE(message.find(directory.path() + ": File too large; free space there"), std::string::npos)
      << message;
  EXPECT_EQ(FilesIn(directory.path()).size(), 4U) << "the file that failed was left";
  EXPECT_NE(large.Add(), nullptr);
}

// Mapped pool files by whether a page fault reads only its own page ("rr" in the kernel's flags).
std::map<bool, int> MappedPoolFiles(const std::string& directory) {
  std::map<bool, int> found;
  std::ifstream maps("/proc/self/smaps");
  bool of_pool = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.find(directory) != std::string::npos) of_pool = true;
    if (line.compare(0, 8, "VmFlags:") != 0) continue;
    if (of_pool) ++found[line.find(" rr") != std::string::npos];
    of_pool = false;
  }
  return found;
}

TEST(PmemStorageTest, AFaultReadsNothingAroundARow) {
  const TestDirectory directory;
  StorageSpec spec{"pmem_libpmem", directory.path(), 0, true};
  {
    const auto storage = Storage::Open(spec);
    if (storage->is_pmem()) GTEST_SKIP() << "the directory is persistent memory: nothing is read around";
    Rows rows(storage.get(), "t", 1000);
    (void)rows.Add();
    EXPECT_EQ(MappedPoolFiles(directory.path()), (std::map<bool, int>{{true, 2}}));
    rows.pool()->Checkpoint(1, 1);
    rows.pool()->WaitDurable();
  }
  const auto storage = Storage::Open(spec);
  PoolSpec wanted = Rows::Spec("t", 1000);
  bool opened = false;
  const auto pool = storage->NewPool(wanted, false, &opened);
  ASSERT_TRUE(opened);
  const auto index = NewHashIndex();
  EXPECT_EQ(pool->Recover(std::nullopt, {index.get()}).rows, 1U);
  EXPECT_EQ(MappedPoolFiles(directory.path()), (std::map<bool, int>{{true, 2}}));
}

TEST(PmemStorageTest, SaysWhatIsWrongWithThePath) {
  const TestDirectory directory;
  const auto message = [](const std::string& path) {
    return MessageOf<Error>([&] { (void)Storage::Open({"pmem_libpmem", path, 0}); });
  };
  EXPECT_EQ(message(""), "storage pmem_libpmem needs a path, the directory for its files");
  EXPECT_EQ(message(directory.file("a/b")),
            "cannot make the storage directory " + directory.file("a/b") +
                "; make it (or mount the persistent memory there) first: No such file or directory");
  WriteAll(directory.file("file"), "x");
  EXPECT_EQ(message(directory.file("file")),
            "the storage path " + directory.file("file") + " is not a directory");
  EXPECT_EQ(MessageOf<SpecError>([] { (void)Storage::Open({"tape", "", 0}); }),
            "storage type 'tape' is not one of dram, pmem_libpmem, dram_pmem, dram_ssd, pmem_memkind");
  EXPECT_EQ(MessageOf<SpecError>([] { (void)Storage::Open({"dram", "/x", 0}); }),
            "storage dram takes no path, but '/x' was given");
}

}  // namespace
}  // namespace oe::storage_test
