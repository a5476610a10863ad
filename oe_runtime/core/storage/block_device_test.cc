#include "oe_runtime/core/storage/block_device.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"

namespace oe::block_device_test {
namespace {

// What byte `at` of a device holds: different in all blocks.
std::byte ByteAt(uint64_t at) {
  return static_cast<std::byte>((at / kBlockBytes * 131 + at % kBlockBytes * 7 + 1) & 0xFF);
}

void Fill(BlockDevice* device) {
  const size_t bytes = device->size();
  const BlockBuffer buffer(bytes);
  for (size_t at = 0; at < bytes; ++at) buffer.data()[at] = ByteAt(at);
  device->Write(0, buffer.data(), bytes);
}

bool IsRight(const BlockRead& read) {
  if (read.error != 0) return false;
  for (uint32_t at = 0; at < read.bytes; ++at) {
    if (read.into[at] != ByteAt(read.offset + at)) return false;
  }
  return true;
}

class BlockDeviceTest : public testing::TestWithParam<ReadMethod> {
 protected:
  std::unique_ptr<BlockDevice> Open() { return OpenBlockDevice(directory_.file("blocks"), GetParam()); }

  TestDirectory directory_;
};

TEST_P(BlockDeviceTest, BlocksAndPiecesAreReadAsWritten) {
  const auto device = Open();
  device->Grow(48 * kBlockBytes);
  ASSERT_EQ(device->size(), 48 * kBlockBytes);
  Fill(device.get());
  device->Flush();

  std::mt19937_64 random(1);
  const auto queue = device->NewQueue();
  const BlockBuffer blocks(100 * 12 * kBlockBytes);
  std::vector<std::byte> pieces(100 * kBlockBytes);
  std::vector<BlockRead> reads(200);
  for (size_t at = 0; at < 100; ++at) {
    const uint64_t count = 1 + random() % 12;
    reads[2 * at] = {random() % (49 - count) * kBlockBytes, blocks.data() + at * 12 * kBlockBytes,
                     static_cast<uint32_t>(count * kBlockBytes)};
    const uint64_t from = random() % kBlockBytes;
    reads[2 * at + 1] = {random() % 48 * kBlockBytes + from, pieces.data() + at * kBlockBytes + 1,
                         static_cast<uint32_t>(1 + random() % std::min(kBlockBytes - from, kBlockBytes - 1))};
  }
  EXPECT_EQ(queue->Submit(reads.data(), 50), 1U);
  EXPECT_EQ(queue->Submit(reads.data() + 50, 0), 2U);
  EXPECT_EQ(queue->Submit(reads.data() + 50, 150), 3U);
  queue->Wait(1);
  for (size_t at = 0; at < 50; ++at) ASSERT_TRUE(IsRight(reads[at])) << at;
  queue->Wait();
  EXPECT_TRUE(queue->Poll());
  for (const BlockRead& read : reads) ASSERT_TRUE(IsRight(read)) << read.offset << " " << read.error;
  EXPECT_EQ(device->stats().reads, 200U);
  EXPECT_EQ(device->stats().read_errors, 0U);
  EXPECT_EQ(device->stats().written_bytes, 48 * kBlockBytes);
}

TEST_P(BlockDeviceTest, ReadsOfSeveralThreadsDoNotMix) {
  const auto device = Open();
  device->Grow(64 * kBlockBytes);
  Fill(device.get());
  std::vector<std::thread> threads;
  std::vector<int> right(4);
  for (size_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      const auto queue = device->NewQueue();
      std::mt19937_64 random(thread);
      std::vector<std::byte> rows(size_t{300} * 64);
      std::vector<BlockRead> reads(300);
      for (int round = 0; round < 10; ++round) {
        for (size_t at = 0; at < reads.size(); ++at) {
          reads[at] = {random() % (64 * kBlockBytes / 64) * 64, &rows[at * 64], 64};
        }
        queue->Submit(reads.data(), reads.size());
        while (!queue->Poll()) std::this_thread::yield();
        for (const BlockRead& read : reads) right[thread] += IsRight(read) ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, std::vector<int>(4, 3000));
}

TEST_P(BlockDeviceTest, AQueueEndsAfterItsReads) {
  const auto device = Open();
  device->Grow(16 * kBlockBytes);
  Fill(device.get());
  std::vector<std::byte> rows(1000 * 16);
  std::vector<BlockRead> reads(1000);
  for (size_t at = 0; at < reads.size(); ++at) reads[at] = {at * 16, &rows[at * 16], 16};
  device->NewQueue()->Submit(reads.data(), reads.size());
  for (const BlockRead& read : reads) ASSERT_TRUE(IsRight(read));
}

TEST_P(BlockDeviceTest, QueuesOfOneThreadMayTakeTurns) {
  const auto device = Open();
  const auto other = OpenBlockDevice(directory_.file("other"), GetParam());
  for (const auto& one : {device.get(), other.get()}) {
    one->Grow(64 * kBlockBytes);
    Fill(one);
  }
  const auto first = device->NewQueue();
  const auto second = other->NewQueue();
  std::vector<std::byte> rows(size_t{1000} * 8);
  std::vector<BlockRead> reads(1000);
  for (size_t at = 0; at < reads.size(); ++at) reads[at] = {at * 8, &rows[at * 8], 8};
  // The first has all that may be in flight, and goes on when it is waited for.
  first->Submit(reads.data(), 500);
  second->Submit(reads.data() + 500, 500);
  second->Wait();
  for (size_t at = 500; at < 1000; ++at) ASSERT_TRUE(IsRight(reads[at])) << at;
  first->Wait();
  for (size_t at = 0; at < 500; ++at) ASSERT_TRUE(IsRight(reads[at])) << at;
  EXPECT_EQ(device->stats().reads, 500U);
  EXPECT_EQ(other->stats().reads, 500U);
}

TEST_P(BlockDeviceTest, ABlockWithAnotherChecksumIsAnError) {
  const auto device = Open();
  device->Grow(4 * kBlockBytes);
  Fill(device.get());
  const BlockBuffer blocks(2 * kBlockBytes);
  std::byte row[16] = {};
  BlockRead whole{kBlockBytes, blocks.data(), kBlockBytes};
  const auto queue = device->NewQueue();
  queue->Submit(&whole, 1);
  queue->Wait();
  const uint32_t sum = BlockChecksum(blocks.data());
  EXPECT_NE(sum, 0U);
  std::vector<BlockRead> reads = {
      {kBlockBytes + 100, row, 16, sum},     {kBlockBytes, blocks.data(), kBlockBytes, sum},
      {kBlockBytes + 100, row, 16, sum ^ 1}, {kBlockBytes, blocks.data(), kBlockBytes, sum ^ 1},
      {2 * kBlockBytes + 100, row, 16, sum}, {0, blocks.data(), 2 * kBlockBytes, sum},
  };
  std::vector<int> errors;
  for (BlockRead& read : reads) {
    std::fill_n(row, 16, std::byte{0});
    queue->Submit(&read, 1);
    queue->Wait();
    errors.push_back(read.error);
    if (read.into == row) {
      EXPECT_EQ(row[0] == ByteAt(read.offset), read.error == 0);
    }
  }
  EXPECT_EQ(errors, (std::vector<int>{0, 0, EBADMSG, EBADMSG, EBADMSG, EINVAL}));
}

TEST_P(BlockDeviceTest, ErrorsAreThoseOfTheirReads) {
  const auto device = Open();
  device->Grow(4 * kBlockBytes);
  Fill(device.get());
  const auto queue = device->NewQueue();
  const BlockBuffer blocks(8 * kBlockBytes);
  std::byte row[16];
  std::vector<BlockRead> reads = {
      {0, blocks.data(), kBlockBytes},                                  // right
      {4 * kBlockBytes, blocks.data() + kBlockBytes, kBlockBytes},      // past the end
      {3 * kBlockBytes, blocks.data() + kBlockBytes, 2 * kBlockBytes},  // partly
      {4 * kBlockBytes + 16, row, 16},
      {kBlockBytes - 8, row, 16},                 // over two blocks
      {0, blocks.data() + 512, 2 * kBlockBytes},  // several blocks to memory that is not aligned
      {0, row, 0},
      {0, nullptr, 16},
  };
  queue->Submit(reads.data(), reads.size());
  queue->Wait();
  std::vector<int> errors;
  for (const BlockRead& read : reads) errors.push_back(read.error);
  EXPECT_EQ(errors, (std::vector<int>{0, ENODATA, ENODATA, ENODATA, EINVAL, EINVAL, EINVAL, EINVAL}));
  EXPECT_TRUE(IsRight(reads[0]));
  EXPECT_EQ(device->stats().read_errors, 7U);
}

INSTANTIATE_TEST_SUITE_P(Methods, BlockDeviceTest, testing::Values(ReadMethod::kBest, ReadMethod::kPreads),
                         [](const auto& method) {
                           return method.param == ReadMethod::kBest ? "Best" : "Preads";
                         });

class FileDeviceTest : public testing::Test {
 protected:
  std::unique_ptr<BlockDevice> Open() { return OpenBlockDevice(directory_.file("blocks")); }
  uint64_t BlocksOf(const std::string& file) const {
    struct stat there{};
    EXPECT_EQ(::stat(directory_.file(file).c_str(), &there), 0);
    return static_cast<uint64_t>(there.st_blocks) * 512;
  }

  TestDirectory directory_;
};

TEST_F(FileDeviceTest, TheNextProcessFindsSizeAndContent) {
  {
    const auto device = Open();
    EXPECT_EQ(device->size(), 0U);
    device->Grow(5 * kBlockBytes + 1);
    EXPECT_EQ(device->size(), 6 * kBlockBytes);  // whole blocks
    Fill(device.get());
    device->Flush();
    device->Grow(kBlockBytes);  // never less
  }
  const auto device = Open();
  ASSERT_EQ(device->size(), 6 * kBlockBytes);
  const BlockBuffer blocks(6 * kBlockBytes);
  BlockRead read{0, blocks.data(), 6 * kBlockBytes};
  device->NewQueue()->Submit(&read, 1);
  EXPECT_TRUE(IsRight(read));
}

TEST_F(FileDeviceTest, MemoryOfWritesNeedsNoAlignment) {
  const auto device = Open();
  device->Grow(2 * kBlockBytes);
  std::vector<std::byte> data(2 * kBlockBytes + 1);
  for (size_t at = 0; at < 2 * kBlockBytes; ++at) data[at + 1] = ByteAt(at);
  device->Write(0, data.data() + 1, 2 * kBlockBytes);
  std::vector<std::byte> row(100);
  BlockRead read{kBlockBytes + 50, row.data(), 100};
  device->NewQueue()->Submit(&read, 1);
  EXPECT_TRUE(IsRight(read));
}

TEST_F(FileDeviceTest, GrowReservesTheSpaceAndDiscardGivesItBack) {
  const auto device = Open();
  device->Grow(uint64_t{1} << 20);
  const uint64_t grown = BlocksOf("blocks");
  EXPECT_GE(grown, uint64_t{1} << 20);
  device->Discard(0, uint64_t{512} << 10);
  EXPECT_LE(BlocksOf("blocks"), grown - (uint64_t{512} << 10));
  EXPECT_EQ(device->size(), uint64_t{1} << 20);
}

TEST_F(FileDeviceTest, AFileThatCannotGrowIsNotLonger) {
  const auto device = Open();
  device->Grow(kBlockBytes);
  // Stands for a full file system: the limit of a file's size gives EFBIG.
  struct rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  struct rlimit small = before;
  small.rlim_cur = 1 << 20;
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string message = MessageOf<StorageError>([&] { device->Grow(2 << 20); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("cannot get"), std::string::npos) << message;
  EXPECT_NE(message.find(directory_.file("blocks")), std::string::npos) << message;
  EXPECT_EQ(device->size(), kBlockBytes);
  device->Grow(2 << 20);
  EXPECT_EQ(device->size(), uint64_t{2} << 20);
}

TEST_F(FileDeviceTest, WritesMustBeWholeBlocksThatAreThere) {
  const auto device = Open();
  device->Grow(kBlockBytes);
  const BlockBuffer blocks(2 * kBlockBytes);
  EXPECT_THROW(device->Write(0, blocks.data(), 100), StorageError);
  EXPECT_THROW(device->Write(8, blocks.data(), kBlockBytes), StorageError);
  EXPECT_THROW(device->Write(0, blocks.data(), 2 * kBlockBytes), StorageError);
  EXPECT_THROW(device->Write(kBlockBytes, blocks.data(), kBlockBytes), StorageError);
}

TEST_F(FileDeviceTest, FilesThatCannotServeAreRefusedByName) {
  const std::string missing = directory_.file("missing") + "/blocks";
  EXPECT_NE(MessageOf<StorageError>([&] { OpenBlockDevice(missing); }).find(missing), std::string::npos);
  EXPECT_NE(MessageOf<StorageError>([&] {
              OpenBlockDevice("/dev/null");
            }).find("/dev/null is not an ordinary file"),
            std::string::npos);
  WriteAll(directory_.file("target"), "x");
  ASSERT_EQ(::symlink("target", directory_.file("link").c_str()), 0);
  EXPECT_THROW(OpenBlockDevice(directory_.file("link")), StorageError);
}

TEST_F(FileDeviceTest, FilesAreOfTheirOwnerOnly) {
  Open();
  struct stat there{};
  ASSERT_EQ(::stat(directory_.file("blocks").c_str(), &there), 0);
  EXPECT_EQ(there.st_mode & 0777, mode_t{0600});
}

}  // namespace
}  // namespace oe::block_device_test
