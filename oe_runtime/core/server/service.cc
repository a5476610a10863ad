#include "oe_runtime/core/server/service.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "oe_runtime/core/common/half_lanes.h"
#include "oe_runtime/core/wire/json_nesting.h"

namespace oe {
namespace {

using nlohmann::json;

void Put(const std::string& text, Buffer* reply) {
  reply->Resize(text.size());
  if (!text.empty()) std::memcpy(reply->data(), text.data(), text.size());
}

std::string TextOf(Bytes body) { return {reinterpret_cast<const char*>(body.data), body.size}; }

json ObjectOf(Bytes body) {
  CheckNesting(body, "the request");
  json request = json::parse(body.data, body.data + body.size, nullptr, false);
  if (!request.is_object()) throw ProtocolError("the request is not a JSON object");
  return request;
}

std::string AbsolutePath(const json& value) {
  if (!value.is_string()) throw ProtocolError("the directory of the request is not a text");
  auto directory = value.get<std::string>();
  if (directory.empty() || directory.front() != '/') {
    throw ProtocolError("directory '" + directory + "' is not an absolute path");
  }
  return directory;
}

// Where values of a table lie in the client's memory.
std::byte* SharedValues(const Session& session, uint32_t table, uint64_t place, uint64_t bytes) {
  const size_t unit = ValueBytes(session.job->store.DtypeOf(table));
  if (place % unit != 0 || bytes > session.shared_size || place > session.shared_size - bytes) {
    throw ProtocolError("values at place " + std::to_string(place) + " of shared memory of " +
                        std::to_string(session.shared_size) + " bytes");
  }
  return session.shared + place;
}

// Bytes of rows that the entries have in the message or its reply.
struct InLine {
  size_t values = 0;
  size_t halves = 0;  // of those of kHalves, which come last
};

// Bounded, together with those in shared memory, so that they can neither overflow nor exhaust the memory.
InLine CountBytes(const Session& session, const BatchView& batch, bool push) {
  const Store& store = session.job->store;
  uint64_t bytes = 0;
  InLine in_line;
  for (const BatchEntry& entry : batch.entries) {
    const uint64_t of_entry = batch.blocks[entry.block].size * store.WireBytes(entry.table);
    bytes += of_entry;
    if (bytes > kMaxBody) {
      throw ProtocolError("a batch of more than " + std::to_string(kMaxBody) + " bytes of rows");
    }
    const Dtype dtype = store.DtypeOf(entry.table);
    if (entry.place == BatchEntry::kHalves) {
      if (push ? dtype == Dtype::kFloat64 : !IsHalf(dtype)) {
        throw ProtocolError("a batch with values of two bytes each for a table that has longer ones");
      }
      in_line.halves += of_entry / 2;
      continue;
    }
    if (entry.place != BatchEntry::kInline) {
      (void)SharedValues(session, entry.table, entry.place, of_entry);
      continue;
    }
    if (in_line.values % sizeof(double) != 0 && dtype == Dtype::kFloat64) {
      throw ProtocolError("a batch with rows of a float64 table behind others");
    }
    in_line.values += of_entry;
  }
  return in_line;
}

// Where the next values of entries are that do not lie in shared memory.
template <typename Byte>
struct Next {
  Byte* values;
  Byte* halves;
  size_t half_bytes;  // of a number there
};

// Where the values of an entry are; those in the message or its reply come one after the other.
template <typename Byte>
Byte* ValuesOf(const Session& session, const BatchEntry& entry, const KeyBlock& block, Next<Byte>* next) {
  const uint64_t bytes = block.size * session.job->store.WireBytes(entry.table);
  if (entry.place == BatchEntry::kHalves) {
    return std::exchange(next->halves, next->halves + bytes / sizeof(float) * next->half_bytes);
  }
  if (entry.place != BatchEntry::kInline) return SharedValues(session, entry.table, entry.place, bytes);
  return std::exchange(next->values, next->values + bytes);
}

// From now on the client may change tables, even if others went back before.
void Sees(Session* session) { session->seen = session->job->fence.seen(); }

void ServeCreateTable(const Session& session, const std::string& text, Buffer* reply) {
  const TableSpec spec = TableSpecFromJsonText(text);
  const uint32_t id =
      session.reads_only ? session.job->store.OpenTable(spec) : session.job->store.CreateTable(spec);
  Put(json(id).dump(), reply);
}

bool ServePull(const Session& session, Bytes body, Buffer* reply, Pass* pass) {
  const BatchView batch = ParseBatch(body);
  if (batch.rest.size != 0)
    throw ProtocolError("a pull with " + std::to_string(batch.rest.size) + " bytes too many");
  const InLine bytes = CountBytes(session, batch, false);
  reply->Resize(bytes.values + bytes.halves);
  auto* const values = reply->as<std::byte>();
  Next<std::byte> next{values, values + bytes.values, sizeof(uint16_t)};
  std::vector<PullPart> parts;
  parts.reserve(batch.entries.size());
  for (const BatchEntry& entry : batch.entries) {
    const KeyBlock& block = batch.blocks[entry.block];
    std::byte* const rows = ValuesOf(session, entry, block, &next);
    parts.push_back(
        {entry.table, block.keys, block.size, rows, 0, nullptr, entry.place == BatchEntry::kHalves});
  }
  if (!session.job->store.LockPull(parts, pass)) return false;
  session.job->store.PullLocked(parts);
  return true;
}

Served ServePush(const Session& session, Buffer* body, Buffer* reply, Pass* pass,
                 std::function<void()>* rest) {
  Store* const store = &session.job->store;
  const BatchView batch = ParseBatch({body->data(), body->size()});
  const InLine bytes = CountBytes(session, batch, true);
  uint64_t counts_size = 0;
  for (const BatchEntry& entry : batch.entries) {
    if (store->Counts(entry.table)) counts_size += batch.blocks[entry.block].size;
    if (session.worker && entry.place < BatchEntry::kHalves) {
      throw ProtocolError("a worker's push with gradients in shared memory");
    }
  }
  const uint64_t expected = bytes.values + counts_size * sizeof(uint32_t) + bytes.halves;
  if (batch.rest.size != expected) {
    throw ProtocolError("a push with " + std::to_string(batch.rest.size) +
                        " bytes of gradients and counts instead of " + std::to_string(expected));
  }
  // 8-byte aligned, as everything before it comes in eights.
  const auto* const values = reinterpret_cast<const std::byte*>(batch.rest.data);
  const auto* counts = reinterpret_cast<const uint32_t*>(values + bytes.values);
  // The reply is empty, and has the memory (ReplyBytes) for gradients that came in two bytes each.
  reply->Resize(2 * bytes.halves);
  UnpackHalves<Bfloat16>(reinterpret_cast<const uint16_t*>(counts + counts_size),
                         bytes.halves / sizeof(uint16_t), reply->as<float>());
  Next<const std::byte> next{values, reply->as<std::byte>(), sizeof(float)};
  std::vector<PushPart> parts;
  parts.reserve(batch.entries.size());
  for (const BatchEntry& entry : batch.entries) {
    const KeyBlock& block = batch.blocks[entry.block];
    const std::byte* const gradients = ValuesOf(session, entry, block, &next);
    parts.push_back({entry.table, block.keys, block.size, gradients, entry.learning_rate, nullptr});
    if (store->Counts(entry.table)) {
      parts.back().counts = counts;
      counts += block.size;
    }
  }
  if (session.worker) {
    if (!session.job->workers.Push(session.client, session.seen, parts, body, reply, pass, rest)) {
      return Served::kLater;
    }
  } else {
    session.job->workers.RequireNone();
    store->Check(parts);
    if (!session.job->fence.Change(session.seen, pass)) return Served::kLater;
    if (!store->LockPush(TablesOf(parts), pass)) return Served::kLater;
    store->PushLocked(parts);
  }
  reply->Resize(0);
  return *rest == nullptr ? Served::kDone : Served::kRest;
}

void ServeKeys(const Store& store, Bytes body, Buffer* reply) {
  const KeysRequest request = ParseKeysRequest(body);
  const std::vector<Key> keys = store.Keys(request.table, request.part);
  if (keys.size() > kMaxBody / sizeof(Key)) {
    throw ProtocolError("a part of " + std::to_string(keys.size()) + " keys is more than a message holds");
  }
  reply->Resize(keys.size() * sizeof(Key));
  if (!keys.empty()) std::memcpy(reply->data(), keys.data(), reply->size());
}

// The bytes of weights and state that rows of a request have.
uint64_t RowBytes(const Session& session, const RowsRequest& request) {
  const Store& store = session.job->store;
  const uint64_t states = request.states ? store.StateBytes(request.table) : 0;
  const uint64_t bytes = request.keys.size * (store.WireBytes(request.table) + states);
  if (bytes > kMaxBody) {
    throw ProtocolError("rows of more than " + std::to_string(kMaxBody) + " bytes in one message");
  }
  return bytes;
}

// Those of them that the message or its reply has.
uint64_t InLineBytes(const Session& session, const RowsRequest& request) {
  const uint64_t bytes = RowBytes(session, request);
  return request.placed ? 0 : bytes;
}

// Where the values of rows by key are: at their places, or in the message or its reply.
struct RowsValues {
  std::byte* weights = nullptr;
  std::byte* states = nullptr;  // nullptr: neither brought nor wanted
};

RowsValues ValuesOf(const Session& session, const RowsRequest& request, uint8_t* in_line) {
  const Store& store = session.job->store;
  const uint64_t bytes = request.keys.size * store.WireBytes(request.table);
  RowsValues values;
  if (request.placed) {
    const uint64_t state_bytes = request.states ? request.keys.size * store.StateBytes(request.table) : 0;
    values.weights = SharedValues(session, request.table, request.placed->weights, bytes);
    if (request.states) {
      values.states = SharedValues(session, request.table, request.placed->states, state_bytes);
    }
  } else {
    values.weights = reinterpret_cast<std::byte*>(in_line);
    if (request.states) values.states = values.weights + bytes;
  }
  return values;
}

void RequireRest(const RowsRequest& request, uint64_t bytes) {
  if (request.rest.size == bytes) return;
  throw ProtocolError("rows with " + std::to_string(request.rest.size) + " bytes of values instead of " +
                      std::to_string(bytes));
}

void ServeAssign(const Session& session, Bytes body, Buffer* reply) {
  const RowsRequest request = ParseRowsRequest(body);
  Store* const store = &session.job->store;
  RequireRest(request, InLineBytes(session, request));
  const KeyBlock& keys = request.keys;
  // Nobody writes to what is assigned.
  const RowsValues values = ValuesOf(session, request, const_cast<uint8_t*>(request.rest.data));
  // Without keys it is only counted.
  if (!session.worker && keys.size > 0) session.job->workers.RequireNone();
  const Fence::Hold hold = session.job->fence.Change(session.seen);
  const Table::AssignCounts counts =
      store->Assign(request.table, keys.keys, keys.size, values.weights, values.states, request.change);
  Put(json{{"created", counts.created}, {"evicted", counts.evicted}, {"no_room", counts.no_room}}.dump(),
      reply);
}

void ServeErase(const Session& session, Bytes body, Buffer* reply) {
  const RowsRequest request = ParseRowsRequest(body);
  RequireRest(request, 0);
  const KeyBlock& keys = request.keys;
  if (!session.worker && keys.size > 0) session.job->workers.RequireNone();
  const Fence::Hold hold = session.job->fence.Change(session.seen);
  Put(json(session.job->store.Erase(request.table, keys.keys, keys.size, request.change)).dump(), reply);
}

void ServeReadRows(const Session& session, Bytes body, Buffer* reply) {
  const RowsRequest request = ParseRowsRequest(body);
  const Store& store = session.job->store;
  RequireRest(request, 0);
  const KeyBlock& keys = request.keys;
  const uint64_t bytes = InLineBytes(session, request);
  reply->Resize(static_cast<size_t>(bytes) + keys.size);
  const RowsValues values = ValuesOf(session, request, reply->data());
  store.ReadRows(request.table, keys.keys, keys.size, values.weights, values.states, reply->data() + bytes);
}

uint64_t IdOf(const json& request) {
  const json id = request.value("id", json());
  if (!id.is_number_unsigned()) throw ProtocolError("the id of the checkpoint is not a number from 0");
  return id.get<uint64_t>();
}

// The cut at which a request has the tables saved, if it does.
std::shared_ptr<void> TakeCut(const Session& session, const json& request) {
  const json cut = request.value("cut", json(false));
  if (!cut.is_boolean()) throw ProtocolError("'cut' is neither true nor false");
  return cut.get<bool>() ? session.job->cut.Take(session.client) : nullptr;
}

void ServeCut(const Session& session, Bytes body, Buffer* reply) {
  const json request = ObjectOf(body);
  Cut* const cut = &session.job->cut;
  if (request.contains("open")) (void)cut->Open(session.client);
  if (request.contains("close")) cut->Close(session.client);
  std::vector<Cut::Allowed> allowed;
  for (const json& one : request.value("let", json::array())) {
    if (!one.is_array() || one.size() != 2 || !one[0].is_number_unsigned() || !one[1].is_number_unsigned()) {
      throw ProtocolError("'let' is not a list of clients and changes");
    }
    allowed.emplace_back(one[0].get<uint64_t>(), one[1].get<uint64_t>());
  }
  cut->Let(session.client, allowed);
  json state = cut->State(session.client);
  state["pushing"] = session.job->store.pushing();
  Put(state.dump(), reply);
}

// Without an id it is only waited for those that there are.
void ServeCheckpoint(const Session& session, Bytes body, Buffer* reply) {
  const json request = ObjectOf(body);
  const json wait = request.value("wait", json(false));
  if (!wait.is_boolean()) throw ProtocolError("'wait' is neither true nor false");
  const Fence::Hold hold = session.job->fence.Change(session.seen);
  if (wait.get<bool>() && !request.contains("id")) {
    session.job->store.WaitDurable();
  } else {
    {
      const auto taken = TakeCut(session, request);
      session.job->store.Checkpoint(IdOf(request), false);
    }
    if (wait.get<bool>()) session.job->store.WaitDurable();
  }
  Put("{}", reply);
}

Scratch* ScratchOf(const Session& session) {
  if (session.scratch != nullptr) return session.scratch;
  throw CheckpointError("this server has no directory for table files; start it with --checkpoint-dir");
}

// Without a directory, the files go through the server's own.
void ServeSave(const Session& session, Bytes body, Buffer* reply) {
  const json request = ObjectOf(body);
  const json since = request.value("since", json::object());
  if (!since.is_object()) throw ProtocolError("'since' is not a JSON object");
  auto taken = TakeCut(session, request);
  Fence::Hold hold = session.job->fence.Stay();  // or some tables would be of before, others of after
  if (!request.contains("directory")) {
    return Put(ScratchOf(session)->Save(session.client, session.job->store, since).dump(), reply);
  }
  const json holds = request.value("hold", json(false));
  if (!holds.is_boolean()) throw ProtocolError("'hold' is neither true nor false");
  std::vector<std::string> contents;
  const json saved = session.job->store.Save(AbsolutePath(request["directory"]), since, true,
                                             holds.get<bool>() ? &contents : nullptr);
  taken.reset();  // others need not wait for the reply
  hold.unlock();
  std::string text = saved.dump();
  if (!contents.empty()) text += '\n';  // which is not in it yet
  for (const std::string& content : contents) text += content;
  Put(text, reply);
}

// All workers of a job go back together.
void GoBack(Session* session, const std::function<void()>& go) {
  Job* const job = session->job;
  const auto go_and_forget = [&] {
    job->cut.GoBack();  // also if `go` fails, since some tables may have gone back
    go();
  };
  const auto go_alone = [&] { job->fence.GoBack(session->client, &session->seen, go_and_forget); };
  if (!session->worker) {
    job->workers.RequireNone();
    return go_alone();
  }
  try {
    job->workers.GoBack(session->client, go_alone);
  } catch (...) {  // another of them may have gone back for all, and failed after some tables
    Sees(session);
    throw;
  }
  Sees(session);
}

void ServeRestore(Session* session, Bytes body, Buffer* reply) {
  const json request = ObjectOf(body);
  Store* const store = &session->job->store;
  if (request.contains("directories")) {
    std::vector<std::string> directories;
    for (const json& directory : request["directories"]) directories.push_back(AbsolutePath(directory));
    GoBack(session, [&] { store->Restore(directories); });
  } else {
    GoBack(session, [&] { ScratchOf(*session)->Restore(session->client, store); });
  }
  Put("{}", reply);
}

void ServeTear(const Session& session, Bytes body, Buffer* reply) {
  constexpr size_t kMostReason = 1000;
  const json reason = ObjectOf(body).value("reason", json());
  if (!reason.is_string()) throw ProtocolError("the reason why the job is torn is not a text");
  // Refused where somebody has gone back since: then what this client pushed before is gone.
  const Fence::Hold hold = session.job->fence.Change(session.seen);
  session.job->store.Tear(reason.get<std::string>().substr(0, kMostReason));
  Put("{}", reply);
}

// Whose tables a kDropTables is about.
Job* JobOf(const Session& session, const json& request) {
  if (!request.contains("job")) return session.job;
  if (!request["job"].is_string()) throw ProtocolError("'job' is not a text");
  return session.jobs == nullptr ? session.job : session.jobs->Get(request["job"].get<std::string>());
}

// No table is named: the client asks whether it may drop some, before it tells any server to.
bool IsQuestion(const json& request) {
  const json tables = request.value("tables", json());
  return tables.is_array() && tables.empty();
}

// Consent to take tables away from others must be said. The workers of one job ask for it together.
void RequireUnused(const Session& session, const Job& job) {
  const bool mine = &job == session.job;
  const uint32_t known = !mine ? 0 : session.worker ? job.workers.connected() : 1;
  const uint32_t clients = job.clients.load();
  if (clients <= known) return;
  throw SpecError("no table is dropped: the job has " + std::to_string(clients - known) + " other client" +
                  (clients - known == 1 ? "" : "s") +
                  " connected; end them first, or drop with force=True, and they get an error");
}

void ServeDropTables(Session* session, Bytes body, Buffer* reply) {
  const json request = ObjectOf(body);
  const json tables = request.value("tables", json());  // null: all
  if (!tables.is_null() && !tables.is_array()) throw ProtocolError("'tables' is neither a list nor null");
  std::vector<std::string> names;
  for (const json& name : tables) {
    if (!name.is_string()) throw ProtocolError("the name of a table is not a text");
    names.push_back(name.get<std::string>());
  }
  const json force = request.value("force", json(false));
  if (!force.is_boolean()) throw ProtocolError("'force' is neither true nor false");
  Job* const job = JobOf(*session, request);
  if (IsQuestion(request)) {
    if (!force.get<bool>()) RequireUnused(*session, *job);
    return Put("0", reply);
  }
  json dropped;  // null: by another worker
  const auto drop = [&] {
    if (!force.get<bool>()) RequireUnused(*session, *job);
    uint64_t count = tables.is_null() ? job->store.Drop(std::nullopt) : 0;
    for (const std::string& name : names) count += job->store.Drop(name);
    if (tables.is_null()) job->shared.ForgetServed();
    dropped = count;
  };
  if (session->worker && job == session->job) {
    job->workers.GoBack(session->client, [&] { job->fence.Alone(session->seen, drop); });
  } else {
    job->fence.Alone(job == session->job ? session->seen : job->fence.seen(), drop);
  }
  Put(dropped.dump(), reply);
}

[[noreturn]] void RefuseReader() {
  throw SpecError("this client is read-only: it may neither change tables nor have them saved");
}

void ServeSharedValue(const Session& session, Bytes body, Buffer* reply) {
  const SharedRequest request = ParseSharedRequest(body);
  if (session.reads_only && (request.write || !SharedValues::IsServed(request.name))) RefuseReader();
  Put(EncodeSharedReply(session.job->shared.Exchange(session.client, request)), reply);
}

void ServeReceive(const Session& session, Bytes body, Buffer* reply) {
  constexpr size_t kMostName = 1000;
  const json request = ObjectOf(body);
  const json save = request.value("save", json(""));
  if (!save.is_string()) throw ProtocolError("the name of the save is not a text");
  ScratchOf(session)->Receive(session.client, request.value("files", json()),
                              save.get<std::string>().substr(0, kMostName), session.job->store);
  Put("{}", reply);
}

void ServeReadFile(const Session& session, Bytes body, Buffer* reply) {
  Bytes rest;
  const FileChunk chunk = ParseFileChunk(body, &rest);
  if (rest.size != 0) throw ProtocolError("a read of a file chunk with bytes too many");
  reply->Resize(chunk.size);
  ScratchOf(session)->Read(session.client, chunk, reply->data());
}

void ServeWriteFile(const Session& session, Bytes body, Buffer* reply) {
  Bytes data;
  const FileChunk chunk = ParseFileChunk(body, &data);
  ScratchOf(session)->Write(session.client, chunk, data);
  reply->Resize(0);
}

}  // namespace

void CheckMay(const Session& session, Op op) {
  if (!session.reads_only) return;
  switch (op) {
    case Op::kCreateTable:  // opens one that there is
    case Op::kPull:
    case Op::kReadAhead:
    case Op::kKeys:
    case Op::kReadRows:
    case Op::kCheckpoints:
    case Op::kStats:
    case Op::kLeave:
    case Op::kShare:
    case Op::kSession:
    case Op::kSharedValue:  // see ServeSharedValue
      return;
    default:
      RefuseReader();
  }
}

bool IsSlow(Op op) {
  switch (op) {
    case Op::kPull:
    case Op::kPush:
    case Op::kLeave:
    case Op::kSharedValue:
    case Op::kCut:
      return false;
    default:
      return true;
  }
}

bool Ready(const Session& session, Op op, Bytes body, Workers::Resume later) {
  if (!session.worker) return true;
  WorkerRequest request;
  request.bytes = body.size;
  switch (op) {
    case Op::kPull:
    case Op::kPush:
      request.kind = op == Op::kPull ? WorkerRequest::Kind::kPull : WorkerRequest::Kind::kPush;
      for (const BatchEntry& entry : ParseBatch(body).entries) request.tables.push_back(entry.table);
      break;
    case Op::kKeys:
    case Op::kSave:
    case Op::kCheckpoint:
    case Op::kEvict:
    case Op::kVersions:
    case Op::kAssign:
    case Op::kErase:
    case Op::kReadRows:
      request.kind = WorkerRequest::Kind::kState;
      break;
    case Op::kRecover:
      request.kind = WorkerRequest::Kind::kGoBack;
      request.target = "checkpoint " + std::to_string(IdOf(ObjectOf(body)));
      break;
    case Op::kDropTables: {
      const json wanted = ObjectOf(body);
      if (IsQuestion(wanted) || JobOf(session, wanted) != session.job) return true;
      request.kind = WorkerRequest::Kind::kGoBack;
      request.target = "no rows of the tables " + wanted.value("tables", json()).dump();
      break;
    }
    case Op::kRestore:
      request.kind = WorkerRequest::Kind::kGoBack;
      request.target = ObjectOf(body).value("directories", json("the files that worker 0 sends")).dump();
      break;
    default:
      return true;
  }
  return session.job->workers.Ready(session.client, std::move(request), std::move(later));
}

bool IsOrdered(const Session& session, Op op) {
  switch (op) {
    case Op::kPush:
    case Op::kAssign:
    case Op::kErase:
    case Op::kEvict:
      return !session.batched;
    case Op::kRestore:
    case Op::kRecover:
      return !session.worker;
    default:
      return false;
  }
}

uint64_t ReplyBytes(const Session& session, Op op, Bytes body) {
  if (op == Op::kPull || op == Op::kPush) {
    const InLine bytes = CountBytes(session, ParseBatch(body), op == Op::kPush);
    return op == Op::kPull ? bytes.values + bytes.halves : 2 * bytes.halves;
  }
  if (op == Op::kKeys) {
    // As keys, and then as the reply. Those that come until it is served are not in it.
    const KeysRequest request = ParseKeysRequest(body);
    return 2 * sizeof(Key) * session.job->store.CountKeys(request.table, request.part);
  }
  if (op == Op::kReadRows) {
    const RowsRequest request = ParseRowsRequest(body);
    return InLineBytes(session, request) + request.keys.size;
  }
  if (op == Op::kSharedValue) return session.job->shared.Bytes(ParseSharedRequest(body).name);
  if (op == Op::kReadFile) {
    Bytes rest;
    return ParseFileChunk(body, &rest).size;
  }
  return 0;
}

namespace {

// Of all but pulls and pushes.
void ServeOther(Session* of_client, Op op, Buffer* request, Buffer* reply) {
  const Session& session = *of_client;
  Store* store = &session.job->store;
  const Bytes body{request->data(), request->size()};
  switch (op) {
    case Op::kCreateTable:
      return ServeCreateTable(session, TextOf(body), reply);
    case Op::kSave:
      return ServeSave(session, body, reply);
    case Op::kRestore:
      return ServeRestore(of_client, body, reply);
    case Op::kReceive:
      return ServeReceive(session, body, reply);
    case Op::kReadFile:
      return ServeReadFile(session, body, reply);
    case Op::kWriteFile:
      return ServeWriteFile(session, body, reply);
    case Op::kDrop:
      ScratchOf(session)->Drop(session.client);
      return Put("{}", reply);
    case Op::kKeys:
      return ServeKeys(*store, body, reply);
    case Op::kCheckpoint:
      return ServeCheckpoint(session, body, reply);
    case Op::kCheckpoints:
      return Put(json(store->Checkpoints()).dump(), reply);
    case Op::kRecover:
      GoBack(of_client, [&, id = IdOf(ObjectOf(body))] { store->Recover(id); });
      return Put("{}", reply);
    case Op::kEvict: {
      const Fence::Hold hold = session.job->fence.Change(session.seen);
      return Put(json(store->Evict()).dump(), reply);
    }
    case Op::kTear:
      return ServeTear(session, body, reply);
    case Op::kCut:
      return ServeCut(session, body, reply);
    case Op::kVersions:
      return Put(store->Versions().dump(-1, ' ', false, json::error_handler_t::replace), reply);
    case Op::kAssign:
      return ServeAssign(session, body, reply);
    case Op::kErase:
      return ServeErase(session, body, reply);
    case Op::kReadRows:
      return ServeReadRows(session, body, reply);
    case Op::kDropTables:
      return ServeDropTables(of_client, body, reply);
    case Op::kSharedValue:
      return ServeSharedValue(session, body, reply);
    case Op::kLeave:
      if (session.worker) session.job->workers.Leave(session.client);
      return Put("{}", reply);
    case Op::kPull:
    case Op::kPush:
    case Op::kError:
    case Op::kHello:
    case Op::kStats:
    case Op::kShutdown:
    case Op::kShare:
    case Op::kReadAhead:
    case Op::kBusy:
    case Op::kSession:
      break;
  }
  throw ProtocolError("operation " + std::to_string(static_cast<int>(op)) + " is not expected here");
}

}  // namespace

Served Serve(Session* session, Op op, Buffer* body, Buffer* reply, std::function<void()>* rest) {
  Pass patient;
  Pass* const pass = session->pass == nullptr ? &patient : session->pass;
  if (op == Op::kPull) {
    Sees(session);  // before the rows are read: of a checkpoint that comes back meanwhile they may not be
    if (!ServePull(*session, {body->data(), body->size()}, reply, pass)) return Served::kLater;
    return Served::kDone;
  }
  if (op == Op::kPush) {
    std::function<void()> waits;
    const Served served = ServePush(*session, body, reply, pass, &waits);
    if (served != Served::kRest || rest != nullptr) {
      if (rest != nullptr) *rest = std::move(waits);
      return served;
    }
    waits();
    return Served::kDone;
  }
  ServeOther(session, op, body, reply);
  return Served::kDone;
}

}  // namespace oe
