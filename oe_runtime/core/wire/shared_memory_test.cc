#include "oe_runtime/core/wire/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace oe::shared_memory_test {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

Nonce SomeNonce(uint8_t first) {
  Nonce nonce{};
  nonce[0] = first;
  nonce[15] = 0xff;
  return nonce;
}

uint64_t MemoryOf(const ShareRequest& request) {
  struct stat status{};
  EXPECT_EQ(::fstat(static_cast<int>(request.file), &status), 0);
  return static_cast<uint64_t>(status.st_blocks) * 512;
}

TEST(SharedMemoryTest, Nonces) {
  const auto nonce = NewNonce();
  ASSERT_TRUE(nonce);
  EXPECT_NE(nonce, NewNonce());
  EXPECT_EQ(ParseNonce(NonceText(*nonce)), nonce);
  EXPECT_FALSE(ParseNonce(NonceText(*nonce) + "0"));
  EXPECT_FALSE(ParseNonce(std::string(31, '0') + "G"));
  EXPECT_FALSE(ParseNonce(std::string(31, '0') + "/"));
}

TEST(SharedMemoryTest, BothSidesSeeTheSame) {
  const auto arena = SharedArena::Create();
  ASSERT_NE(arena, nullptr);
  Buffer block(3 * kMiB, arena);
  const auto place = arena->PlaceOf(block.data());
  ASSERT_TRUE(place);
  EXPECT_FALSE(arena->PlaceOf(&place));
  const auto mapping = SharedMapping::Open(arena->Show(1, SomeNonce(1)), SomeNonce(1));
  ASSERT_NE(mapping, nullptr);
  EXPECT_EQ(mapping->size(), arena->size());
  block.data()[5] = 42;
  EXPECT_EQ(mapping->data()[*place + 5], std::byte{42});
  mapping->data()[*place + 6] = std::byte{43};
  EXPECT_EQ(block.data()[6], 43);
}

TEST(SharedMemoryTest, SmallBuffersAndThoseWithoutRoomAreNotShared) {
  const auto arena = SharedArena::Create();
  EXPECT_FALSE(arena->PlaceOf(Buffer(SharedArena::kLeastBlock - 1, arena).data()));
  EXPECT_TRUE(arena->PlaceOf(Buffer(SharedArena::kLeastBlock, arena).data()));
  EXPECT_EQ(arena->Take(SharedArena::kMost), nullptr);
  EXPECT_FALSE(arena->PlaceOf(Buffer(SharedArena::kLeastBlock, nullptr).data()));
}

// What blocks hold is theirs alone, however they come and go, and what was given back is used again.
TEST(SharedMemoryTest, BlocksComeAndGo) {
  const auto arena = SharedArena::Create();
  std::mt19937_64 random(1);
  std::vector<std::pair<Buffer, uint8_t>> blocks;
  for (int i = 0; i < 2000; ++i) {
    if (blocks.size() == 12 || (!blocks.empty() && random() % 2 == 0)) {
      const size_t which = random() % blocks.size();
      const auto& [block, mark] = blocks[which];
      for (const size_t at : {size_t{0}, block.size() / 2, block.size() - 1}) {
        ASSERT_EQ(block.data()[at], mark);
      }
      std::swap(blocks[which], blocks.back());
      blocks.pop_back();
    } else {
      blocks.emplace_back(Buffer(SharedArena::kLeastBlock + random() % kMiB, arena), static_cast<uint8_t>(i));
      auto& [block, mark] = blocks.back();
      for (const size_t at : {size_t{0}, block.size() / 2, block.size() - 1}) block.data()[at] = mark;
    }
  }
  EXPECT_LE(arena->size(), 32 * kMiB);
  blocks.clear();
  const Buffer first(kMiB, arena);
  EXPECT_EQ(arena->PlaceOf(first.data()), kNonceBytes);
}

