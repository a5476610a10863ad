#include "oe_runtime/core/storage/storage.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/storage/row_store.h"

namespace oe {
namespace {

std::vector<std::string> FilesIn(const std::string& directory) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    names.insert(entry.path().filename().string());
  }
  return {names.begin(), names.end()};
}

class StorageTest : public testing::TestWithParam<const char*> {
 protected:
  StorageSpec Spec(uint64_t capacity = 0) const {
    const std::string type = GetParam();
    return {type, type == "dram" ? "" : directory_.path(), capacity};
  }

  TestDirectory directory_;
};

TEST_P(StorageTest, BlocksAreAlignedDisjointAndStay) {
  const auto storage = Storage::Open(Spec());
  const auto arena = storage->NewArena("t", "{}");
  std::vector<std::byte*> blocks;
  constexpr size_t kBytes = 100000;
  for (int i = 0; i < 100; ++i) {
    blocks.push_back(arena->Allocate(kBytes));
    ASSERT_EQ(reinterpret_cast<uintptr_t>(blocks.back()) % 256, 0U);
    std::memset(blocks.back(), i, kBytes);
  }
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(blocks[static_cast<size_t>(i)][0], std::byte(i));
    EXPECT_EQ(blocks[static_cast<size_t>(i)][kBytes - 1], std::byte(i));
  }
  EXPECT_GE(arena->bytes(), 100 * kBytes);
  EXPECT_LE(arena->bytes(), 100 * kBytes * 3 / 2);
  EXPECT_EQ(storage->bytes(), arena->bytes());
}

TEST_P(StorageTest, TheCapIsOneForAllArenasAndComesBack) {
  constexpr uint64_t kCap = uint64_t{2} << 20;
  const auto storage = Storage::Open(Spec(kCap));
  auto first = storage->NewArena("first", "{}");
  const auto second = storage->NewArena("second", "{}");
  (void)first->Allocate(uint64_t{1} << 20);
  const std::string message = MessageOf<StorageError>([&] {
    while (true) (void)second->Allocate(size_t{100} << 10);
  });
  EXPECT_NE(message.find("is full: table 'second' needs 1"), std::string::npos) << message;
  EXPECT_NE(message.find("of 2.0 MiB are in use; raise the storage size"), std::string::npos) << message;
  EXPECT_GT(storage->bytes(), kCap * 8 / 10) << "gave up with room left";
  EXPECT_LE(storage->bytes(), kCap);
  first.reset();
  EXPECT_NE(second->Allocate(size_t{100} << 10), nullptr);
}

TEST_P(StorageTest, RowsKeepTheirPlace) {
  const auto storage = Storage::Open(Spec());
  const auto arena = storage->NewArena("t", "{}");
  for (const size_t floats : {size_t{1}, size_t{18}, size_t{130}, size_t{200000}}) {
    RowStore store(arena.get(), floats);
    std::vector<float*> rows;
    const uint32_t count = floats > 1000 ? 5 : 5000;
    for (uint32_t i = 0; i < count; ++i) {
      store.Reserve();
      ASSERT_EQ(store.Add(), i);
      rows.push_back(store.row(i));
      store.row(i)[0] = static_cast<float>(i);
      store.row(i)[floats - 1] = static_cast<float>(i);
    }
    for (uint32_t i = 0; i < count; ++i) {
      ASSERT_EQ(store.row(i), rows[i]);
      ASSERT_EQ(store.row(i)[0], static_cast<float>(i));
      ASSERT_EQ(store.row(i)[floats - 1], static_cast<float>(i));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, StorageTest, testing::Values("dram", "pmem_libpmem"),
                         [](const auto& kind) { return std::string(kind.param); });

TEST(PmemStorageTest, FilesDescribeThemselvesAndGoOnClose) {
  const TestDirectory directory;
  {
    const auto storage = Storage::Open({"pmem_libpmem", directory.path(), 0});
    const auto arena = storage->NewArena("t", R"({"name": "t", "dim": 9})");
    (void)arena->Allocate(1000);
    const auto files = FilesIn(directory.path());
    ASSERT_EQ(files.size(), 2U);
    EXPECT_EQ(files[0], "oe-rows-000001.pool");
    EXPECT_EQ(files[1], "oe.lock");
    const std::string content = ReadAll(directory.file(files[0]));
    EXPECT_EQ(content.compare(0, 6, "OEPOOL"), 0);
    EXPECT_NE(content.find(R"("table":{"dim":9,"name":"t"})"), std::string::npos);
    EXPECT_EQ(std::stol(ReadAll(directory.file("oe.lock"))), ::getpid());
  }
  EXPECT_TRUE(FilesIn(directory.path()).empty());
}

TEST(PmemStorageTest, OneStorageADirectoryInAProcess) {
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
    const auto arena = storage->NewArena("t", "{}");
    (void)arena->Allocate(1000);
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
  EXPECT_EQ(FilesIn(directory.path()).size(), 2U) << "the holder's files were touched";
  ::close(done[1]);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_EQ(FilesIn(directory.path()).size(), 2U);
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
  const auto arena = storage->NewArena("t", "{}");
  // A limit on file sizes stands in for the full device: allocating the blocks of a larger file fails.
  struct rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  struct rlimit limit = before;
  limit.rlim_cur = 300000;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_NE(arena->Allocate(290000), nullptr) << "did not try a smaller piece";
  const std::string message = MessageOf<StorageError>([&] { (void)arena->Allocate(400000); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  (void)std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("table 't': cannot get 3"), std::string::npos) << message;
  EXPECT_NE(message.find(directory.path() + ": File too large; free space there"), std::string::npos)
      << message;
  EXPECT_EQ(FilesIn(directory.path()).size(), 2U) << "the file that failed was left";
  EXPECT_NE(arena->Allocate(400000), nullptr);
}

TEST(PmemStorageTest, SaysWhatIsWrongWithThePath) {
  const TestDirectory directory;
  const auto message = [](const std::string& path) {
    return MessageOf<Error>([&] { (void)Storage::Open({"pmem_libpmem", path, 0}); });
  };
  EXPECT_EQ(message(""), "storage pmem_libpmem needs a path, the directory for its pool files");
  EXPECT_EQ(message(directory.file("a/b")),
            "cannot make the storage directory " + directory.file("a/b") +
                "; make it (or mount the persistent memory there) first: No such file or directory");
  WriteAll(directory.file("file"), "x");
  EXPECT_EQ(message(directory.file("file")),
            "the storage path " + directory.file("file") + " is not a directory");
  EXPECT_EQ(MessageOf<SpecError>([] { (void)Storage::Open({"tape", "", 0}); }),
            "storage type 'tape' is not one of dram, pmem_libpmem");
  EXPECT_EQ(MessageOf<SpecError>([] { (void)Storage::Open({"dram", "/x", 0}); }),
            "storage dram takes no path, but '/x' was given");
}

}  // namespace
}  // namespace oe
