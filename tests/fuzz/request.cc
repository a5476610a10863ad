#include <algorithm>
#include <array>
#include <exception>
#include <iterator>
#include <nlohmann/json.hpp>

#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/server/jobs.h"
#include "oe_runtime/core/server/service.h"
#include "tests/fuzz/targets.h"

namespace oe {
namespace {

constexpr Op kOps[] = {Op::kCreateTable, Op::kPull,  Op::kPush,      Op::kRestore,    Op::kReceive,
                       Op::kReadFile,    Op::kKeys,  Op::kWriteFile, Op::kDrop,       Op::kHello,
                       Op::kLeave,       Op::kEvict, Op::kRecover,   Op::kAssign,     Op::kErase,
                       Op::kReadRows,    Op::kTear,  Op::kVersions,  Op::kSharedValue};
constexpr uint8_t kOther = 0x80;  // in the byte of the operation: the second client says it

// What a fresh server has after a client made two tables.
struct Fixture {
  Fixture() : job(jobs.Get("")), store(job->store), scratch(directory.file("server")) {
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
  Jobs jobs{Storage::Open({}), {0, 1}, &pool, uint64_t{1} << 20};
  Job* const job;
  Store& store;
  Scratch scratch;
};

}  // namespace

// Requests of one input follow each other, as on two connections: a byte for the operation, two for the
// length. A hello has the text that says which worker the client is.
void FuzzRequest(const uint8_t* data, size_t size) {
  static Fixture fixture;  // lives as long as the process
  Workers* const workers = &fixture.job->workers;
  std::array<Session, 2> sessions = {Session{fixture.job, &fixture.scratch, 1, 1},
                                     Session{fixture.job, &fixture.scratch, 2, 2}};
  std::vector<std::byte> shared(256);  // with a fence behind it under the sanitizers
  sessions[0].shared = shared.data();
  sessions[0].shared_size = shared.size();
  Buffer reply;
  while (size >= 3) {
    Session& session = sessions[data[0] >= kOther ? 1 : 0];
    const Op op = kOps[data[0] % kOther % std::size(kOps)];
    uint16_t length = 0;
    std::memcpy(&length, data + 1, sizeof length);
    Buffer body = CopyOf(data + 3, std::min<size_t>(length, size - 3));
    data += 3 + body.size();
    size -= 3 + body.size();
    const Bytes bytes{body.data(), body.size()};
    // Tables and the files of a restore that are of any size are the owner's right, but not this test's
    // memory.
    if (op == Op::kCreateTable && fixture.store.TableNames().size() > 50) continue;
    try {
      if (op == Op::kHello) {
        workers->End(session.client);
        session.worker = false;
        workers->Join(session.client,
                      WorkerSpecFromJsonText({reinterpret_cast<const char*>(bytes.data), bytes.size}));
        session.worker = true;
        continue;
      }
      // What has to wait for the other client waits in vain.
      std::exception_ptr refused;
      bool resumed = false;
      if (!Ready(session, op, bytes, [&](const std::exception_ptr& error) {
            resumed = true;
            refused = error;
          })) {
        workers->GiveUp(session.client);
        Require(resumed);
        if (refused != nullptr) continue;
      }
      const uint64_t expected = ReplyBytes(session, op, bytes);
      if (expected > uint64_t{1} << 24) continue;
      Serve(&session, op, &body, &reply);
      Require((op != Op::kPull && op != Op::kReadRows) || reply.size() == expected);
    } catch (const std::exception&) {
      continue;
    }
  }
  for (const Session& session : sessions) {
    workers->End(session.client);
    fixture.job->shared.End(session.client);
    fixture.scratch.Drop(session.client);
  }
  fixture.store.Mend();
  Require(workers->Stats().is_null());
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
  // The same of the second client.
  const auto other = [&request](Op op, const std::string& body) {
    std::string text = request(op, body);
    text[0] = static_cast<char>(static_cast<uint8_t>(text[0]) | kOther);
    return text;
  };
  const auto worker = [](uint32_t rank, bool synchronous, bool stop_when_lost) {
    return ToJsonText({rank, 2, synchronous, std::nullopt, stop_when_lost, 1.0});
  };
  const auto batch = [](uint32_t table, const std::vector<uint64_t>& keys, double rate,
                        uint64_t place = BatchEntry::kInline) {
    Buffer head;
    EncodeBatch({{table, 0, rate, place}}, {{keys.data(), keys.size()}}, &head);
    return std::string(reinterpret_cast<const char*>(head.data()), head.size());
  };
  const auto rows = [](uint32_t table, bool states, const std::vector<uint64_t>& keys) {
    Buffer head;
    EncodeRowsRequest({table, states, {keys.data(), keys.size()}, {}, states ? 0U : 7U}, &head);
    return std::string(reinterpret_cast<const char*>(head.data()), head.size());
  };
  const auto placed = [](uint32_t table, uint64_t place) {
    const std::vector<uint64_t> keys{4, 5};
    Buffer head;
    EncodeRowsRequest(
        {table, true, {keys.data(), keys.size()}, {}, 0, RowsRequest::Placed{place, place + 64}}, &head);
    return std::string(reinterpret_cast<const char*>(head.data()), head.size());
  };
  const std::string spec =
      R"({"name":"c","dim":2,"optimizer":{"name":"adam"},"initializer":{"name":"uniform","seed":1}})";
  const std::string receive =
      R"({"files":[{"file":"server-0-of-1.a.oet","bytes":4},{"file":"server-0-of-1.b.oet","bytes":4}]})";
  return {
      {"create", request(Op::kCreateTable, spec)},
      {"pull", request(Op::kPull, batch(0, {1, 2, 3}, 0))},
      {"push", request(Op::kPush, batch(1, {1, 2}, 0.5) + std::string(24, '\0')) +
                   request(Op::kKeys, EncodeKeysRequest({1, 0}))},
      {"shared", request(Op::kPull, batch(1, {1, 2}, 0, 64)) + request(Op::kPush, batch(1, {1, 2}, 0.5, 64)) +
                     request(Op::kPull, batch(1, {1, 2}, 0))},
      {"receive", request(Op::kReceive, receive) +
                      request(Op::kWriteFile, EncodeFileChunk({"server-0-of-1.a.oet", 0, 4}) + "data") +
                      request(Op::kRestore, "{}") + request(Op::kDrop, "")},
      {"workers", request(Op::kHello, worker(0, true, false)) + other(Op::kHello, worker(1, true, false)) +
                      request(Op::kPush, batch(0, {1, 2}, 0.5) + std::string(8, '\1')) +
                      request(Op::kPull, batch(0, {1}, 0)) +
                      other(Op::kPush, batch(0, {2, 3}, 0.5) + std::string(8, '\2')) +
                      request(Op::kPull, batch(0, {1}, 0)) + other(Op::kLeave, "") +
                      request(Op::kPush, batch(0, {2}, 0.5) + std::string(4, '\1'))},
      {"asynchronous", request(Op::kHello, worker(1, false, true)) +
                           request(Op::kPush, batch(0, {1, 2}, 0.5) + std::string(8, '\1')) +
                           request(Op::kRecover, R"({"id":1})")},
      {"rows", request(Op::kAssign, rows(1, false, {4, 5}) + std::string(24, '\1')) +
                   request(Op::kReadRows, rows(1, true, {3, 4})) + request(Op::kErase, rows(1, false, {4}))},
      {"placed_rows", request(Op::kAssign, placed(1, 64)) + request(Op::kReadRows, placed(1, 128))},
      {"values",
       request(Op::kSharedValue, EncodeSharedRequest({"queue", true, 0, {&kMagic[0], kMagic.size()}})) +
           other(Op::kSharedValue, EncodeSharedRequest({"queue", false, 0, {}}))},
      {"read", request(Op::kReadFile, EncodeFileChunk({"server-0-of-1.a.oet", 0, 4}))},
      {"torn", request(Op::kTear, R"({"reason":"a disk is full"})") + request(Op::kVersions, "") +
                   request(Op::kPush, batch(0, {1, 2}, 0.5) + std::string(8, '\1'))},
      {"restore", request(Op::kRestore, R"({"directory":"/nonexistent"})")}};
}

}  // namespace oe