TEST(SharedMemoryTest, LargeUnusedMemoryIsReturnedToTheSystem) {
  const auto arena = SharedArena::Create();
  const ShareRequest request = arena->Show(0, SomeNonce(1));
  {
    const Buffer large(SharedArena::kMostSpare + 20 * kMiB, arena);
    EXPECT_GE(MemoryOf(request), large.size());
  }
  EXPECT_LT(MemoryOf(request), 20 * kMiB);
  Buffer again(20 * kMiB, arena);
  std::memset(again.data(), 1, again.size());
  EXPECT_LT(MemoryOf(request), 40 * kMiB);
}

// A process that was forked has copies of the buffers, but not their memory.
TEST(SharedMemoryTest, AForkedProcessGivesNothingBack) {
  const auto arena = SharedArena::Create();
  Buffer block(SharedArena::kMostSpare + 20 * kMiB, arena);
  block.data()[7] = 7;
  const pid_t child = ::fork();
  if (child == 0) {
    block = Buffer();
    ::_exit(arena->Take(kMiB) == nullptr ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(block.data()[7], 7);
}

TEST(SharedMemoryTest, MemoryThatDiffersFromTheAnnouncementIsRefused) {
  const auto arena = SharedArena::Create();
  const Buffer block(kMiB, arena);
  const Nonce nonce = SomeNonce(1);
  const ShareRequest good = arena->Show(2, nonce);
  ASSERT_NE(SharedMapping::Open(good, nonce), nullptr);
  EXPECT_EQ(SharedMapping::Open(good, SomeNonce(2)), nullptr);
  const auto with = [&good](auto change) {
    ShareRequest request = good;
    change(&request);
    return request;
  };
  for (const ShareRequest& bad : {
           with([](ShareRequest* r) { r->size += 1; }),  // beyond its end
           with([](ShareRequest* r) { r->size = kNonceBytes - 1; }),
           with([](ShareRequest* r) { r->size = ~uint64_t{0}; }),
           with([](ShareRequest* r) { r->nonce_at += 1; }),
           with([](ShareRequest* r) { r->nonce_at = kNonceBytes - sizeof(Nonce) + 1; }),
           with([](ShareRequest* r) { r->nonce_at = ~uint64_t{0}; }),
           with([](ShareRequest* r) { r->process = 0; }),
           with([](ShareRequest* r) { r->process = 1U << 31; }),
           with([](ShareRequest* r) { r->file = 1U << 31; }),
           with([](ShareRequest* r) { r->file = 0; }),  // the standard input
       }) {
    EXPECT_EQ(SharedMapping::Open(bad, nonce), nullptr);
  }
  // Nor may it lie among rows, which others may have a say in.
  Buffer rows(kMiB, arena);
  std::memcpy(rows.data(), nonce.data(), nonce.size());
  const uint64_t place = arena->PlaceOf(rows.data()).value();
  EXPECT_EQ(SharedMapping::Open(with([&](ShareRequest* r) { r->nonce_at = place; }), nonce), nullptr);
}

// One that could be cut would end the server that looks at it.
TEST(SharedMemoryTest, MemoryThatIsNotSealedIsRefused) {
  const auto arena = SharedArena::Create();
  EXPECT_NE(::ftruncate(static_cast<int>(arena->Show(0, SomeNonce(1)).file), 0), 0);

  const Nonce nonce = SomeNonce(1);
  const File file(::memfd_create("oe_runtime", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(file.get(), 8192), 0);
  ASSERT_EQ(::pwrite(file.get(), nonce.data(), nonce.size(), 0), static_cast<ssize_t>(nonce.size()));
  const ShareRequest request{static_cast<uint32_t>(::getpid()), static_cast<uint32_t>(file.get()), 8192, 0};
  EXPECT_EQ(SharedMapping::Open(request, nonce), nullptr);
  ASSERT_EQ(::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK), 0);
  EXPECT_NE(SharedMapping::Open(request, nonce), nullptr);
}

}  // namespace
}  // namespace oe::shared_memory_test
