// The bodies of frames. Parsers never trust a count: every one is checked against the bytes that are there,
// and ProtocolError says which field is wrong. Parsed views point into the body.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "oe_runtime/core/wire/buffer.h"
#include "oe_runtime/core/wire/errors.h"

namespace oe {

// Op::kHello. The reply is JSON: {index, count, storage, is_pmem, pid, checkpoint_dir: bool}, since version 6
// {version}, with a server that would share memory {nonce} (wire/shared_memory.h), and bools: reads_ahead,
// whether it takes Op::kReadAhead, counts_changes, whether RowsRequest::change, places_rows, whether
// RowsRequest::placed, cuts, whether Op::kCut, halves, whether BatchEntry::kHalves, sessions, whether
// Op::kSession.
struct Hello {
  uint16_t version = 0;  // the newest that the client speaks (frame.h)
  std::string token;
  std::string job;  // whose tables this connection sees
  // Of a job with several workers: ToJsonText (wire/worker_spec.h); of a client that only reads: kReader;
  // otherwise empty.
  std::string worker = {};
  // Of a client whose connection broke: what Op::kSession gave it. The other fields but the token are then of
  // no account, and the server may say that it is busy before it replies. Not in the body if it is empty.
  std::string session = {};
};
constexpr char kReader[] = "reader";
std::string EncodeHello(const Hello& hello);
Hello ParseHello(Bytes body);

// Op::kError.
struct ErrorBody {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
};
std::string EncodeError(const ErrorBody& error);
ErrorBody ParseError(Bytes body);

// Op::kPull and Op::kPush: blocks of keys, and entries that say which table wants which block. Tables that
// are looked up with the same ids share one block.
//
//   uint32 blocks, uint32 entries
//   entries x { uint32 table, uint32 block, double learning_rate, uint64 place }
//                                                                       learning_rate is 0 in a pull
//   blocks  x uint64 number of keys
//   keys of all blocks, uint64 each
//   push only: for each entry, keys x dim values: float64 for a table of that dtype, else float32
//   push only: for each entry whose table counts (policy/policy_spec.h), keys x uint32:
//              how often each key was
//              in the client's batch
//   push only: for each entry of kHalves, keys x dim bfloat16
//
// The reply to a pull is, for each entry, keys x dim values, and behind them those of kHalves; the reply to a
// push is empty. So that all values are aligned, entries of float64 tables come first. A worker's may wait
// for other workers' (server/workers.h).
//
// An entry whose place is not kInline has its values there in the memory that the client shares
// (wire/shared_memory.h), aligned as values are, instead of in the message or the reply. Not in a worker's
// push, which is kept beyond its reply.
//
// An entry whose place is kHalves has its values in the message or the reply, in two bytes each: in a pull as
// the rows of a bfloat16 or float16 table have them; in a push as bfloat16, of any table but a float64 one.
// Only for servers whose reply to the hello says that they take it.
struct BatchEntry {
  static constexpr uint64_t kInline = ~uint64_t{0};
  static constexpr uint64_t kHalves = kInline - 1;
  uint32_t table = 0;
  uint32_t block = 0;
  double learning_rate = 0;
  uint64_t place = kInline;
};
struct KeyBlock {
  const uint64_t* keys = nullptr;
  size_t size = 0;
};
struct BatchView {
  std::vector<BatchEntry> entries;
  std::vector<KeyBlock> blocks;
  Bytes rest;  // the values and counts of a push
};

// Op::kShare: where the client's shared memory is (wire/shared_memory.h); it is said again when it has grown.
// The reply is JSON, whether the server has it now; if not, what it had before stays.
struct ShareRequest {
  uint32_t process = 0;
  uint32_t file = 0;  // its descriptor there
  uint64_t size = 0;
  uint64_t nonce_at = 0;
};
constexpr size_t kNonceBytes = 4096;  // the beginning of such memory, where nothing but nonces lies
std::string EncodeShareRequest(const ShareRequest& request);
ShareRequest ParseShareRequest(Bytes body);

// Op::kKeys: the keys of one part of a table (Table::Keys). The reply is the keys, uint64 each.
struct KeysRequest {
  uint32_t table = 0;
  uint32_t part = 0;
};
std::string EncodeKeysRequest(const KeysRequest& request);
KeysRequest ParseKeysRequest(Bytes body);

// Op::kAssign, Op::kErase and Op::kReadRows:
//
//   uint32 table, uint32 flags: 1 if the optimizer's state is in the request (assign) or wanted (read), 2 if
//     a change follows, 4 if places follow
//   uint64 number of keys; the change, uint64; the places, uint64 each; keys, uint64 each
//   assign without places only: keys x dim values, and with the state keys x state_values of them
//
// A value is a float64 for a table of that dtype, else a float32. The reply to kReadRows is weights and state
// in this order, unless they have places, then a byte for each key: whether it has a row.
struct RowsRequest {
  // Where weights and state lie in the memory that the client shares (wire/shared_memory.h), aligned as they
  // are; of a request without state, the second is 0.
  struct Placed {
    uint64_t weights = 0;
    uint64_t states = 0;
  };
  uint32_t table = 0;
  bool states = false;
  KeyBlock keys;
  Bytes rest;
  // Of an assign or erase: its number, which every server of the job gets, also those without keys. 0: none,
  // as from clients of 0.2.0. Only for servers whose reply to the hello says that they count changes.
  uint64_t change = 0;
  std::optional<Placed> placed = {};  // only for servers whose reply to the hello says that they take it
};
// All but the values, which follow.
void EncodeRowsRequest(const RowsRequest& request, Buffer* head);
// body.data must be aligned to 8 bytes.
RowsRequest ParseRowsRequest(Bytes body);

// Checkpoints. The directory in the body of kSave and kRestore is one that client and server share; without
// it the server uses its own (ServerOptions::checkpoint_dir), to and from which the client moves the files:
//
//   save     kSave {"directory", "hold": true}: files of few rows may follow the JSON of the reply, after \n,
//            in its order; the client writes them
//   save     kSave {}, then kReadFile until every file of the reply is here, then kDrop
//   restore  kReceive {"files": [{"file": name, "bytes": size}], "save": NameOfSave}, one file of each table
//            the server has and those of their admission filters, then
//            kWriteFile, the chunks of a file in order, then kRestore {}
//
// Every connection has files of its own: another kSave or kReceive of the same one begins anew, and they go
// when it ends.
//
// Op::kReadFile and Op::kWriteFile. The reply to a read is `size` bytes, to a write it is empty.
//
//   uint64 offset, uint32 size, uint16 length of the name, the name; write only: `size` bytes
struct FileChunk {
  std::string file;
  uint64_t offset = 0;
  uint32_t size = 0;
};
std::string EncodeFileChunk(const FileChunk& chunk);
// Sets *data to what follows the name: nothing for a read. Throws ProtocolError for more than kMaxChunk.
FileChunk ParseFileChunk(Bytes body, Bytes* data);

// Op::kSharedValue (server/shared_values.h).
//
//   request  uint64 version that a write replaces, uint32 1 for a write, 0 for a read,
//            uint16 length of the name, the name, the value of a write
//   reply    uint64 version, uint64 the client's number, uint32 1 if it has written, else 0,
//            uint32 number of members, their numbers, uint64 each, the value unless it has written
struct SharedRequest {
  static constexpr size_t kMostName = 64;  // bytes
  std::string name;
  bool write = false;
  uint64_t version = 0;
  Bytes value;
};
struct SharedReply {
  uint64_t version = 0;  // of the present value; 0: there is none
  uint64_t client = 0;
  bool written = false;
  std::vector<uint64_t> members;             // clients that take part, ascending
  std::shared_ptr<const std::string> value;  // nullptr: none, or the client knows it
};
std::string EncodeSharedRequest(const SharedRequest& request);
// The value is a view into the body. Throws ProtocolError for a name or value that is too long.
SharedRequest ParseSharedRequest(Bytes body);
std::string EncodeSharedReply(const SharedReply& reply);
SharedReply ParseSharedReply(Bytes body);

// Writes everything but values and counts into *head.
void EncodeBatch(const std::vector<BatchEntry>& entries, const std::vector<KeyBlock>& blocks, Buffer* head);
// body.data must be aligned to 8 bytes, which every Buffer is.
BatchView ParseBatch(Bytes body);

}  // namespace oe
