#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "oe_runtime/core/wire/frame.h"
#include "oe_runtime/core/wire/messages.h"

namespace oe::wire_test {
namespace {

std::string MessageOf(const std::function<void()>& action) {
  try {
    action();
  } catch (const ProtocolError& error) {
    return error.what();
  }
  return "no error";
}

Bytes ViewOf(const Buffer& buffer) { return {buffer.data(), buffer.size()}; }

Buffer CopyOf(Bytes bytes) {
  Buffer copy(bytes.size);
  if (bytes.size != 0) std::memcpy(copy.data(), bytes.data, bytes.size);
  return copy;
}

// A push of two tables that share a block, and one with a block of its own.
Buffer SampleBatch() {
  const std::vector<uint64_t> first = {1, 2, std::numeric_limits<uint64_t>::max()};
  const std::vector<uint64_t> second = {7};
  Buffer head;
  EncodeBatch({{0, 0, 0.5}, {4, 0, 0.25, 4096}, {2, 1, 1.0}}, {{first.data(), 3}, {second.data(), 1}}, &head);
  return head;
}

TEST(BufferTest, LargeBlocksAreUsedAgain) {
  Buffer::FreeSpare();
  const uint8_t* block = nullptr;
  {
    Buffer first(size_t{10} << 20);
    block = first.data();
    first.data()[first.size() - 1] = 1;
  }
  EXPECT_GE(Buffer::Spare(), size_t{10} << 20);
  const Buffer again((size_t{10} << 20) - 12345);
  EXPECT_EQ(again.data(), block);
  EXPECT_EQ(Buffer::Spare(), 0U);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(again.data()) % Buffer::kAlignment, 0U);
  {
    const Buffer small(1000);
  }
  EXPECT_EQ(Buffer::Spare(), 0U);
}

TEST(BufferTest, SpareBlocksAreBounded) {
  Buffer::FreeSpare();
  {
    std::vector<Buffer> many;
    for (size_t size = 1; size <= 48; ++size) many.emplace_back(size << 20);
    const Buffer huge(Buffer::kMostSpare + 1);
  }
  EXPECT_LE(Buffer::Spare(), Buffer::kMostSpare);
  EXPECT_GE(Buffer::Spare(), Buffer::kMostSpare / 2);
  Buffer::FreeSpare();
  EXPECT_EQ(Buffer::Spare(), 0U);
}

TEST(FrameTest, HeaderRoundTrip) {
  const FrameHeader header{Op::kPush, 0x0123456789ABCDEFULL, 1234};
  const FrameHeader read = DecodeHeader(EncodeHeader(header), kMaxBody);
  EXPECT_EQ(read.op, header.op);
  EXPECT_EQ(read.request, header.request);
  EXPECT_EQ(read.length, header.length);
  EXPECT_EQ(read.version, 6);
}

TEST(FrameTest, HeaderBytesAreTheDocumentedOnes) {
  const HeaderBytes bytes = EncodeHeader({Op::kPull, 0x0102, 0x0304});
  const HeaderBytes wanted = {'O', 'E', 'P', '\n', 6, 0, 3, 0, 2, 1, 0, 0,
                              0,   0,   0,   0,    4, 3, 0, 0, 0, 0, 0, 0};
  EXPECT_EQ(bytes, wanted);
}

TEST(FrameTest, BytesOfAnotherProtocolAreRefused) {
  HeaderBytes bytes{};
  std::memcpy(bytes.data(), "GET / HTTP/1.1\r\nHost: x", 23);
  EXPECT_THROW(DecodeHeader(bytes, kMaxBody), NotOurs);
}

TEST(FrameTest, AnotherVersionIsNamed) {
  HeaderBytes bytes = EncodeHeader({Op::kHello, 1, 0});
  bytes[4] = 9;
  EXPECT_EQ(
      MessageOf([&] { DecodeHeader(bytes, kMaxBody); }),
      "the peer speaks protocol version 9, this side versions 5 to 6; install the same oe_runtime on both "
      "hosts");
  bytes[4] = 4;
  EXPECT_THROW(DecodeHeader(bytes, kMaxBody), OtherVersion);
}

TEST(FrameTest, ThePreviousVersionIsAccepted) {
  const HeaderBytes bytes = EncodeHeader({Op::kHello, 1, 0, 5});
  EXPECT_EQ(bytes[4], 5);
  EXPECT_EQ(DecodeHeader(bytes, kMaxBody).version, 5);
}

TEST(FrameTest, UnknownOperation) {
  HeaderBytes bytes = EncodeHeader({Op::kHello, 1, 0});
  bytes[6] = 99;
  EXPECT_EQ(MessageOf([&] { DecodeHeader(bytes, kMaxBody); }), "unknown operation 99");
}

TEST(FrameTest, LengthIsBounded) {
  EXPECT_NO_THROW(DecodeHeader(EncodeHeader({Op::kHello, 1, 4096}), 4096));
  EXPECT_EQ(MessageOf([] { DecodeHeader(EncodeHeader({Op::kHello, 1, 4097}), 4096); }),
            "a body of 4097 bytes; at most 4096 are allowed here");
  EXPECT_THROW(DecodeHeader(EncodeHeader({Op::kPush, 1, std::numeric_limits<uint64_t>::max()}), kMaxBody),
               ProtocolError);
}

TEST(MessageTest, HelloRoundTripAndTruncation) {
  const std::string body = EncodeHello({kProtocolVersion, "secret", "job", "worker"});
  const auto* data = reinterpret_cast<const uint8_t*>(body.data());
  EXPECT_EQ(ParseHello({data, body.size()}).token, "secret");
  EXPECT_EQ(ParseHello({data, body.size()}).job, "job");
  EXPECT_EQ(ParseHello({data, body.size()}).worker, "worker");
  for (size_t size = 0; size < body.size(); ++size) EXPECT_THROW(ParseHello({data, size}), ProtocolError);
  const std::string longer = body + "x";
  EXPECT_THROW(ParseHello({reinterpret_cast<const uint8_t*>(longer.data()), longer.size()}), ProtocolError);
}

TEST(MessageTest, ErrorsKeepTheirClass) {
  const auto round_trip = [](const std::exception& error) {
    const std::string body = EncodeError({CodeOf(error), error.what()});
    const ErrorBody read = ParseError({reinterpret_cast<const uint8_t*>(body.data()), body.size()});
    ThrowAs(read.code, read.message);
  };
  EXPECT_THROW(round_trip(SpecError("x")), SpecError);
  EXPECT_THROW(round_trip(SpecMismatch("x")), SpecMismatch);
  EXPECT_THROW(round_trip(KeyRangeError("x")), KeyRangeError);
  EXPECT_THROW(round_trip(GradientError("x")), GradientError);
  EXPECT_THROW(round_trip(StorageError("x")), StorageError);
  EXPECT_THROW(round_trip(TooManyConnections("x")), TooManyConnections);
  EXPECT_THROW(round_trip(CheckpointError("x")), CheckpointError);
  EXPECT_THROW(round_trip(AuthError("x")), AuthError);
  EXPECT_THROW(round_trip(ProtocolError("x")), ProtocolError);
  EXPECT_THROW(round_trip(WorkerLost("x")), WorkerLost);
  EXPECT_THROW(round_trip(std::bad_alloc()), Error);
  const uint8_t from_the_future[] = {57, 48, 0, 0, '?'};
  EXPECT_THROW(ThrowAs(ParseError({from_the_future, 5}).code, "x"), Error);
}

TEST(MessageTest, FileChunkRoundTripAndTruncation) {
  const std::string head = EncodeFileChunk({"server-0-of-1.t.oet", uint64_t{5} << 40, 3});
  const std::string body = head + "abc";
  const auto* data = reinterpret_cast<const uint8_t*>(body.data());
  Bytes rest;
  const FileChunk chunk = ParseFileChunk({data, body.size()}, &rest);
  EXPECT_EQ(chunk.file, "server-0-of-1.t.oet");
  EXPECT_EQ(chunk.offset, uint64_t{5} << 40);
  EXPECT_EQ(chunk.size, 3U);
  EXPECT_EQ(std::string(rest.data, rest.data + rest.size), "abc");
  for (size_t size = 0; size < head.size(); ++size) {
    EXPECT_THROW(ParseFileChunk({data, size}, &rest), ProtocolError);
  }
  for (const uint32_t size : {0U, kMaxChunk + 1, ~0U}) {
    const std::string bad = EncodeFileChunk({"t", 0, size});
    EXPECT_THROW(ParseFileChunk({reinterpret_cast<const uint8_t*>(bad.data()), bad.size()}, &rest),
                 ProtocolError);
  }
}

TEST(MessageTest, SharedValueRoundTripAndLimits) {
  const std::string value = "{\"taken\": 3}";
  const auto view = [](const std::string& text) {
    return Bytes{reinterpret_cast<const uint8_t*>(text.data()), text.size()};
  };
  const std::string body = EncodeSharedRequest({"queue", true, uint64_t{7} << 40, view(value)});
  const SharedRequest request = ParseSharedRequest(view(body));
  EXPECT_EQ(request.name, "queue");
  EXPECT_TRUE(request.write);
  EXPECT_EQ(request.version, uint64_t{7} << 40);
  EXPECT_EQ(std::string(request.value.data, request.value.data + request.value.size), value);
  for (size_t size = 0; size < body.size() - value.size(); ++size) {
    EXPECT_THROW(ParseSharedRequest({view(body).data, size}), ProtocolError);
  }
  const std::string most(kMaxSharedValue, 'x');
  const std::string more(kMaxSharedValue + 1, 'x');
  EXPECT_LE(EncodeSharedRequest({std::string(64, 'n'), true, 0, view(most)}).size(),
            MaxRequest(Op::kSharedValue));
  for (const auto& bad : {EncodeSharedRequest({"", true, 0, view(value)}),
                          EncodeSharedRequest({std::string(65, 'n'), true, 0, view(value)}),
                          EncodeSharedRequest({"queue", false, 0, view(value)}),
                          EncodeSharedRequest({"queue", true, 0, view(more)})}) {
    EXPECT_THROW(ParseSharedRequest(view(bad)), ProtocolError);
  }
  SharedReply reply;
  reply.version = 9;
  reply.client = 4;
  reply.members = {2, 4, uint64_t{1} << 33};
  reply.value = std::make_shared<const std::string>(value);
  const std::string answer = EncodeSharedReply(reply);
  const SharedReply parsed = ParseSharedReply(view(answer));
  EXPECT_EQ(parsed.version, 9U);
  EXPECT_EQ(parsed.client, 4U);
  EXPECT_FALSE(parsed.written);
  EXPECT_EQ(parsed.members, reply.members);
  EXPECT_EQ(*parsed.value, value);
  for (size_t size = 0; size < answer.size() - value.size(); ++size) {
    EXPECT_THROW(ParseSharedReply({view(answer).data, size}), ProtocolError);
  }
}

TEST(BatchTest, RoundTrip) {
  const Buffer head = SampleBatch();
  const BatchView view = ParseBatch(ViewOf(head));
  ASSERT_EQ(view.entries.size(), 3U);
  EXPECT_EQ(view.entries[1].table, 4U);
  EXPECT_EQ(view.entries[1].block, 0U);
  EXPECT_EQ(view.entries[1].learning_rate, 0.25);
  EXPECT_EQ(view.entries[1].place, 4096U);
  EXPECT_EQ(view.entries[2].place, BatchEntry::kInline);
  ASSERT_EQ(view.blocks.size(), 2U);
  EXPECT_EQ(view.blocks[0].size, 3U);
  EXPECT_EQ(view.blocks[0].keys[2], std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(view.blocks[1].keys[0], 7U);
  EXPECT_EQ(view.rest.size, 0U);
}

TEST(BatchTest, EveryTruncationIsRefused) {
  const Buffer head = SampleBatch();
  for (size_t size = 0; size < head.size(); ++size) {
    const Buffer cut =
        CopyOf({head.data(), size});  // its own memory, so that a sanitizer sees a read past it
    EXPECT_THROW(ParseBatch(ViewOf(cut)), ProtocolError) << size;
  }
}

TEST(BatchTest, CountsThatWouldOverflowAreRefused) {
  Buffer head = SampleBatch();
  const auto set = [&head](size_t offset, uint64_t value, size_t size) {
    std::memcpy(head.data() + offset, &value, size);
  };
  set(4, 0xFFFFFFFFU, 4);  // entries
  EXPECT_THROW(ParseBatch(ViewOf(head)), ProtocolError);
  head = SampleBatch();
  set(0, 0xFFFFFFFFU, 4);  // blocks
  EXPECT_THROW(ParseBatch(ViewOf(head)), ProtocolError);
  for (const uint64_t size : {uint64_t{5}, uint64_t{1} << 61, ~uint64_t{0}}) {
    head = SampleBatch();
    set(8 + 3 * 24, size, 8);  // keys of the first block; times 8 it may wrap around
    EXPECT_THROW(ParseBatch(ViewOf(head)), ProtocolError) << size;
  }
}

TEST(BatchTest, AnEntryMustNameABlock) {
  Buffer head = SampleBatch();
  const uint32_t block = 2;
  std::memcpy(head.data() + 8 + 4, &block, 4);
  EXPECT_EQ(MessageOf([&] { ParseBatch(ViewOf(head)); }), "batch: an entry names block 2 of 2");
}

// Whatever the bytes, parsing ends in a view within the body or in ProtocolError.
TEST(BatchTest, GarbageNeverReadsOutside) {
  std::mt19937_64 random(7);
  int refused = 0;
  for (int round = 0; round < 3000; ++round) {
    Buffer bytes = SampleBatch();
    const size_t changes = 1 + random() % 8;
    for (size_t i = 0; i < changes; ++i)
      bytes.data()[random() % bytes.size()] = static_cast<uint8_t>(random());
    const Buffer cut = CopyOf({bytes.data(), random() % (bytes.size() + 1)});
    try {
      uint64_t sum = 0;
      const BatchView view = ParseBatch(ViewOf(cut));
      for (const BatchEntry& entry : view.entries) {
        const KeyBlock& block = view.blocks.at(entry.block);
        for (size_t i = 0; i < block.size; ++i) sum += block.keys[i];
      }
      (void)sum;
    } catch (const ProtocolError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
}

TEST(BufferTest, AlignedAndReused) {
  Buffer buffer(100);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0U);
  const uint8_t* before = buffer.data();
  buffer.Resize(10);
  EXPECT_EQ(buffer.data(), before);
  EXPECT_EQ(buffer.size(), 10U);
  buffer.Resize(0);
  EXPECT_EQ(buffer.size(), 0U);
}

}  // namespace
}  // namespace oe::wire_test
