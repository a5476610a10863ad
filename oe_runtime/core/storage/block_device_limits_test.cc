// Block devices where the kernel forbids something: a seccomp filter of one thread, or a limit, stands for
// it.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/io_uring.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/file.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/storage/block_device.h"
#include "oe_runtime/core/storage/uring_queue.h"

namespace oe::block_device_limits_test {
namespace {

// A system call that fails: all calls, or those with any bit of `mask` in an argument.
struct Forbidden {
  long call;
  int error;
  uint32_t argument = 0;
  uint32_t mask = 0;
};

bool Install(const std::vector<Forbidden>& calls) {
  std::vector<struct sock_filter> filter;
  const auto load = [&](size_t offset) {
    filter.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(offset)));
  };
  for (const Forbidden& one : calls) {
    load(offsetof(struct seccomp_data, nr));
    const auto skipped = static_cast<unsigned char>(one.mask == 0 ? 1 : 3);
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(one.call), 0, skipped));
    if (one.mask != 0) {
      load(offsetof(struct seccomp_data, args) + one.argument * sizeof(uint64_t));
      filter.push_back(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, one.mask, 0, 1));
    }
    filter.push_back(
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(one.error & SECCOMP_RET_DATA)));
  }
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const struct sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) == 0;
}

// Runs `work` in a thread for which the calls fail. False where no filter may be installed.
bool RunWithout(const std::vector<Forbidden>& calls, const std::function<void()>& work) {
  bool installed = false;
  std::thread([&] {
    installed = Install(calls);
    if (installed) work();
  }).join();
  return installed;
}

bool KernelHasUring() {
  struct io_uring_params params{};
  const File ring(static_cast<int>(::syscall(__NR_io_uring_setup, 1, &params)));
  return ring.ok() && (params.features & IORING_FEAT_RW_CUR_POS) != 0;
}

// Sets a soft limit for as long as it lives.
class Limit {
 public:
  Limit(__rlimit_resource resource, rlim_t value) : resource_(resource) {
    (void)::getrlimit(resource_, &before_);
    struct rlimit now = before_;
    now.rlim_cur = std::min(value, before_.rlim_max);
    (void)::setrlimit(resource_, &now);
  }
  ~Limit() { (void)::setrlimit(resource_, &before_); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

 private:
  __rlimit_resource resource_;
  struct rlimit before_{};
};

class BlockDeviceLimitsTest : public testing::Test {
 protected:
  static constexpr size_t kBlocks = 32;

  std::unique_ptr<BlockDevice> Open() { return OpenBlockDevice(directory_.file("blocks")); }
  // Writes a number into each block, and reads all of them in two shapes.
  static void ExpectRightReads(BlockDevice* device) {
    device->Grow(kBlocks * kBlockBytes);
    const BlockBuffer blocks(kBlocks * kBlockBytes);
    for (size_t at = 0; at < blocks.size(); ++at)
      blocks.data()[at] = static_cast<std::byte>(at / kBlockBytes + 1);
    device->Write(0, blocks.data(), blocks.size());
    std::fill_n(blocks.data(), blocks.size(), std::byte{0});
    std::vector<std::byte> rows(kBlocks);
    std::vector<BlockRead> reads;
    for (size_t at = 0; at < kBlocks; ++at) {
      reads.push_back({at * kBlockBytes, blocks.data() + at * kBlockBytes, kBlockBytes});
      reads.push_back({at * kBlockBytes + 77, &rows[at], 1});
    }
    const auto queue = device->NewQueue();
    queue->Submit(reads.data(), reads.size());
    queue->Wait();
    for (size_t at = 0; at < kBlocks; ++at) {
      EXPECT_EQ(reads[2 * at].error, 0);
      EXPECT_EQ(reads[2 * at + 1].error, 0);
      EXPECT_EQ(static_cast<size_t>(blocks.data()[at * kBlockBytes + 4095]), at + 1);
      EXPECT_EQ(static_cast<size_t>(rows[at]), at + 1);
    }
  }

