#include "oe_runtime/core/wire/frame.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace oe {

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire format is little-endian, and this code copies numbers as they lie in memory"
#endif

HeaderBytes EncodeHeader(const FrameHeader& header) {
  HeaderBytes bytes;
  const auto op = static_cast<uint16_t>(header.op);
  std::memcpy(bytes.data(), kMagic.data(), kMagic.size());
  std::memcpy(bytes.data() + 4, &header.version, sizeof header.version);
  std::memcpy(bytes.data() + 6, &op, sizeof op);
  std::memcpy(bytes.data() + 8, &header.request, sizeof header.request);
  std::memcpy(bytes.data() + 16, &header.length, sizeof header.length);
  return bytes;
}

FrameHeader DecodeHeader(const HeaderBytes& bytes, uint64_t max_length) {
  if (!std::equal(kMagic.begin(), kMagic.end(), bytes.begin())) {
    throw NotOurs("the peer does not speak the oe_runtime protocol");
  }
  uint16_t op = 0;
  FrameHeader header;
  std::memcpy(&header.version, bytes.data() + 4, sizeof header.version);
  std::memcpy(&op, bytes.data() + 6, sizeof op);
  std::memcpy(&header.request, bytes.data() + 8, sizeof header.request);
  std::memcpy(&header.length, bytes.data() + 16, sizeof header.length);
  if (header.version < kOldestProtocol || header.version > kProtocolVersion) {
    throw OtherVersion("the peer speaks protocol version " + std::to_string(header.version) +
                       ", this side versions " + std::to_string(kOldestProtocol) + " to " +
                       std::to_string(kProtocolVersion) + "; install the same oe_runtime on both hosts");
  }
  if (op > kLastOp) throw ProtocolError("unknown operation " + std::to_string(op));
  if (header.length > max_length) {
    throw ProtocolError("a body of " + std::to_string(header.length) + " bytes; at most " +
                        std::to_string(max_length) + " are allowed here");
  }
  header.op = static_cast<Op>(op);
  return header;
}

}  // namespace oe
