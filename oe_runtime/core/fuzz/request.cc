#include <algorithm>
#include <iterator>

#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/fuzz/targets.h"
#include "oe_runtime/core/server/service.h"

namespace oe {
namespace {

constexpr Op kOps[] = {Op::kCreateTable, Op::kPull, Op::kPush,      Op::kRestore, Op::kReceive,
                       Op::kReadFile,    Op::kKeys, Op::kWriteFile, Op::kDrop};

// What a fresh server has after a client made two tables.
struct Fixture {
  Fixture() : store(Storage::Open({}), {0, 1}, &pool), scratch(directory.file("server")) {
    for (const char* name : {"a", "b"}) {
      TableSpec spec;
      spec.name = name;
      spec.dim = name[0] == 'a' ? 1 : 3;
      spec.optimizer.name = "sgd";
      spec.initializer.name = "zeros";
      if (name[0] == 'b') {
        spec.index = "array";
        spec.input_dim = 100;
      }
      store.CreateTable(spec);
    }
  }
  TestDirectory directory;
  ThreadPool pool{1};
  Store store;
  Scratch scratch;
};

}  // namespace

// Requests of one input follow each other, as on a connection: a byte for the operation, two for the length.
void FuzzRequest(const uint8_t* data, size_t size) {
  static Fixture* const fixture = new Fixture;  // lives as long as the process
  const Session session{&fixture->store, &fixture->scratch, 1};
  Buffer reply;
  while (size >= 3) {
    const Op op = kOps[data[0] % std::size(kOps)];
    uint16_t length = 0;
    std::memcpy(&length, data + 1, sizeof length);
    const Buffer body = CopyOf(data + 3, std::min<size_t>(length, size - 3));
    data += 3 + body.size();
    size -= 3 + body.size();
    const Bytes bytes{body.data(), body.size()};
    // Tables and the files of a restore that are of any size are the owner's right, but not this test's
    // memory.
    if (op == Op::kCreateTable && fixture->store.TableNames().size() > 50) continue;
    try {
      const uint64_t expected = ReplyBytes(session, op, bytes);
      if (expected > uint64_t{1} << 24) continue;
      Serve(session, op, bytes, &reply);
      Require(op != Op::kPull || reply.size() == expected);
    } catch (const std::exception&) {
      continue;
    }
  }
  fixture->scratch.Drop(1);
}

std::vector<std::pair<std::string, std::string>> RequestSeeds() {
  const auto request = [](Op op, const std::string& body) {
    size_t number = 0;
    while (kOps[number] != op) ++number;
    const auto length = static_cast<uint16_t>(body.size());
    std::string text(3, static_cast<char>(number));
    std::memcpy(text.data() + 1, &length, sizeof length);
    return text + body;
  };
  const auto batch = [](uint32_t table, const std::vector<uint64_t>& keys, double rate) {
    Buffer head;
    EncodeBatch({{table, 0, rate}}, {{keys.data(), keys.size()}}, &head);
    return std::string(reinterpret_cast<const char*>(head.data()), head.size());
  };
  const std::string spec =
      R"({"name":"c","dim":2,"optimizer":{"name":"adam"},"initializer":{"name":"uniform","seed":1}})";
  const std::string receive =
      R"({"files":[{"file":"server-0-of-1.a.oet","bytes":4},{"file":"server-0-of-1.b.oet","bytes":4}]})";
  return {{"create", request(Op::kCreateTable, spec)},
          {"pull", request(Op::kPull, batch(0, {1, 2, 3}, 0))},
          {"push", request(Op::kPush, batch(1, {1, 2}, 0.5) + std::string(24, '\0')) +
                       request(Op::kKeys, EncodeKeysRequest({1, 0}))},
          {"receive", request(Op::kReceive, receive) +
                          request(Op::kWriteFile, EncodeFileChunk({"server-0-of-1.a.oet", 0, 4}) + "data") +
                          request(Op::kRestore, "{}") + request(Op::kDrop, "")},
          {"read", request(Op::kReadFile, EncodeFileChunk({"server-0-of-1.a.oet", 0, 4}))},
          {"restore", request(Op::kRestore, R"({"directory":"/nonexistent"})")}};
}

}  // namespace oe
