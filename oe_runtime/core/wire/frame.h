// Everything between a client and a server is a frame: a fixed header, then `length` bytes of body.
//
//   offset  0  magic    "OEP\n"
//           4  version  uint16   that both sides speak, see below
//           6  op       uint16   Op; a reply repeats the request's, or is kError
//           8  request  uint64   number of the request, the same to all servers; a reply repeats it. Its
//                                upper half names the client: random, 0 of 0.2.0 and before
//          16  length   uint64   bytes of body; bounded, see below
//
// Numbers are little-endian. This header never changes, so that two versions can at least tell each other
// that they differ.
//
// Each version of this program speaks its own version of the protocol and the one before. The hello is sent
// in a frame of the older one, so that a server of either reads it, and names the newer one in its body; the
// server replies with the newest that both speak, and from then on every frame has that version. A server
// whose reply names none speaks version 5.
#pragma once

#include <array>
#include <cstdint>

#include "oe_runtime/core/wire/buffer.h"
#include "oe_runtime/core/wire/errors.h"

namespace oe {

constexpr uint16_t kProtocolVersion = 6;
constexpr uint16_t kOldestProtocol = 5;  // that is still spoken
constexpr size_t kHeaderBytes = 24;
constexpr std::array<uint8_t, 4> kMagic = {'O', 'E', 'P', '\n'};

// The largest body. A peer that did not say hello yet may only send a small one: nobody without the token can
// make a server allocate memory.
constexpr uint64_t kMaxBody = uint64_t{1} << 31;
constexpr uint64_t kMaxHelloBody = 4096;

enum class Op : uint16_t {
  kError = 0,
  kHello = 1,
  kCreateTable = 2,
  kPull = 3,
  kPush = 4,
  kSave = 5,
  kRestore = 6,
  kStats = 7,
  kShutdown = 8,
  kKeys = 9,
  kReceive = 10,      // the server shall take table files for a restore
  kReadFile = 11,     // a chunk of a saved table file
  kWriteFile = 12,    // the next chunk of a file that was announced
  kDrop = 13,         // the server shall remove the table files of this client
  kCheckpoint = 14,   // {"id", "wait"}: Store::Checkpoint; {"wait": true} alone: Store::WaitDurable
  kCheckpoints = 15,  // Store::Checkpoints, a JSON array
  kRecover = 16,      // {"id"}: Store::Recover
  kEvict = 17,        // Store::Evict, a JSON number
  kLeave = 18,        // this worker has no more batches; the others go on without it
  kShare = 19,        // the client has memory that the server may see (wire/shared_memory.h)
  // Since version 6.
  // Rows by key (wire/messages.h).
  kAssign = 20,    // Store::Assign; the reply is JSON
  kErase = 21,     // Store::Erase, a JSON number
  kReadRows = 22,  // Store::ReadRows
  // {"tables": names or null for all, "force", "job" if it is not the client's}: Store::Drop. Refused while
  // the job has other clients, unless "force"; the workers of a job all ask for the same. The reply is how
  // many tables there were, or null if another worker's request dropped them. An empty list only asks.
  kDropTables = 23,
  kTear = 24,         // {"reason"}: Store::Tear
  kVersions = 25,     // Store::Versions
  kSharedValue = 27,  // a read or a compare-and-set (server/shared_values.h, wire/messages.h)
  // The keys of a pull that the client is going to ask for, as in a pull without places: the server replies
  // at once, and then reads those rows from the drive that it does not have in DRAM. Of servers whose reply
  // to the hello says that they do.
  kReadAhead = 28,
  // {"open": true} or {"close": true}, {"let": [[client, change], ...]} or {}: Cut::Open, Close, Let; the
  // reply is Cut::State and "pushing", see Store::Versions. Of servers whose reply to the hello says that
  // they do.
  kCut = 29,
  // From now on the server keeps what it has of this client while the connection is broken
  // (server/sessions.h). The reply is the JSON text by which a hello goes on with it. Of servers whose reply
  // to the hello says that they do.
  kSession = 30,
  // Not a request: the server says, about four times per second, that the client's request
  // waits or takes long; {"for": what it waits for}, with the number of the request. The reply follows.
  kBusy = 26,
};
constexpr uint16_t kLastOp = 30;
// The protocol since which peers know kAssign and what follows it, and ErrorCode::kStorageFull.
constexpr uint16_t kVersion6 = 6;
constexpr uint64_t kMaxBusyBody = 4096;

// The most bytes of a file that one request moves.
constexpr uint32_t kMaxChunk = uint32_t{4} << 20;

// The most bytes of one shared value.
constexpr uint32_t kMaxSharedValue = uint32_t{1} << 20;

// The largest body of a request, which a server checks before it takes memory for it; a reply has up to
// kMaxBody. A parsed body takes more than its bytes (JSON up to 20 times as much), so only rows and keys,
// which stay as they are, may be large. Every operation is listed: a new one must say what it needs.
constexpr uint64_t MaxRequest(Op op) {
  constexpr uint64_t kSmall = uint64_t{64} << 10;
  constexpr uint64_t kTables = uint64_t{4} << 20;  // JSON with an entry for each table of a job
  switch (op) {
    case Op::kHello:
      return kMaxHelloBody;
    case Op::kPull:
    case Op::kPush:
    case Op::kReadAhead:
    case Op::kAssign:
    case Op::kErase:
    case Op::kReadRows:
      return kMaxBody;
    case Op::kSave:
    case Op::kRestore:
    case Op::kReceive:
    case Op::kDropTables:
      return kTables;
    case Op::kWriteFile:
      return kMaxChunk + 2 * kSmall;  // the name of the file too
    case Op::kReadFile:
      return 2 * kSmall;
    case Op::kSharedValue:
      return kMaxSharedValue + kSmall;  // the name too
    case Op::kError:
    case Op::kCreateTable:
    case Op::kStats:
    case Op::kShutdown:
    case Op::kKeys:
    case Op::kDrop:
    case Op::kCheckpoint:
    case Op::kCheckpoints:
    case Op::kRecover:
    case Op::kEvict:
    case Op::kLeave:
    case Op::kShare:
    case Op::kTear:
    case Op::kVersions:
    case Op::kCut:
    case Op::kBusy:
    case Op::kSession:
      break;
  }
  return kSmall;
}

// The most entries and blocks of a batch: each takes some 100 bytes of a server, however few its keys.
constexpr uint32_t kMaxEntries = uint32_t{1} << 16;

struct FrameHeader {
  Op op = Op::kError;
  uint64_t request = 0;
  uint64_t length = 0;
  uint16_t version = kProtocolVersion;
};

constexpr uint64_t ClientOf(uint64_t request) { return request >> 32; }
constexpr uint64_t ChangeOf(uint64_t request) { return request & 0xffffffff; }

using HeaderBytes = std::array<uint8_t, kHeaderBytes>;

HeaderBytes EncodeHeader(const FrameHeader& header);

// What came first on the connection is not ours at all (another protocol, garbage); no reply would make
// sense.
class NotOurs : public ProtocolError {
 public:
  using ProtocolError::ProtocolError;
};

// The peer is another version of this program.
class OtherVersion : public ProtocolError {
 public:
  using ProtocolError::ProtocolError;
};

// Throws NotOurs for a wrong magic, OtherVersion for a version that this side does not speak, ProtocolError
// for an unknown op or a body longer than max_length; the message says what was found.
FrameHeader DecodeHeader(const HeaderBytes& bytes, uint64_t max_length);

}  // namespace oe
