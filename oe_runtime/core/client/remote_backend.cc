
#include <algorithm>
#include <asio/ip/tcp.hpp>
#include <chrono>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <thread>

#include "oe_runtime/core/client/backend.h"
#include "oe_runtime/core/client/exchange.h"
#include "oe_runtime/core/client/rounds.h"
#include "oe_runtime/core/client/transfer.h"
#include "oe_runtime/core/common/half_lanes.h"
#include "oe_runtime/core/server/jobs.h"
#include "oe_runtime/core/wire/errors.h"

namespace oe {
namespace {

using asio::ip::tcp;
using nlohmann::json;

// A save or restore moves whole tables; a dead server is found by its connection, not by the clock.
constexpr double kLongTimeout = 3600;

constexpr uint64_t kMostPulled = uint64_t{256} << 20;  // by one message; what is more comes by several
constexpr uint64_t kMostPushed =
    kMaxBody - (uint64_t{1} << 20);   // there is more in a message than this counts
constexpr size_t kMostReason = 1000;  // bytes
constexpr char kCloseCut[] = R"({"close": true})";
constexpr auto kSettle = std::chrono::milliseconds(2000);  // for a push that some servers have already
// As long a cut is waited for before others' changes go on: at first, and later. A server closes it later.
constexpr auto kFirstCut = kSettle + std::chrono::milliseconds(500);
constexpr auto kLastCut = std::chrono::milliseconds(6000);

struct HostPort {
  std::string host;
  std::string port;
};

// "host:port" or "[v6 address]:port".
HostPort ParseEndpoint(const std::string& endpoint) {
  const size_t colon = endpoint.rfind(':');
  if (colon == std::string::npos || colon == 0) {
    throw SpecError("server '" + endpoint + "' is not of the form host:port");
  }
  HostPort result{endpoint.substr(0, colon), endpoint.substr(colon + 1)};
  if (result.host.front() == '[' && result.host.back() == ']') {
    result.host = result.host.substr(1, result.host.size() - 2);
  }
  const bool digits =
      !result.port.empty() && result.port.size() <= 5 &&
      std::all_of(result.port.begin(), result.port.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!digits || std::stoul(result.port) == 0 || std::stoul(result.port) > 65535) {
    throw SpecError("server '" + endpoint + "': '" + result.port + "' is not a port (1 to 65535)");
  }
  return result;
}

asio::const_buffer View(const std::string& text) { return asio::buffer(text); }
asio::const_buffer View(const Buffer& buffer) { return asio::buffer(buffer.data(), buffer.size()); }

class RemoteBackend : public Backend {
 public:
  RemoteBackend(const RemoteOptions& options, ThreadPool* pool)
      : timeout_(options.timeout),
        job_(options.job),
        worker_(options.worker),
        patience_(timeout_ + (worker_.takes_part() ? worker_.wait : 0)),
        long_patience_(patience_ + std::max(0.0, kLongTimeout - timeout_)),
        wire_checkpoints_(options.wire_checkpoints),
        pool_(pool),
        exchanger_(&io_, options.check_interrupt) {
    if (!std::isfinite(timeout_) || timeout_ <= 0) throw SpecError("the timeout must be more than 0 seconds");
    if (options.token.size() > 1024) throw SpecError("the token is longer than 1024 bytes");
    CheckJobName(options.job);
    (void)WorkerSpecFromJsonText(ToJsonText(worker_));  // throws for one that cannot be
    if (options.endpoints.empty()) throw SpecError("no server is given");
    std::vector<HostPort> places;
    for (const std::string& endpoint : options.endpoints) {
      places.push_back(ParseEndpoint(endpoint));
      if (std::count(options.endpoints.begin(), options.endpoints.end(), endpoint) > 1) {
        throw SpecError("server " + endpoint + " is given twice");
      }
    }
    std::vector<tcp::endpoint> addresses;
    tcp::resolver resolver(io_);
    for (size_t i = 0; i < places.size(); ++i) {
      asio::error_code error;
      const auto found = resolver.resolve(places[i].host, places[i].port, error);
      if (error || found.empty()) {
        throw ServerLost(options.endpoints[i], "server " + options.endpoints[i] + ": the host name '" +
                                                   places[i].host + "' is not known (" + error.message() +
                                                   ")");
      }
      addresses.push_back(found.begin()->endpoint());
      peers_.push_back(std::make_unique<Peer>(&io_, options.endpoints[i]));
    }
    exchanger_.Connect(peers_, addresses, options.tls, options.token, timeout_);
    if (options.read_only && worker_.takes_part()) throw SpecError("a worker cannot be read-only");
    SayHello(options);
    OpenSessions(options);
    const bool local =
        std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) { return peer->nonce; });
    if (local && options.share_memory && options.tls != TlsMode::kOn) arena_ = SharedArena::Create();
  }

  uint32_t servers() const override { return static_cast<uint32_t>(peers_.size()); }

  std::vector<uint32_t> CreateTable(const TableSpec& spec) override {
    std::vector<uint32_t> ids;
    // It may recover the table, which takes as long as it has rows.
    for (const json& reply : AskAll(Op::kCreateTable, json(spec).dump(), long_patience_)) {
      ids.push_back(static_cast<uint32_t>(Number(reply, "the reply to create_table")));
    }
    tables_[spec.name] = spec;
    return ids;
  }

  void RequireHalves() const override {
    for (const auto& peer : peers_) {
      if (peer->halves) continue;
      throw SpecError("server " + peer->endpoint +
                      " is of a version that takes no bfloat16 gradients; update it, or leave out the "
                      "'exchange_dtype' of the tables");
    }
  }

  Buffer NewBuffer(size_t bytes) override { return {bytes, arena_}; }

  void Pull(const std::vector<ServerBatch>& batches) override {
    Share();
    if (LargestBytes(batches) <= kMostPulled) return PullRound(batches);
    for (const std::vector<ServerBatch>& round : RoundsOfPull(batches, kMostPulled)) PullRound(round);
  }

