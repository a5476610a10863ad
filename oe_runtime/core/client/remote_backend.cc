#include <algorithm>
#include <asio/ip/tcp.hpp>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "oe_runtime/core/client/backend.h"
#include "oe_runtime/core/client/exchange.h"
#include "oe_runtime/core/client/transfer.h"
#include "oe_runtime/core/server/jobs.h"
#include "oe_runtime/core/wire/errors.h"

namespace oe {
namespace {

using asio::ip::tcp;
using nlohmann::json;

// A save or restore moves whole tables; a dead server is found by its connection, not by the clock.
constexpr double kLongTimeout = 3600;

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
    const bool local =
        std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) { return peer->nonce; });
    if (local && options.share_memory && options.tls != TlsMode::kOn) arena_ = SharedArena::Create();
  }

  uint32_t servers() const override { return static_cast<uint32_t>(peers_.size()); }

  std::vector<uint32_t> CreateTable(const TableSpec& spec) override {
    std::vector<uint32_t> ids;
    for (const json& reply : AskAll(Op::kCreateTable, json(spec).dump(), timeout_)) {
      if (!reply.is_number_unsigned()) throw ProtocolError("the reply to create_table is not a number");
      ids.push_back(reply.get<uint32_t>());
    }
    tables_[spec.name] = spec;
    return ids;
  }

  Buffer NewBuffer(size_t bytes) override { return {bytes, arena_}; }

  void Pull(const std::vector<ServerBatch>& batches) override {
    Share();
    std::vector<Buffer> heads(batches.size());
    std::vector<Call> calls(batches.size());
    for (size_t s = 0; s < batches.size(); ++s) {
      const std::vector<BatchEntry> entries = Placed(batches[s], peers_[s]->shared);
      EncodeBatch(entries, batches[s].blocks, &heads[s]);
      calls[s].body = {asio::buffer(heads[s].data(), heads[s].size())};
      calls[s].exact = true;
      for (const auto& [data, size] : Pieces(batches[s], entries)) {
        calls[s].into.push_back(asio::buffer(data, size));
      }
    }
    Run(Op::kPull, &calls, patience_);
    RaiseErrors(calls, "");
  }

  void Push(const std::vector<ServerBatch>& batches) override {
    Share();
    std::vector<Buffer> heads(batches.size());
    std::vector<Call> calls(batches.size());
    for (size_t s = 0; s < batches.size(); ++s) {
      calls[s].skip = batches[s].skip;
      if (batches[s].skip) continue;
      // What the server keeps until other workers have pushed must be its own.
      const std::vector<BatchEntry> entries =
          Placed(batches[s], worker_.takes_part() ? 0 : peers_[s]->shared);
      EncodeBatch(entries, batches[s].blocks, &heads[s]);
      calls[s].body = {asio::buffer(heads[s].data(), heads[s].size())};
      for (const auto& [data, size] : Pieces(batches[s], entries)) {
        calls[s].body.push_back(asio::buffer(data, size));
      }
      for (size_t i = 0; i < batches[s].counts.size(); ++i) {
        if (batches[s].counts[i] == nullptr) continue;
        const size_t keys = batches[s].blocks[batches[s].entries[i].block].size;
        if (keys > 0) calls[s].body.push_back(asio::buffer(batches[s].counts[i], keys * sizeof(uint32_t)));
      }
    }
    Run(Op::kPush, &calls, patience_);
    RaiseErrors(calls, "this push was applied by");
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
      const json count = ParseReply(server, call);
      if (!count.is_number_unsigned()) throw ProtocolError("the number of erased rows is not a number");
      erased += count.get<uint64_t>();
    }
    return erased;
  }

  void ReadRows(std::vector<ServerRows>* parts) override {
    std::vector<Buffer> heads(parts->size());
    std::vector<Call> calls(parts->size());
    for (size_t s = 0; s < parts->size(); ++s) {
      ServerRows& part = (*parts)[s];
      part.found.resize(part.keys.size());
      calls[s].skip = part.keys.empty();
      if (calls[s].skip) continue;
      EncodeRowsRequest(RequestOf(part), &heads[s]);
      calls[s].body = {asio::buffer(heads[s].data(), heads[s].size())};
      calls[s].exact = true;
      calls[s].into = {asio::buffer(part.weights.data(), part.weights.size())};
      if (part.states && part.states->size() > 0) {
        calls[s].into.push_back(asio::buffer(part.states->data(), part.states->size()));
      }
      calls[s].into.push_back(asio::buffer(part.found));
    }
    Run(Op::kReadRows, &calls, patience_);
    RaiseErrors(calls, "");
  }

  std::vector<Key> Keys(const std::vector<uint32_t>& ids, uint32_t part) override {
    std::vector<std::string> bodies;
    bodies.reserve(ids.size());
    for (const uint32_t id : ids) bodies.push_back(EncodeKeysRequest({id, part}));
    std::vector<Call> calls(peers_.size());
    for (size_t i = 0; i < calls.size(); ++i) calls[i].body = {View(bodies[i])};
    Run(Op::kKeys, &calls, patience_);
    RaiseErrors(calls, "");
    std::vector<Key> all;
    for (const Call& call : calls) {
      const size_t count = call.reply.size() / sizeof(Key);
      all.insert(all.end(), call.reply.as<Key>(), call.reply.as<Key>() + count);
    }
    return all;
  }

  json Save(const std::string& directory, const std::string& since) override {
    json request = json::object();
    if (!since.empty()) {
      std::vector<std::string> tables;
      tables.reserve(tables_.size());
      for (const auto& [name, spec] : tables_) tables.push_back(name);
      request["since"] = TableChecksums(since, tables);
    }
    std::vector<json> replies;
    if (!wire_checkpoints_) {
      request["directory"] = directory;
      replies = AskAll(Op::kSave, request.dump(), long_patience_);
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
      AskAll(Op::kRestore, json{{"directories", directories}}.dump(), long_patience_);
      return;
    }
    Transfer([&](const Ask& ask) {
      // Of several workers one sends for all.
      if (worker_.rank == 0) SendTables(tables_, directories, servers(), ask, pool_);
      AskAll(Op::kRestore, "{}", long_patience_);
    });
  }

  void ApplyIncrement(const std::string& /*directory*/) override {
    throw SpecError("increments are applied in the tables of this process only; servers restore");
  }

  void WaitDurable() override { AskAll(Op::kCheckpoint, json{{"wait", true}}.dump(), long_patience_); }

  void Checkpoint(uint64_t id, bool wait) override {
    AskAll(Op::kCheckpoint, json{{"id", id}, {"wait", wait}}.dump(), long_patience_);
  }

  std::vector<uint64_t> Checkpoints() override {
    std::vector<std::vector<uint64_t>> lists;
    for (const json& reply : AskAll(Op::kCheckpoints, "", timeout_)) {
      if (!reply.is_array()) throw ProtocolError("a list of checkpoints is not an array");
      lists.push_back(reply.get<std::vector<uint64_t>>());
    }
    return CommonIds(lists);
  }

  void Recover(uint64_t id) override { AskAll(Op::kRecover, json{{"id", id}}.dump(), long_patience_); }

  std::optional<uint64_t> Drop(const std::vector<std::string>& tables, const std::optional<std::string>& job,
                               bool force) override {
    json request = {{"tables", tables}, {"force", force}};
    if (tables.empty()) request["tables"] = nullptr;
    if (job && *job != job_) request["job"] = *job;
    const std::string body = request.dump();
    std::vector<Call> calls(peers_.size());
    for (Call& call : calls) call.body = {View(body)};
    Run(Op::kDropTables, &calls, long_patience_);
    RaiseErrors(calls, "tables were dropped by");
    if (!request.contains("job")) {
      for (const std::string& table : tables) tables_.erase(table);
      if (tables.empty()) tables_.clear();
    }
    uint64_t dropped = 0;
    for (size_t i = 0; i < calls.size(); ++i) {
      const json count = ParseReply(i, calls[i]);
      if (count.is_null()) return std::nullopt;
      if (!count.is_number_unsigned()) throw ProtocolError("the number of dropped tables is not a number");
      dropped += count.get<uint64_t>();
    }
    return dropped;
  }

  uint64_t Evict() override {
    uint64_t evicted = 0;
    for (const json& reply : AskAll(Op::kEvict, "", long_patience_)) {
      if (!reply.is_number_unsigned()) throw ProtocolError("the number of evicted rows is not a number");
      evicted += reply.get<uint64_t>();
    }
    return evicted;
  }

  json Stats() override { return AskAll(Op::kStats, "", timeout_); }

  void Leave() override {
    if (worker_.takes_part()) AskAll(Op::kLeave, "", timeout_);
  }

  void Shutdown() override {
    AskAll(Op::kShutdown, "", timeout_);
    Close();
  }

  void Close() override {
    closed_ = true;
    for (const auto& peer : peers_) {
      asio::error_code ignored;
      peer->stream.socket().close(ignored);
    }
  }

 private:
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
    Run(Op::kShare, &calls, timeout_);
    RaiseErrors(calls, "");
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
  std::vector<BatchEntry> Placed(const ServerBatch& batch, size_t shared) const {
    std::vector<BatchEntry> entries = batch.entries;
    if (arena_ == nullptr || shared == 0) return entries;
    for (size_t i = 0; i < entries.size(); ++i) {
      const std::optional<uint64_t> place = arena_->PlaceOf(batch.values[i]);
      if (place && batch.bytes[i] > 0 && *place + batch.bytes[i] <= shared) entries[i].place = *place;
    }
    return entries;
  }

  static RowsRequest RequestOf(const ServerRows& part) {
    return {part.table, part.states.has_value(), {part.keys.data(), part.keys.size()}, {}};
  }

  // A request that changes rows, to the servers whose parts have keys; their numbers and what they replied.
  std::vector<std::pair<size_t, Call>> AskRows(Op op, const std::vector<ServerRows>& parts, bool values) {
    std::vector<Buffer> heads(parts.size());
    std::vector<Call> calls(parts.size());
    for (size_t s = 0; s < parts.size(); ++s) {
      const ServerRows& part = parts[s];
      calls[s].skip = part.keys.empty();
      if (calls[s].skip) continue;
      EncodeRowsRequest(RequestOf(part), &heads[s]);
      calls[s].body = {asio::buffer(heads[s].data(), heads[s].size())};
      if (!values) continue;
      calls[s].body.push_back(asio::buffer(part.weights.data(), part.weights.size()));
      if (part.states && part.states->size() > 0) {
        calls[s].body.push_back(asio::buffer(part.states->data(), part.states->size()));
      }
    }
    Run(op, &calls, patience_);
    RaiseErrors(calls, "these rows were changed by");
    std::vector<std::pair<size_t, Call>> replies;
    for (size_t s = 0; s < calls.size(); ++s) {
      if (!calls[s].skip) replies.emplace_back(s, std::move(calls[s]));
    }
    return replies;
  }

  // What crosses the socket. Parts that lie one after the other in memory, as those of one group do, become
  // one.
  static std::vector<std::pair<std::byte*, size_t>> Pieces(const ServerBatch& batch,
                                                           const std::vector<BatchEntry>& entries) {
    std::vector<std::pair<std::byte*, size_t>> pieces;
    const std::byte* end = nullptr;
    for (size_t i = 0; i < batch.values.size(); ++i) {
      const size_t bytes = batch.bytes[i];
      if (bytes == 0 || entries[i].place != BatchEntry::kInline) continue;
      if (!pieces.empty() && batch.values[i] == end) {
        pieces.back().second += bytes;
      } else {
        pieces.emplace_back(batch.values[i], bytes);
      }
      end = batch.values[i] + bytes;
    }
    return pieces;
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
      work([this](Op op, std::vector<Call>* calls) {
        Run(op, calls, timeout_);
        RaiseErrors(*calls, "");
      });
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
    Run(Op::kHello, &calls, timeout_);
    RaiseErrors(calls, "");
    for (size_t i = 0; i < peers_.size(); ++i) {
      const json reply = ParseReply(i, calls[i]);
      peers_[i]->nonce = NonceOf(reply, *peers_[i]);
      const auto index = reply.value("index", uint64_t{0});
      const auto count = reply.value("count", uint64_t{0});
      if (wire_checkpoints_ && !reply.value("checkpoint_dir", false)) {
        throw CheckpointError("server " + peers_[i]->endpoint +
                              " has no directory of its own for checkpoints; start it with --checkpoint-dir");
      }
      if (index == i && count == peers_.size()) continue;
      throw SpecError("server " + peers_[i]->endpoint + " is server " + std::to_string(index) + " of " +
                      std::to_string(count) + ", but it stands at place " + std::to_string(i) + " of " +
                      std::to_string(peers_.size()) + "; give all servers, in the order of their index");
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
    if (lost_) throw ServerLost(*lost_);
    if (closed_) throw Error("this client is closed");
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

  // The same small request to every server; their JSON replies.
  std::vector<json> AskAll(Op op, const std::string& body, double timeout) {
    std::vector<Call> calls(peers_.size());
    for (Call& call : calls) call.body = {View(body)};
    Run(op, &calls, timeout);
    RaiseErrors(calls, "");
    std::vector<json> replies;
    replies.reserve(calls.size());
    for (size_t i = 0; i < calls.size(); ++i) replies.push_back(ParseReply(i, calls[i]));
    return replies;
  }

  json ParseReply(size_t server, const Call& call) const {
    const uint8_t* data = call.reply.data();
    json reply = json::parse(data, data + call.reply.size(), nullptr, false);
    if (reply.is_discarded())
      throw ProtocolError("server " + peers_[server]->endpoint + ": the reply is not JSON");
    return reply;
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
  asio::io_context io_{1};
  Exchanger exchanger_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::shared_ptr<SharedArena> arena_;       // where rows and gradients lie; nullptr if no server can see it
  size_t shared_ = 0;                        // how much of it the servers were told of
  std::map<std::string, TableSpec> tables_;  // that this client created, by name
  std::optional<ServerLost> lost_;           // what every later request gets too
  bool closed_ = false;
};

}  // namespace

std::unique_ptr<Backend> NewRemoteBackend(const RemoteOptions& options, ThreadPool* pool) {
  return std::make_unique<RemoteBackend>(options, pool);
}

}  // namespace oe
