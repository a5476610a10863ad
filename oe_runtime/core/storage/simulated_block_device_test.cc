#include "oe_runtime/core/storage/simulated_block_device.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "oe_runtime/core/common/error.h"

namespace oe::simulated_block_device_test {
namespace {

std::vector<std::byte> Blocks(size_t count, int value) {
  return std::vector<std::byte>(count * kBlockBytes, static_cast<std::byte>(value));
}

// Bytes of the device, one a sector of 512.
std::vector<int> Sectors(BlockDevice* device) {
  std::vector<int> sectors;
  const auto queue = device->NewQueue();
  for (uint64_t at = 0; at < device->size(); at += 512) {
    std::byte bytes[512];
    BlockRead read{at, bytes, 512};
    queue->Submit(&read, 1);
    queue->Wait();
    EXPECT_EQ(read.error, 0);
    for (const std::byte byte : bytes) EXPECT_EQ(byte, bytes[0]);
    sectors.push_back(static_cast<int>(bytes[0]));
  }
  return sectors;
}

// Writes 2 over durable 1 in two blocks, then 3 over both.
std::vector<int> AfterPowerCut(uint64_t seed, size_t sector_bytes) {
  SimulatedBlockDevice device(seed, sector_bytes);
  device.Grow(2 * kBlockBytes);
  device.Write(0, Blocks(2, 1).data(), 2 * kBlockBytes);
  device.Flush();
  device.Write(0, Blocks(2, 2).data(), 2 * kBlockBytes);
  device.Write(0, Blocks(2, 3).data(), 2 * kBlockBytes);
  EXPECT_EQ(Sectors(&device), std::vector<int>(16, 3));  // read as written
  device.Restart(true);
  return Sectors(&device);
}

TEST(SimulatedBlockDeviceTest, APowerCutLosesReordersAndTearsWhatWasNotFlushed) {
  std::set<std::vector<int>> seen;
  bool lost = false, kept = false, older_won = false, torn = false;
  for (uint64_t seed = 0; seed < 500; ++seed) {
    const std::vector<int> sectors = AfterPowerCut(seed, 512);
    ASSERT_EQ(sectors, AfterPowerCut(seed, 512));  // a seed repeats a run
    seen.insert(sectors);
    lost = lost || sectors == std::vector<int>(16, 1);
    kept = kept || std::count(sectors.begin(), sectors.end(), 3) >= 12;
    older_won = older_won || std::count(sectors.begin(), sectors.end(), 2) > 0;
    torn = torn || std::set<int>(sectors.begin(), sectors.begin() + 8).size() == 3;
  }
  EXPECT_TRUE(lost && kept && older_won && torn);
  EXPECT_GT(seen.size(), 100U);
}

TEST(SimulatedBlockDeviceTest, SectorsAreTornAsWhole) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const std::vector<int> sectors = AfterPowerCut(seed, kBlockBytes);
    for (size_t at = 0; at < sectors.size(); ++at) ASSERT_EQ(sectors[at], sectors[at / 8 * 8]);
  }
}

TEST(SimulatedBlockDeviceTest, AFlushKeepsAndAKillKeepsAll) {
  SimulatedBlockDevice device(1);
  device.Grow(kBlockBytes);
  device.Write(0, Blocks(1, 5).data(), kBlockBytes);
  device.Restart(false);
  EXPECT_EQ(Sectors(&device), std::vector<int>(8, 5));
  device.Flush();
  device.Restart(true);
  EXPECT_EQ(Sectors(&device), std::vector<int>(8, 5));
}

TEST(SimulatedBlockDeviceTest, GrowthIsLostOrKeptAsZeros) {
  std::set<uint64_t> sizes;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SimulatedBlockDevice device(seed);
    device.Grow(kBlockBytes);
    device.Restart(true);
    sizes.insert(device.size());
    for (const int sector : Sectors(&device)) ASSERT_EQ(sector, 0);
  }
  EXPECT_EQ(sizes, (std::set<uint64_t>{0, kBlockBytes}));
}

TEST(SimulatedBlockDeviceTest, AfterACrashNothingIsWritten) {
  bool partly = false;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SimulatedBlockDevice device(seed);
    device.Grow(kBlockBytes);
    device.CrashAfter(1);
    device.Flush();
    EXPECT_THROW(device.Write(0, Blocks(1, 5).data(), kBlockBytes), SimulatedBlockDevice::Crash);
    EXPECT_THROW(device.Write(0, Blocks(1, 6).data(), kBlockBytes), SimulatedBlockDevice::Crash);
    EXPECT_THROW(device.Flush(), SimulatedBlockDevice::Crash);
    device.Restart(false);
    const std::vector<int> sectors = Sectors(&device);
    const std::set<int> values(sectors.begin(), sectors.end());
    EXPECT_EQ(values.count(6), 0U);
    partly = partly || values.size() == 2;  // the process ended in the middle
  }
  EXPECT_TRUE(partly);
}

