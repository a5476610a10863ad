#include "oe_runtime/core/wire/frame.h"

#include <algorithm>

#include "oe_runtime/core/wire/messages.h"
#include "oe_runtime/core/wire/shared_memory.h"
#include "oe_runtime/core/wire/worker_spec.h"
#include "tests/fuzz/targets.h"

namespace oe {
namespace {

std::string TextOf(const Buffer& buffer) {
  return {reinterpret_cast<const char*>(buffer.data()), buffer.size()};
}

// Whatever could be parsed is written again, and must be what was read.
void ParseBody(Op op, Bytes body) {
  const std::string text(reinterpret_cast<const char*>(body.data), body.size);
  switch (op) {
    case Op::kHello:
      Require(EncodeHello(ParseHello(body)) == text);
      return;
    case Op::kError:
      Require(EncodeError(ParseError(body)) == text);
      return;
    case Op::kShare: {
      const ShareRequest request = ParseShareRequest(body);
      Require(EncodeShareRequest(request) == text);
      Require(SharedMapping::Open(request, {}) == nullptr);  // there is no such memory in this process
      return;
    }
    case Op::kKeys:
      Require(EncodeKeysRequest(ParseKeysRequest(body)) == text);
      return;
    case Op::kReadFile:
    case Op::kWriteFile: {
      Bytes data;
      const FileChunk chunk = ParseFileChunk(body, &data);
      Require(EncodeFileChunk(chunk) + std::string(reinterpret_cast<const char*>(data.data), data.size) ==
              text);
      return;
    }
    case Op::kSharedValue:
      Require(EncodeSharedRequest(ParseSharedRequest(body)) == text);
      return;
    case Op::kAssign:
    case Op::kErase:
    case Op::kReadRows: {
      const RowsRequest request = ParseRowsRequest(body);
      Buffer head;
      EncodeRowsRequest(request, &head);
      Require(TextOf(head) +
                  std::string(reinterpret_cast<const char*>(request.rest.data), request.rest.size) ==
              text);
      return;
    }
    default: {
      const BatchView batch = ParseBatch(body);
      Buffer head;
      EncodeBatch(batch.entries, batch.blocks, &head);
      Require(TextOf(head) + std::string(reinterpret_cast<const char*>(batch.rest.data), batch.rest.size) ==
              text);
    }
  }
}

}  // namespace

void FuzzFrame(const uint8_t* data, size_t size) {
  HeaderBytes header{};
  std::copy_n(data, std::min(size, header.size()), header.begin());
  try {
    const FrameHeader frame = DecodeHeader(header, kMaxBody);
    Require(EncodeHeader(frame) == header && frame.length <= kMaxBody);
    if (size < header.size()) return;
    const Buffer body = CopyOf(data + header.size(), size - header.size());
    ParseBody(frame.op, {body.data(), body.size()});
  } catch (const ProtocolError&) {
    return;
  }
}

std::vector<std::pair<std::string, std::string>> FrameSeeds() {
  const std::vector<uint64_t> keys = {1, 2, ~uint64_t{0}};
  Buffer batch;
  EncodeBatch({{0, 0, 0.0}, {1, 1, 0.5}, {2, 0, 0.5, 4096}}, {{keys.data(), 3}, {keys.data(), 1}}, &batch);
  const std::string pull = TextOf(batch);
  Buffer rows;
  EncodeRowsRequest({1, true, {keys.data(), 3}, {}, 7}, &rows);
  const std::vector<std::pair<Op, std::string>> frames = {
      {Op::kHello, EncodeHello({kProtocolVersion, "a token", "a-job", ToJsonText(WorkerSpec())})},
      {Op::kError, EncodeError({ErrorCode::kSpec, "the field 'dim' is missing"})},
      {Op::kPull, pull},
      {Op::kPush, pull + std::string(4 * sizeof(float), '\1')},
      {Op::kShare, EncodeShareRequest({1, 5, uint64_t{1} << 24, 16})},
      {Op::kKeys, EncodeKeysRequest({1, 2})},
      {Op::kReadFile, EncodeFileChunk({"server-0-of-1.t.oet", 4096, 512})},
      {Op::kWriteFile, EncodeFileChunk({"server-0-of-1.t.oet", 0, 4}) + "data"},
      {Op::kSharedValue, EncodeSharedRequest({"queue", true, 5, {&kMagic[0], kMagic.size()}})},
      {Op::kAssign, TextOf(rows) + std::string(size_t{3} * 4 * sizeof(float), '\1')},
  };
  std::vector<std::pair<std::string, std::string>> seeds;
  for (const auto& [op, body] : frames) {
    const HeaderBytes header = EncodeHeader({op, 1, body.size()});
    seeds.emplace_back("op-" + std::to_string(static_cast<int>(op)),
                       std::string(header.begin(), header.end()) + body);
  }
  return seeds;
}

}  // namespace oe