  bool reads_ahead() const override {
    return std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) { return peer->reads_ahead; });
  }

  void ReadAhead(const std::vector<ServerBatch>& batches) override {
    std::vector<Buffer> heads(batches.size());
    std::vector<Call> calls(batches.size());
    for (size_t s = 0; s < batches.size(); ++s) {
      calls[s].skip = batches[s].skip || !peers_[s]->reads_ahead;
      if (calls[s].skip) continue;
      EncodeBatch(batches[s].entries, batches[s].blocks, &heads[s]);
      calls[s].body = {View(heads[s])};
    }
    RunWhole(Op::kReadAhead, &calls, timeout_);
  }

  void Push(const std::vector<ServerBatch>& batches) override {
    RequireIntact();
    Share();
    if (LargestBytes(batches) <= kMostPushed) return PushRound(batches, false);
    const Rounds rounds = RoundsOfPush(batches, kMostPushed);
    for (size_t i = 0; i < rounds.size(); ++i) PushRound(rounds[i], i > 0);
  }

  std::string torn() const override { return torn_; }

  void Tear(const std::string& reason) override {
    torn_ = reason;
    if (lost_ || closed_) return;
    const std::string body = Text(json{{"reason", reason.substr(0, kMostReason)}});
    std::vector<Call> calls = SameCalls(body);
    for (size_t i = 0; i < peers_.size(); ++i) calls[i].skip = peers_[i]->version < kVersion6;
    try {
      Run(Op::kTear, &calls, timeout_);
    } catch (const Error&) {
      return;  // the reconnect tells them
    }
    const bool told = std::all_of(calls.begin(), calls.end(), [](const Call& call) {
      // Somebody has gone back meanwhile, and what this client pushed is gone.
      const bool too_late = call.failed && call.error.code == ErrorCode::kCheckpoint;
      return !call.skip && (!call.failed || too_late);
    });
    if (told) torn_.clear();
  }

  Table::AssignCounts Assign(const std::vector<ServerRows>& parts) override {
    Table::AssignCounts sum;
    for (const auto& [server, call] : AskRows(Op::kAssign, parts, true)) {
      const json counts = ParseReply(server, call);
      sum.created += counts.value("created", uint64_t{0});
      sum.evicted += counts.value("evicted", uint64_t{0});
      sum.no_room += counts.value("no_room", uint64_t{0});
    }
    return sum;
  }

  uint64_t Erase(const std::vector<ServerRows>& parts) override {
    uint64_t erased = 0;
    for (const auto& [server, call] : AskRows(Op::kErase, parts, false)) {
      erased += Number(ParseReply(server, call), "the number of erased rows");
    }
    return erased;
  }

  void ReadRows(const std::vector<ServerRows>& parts) override {
    RequireVersion(kVersion6, "rows by key");
    Share();
    std::vector<Buffer> heads(parts.size());
    std::vector<Call> calls(parts.size());
    for (size_t s = 0; s < parts.size(); ++s) {
      const ServerRows& part = parts[s];
      calls[s].skip = part.keys.size == 0;
      if (calls[s].skip) continue;
      const RowsRequest request = RequestOf(part, *peers_[s]);
      EncodeRowsRequest(request, &heads[s]);
      calls[s].body = {View(heads[s])};
      calls[s].exact = true;
      AddValues(request, part, [&](asio::mutable_buffer values) { calls[s].into.push_back(values); });
      calls[s].into.push_back(asio::buffer(part.found, part.keys.size));
    }
    RunWhole(Op::kReadRows, &calls, patience_);
  }

  // A copy costs less than to send them.
  bool TakesInPlace(const std::byte* values, bool dense) const override {
    const Peer& peer = *peers_.front();
    const bool shares = arena_ != nullptr && peer.places_rows && peer.nonce;
    return dense && (!shares || arena_->PlaceOf(values));
  }

  std::vector<Key> Keys(const std::vector<uint32_t>& ids, uint32_t part) override {
    std::vector<std::string> bodies;
    bodies.reserve(ids.size());
    for (const uint32_t id : ids) bodies.push_back(EncodeKeysRequest({id, part}));
    std::vector<Call> calls(peers_.size());
    for (size_t i = 0; i < calls.size(); ++i) calls[i].body = {View(bodies[i])};
    RunWhole(Op::kKeys, &calls, patience_);
    std::vector<Key> all;
    for (const Call& call : calls) {
      const size_t count = call.reply.size() / sizeof(Key);
      all.insert(all.end(), call.reply.as<Key>(), call.reply.as<Key>() + count);
    }
    return all;
  }

  json Save(const std::string& directory, const std::string& since, Contents* contents) override {
    RequireIntact();
    json request = json::object();
    if (!since.empty()) {
      std::vector<std::string> tables;
      tables.reserve(tables_.size());
      for (const auto& [name, spec] : tables_) tables.push_back(name);
      request["since"] = TableChecksums(since, tables);
    }
    if (!wire_checkpoints_) request["directory"] = directory;
    request["cut"] = HoldChanges();
    std::vector<json> replies;
    if (!wire_checkpoints_) {
      if (contents != nullptr) request["hold"] = true;
      const std::string body = request.dump();
      std::vector<Call> calls = SameCalls(body);
      RunWhole(Op::kSave, &calls, long_patience_);
      for (uint32_t i = 0; i < calls.size(); ++i) {
        const Buffer& reply = calls[i].reply;
        replies.push_back(
            ReadSaved(peers_[i]->endpoint, {reply.data(), reply.size()}, {i, servers()}, contents));
      }
    } else {
      Transfer([&](const Ask& ask) {
        replies = AskAll(Op::kSave, request.dump(), long_patience_);
        FetchTables(replies, directory, ask, pool_);
      });
    }
    json all = json::array();
    for (json& reply : replies) {
      for (json& entry : reply) all.push_back(std::move(entry));
    }
    return all;
  }

  void Restore(const std::vector<std::string>& directories) override {
    if (!wire_checkpoints_) {
      GoBack("a restore", Op::kRestore, json{{"directories", directories}}.dump());
      return;
    }
    Transfer([&](const Ask& ask) {
      // Of several workers one sends for all.
      if (worker_.rank == 0) SendTables(tables_, directories, servers(), ask, pool_);
      GoBack("a restore", Op::kRestore, "{}");
    });
  }

  void ApplyIncrement(std::vector<Increment>* /*increment*/) override {
    throw SpecError("increments are applied in the tables of this process only; servers restore");
  }

  void WaitDurable() override { AskAll(Op::kCheckpoint, json{{"wait", true}}.dump(), long_patience_); }

  void Checkpoint(uint64_t id, bool wait) override {
    RequireIntact();
    const bool cut = HoldChanges();
    AskAll(Op::kCheckpoint, json{{"id", id}, {"wait", wait}, {"cut", cut}}.dump(), long_patience_);
  }

  std::vector<uint64_t> Checkpoints() override {
    std::vector<std::vector<uint64_t>> lists;
    for (const json& reply : AskAll(Op::kCheckpoints, "", timeout_)) {
      if (!reply.is_array()) throw ProtocolError("a list of checkpoints is not an array");
      lists.push_back(reply.get<std::vector<uint64_t>>());
    }
    return CommonIds(lists);
  }

  void Recover(uint64_t id) override { GoBack("a recovery", Op::kRecover, json{{"id", id}}.dump()); }

  std::optional<uint64_t> Drop(const std::vector<std::string>& tables, const std::optional<std::string>& job,
                               bool force) override {
    RequireVersion(kVersion6, "dropping tables");
    json request = {{"tables", tables}, {"force", force}};
    if (tables.empty()) request["tables"] = nullptr;
    if (job && *job != job_) request["job"] = *job;
    const std::string body = request.dump();
    if (peers_.size() > 1 && !force) {  // one server may know of clients that the others do not
      request["tables"] = json::array();
      AskAll(Op::kDropTables, request.dump(), long_patience_);
    }
    const std::vector<json> counts = AskAll(Op::kDropTables, body, long_patience_, "tables were dropped by");
    if (!request.contains("job")) {
      for (const std::string& table : tables) tables_.erase(table);
      if (tables.empty()) tables_.clear();
    }
    uint64_t dropped = 0;
    for (const json& count : counts) {
      if (count.is_null()) return std::nullopt;
      dropped += Number(count, "the number of dropped tables");
    }
    return dropped;
  }

  uint64_t Evict() override {
    RequireIntact();
    uint64_t evicted = 0;
    for (const json& reply : AskAll(Op::kEvict, "", long_patience_)) {
      evicted += Number(reply, "the number of evicted rows");
    }
    return evicted;
  }

  json Stats() override { return AskAll(Op::kStats, "", timeout_); }

  SharedReply ExchangeShared(const SharedRequest& request) override {
    RequireVersion(kVersion6, "shared values");
    if (request.name.size() > SharedRequest::kMostName || request.value.size > kMaxSharedValue) {
      throw SpecError("shared value '" + request.name + "' of " + std::to_string(request.value.size) +
                      " bytes: a name has at most " + std::to_string(SharedRequest::kMostName) +
                      " bytes, a value " + std::to_string(kMaxSharedValue));
    }
    const std::string body = EncodeSharedRequest(request);
    std::vector<Call> calls = SameCalls(body);
    for (size_t i = 1; i < calls.size(); ++i) calls[i].skip = true;
    RunWhole(Op::kSharedValue, &calls, timeout_);
    return ParseSharedReply({calls.front().reply.data(), calls.front().reply.size()});
  }

  void Leave() override {
    if (worker_.takes_part()) AskAll(Op::kLeave, "", timeout_);
  }

  void Shutdown() override {
    AskAll(Op::kShutdown, "", timeout_);
    Close();
  }

  void Close() override {
    closed_ = true;
    for (const auto& peer : peers_) CloseNow(peer.get());
  }

 private:
  void PullRound(const std::vector<ServerBatch>& batches) {
    std::vector<Buffer> heads(batches.size());
    std::vector<Call> calls(batches.size());
    std::vector<Piece> halves;
    for (size_t s = 0; s < batches.size(); ++s) {
      calls[s].skip = batches[s].skip;
      if (batches[s].skip) continue;
      const std::vector<BatchEntry> entries = Placed(batches[s], *peers_[s], peers_[s]->shared);
      EncodeBatch(entries, batches[s].blocks, &heads[s]);
      calls[s].body = {View(heads[s])};
      calls[s].exact = true;
      for (const Piece& piece : Pieces(batches[s], entries)) {
        calls[s].into.push_back(asio::buffer(piece.data, piece.bytes));
      }
      // Into the second half of their place.
      for (const Piece& piece : HalfPieces(batches[s], entries)) {
        halves.push_back(piece);
        calls[s].into.push_back(asio::buffer(piece.data + piece.bytes / 2, piece.bytes / 2));
      }
    }
    RunWhole(Op::kPull, &calls, patience_);
    pool_->ParallelFor(halves.size(), [&](size_t i) { Widen(halves[i]); });
  }

  // `some`: of the same push some tables have been pushed already.
  void PushRound(const std::vector<ServerBatch>& batches, bool some) {
    std::vector<Buffer> heads(batches.size());
    std::vector<Buffer> halves(batches.size());
    std::vector<Call> calls(batches.size());
    for (size_t s = 0; s < batches.size(); ++s) {
      calls[s].skip = batches[s].skip;
      if (batches[s].skip) continue;
      // What the server keeps until other workers have pushed must be its own.
      const std::vector<BatchEntry> entries =
          Placed(batches[s], *peers_[s], worker_.takes_part() ? 0 : peers_[s]->shared);
      EncodeBatch(entries, batches[s].blocks, &heads[s]);
      calls[s].body = {View(heads[s])};
      for (const Piece& piece : Pieces(batches[s], entries)) {
        calls[s].body.push_back(asio::buffer(piece.data, piece.bytes));
      }
      for (size_t i = 0; i < batches[s].counts.size(); ++i) {
        if (batches[s].counts[i] == nullptr) continue;
        const size_t keys = batches[s].blocks[batches[s].entries[i].block].size;
        if (keys > 0) calls[s].body.push_back(asio::buffer(batches[s].counts[i], keys * sizeof(uint32_t)));
      }
      const std::vector<Piece> pieces = HalfPieces(batches[s], entries);
      if (pieces.empty()) continue;
      halves[s] = Narrow(pieces);
      calls[s].body.push_back(View(halves[s]));
    }
    // A job that goes on without lost workers goes on without what they pushed last.
    const bool tears = !worker_.takes_part() || worker_.stop_when_lost;
    RunChange("a push", Op::kPush, &calls, patience_, tears);
    TearIfTorn("a push", calls, some);
    RaiseErrors(calls, "this push was applied by");
  }

  // Run() of what changes tables: where it breaks off, nobody knows which servers have done it.
  void RunChange(const std::string& what, Op op, std::vector<Call>* calls, double timeout, bool tears) {
    RequireOpen();
    try {
      Run(op, calls, timeout);
    } catch (const SpecError&) {
      throw;  // nothing was sent
    } catch (const std::exception& error) {
      if (tears) torn_ = what + " broke off: " + error.what();
      throw;
    }
  }

  // Tells all servers if some have done what others have refused. `some`: something of it was done before.
  void TearIfTorn(const std::string& what, const std::vector<Call>& calls, bool some) {
    std::string done;
    const Call* failed = nullptr;
    bool changed = false;  // whether one that failed may have changed something
    std::string where;
    for (size_t i = 0; i < calls.size(); ++i) {
      if (calls[i].skip) continue;
      if (!calls[i].failed) {
        done += (done.empty() ? "" : ", ") + peers_[i]->endpoint;
        continue;
      }
      if (failed == nullptr) where = peers_[i]->endpoint;
      if (failed == nullptr) failed = &calls[i];
      // A single server that knows how to has torn its tables itself, if they are.
      changed = changed || (MayHaveChanged(calls[i].error.code) &&
                            (peers_.size() > 1 || peers_[i]->version < kVersion6));
    }
    if (failed == nullptr) return;
    if (done.empty() && !some && (!changed || NoneIsTorn())) return;
    Tear(what + " failed on server " + where + " (" + failed->error.message + ")" +
         (done.empty() ? "" : " and was done by " + done));
  }

  // Whether all servers say that they have not torn their tables themselves. A worker does not ask: the
  // answer may have to wait for others.
  bool NoneIsTorn() {
    if (worker_.takes_part()) return false;
    for (const auto& peer : peers_) {
      if (peer->version < kVersion6) return false;
    }
    try {
      const std::vector<json> all = AskAll(Op::kVersions, "", patience_);
      return std::all_of(all.begin(), all.end(), [](const json& one) { return one.at("torn").is_null(); });
    } catch (const Error&) {
      return false;
    } catch (const json::exception&) {
      return false;
    }
  }

  static bool MayHaveChanged(ErrorCode code) {
    switch (code) {
      case ErrorCode::kSpec:
      case ErrorCode::kSpecMismatch:
      case ErrorCode::kKeyRange:
      case ErrorCode::kCheckpoint:
      case ErrorCode::kAuth:
      case ErrorCode::kProtocol:
      case ErrorCode::kGradient:
      case ErrorCode::kWorker:
      case ErrorCode::kTorn:
        return false;  // refused before anything is changed
      default:
        return true;
    }
  }

  using Clock = std::chrono::steady_clock;

  // Returns when all servers have the same changes, and whether those of other clients wait until the save
  // that follows has begun. Batches of synchronous workers do not, nor do changes on servers that know no
  // cut: they are only compared. Throws TornError.
  bool HoldChanges() {
    RequireIntact();
    if (std::any_of(peers_.begin(), peers_.end(),
                    [](const auto& peer) { return peer->version < kVersion6; })) {
      return false;
    }
    if ((worker_.takes_part() && worker_.synchronous) ||
        !std::all_of(peers_.begin(), peers_.end(), [](const auto& peer) { return peer->cuts; })) {
      RequireSameChanges();
      return false;
    }
    for (std::chrono::milliseconds limit = kFirstCut;;) {
      const std::vector<json> opened = OpenCut();
      const bool open = !opened.empty();
      try {
        if (open && AwaitCut(limit, opened)) return true;
      } catch (const json::exception& problem) {
        throw ProtocolError(std::string("the state of a cut makes no sense: ") + problem.what());
      }
      AskAll(Op::kCut, kCloseCut, long_patience_);
      // Another client saves, or one whose change is on its way is slow: the others go on meanwhile.
      const Clock::time_point next = Clock::now() + (open ? limit : kSettle / 100);
      while (Clock::now() < next) {
        std::this_thread::sleep_for(kSettle / 100);
        if (open) AskAll(Op::kVersions, "", patience_);  // notices an interrupt
      }
      if (open) limit = kLastCut;
    }
  }

  // Returns the states of the servers; none if another client has a cut open. The first server decides
  // between clients that save at the same time.
  std::vector<json> OpenCut() {
    const std::string body = Text(json{{"open", true}});
    std::vector<json> states(peers_.size());
    for (const bool first : {true, false}) {
      std::vector<Call> calls = SameCalls(body);
      for (size_t i = 0; i < calls.size(); ++i) calls[i].skip = (i == 0) != first;
      RunWhole(Op::kCut, &calls, long_patience_);
      for (size_t i = 0; i < calls.size(); ++i) {
        if (calls[i].skip) continue;
        states[i] = ParseReply(i, calls[i]);
        if (!states[i].value("open", false)) return {};
      }
    }
    return states;
  }

  // Lets changes through until all servers, which are in these states, are between the same two of every
  // client. False if that takes longer than the limit.
  bool AwaitCut(std::chrono::milliseconds limit, std::vector<json> states) {
    const Clock::time_point opened = Clock::now();
    Clock::time_point still = opened;  // since when nothing has moved
    std::chrono::microseconds pause{100};
    std::vector<json> before;
    for (;;) {
      uint64_t running = 0;
      uint64_t pushing = 0;
      for (const json& state : states) {
        if (!state.at("open").get<bool>()) return false;
        running += state.at("running").get<uint64_t>();
        pushing += state.at("pushing").get<uint64_t>();
      }
      const Clock::time_point now = Clock::now();
      if (states != before || running > 0 || pushing > 0) still = now;
      const bool settled = now - still >= kSettle;
      std::vector<json> let = Lagging(states);
      const bool lags = std::any_of(let.begin(), let.end(), [](const json& one) { return !one.empty(); });
      if (settled || (running == 0 && !lags)) {
        if (peers_.size() == 1) return true;
        const std::vector<json> versions = AskAll(Op::kVersions, "", long_patience_);
        const std::string difference = DifferenceOf(versions);
        if (difference.empty()) return true;
        if (settled) {
          AskAll(Op::kCut, kCloseCut, long_patience_);
          Tear(difference);
          throw TornError(TornText(difference));
        }
        AddNameless(versions, states, &let);
      }
      if (now - opened >= limit) return false;
      before = std::move(states);
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, std::chrono::microseconds(20000));
      states = LetThrough(let);
    }
  }

  // Returns the servers' states after these changes may begin.
  std::vector<json> LetThrough(const std::vector<json>& let) {
    std::vector<std::string> bodies(let.size());
    std::vector<Call> calls(let.size());
    for (size_t i = 0; i < calls.size(); ++i) {
      bodies[i] = Text(json{{"let", let[i]}});
      calls[i].body = {View(bodies[i])};
    }
    RunWhole(Op::kCut, &calls, long_patience_);
    std::vector<json> states(calls.size());
    for (size_t i = 0; i < calls.size(); ++i) states[i] = ParseReply(i, calls[i]);
    return states;
  }

  // What each server has not that another has: the clients, and their last changes there.
  static std::vector<json> Lagging(const std::vector<json>& states) {
    constexpr size_t kMost = 1000;  // at once
    std::map<uint64_t, uint64_t> furthest;
    for (const json& state : states) {
      for (const json& client : state.at("clients")) {
        uint64_t& change = furthest[client.at(0).get<uint64_t>()];
        change = std::max(change, client.at(1).get<uint64_t>());
      }
    }
    std::vector<json> let(states.size(), json::array());
    for (size_t i = 0; i < states.size(); ++i) {
      for (const json& client : states[i].at("clients")) {
        const auto name = client.at(0).get<uint64_t>();
        if (name == 0 || client.at(1).get<uint64_t>() == furthest[name] || let[i].size() == kMost) continue;
        let[i].push_back({name, furthest[name]});
      }
    }
    return let;
  }

  // The same of clients without a name, whose pushes are counted.
  static void AddNameless(const std::vector<json>& versions, const std::vector<json>& states,
                          std::vector<json>* let) {
    for (const auto& item : versions.front().at("tables").items()) {
      const std::vector<uint64_t> pushes = PushesTo(versions, item.key());
      if (pushes.empty()) continue;
      const uint64_t most = *std::max_element(pushes.begin(), pushes.end());
      for (size_t i = 0; i < states.size(); ++i) {
        const json& clients = states[i].at("clients");
        if (pushes[i] == most || clients.empty() || clients.front().at(0) != 0) continue;
        (*let)[i].push_back({0, clients.front().at(1).get<uint64_t>() + most - pushes[i]});
      }
    }
  }

  // Throws TornError if the servers stay different while nobody changes them.
  void RequireSameChanges() {
    if (peers_.size() == 1) return;
    std::vector<json> before;
    Clock::time_point still = Clock::now();  // since when nothing has moved
    for (;;) {
      std::vector<json> now = AskAll(Op::kVersions, "", patience_);
      const std::string difference = DifferenceOf(now);
      if (difference.empty()) return;
      const bool origins = !DifferenceOfOrigins(now).empty();
      bool pushing = false;
      for (size_t i = 0; i < now.size(); ++i) {
        pushing = pushing || now[i].value("pushing", 0) > 0;
        // Somebody else pushes: a server may just not have the latest yet.
        if (!origins && !before.empty() && now[i]["tables"] != before[i]["tables"]) return;
      }
      if (pushing) still = Clock::now();
      if (Clock::now() - still >= kSettle) {
        Tear(difference);
        throw TornError(TornText(difference));
      }
      before = std::move(now);
      std::this_thread::sleep_for(kSettle / 20);
    }
  }

  // Empty if all servers have the same changes. Those of asynchronous workers are not compared: one that is
  // lost leaves its last push wherever it came.
  std::string DifferenceOf(const std::vector<json>& versions) const {
    std::string difference = DifferenceOfOrigins(versions);
    if (!difference.empty() || (worker_.takes_part() && !worker_.synchronous)) return difference;
    difference = DifferenceOfPushes(versions);
    return difference.empty() ? DifferenceOfChanges(versions) : difference;
  }

  // All tables of all servers are replaced.
  void GoBack(const std::string& what, Op op, const std::string& body) {
    std::vector<Call> calls = SameCalls(body);
    RunChange(what, op, &calls, long_patience_, true);
    TearIfTorn(what, calls, false);
    RaiseErrors(calls, "");
    torn_.clear();
  }

  static json OriginsOf(const json& versions, const std::string& table) {
    const json& of_table = versions.at("tables").at(table);
    return of_table.size() > 2 ? of_table.at(2) : json();  // 0.2.0 has none
  }

  static const json* Find(const json& origins, const json& text) {
    const auto found = std::find_if(origins.begin(), origins.end(),
                                    [&](const json& origin) { return origin.at(0) == text; });
    return found == origins.end() ? nullptr : &*found;
  }

  // What `between(table, i)` first finds between the table of the first server and that of server i, of those
  // that all servers have; empty if nothing. A table is not everywhere while another client is making it, nor
  // on a server that came back until a client makes it again.
  template <typename Between>
  static std::string FirstDifference(const std::vector<json>& all, const Between& between) {
    try {
      for (const auto& item : all.front().at("tables").items()) {
        const std::string& table = item.key();
        if (!std::all_of(all.begin(), all.end(),
                         [&](const json& one) { return one.at("tables").contains(table); })) {
          continue;
        }
        for (size_t i = 1; i < all.size(); ++i) {
          if (std::string found = between(table, i); !found.empty()) return found;
        }
      }
    } catch (const json::exception&) {
      return "";  // of a server that says something else
    }
    return "";
  }

  // Which table started from something else on one server than on another; empty if none. A server that came
  // back with a checkpoint and one that made it have that in common.
  std::string DifferenceOfOrigins(const std::vector<json>& all) const {
    return FirstDifference(all, [&](const std::string& table, size_t i) -> std::string {
      const json first = OriginsOf(all.front(), table);
      const json other = OriginsOf(all[i], table);
      const auto is_common = [&](const json& origin) { return Find(other, origin.at(0)) != nullptr; };
      if (first.is_null() || other.is_null() || std::any_of(first.begin(), first.end(), is_common)) return "";
      return "table '" + table + "' started from " + other.at(0).at(0).get<std::string>() + " on server " +
             peers_[i]->endpoint + ", from " + first.at(0).at(0).get<std::string>() + " on server " +
             peers_.front()->endpoint;
    });
  }

  // Which table has other assigns or erases on one server than on another; empty if none. Counted from the
  // oldest origin that both have, and since which both know all.
  std::string DifferenceOfChanges(const std::vector<json>& all) const {
    return FirstDifference(all, [&](const std::string& table, size_t i) -> std::string {
      const json other = OriginsOf(all[i], table);
      for (const json& origin : OriginsOf(all.front(), table)) {
        const json* const same = Find(other, origin.at(0));
        if (same == nullptr || same->at(1).is_null() || origin.at(1).is_null()) continue;
        if (same->at(1) == origin.at(1)) break;
        return "server " + peers_[i]->endpoint + " has other assignments or erases in table '" + table +
               "' than server " + peers_.front()->endpoint;
      }
      return "";
    });
  }

  // The pushes to a table, of each server; none if it is not everywhere. Counted from when the job last went
  // back, if it has everywhere: a checkpoint of asynchronous workers may have other versions on each server.
  static std::vector<uint64_t> PushesTo(const std::vector<json>& all, const std::string& table) {
    std::vector<uint64_t> pushes;
    bool based = true;
    for (const json& one : all) {
      if (!one.at("tables").contains(table)) return {};
      based = based && !one.at("tables").at(table).at(1).is_null();
    }
    for (const json& one : all) {
      const json& of_table = one.at("tables").at(table);
      pushes.push_back(of_table.at(0).get<uint64_t>() - (based ? of_table.at(1).get<uint64_t>() : 0));
    }
    return pushes;
  }

  // Which table has other pushes on one server than on another; empty if none.
  std::string DifferenceOfPushes(const std::vector<json>& all) const {
    return FirstDifference(all, [&](const std::string& table, size_t i) -> std::string {
      const std::vector<uint64_t> pushes = PushesTo(all, table);
      if (pushes[i] == pushes.front()) return "";
      return "server " + peers_[i]->endpoint + " has " + std::to_string(pushes[i]) + " pushes to table '" +
             table + "', server " + peers_.front()->endpoint + " " + std::to_string(pushes.front());
    });
  }

  void RequireIntact() const {
    if (!lost_ && !closed_ && !torn_.empty()) throw TornError(TornText(torn_));
  }

  void RequireOpen() const {
    if (lost_) throw ServerLost(*lost_);
    if (closed_) throw Error("this client is closed");
  }

  static std::string Text(const json& value) {
    return value.dump(-1, ' ', false, json::error_handler_t::replace);
  }

  // Tells servers on this host where the shared memory is, if it is new or has grown.
  void Share() {
    if (arena_ == nullptr || arena_->size() == shared_) return;
    shared_ = arena_->size();
    std::vector<std::string> bodies(peers_.size());
    std::vector<Call> calls(peers_.size());
    for (size_t i = 0; i < peers_.size(); ++i) {
      const std::optional<Nonce>& nonce = peers_[i]->nonce;
      if (!nonce || i >= SharedArena::kMostNonces) {
        calls[i].skip = true;
        continue;
      }
      bodies[i] = EncodeShareRequest(arena_->Show(i, *nonce));
      calls[i].body = {View(bodies[i])};
    }
    RunWhole(Op::kShare, &calls, timeout_);
    for (size_t i = 0; i < peers_.size(); ++i) {
      if (calls[i].skip) continue;
      if (ParseReply(i, calls[i]) == true) {
        peers_[i]->shared = shared_;
      } else {
        peers_[i]->nonce.reset();  // what it has it keeps
      }
    }
  }

  // The entries, with the places of those values that lie in the first `shared` bytes of the shared memory.
  // Of the others, those are of kHalves that lose nothing by it.
  std::vector<BatchEntry> Placed(const ServerBatch& batch, const Peer& peer, size_t shared) const {
    std::vector<BatchEntry> entries = batch.entries;
    for (size_t i = 0; peer.halves && i < entries.size(); ++i) {
      if (IsHalf(batch.packs[i])) entries[i].place = BatchEntry::kHalves;
    }
    if (arena_ == nullptr || shared == 0) return entries;
    for (size_t i = 0; i < entries.size(); ++i) {
      const std::optional<uint64_t> place = arena_->PlaceOf(batch.values[i]);
      if (place && batch.bytes[i] > 0 && *place + batch.bytes[i] <= shared) entries[i].place = *place;
    }
    return entries;
  }

  static RowsRequest KeysOf(const ServerRows& part) {
    return {part.table, part.with_states, part.keys, {}, 0};
  }
  // With the places of values that lie in the shared memory, as far as the server sees it.
  RowsRequest RequestOf(const ServerRows& part, const Peer& peer) const {
    RowsRequest request = KeysOf(part);
    if (arena_ == nullptr || !peer.places_rows || part.weights_bytes == 0) return request;
    RowsRequest::Placed placed;
    const auto find = [&](const std::byte* values, size_t bytes, uint64_t* place) {
      const std::optional<uint64_t> found = arena_->PlaceOf(values);
      if (!found || *found + bytes > peer.shared) return false;
      *place = *found;
      return true;
    };
    if (!find(part.weights, part.weights_bytes, &placed.weights)) return request;
    if (part.states_bytes > 0 && !find(part.states, part.states_bytes, &placed.states)) return request;
    request.placed = placed;
    return request;
  }

  // The values that go over the socket.
  template <typename ToBuffer>
  static void AddValues(const RowsRequest& request, const ServerRows& part, const ToBuffer& add) {
    if (request.placed) return;
    add(asio::buffer(part.weights, part.weights_bytes));
    if (part.states_bytes > 0) add(asio::buffer(part.states, part.states_bytes));
  }

  // Takes a change back from servers without keys of it that have counted it, after those with keys have
  // refused it.
  void TakeBack(Op op, const std::vector<ServerRows>& parts, const std::vector<size_t>& counted,
                uint64_t change) {
    std::vector<Buffer> heads(parts.size());
    std::vector<Call> calls(parts.size());
    for (Call& call : calls) call.skip = true;
    for (const size_t s : counted) {
      RowsRequest request = KeysOf(parts[s]);
      request.change = uint64_t{0} - change;
      EncodeRowsRequest(request, &heads[s]);
      calls[s].body = {View(heads[s])};
      calls[s].skip = false;
    }
    if (!counted.empty()) Run(op, &calls, patience_);  // where this fails, servers differ: they are torn
  }

  // A request that changes rows, to the servers whose parts have keys; their numbers and what they replied.
  // Servers without keys count it too: a client that compares servers may not be the one that changed them.
  std::vector<std::pair<size_t, Call>> AskRows(Op op, const std::vector<ServerRows>& parts, bool values) {
    RequireVersion(kVersion6, "rows by key");
    RequireIntact();
    Share();
    const uint64_t change = (uint64_t{random_()} << 32) | random_() | 1;
    std::vector<Buffer> heads(parts.size());
    std::vector<Call> calls(parts.size());
    for (size_t s = 0; s < parts.size(); ++s) {
      const ServerRows& part = parts[s];
      RowsRequest request = values ? RequestOf(part, *peers_[s]) : KeysOf(part);
      if (peers_.size() > 1 && peers_[s]->counts_changes) request.change = change;
      calls[s].skip = part.keys.size == 0 && request.change == 0;
      if (calls[s].skip) continue;
      EncodeRowsRequest(request, &heads[s]);
      calls[s].body = {View(heads[s])};
      if (!values) continue;
      AddValues(request, part, [&](asio::const_buffer of_part) { calls[s].body.push_back(of_part); });
    }
    const std::string what = op == Op::kErase ? "an erase" : "an assignment";
    RunChange(what, op, &calls, patience_, true);
    std::vector<size_t> counted;
    bool failed = false;
    for (size_t s = 0; s < calls.size(); ++s) {
      failed = failed || calls[s].failed;
      if (calls[s].skip || calls[s].failed || parts[s].keys.size > 0) continue;
      counted.push_back(s);
      calls[s].skip = true;
    }
    // One that all have refused has changed no rows (Table::Assign), or those that its error speaks of.
    const bool done =
        std::any_of(calls.begin(), calls.end(), [](const Call& call) { return !call.skip && !call.failed; });
    if (done) TearIfTorn(what, calls, false);
    if (failed && !done) {
      try {
        TakeBack(op, parts, counted, change);
      } catch (const Error& error) {  // what the servers refused is what the caller must read
        torn_ = what + " could not be taken back: " + error.what();  // the reconnect tells them
      }
    }
    RaiseErrors(calls, "these rows were changed by");
    std::vector<std::pair<size_t, Call>> replies;
    for (size_t s = 0; s < calls.size(); ++s) {
      if (!calls[s].skip) replies.emplace_back(s, std::move(calls[s]));
    }
    return replies;
  }

  // Values of entries that cross the socket and lie one after the other in memory.
  struct Piece {
    std::byte* data;
    size_t bytes;  // here
    Dtype dtype;
  };

  // Those of kInline, or of kHalves. Parts that lie one after the other, as those of one group do, become
  // one.
  static std::vector<Piece> Pieces(const ServerBatch& batch, const std::vector<BatchEntry>& entries,
                                   uint64_t place = BatchEntry::kInline) {
    std::vector<Piece> pieces;
    for (size_t i = 0; i < batch.values.size(); ++i) {
      if (batch.bytes[i] == 0 || entries[i].place != place) continue;
      const Dtype dtype = place == BatchEntry::kHalves ? batch.packs[i] : Dtype::kFloat32;
      if (!pieces.empty() && pieces.back().dtype == dtype &&
          batch.values[i] == pieces.back().data + pieces.back().bytes) {
        pieces.back().bytes += batch.bytes[i];
      } else {
        pieces.push_back({batch.values[i], batch.bytes[i], dtype});
      }
    }
    return pieces;
  }
  static std::vector<Piece> HalfPieces(const ServerBatch& batch, const std::vector<BatchEntry>& entries) {
    return Pieces(batch, entries, BatchEntry::kHalves);
  }

  // Makes floats of the halves that were read into the second half of the piece.
  static void Widen(const Piece& piece) {
    const auto* const halves = reinterpret_cast<const uint16_t*>(piece.data + piece.bytes / 2);
    auto* const values = reinterpret_cast<float*>(piece.data);
    const size_t n = piece.bytes / sizeof(float);
    piece.dtype == Dtype::kBfloat16 ? UnpackHalves<Bfloat16>(halves, n, values)
                                    : UnpackHalves<Float16>(halves, n, values);
  }

  // Floats that are bfloat16 already, as these.
  static Buffer Narrow(const std::vector<Piece>& pieces) {
    size_t bytes = 0;
    for (const Piece& piece : pieces) bytes += piece.bytes / 2;
    Buffer halves(bytes);
    auto* to = halves.as<uint16_t>();
    for (const Piece& piece : pieces) {
      const size_t n = piece.bytes / sizeof(float);
      PackBfloat16(reinterpret_cast<const float*>(piece.data), n, to);
      to += n;
    }
    return halves;
  }

  // Does `work`, and has the servers remove their copies, however it ends.
  void Transfer(const std::function<void(const Ask&)>& work) {
    const auto drop = [this] {
      try {
        AskAll(Op::kDrop, "", timeout_);
      } catch (const Error&) {
        return;  // the work is done or has failed already, and the next transfer removes what was left
      }
    };
    try {
      work([this](Op op, std::vector<Call>* calls) { RunWhole(op, calls, timeout_); });
    } catch (const Error&) {
      if (!lost_ && !closed_) drop();
      throw;
    }
    drop();
  }

  void SayHello(const RemoteOptions& options) {
    // Over an encrypted connection the token has been proven, and stays here.
    std::string worker = worker_.takes_part() ? ToJsonText(worker_) : "";
    if (options.read_only) worker = kReader;
    const std::string clear = EncodeHello({kProtocolVersion, options.token, options.job, worker});
    const std::string encrypted = EncodeHello({kProtocolVersion, "", options.job, worker});
    std::vector<Call> calls(peers_.size());
    for (size_t i = 0; i < calls.size(); ++i) {
      calls[i].body = {View(peers_[i]->stream.encrypted() ? encrypted : clear)};
    }
    RunWhole(Op::kHello, &calls, timeout_);
    for (size_t i = 0; i < peers_.size(); ++i) {
      const json reply = ParseReply(i, calls[i]);
      const auto version = reply.value("version", uint64_t{kOldestProtocol});
      if (version < kOldestProtocol || version > kProtocolVersion) {
        throw ProtocolError("server " + peers_[i]->endpoint + " goes on in version " +
                            std::to_string(version) + " of the protocol, which was not offered");
      }
      peers_[i]->version = static_cast<uint16_t>(version);
      peers_[i]->nonce = NonceOf(reply, *peers_[i]);
      peers_[i]->reads_ahead = reply.value("reads_ahead", false);
      peers_[i]->counts_changes = reply.value("counts_changes", false);
      peers_[i]->places_rows = reply.value("places_rows", false);
      peers_[i]->cuts = reply.value("cuts", false);
      peers_[i]->halves = reply.value("halves", false);
      peers_[i]->sessions = reply.value("sessions", false);
      const auto index = reply.value("index", uint64_t{0});
      const auto count = reply.value("count", uint64_t{0});
      if (wire_checkpoints_ && !reply.value("checkpoint_dir", false)) {
        throw CheckpointError("server " + peers_[i]->endpoint +
                              " has no directory of its own for checkpoints; start it with --checkpoint-dir");
      }
      const size_t all = options.of == 0 ? peers_.size() : options.of;
      if (index == i && count == all) continue;
      throw SpecError("server " + peers_[i]->endpoint + " is server " + std::to_string(index) + " of " +
                      std::to_string(count) + ", but it stands at place " + std::to_string(i) + " of " +
                      std::to_string(all) + "; give all servers, in the order of their index");
    }
  }

  // From now on a connection that breaks can be replaced.
  void OpenSessions(const RemoteOptions& options) {
    std::vector<Call> calls(peers_.size());
    for (size_t i = 0; i < peers_.size(); ++i) calls[i].skip = !peers_[i]->sessions;
    RunWhole(Op::kSession, &calls, timeout_);
    for (size_t i = 0; i < peers_.size(); ++i) {
      if (calls[i].skip) continue;
      const json name = ParseReply(i, calls[i]);
      if (!name.is_string() || name.empty()) continue;
      const std::string token = peers_[i]->stream.encrypted() ? "" : options.token;
      peers_[i]->resume = EncodeHello({kProtocolVersion, token, job_, "", name.get<std::string>()});
    }
  }

  // Of a server that may be on this host: a connection from an address to itself does not leave it.
  static std::optional<Nonce> NonceOf(const json& hello, Peer& peer) {
    const json nonce = hello.value("nonce", json());
    asio::error_code error;
    const tcp::endpoint here = peer.stream.socket().local_endpoint(error);
    const tcp::endpoint there = peer.stream.socket().remote_endpoint(error);
    if (error || here.address() != there.address() || !nonce.is_string()) return std::nullopt;
    return ParseNonce(nonce.get<std::string>());
  }

  void Run(Op op, std::vector<Call>* calls, double timeout) {
    RequireOpen();
    try {
      exchanger_.Run(op, peers_, calls, timeout);
    } catch (const ServerLost& error) {
      lost_ = error;
      throw;
    } catch (const SpecError&) {
      throw;  // nothing was sent
    } catch (...) {
      closed_ = true;
      throw;
    }
  }

  // Run() that throws what the servers replied as errors; `changed` as of RaiseErrors().
  void RunWhole(Op op, std::vector<Call>* calls, double timeout, const std::string& changed = "") {
    Run(op, calls, timeout);
    RaiseErrors(*calls, changed);
  }

  // The same request to every server; `body` must outlive it.
  std::vector<Call> SameCalls(const std::string& body) const {
    std::vector<Call> calls(peers_.size());
    for (Call& call : calls) call.body = {View(body)};
    return calls;
  }

  // The same small request to every server; their JSON replies.
  std::vector<json> AskAll(Op op, const std::string& body, double timeout, const std::string& changed = "") {
    std::vector<Call> calls = SameCalls(body);
    RunWhole(op, &calls, timeout, changed);
    std::vector<json> replies;
    replies.reserve(calls.size());
    for (size_t i = 0; i < calls.size(); ++i) replies.push_back(ParseReply(i, calls[i]));
    return replies;
  }

  // A reply that `what` names in the error if it is none.
  static uint64_t Number(const json& reply, const std::string& what) {
    if (!reply.is_number_unsigned()) throw ProtocolError(what + " is not a number");
    return reply.get<uint64_t>();
  }

  json ParseReply(size_t server, const Call& call) const {
    return ParseJsonReply(peers_[server]->endpoint, {call.reply.data(), call.reply.size()});
  }

  void RequireVersion(uint16_t version, const std::string& what) const {
    for (const auto& peer : peers_) {
      if (peer->version >= version) continue;
      throw SpecError("server " + peer->endpoint + " speaks version " + std::to_string(peer->version) +
                      " of the protocol, which does not know " + what + "; update it");
    }
  }

  // `changed` names what some servers have done, where that must be told.
  void RaiseErrors(const std::vector<Call>& calls, const std::string& changed) const {
    std::string done;
    const Call* first = nullptr;
    std::string where;
    for (size_t i = 0; i < calls.size(); ++i) {
      if (calls[i].skip) continue;
      if (!calls[i].failed) {
        done += (done.empty() ? "" : ", ") + peers_[i]->endpoint;
      } else if (first == nullptr) {
        first = &calls[i];
        where = peers_[i]->endpoint;
      }
    }
    if (first == nullptr) return;
    std::string message = first->error.message + " (server " + where + ")";
    if (!changed.empty() && !done.empty()) {
      message += "; " + changed + " " + done + " all the same: go on from the last checkpoint";
    }
    ThrowAs(first->error.code, message);
  }

  const double timeout_;
  const std::string job_;
  const WorkerSpec worker_;
  // Seconds for requests that may wait for other workers, and for those that move whole tables.
  const double patience_;
  const double long_patience_;
  const bool wire_checkpoints_;
  ThreadPool* const pool_;
  std::random_device random_;  // numbers of changes
  asio::io_context io_{1};
  Exchanger exchanger_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::shared_ptr<SharedArena> arena_;       // where rows and gradients lie; nullptr if no server can see it
  size_t shared_ = 0;                        // how much of it the servers were told of
  std::map<std::string, TableSpec> tables_;  // that this client created, by name
  std::optional<ServerLost> lost_;           // what every later request gets too
  std::string torn_;                         // why the servers are torn, if not all of them know
  bool closed_ = false;
};

}  // namespace

std::unique_ptr<Backend> NewRemoteBackend(const RemoteOptions& options, ThreadPool* pool) {
  return std::make_unique<RemoteBackend>(options, pool);
}

}  // namespace oe