TEST(SimulatedBlockDeviceTest, AFailedFlushStaysFailedAndLosesWhatReadsStillFind) {
  bool lost = false;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    SimulatedBlockDevice device(seed);
    device.Grow(kBlockBytes);
    device.Flush();
    device.FailFlushesAfter(0);
    device.Write(0, Blocks(1, 5).data(), kBlockBytes);
    EXPECT_THROW(device.Flush(), StorageError);
    EXPECT_THROW(device.Flush(), StorageError);
    EXPECT_THROW(device.Write(0, Blocks(1, 6).data(), kBlockBytes), StorageError);
    EXPECT_EQ(Sectors(&device), std::vector<int>(8, 5));
    device.Restart(true);
    lost = lost || Sectors(&device) != std::vector<int>(8, 5);
    device.Flush();
  }
  EXPECT_TRUE(lost);
}

TEST(SimulatedBlockDeviceTest, BadBlocksFailTheirReadsUntilTheyAreWritten) {
  SimulatedBlockDevice device(1);
  device.Grow(4 * kBlockBytes);
  device.FailReads(2 * kBlockBytes + 100);
  const auto queue = device.NewQueue();
  const BlockBuffer blocks(4 * kBlockBytes);
  const auto error_of = [&](uint64_t offset, uint32_t bytes) {
    BlockRead read{offset, blocks.data(), bytes};
    queue->Submit(&read, 1);
    queue->Wait();
    return read.error;
  };
  EXPECT_EQ(error_of(kBlockBytes, kBlockBytes), 0);
  EXPECT_EQ(error_of(2 * kBlockBytes, kBlockBytes), EIO);
  EXPECT_EQ(error_of(2 * kBlockBytes + 8, 16), EIO);
  EXPECT_EQ(error_of(kBlockBytes, 3 * kBlockBytes), EIO);
  EXPECT_EQ(error_of(3 * kBlockBytes, kBlockBytes), 0);
  EXPECT_EQ(error_of(4 * kBlockBytes, kBlockBytes), ENODATA);
  EXPECT_EQ(error_of(kBlockBytes - 8, 16), EINVAL);
  device.Write(2 * kBlockBytes, Blocks(1, 5).data(), kBlockBytes);
  EXPECT_EQ(error_of(2 * kBlockBytes, kBlockBytes), 0);
  EXPECT_EQ(device.stats().read_errors, 5U);
}

TEST(SimulatedBlockDeviceTest, AFailedWriteLeavesSomeOfItsSectors) {
  SimulatedBlockDevice device(1);
  device.Grow(4 * kBlockBytes);
  device.FailWritesAfter(1);
  device.Write(0, Blocks(4, 1).data(), 4 * kBlockBytes);
  EXPECT_THROW(device.Write(0, Blocks(4, 2).data(), 4 * kBlockBytes), StorageError);
  const std::vector<int> sectors = Sectors(&device);
  EXPECT_EQ(std::set<int>(sectors.begin(), sectors.end()), (std::set<int>{1, 2}));
}

TEST(SimulatedBlockDeviceTest, ReadsHappenAtAnyTimeBeforeTheyAreWaitedFor) {
  std::set<int> seen;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SimulatedBlockDevice device(seed);
    device.Grow(kBlockBytes);
    const auto queue = device.NewQueue();
    std::byte byte{};
    BlockRead read{0, &byte, 1};
    queue->Submit(&read, 1);
    device.Write(0, Blocks(1, 5).data(), kBlockBytes);
    queue->Wait();
    seen.insert(static_cast<int>(byte));
  }
  EXPECT_EQ(seen, (std::set<int>{0, 5}));
}

TEST(SimulatedBlockDeviceTest, AFlippedBitIsAnotherChecksum) {
  SimulatedBlockDevice device(1);
  device.Grow(2 * kBlockBytes);
  device.Write(0, Blocks(2, 5).data(), 2 * kBlockBytes);
  const auto queue = device.NewQueue();
  const auto error_of = [&](uint64_t offset) {
    std::byte byte{};
    BlockRead read{offset, &byte, 1, BlockChecksum(Blocks(1, 5).data())};
    queue->Submit(&read, 1);
    queue->Wait();
    return read.error;
  };
  EXPECT_EQ(error_of(kBlockBytes), 0);
  device.Flip(kBlockBytes + 3000, 2);
  EXPECT_EQ(error_of(kBlockBytes), EBADMSG);
  EXPECT_EQ(error_of(0), 0);
}

TEST(SimulatedBlockDeviceTest, AFullDeviceSaysSo) {
  SimulatedBlockDevice device(1);
  device.capacity = 2 * kBlockBytes;
  device.Grow(2 * kBlockBytes);
  EXPECT_THROW(device.Grow(3 * kBlockBytes), StorageFull);
  EXPECT_EQ(device.size(), 2 * kBlockBytes);
}

}  // namespace
}  // namespace oe::simulated_block_device_test