  TestDirectory directory_;
};

#define SKIP_WITHOUT_FILTER(ran) \
  if (!(ran)) GTEST_SKIP() << "no seccomp filter may be installed here"

TEST_F(BlockDeviceLimitsTest, UringIsUsedWhereTheKernelHasIt) {
  const auto device = Open();
  if (device->description().find("direct I/O") != std::string::npos) GTEST_SKIP() << device->description();
  EXPECT_EQ(device->description().substr(0, 8), HasLiburing() && KernelHasUring() ? "io_uring" : "preads: ");
}

TEST_F(BlockDeviceLimitsTest, PreadsServeWhereUringIsForbidden) {
  for (const Forbidden& forbidden : std::vector<Forbidden>{{__NR_io_uring_setup, EPERM},
                                                           {__NR_io_uring_setup, ENOSYS},
                                                           {__NR_io_uring_enter, EPERM},
                                                           {__NR_io_uring_setup, ENOMEM}}) {
    SKIP_WITHOUT_FILTER(RunWithout({forbidden}, [&] {
      const auto device = Open();
      const std::string how = device->description();
      EXPECT_EQ(how.substr(0, 8), "preads: ") << how;
      EXPECT_GT(how.size(), std::string("preads: ").size()) << "no reason";
      ExpectRightReads(device.get());
    }));
  }
}

TEST_F(BlockDeviceLimitsTest, ThePageCacheServesWhereDirectReadsAreForbidden) {
  SKIP_WITHOUT_FILTER(RunWithout({{__NR_openat, EINVAL, 2, O_DIRECT}}, [&] {
    const auto device = Open();
    EXPECT_EQ(device->description(),
              "preads through the page cache: no direct I/O for " + directory_.file("blocks"));
    ExpectRightReads(device.get());
    device->Flush();
  }));
}

TEST_F(BlockDeviceLimitsTest, BuffersAreNotRegisteredWithoutLockedMemory) {
  if (!HasLiburing() || !KernelHasUring()) GTEST_SKIP() << "no io_uring here";
  std::string how;
  std::thread([&] {
    // Who may lock any memory has no limit.
    struct __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct sets[2] = {};
    if (::syscall(SYS_capget, &header, sets) == 0) {
      sets[0].effective &= ~(1U << CAP_IPC_LOCK);
      (void)::syscall(SYS_capset, &header, sets);
    }
    const Limit limit(RLIMIT_MEMLOCK, 0);
    const auto device = Open();
    how = device->description();
    ExpectRightReads(device.get());
  }).join();
  if (how.find("direct I/O") != std::string::npos) GTEST_SKIP() << how;
  EXPECT_NE(how.find("limit of locked memory (ulimit -l)"), std::string::npos) << how;
}

TEST_F(BlockDeviceLimitsTest, NoOpenFilesAreLeftIsAnError) {
  const int next = File(::dup(0)).get();
  const Limit limit(RLIMIT_NOFILE, static_cast<rlim_t>(next));
  const std::string message = MessageOf<StorageError>([&] { Open(); });
  EXPECT_NE(message.find("Too many open files"), std::string::npos) << message;
}

TEST_F(BlockDeviceLimitsTest, AFailedFlushStaysFailed) {
  SKIP_WITHOUT_FILTER(RunWithout({{__NR_fdatasync, EIO}}, [&] {
    const auto device = Open();
    device->Grow(kBlockBytes);
    const std::string message = MessageOf<StorageError>([&] { device->Flush(); });
    EXPECT_NE(message.find(directory_.file("blocks")), std::string::npos) << message;
    EXPECT_NE(message.find("Input/output error"), std::string::npos) << message;
    // In this thread all would go well again.
    std::thread([&] {
      const BlockBuffer block(kBlockBytes);
      EXPECT_THROW(device->Write(0, block.data(), kBlockBytes), StorageError);
      EXPECT_THROW(device->Flush(), StorageError);
      EXPECT_THROW(device->Grow(2 * kBlockBytes), StorageError);
    }).join();
  }));
}

TEST_F(BlockDeviceLimitsTest, FailedReadsAndWritesNameTheirCause) {
  const auto device = Open();
  device->Grow(kBlockBytes);
  SKIP_WITHOUT_FILTER(RunWithout({{__NR_pwrite64, ENOSPC}}, [&] {
    const BlockBuffer block(kBlockBytes);
    EXPECT_NE(
        MessageOf<StorageFull>([&] { device->Write(0, block.data(), kBlockBytes); }).find("No space left"),
        std::string::npos);
  }));
  SKIP_WITHOUT_FILTER(RunWithout({{__NR_pwrite64, EIO}}, [&] {
    const BlockBuffer block(kBlockBytes);
    const std::string message = MessageOf<StorageError>([&] { device->Write(0, block.data(), kBlockBytes); });
    EXPECT_NE(message.find(directory_.file("blocks") + ": Input/output error"), std::string::npos) << message;
  }));
  SKIP_WITHOUT_FILTER(RunWithout({{__NR_io_uring_setup, EPERM}, {__NR_pread64, EIO}}, [&] {
    // A device of its own: threads that read inherit the filter.
    const auto bad = OpenBlockDevice(directory_.file("bad"), ReadMethod::kPreads);
    bad->Grow(kBlockBytes);
    std::byte row{};
    BlockRead read{8, &row, 1};
    const auto queue = bad->NewQueue();
    queue->Submit(&read, 1);
    queue->Wait();
    EXPECT_EQ(read.error, EIO);
    EXPECT_EQ(bad->stats().read_errors, 1U);
  }));
}

// A queue that cannot finish is destroyed like any other, and what it had asked for is not read later.
TEST_F(BlockDeviceLimitsTest, AQueueEndsWhereTheKernelTakesNoMoreReads) {
  const auto device = Open();
  if (device->description().substr(0, 8) != "io_uring") GTEST_SKIP() << device->description();
  device->Grow(kBlocks * kBlockBytes);
  bool installed = false;
  std::thread([&] {
    ExpectRightReads(device.get());  // with the ring of this thread
    installed = Install({{__NR_io_uring_enter, EPERM}});
    if (!installed) return;
    std::vector<std::byte> rows(kBlocks, std::byte{0xAA});
    std::vector<BlockRead> reads;
    reads.reserve(kBlocks);
    for (size_t at = 0; at < kBlocks; ++at) reads.push_back({at * kBlockBytes + 77, &rows[at], 1});
    for (int turn = 0; turn < 10; ++turn) {  // more than a ring has room for
      const auto queue = device->NewQueue();
      const std::string message = MessageOf<StorageError>([&] { queue->Submit(reads.data(), reads.size()); });
      EXPECT_EQ(message, "io_uring fails: Operation not permitted");
    }
  }).join();
  SKIP_WITHOUT_FILTER(installed);
}

TEST_F(BlockDeviceLimitsTest, TheSpaceOfADeviceIsReservedOrTheCauseIsNamed) {
  SKIP_WITHOUT_FILTER(RunWithout({{__NR_fallocate, ENOSPC}}, [&] {
    const auto device = Open();
    EXPECT_THROW(device->Grow(kBlockBytes), StorageFull);
    EXPECT_EQ(device->size(), 0U);
  }));
  // A file system without reservations: blocks come with their writes.
  SKIP_WITHOUT_FILTER(RunWithout({{__NR_fallocate, EOPNOTSUPP}}, [&] {
    const auto device = Open();
    ExpectRightReads(device.get());
    device->Discard(0, kBlockBytes);
    EXPECT_EQ(device->size(), kBlocks * kBlockBytes);
  }));
}

}  // namespace
}  // namespace oe::block_device_limits_test
