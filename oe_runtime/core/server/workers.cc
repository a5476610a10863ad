// The states of a seat, which is the place of one rank. A batch waits for the seats in kAwaited and kIn.
//
//   state          event                                            next state   function
//   kAwaited       a client joins                                   kIn          Seated
//   kIn            its connection ends, or is replaced: 1           kAwaited     Unseat
//                                                       otherwise   kLost        Unseat
//   kIn, kOut      the client leaves                                kLeft        Leave
//   kLost, kLeft   a client joins: 1 or 2                           kIn          Seated
//                                  otherwise                        kOut         Seated
//   kOut           its connection ends, or is replaced              kLost        Unseat
//   kOut           all go back to a checkpoint together             kIn          GoBack
//   any            the last connection ends, or a higher            (no seats)   Forget
//                  generation comes, or a worker whose place
//                  is taken while all are away
//
//   1: nobody has pushed since the workers came or went back (pushed_).
//   2: the mode is asynchronous, and interrupted_ is not set.
//
// A connection is replaced when another client joins with its rank. One that breaks has not ended: its worker
// is away, and keeps its seat in its state until it is there again or its session ends (sessions.h).
//
// The states of the job. interrupted_ is set when a required seat becomes kLost and the workers said "stop"
// for on_lost. failure_ is set when a batch could not be applied. From then on pushes, and requests that
// would wait, fail. Both end when all go back, or when all connections have ended. leader_ is the client that
// goes back for all, the one with the lowest rank; the others wait for its result.
#include "oe_runtime/core/server/workers.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "oe_runtime/core/wire/errors.h"

namespace oe {
namespace {

using Kind = WorkerRequest::Kind;

std::string Seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", seconds);
  return text;
}

constexpr const char* kTaken =
    "another connection has taken the place of this worker: all workers were started again, or two have the "
    "same rank";

template <typename Value>
void RequireSame(const char* field, const Value& of_this, const Value& of_others) {
  if (of_this == of_others) return;
  throw SpecError(std::string("worker: '") + field + "' is " + nlohmann::json(of_this).dump() +
                  ", but the job's other workers have said " + nlohmann::json(of_others).dump() +
                  "; all must say the same, until all have gone (those of a host that has vanished are held "
                  "for gone after 90 s, or at once where the new ones have a higher generation)");
}

}  // namespace

Workers::Workers(std::string job, Store* store, const Fence* fence, Budget* held, const Post* post)
    : job_(std::move(job)), store_(store), fence_(fence), held_(held), post_(post) {}

uint32_t Workers::RankOf(uint64_t client) const {
  for (uint32_t rank = 0; rank < seats_.size(); ++rank) {
    if (seats_[rank].client == client) return rank;
  }
  throw WorkerLost(kTaken);
}

// "worker 1 of 4", "workers 1, 2 of 4 of job 'x'".
std::string Workers::Names(const std::vector<uint32_t>& ranks) const {
  constexpr size_t kMost = 10;
  std::string text = ranks.size() == 1 ? "worker " : "workers ";
  for (size_t i = 0; i < std::min(ranks.size(), kMost); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  if (ranks.size() > kMost) text += " and " + std::to_string(ranks.size() - kMost) + " more";
  return text + " of " + std::to_string(seats_.size()) + (job_.empty() ? "" : " of job '" + job_ + "'");
}

// Why no batch can be completed any more; nullptr if they can.
std::exception_ptr Workers::Failure() const {
  if (failure_ != nullptr) return failure_;
  if (!interrupted_) return nullptr;
  std::vector<uint32_t> lost;
  for (uint32_t rank = 0; rank < seats_.size(); ++rank) {
    if (seats_[rank].state == State::kLost || seats_[rank].state == State::kOut) lost.push_back(rank);
  }
  return std::make_exception_ptr(WorkerLost(
      Names(lost) + (lost.size() == 1 ? " was lost: its connection" : " were lost: their connections") +
      " ended without leave()" + kGoBackTogether));
}

std::exception_ptr Workers::MayNotPush(uint32_t rank) const {
  if (std::exception_ptr failure = Failure()) return failure;
  const State state = seats_[rank].state;
  if (state == State::kLeft) return std::make_exception_ptr(SpecError(Names({rank}) + " has left"));
  if (state != State::kOut) return nullptr;
  return std::make_exception_ptr(
      WorkerLost(Names({rank}) + " was away, and the others went on without it" + kGoBackTogether));
}

Workers::Table* Workers::TableOf(uint32_t id) {
  Table& table = tables_[id];
  table.held.resize(seats_.size());
  table.pushes.resize(seats_.size());
  return &table;
}

// Sets *waits to whether the request has to wait; returns the workers that it waits for.
std::vector<uint32_t> Workers::MissingFor(uint32_t rank, const WorkerRequest& request, bool* waits) const {
  std::vector<bool> missing(seats_.size());
  *waits = false;
  const auto look_at = [&](const Table& table) {
    const bool bounded = !spec_.synchronous && spec_.staleness && request.kind == Kind::kPull;
    if (!bounded && table.held[rank].body == nullptr) return;
    *waits = *waits || !bounded;
    for (uint32_t other = 0; other < seats_.size(); ++other) {
      if (!seats_[other].required()) continue;
      const bool behind = bounded ? table.pushes[other] + *spec_.staleness < table.pushes[rank]
                                  : table.held[other].body == nullptr;
      missing[other] = missing[other] || behind;
      *waits = *waits || behind;
    }
  };
  if (request.kind == Kind::kState) {
    for (const auto& [id, table] : tables_) look_at(table);
  }
  for (const uint32_t id : request.tables) {
    const auto found = tables_.find(id);
    if (found != tables_.end()) look_at(found->second);
  }
  std::vector<uint32_t> ranks;
  for (uint32_t other = 0; other < seats_.size(); ++other) {
    if (missing[other]) ranks.push_back(other);
  }
  return ranks;
}

// The workers that have not asked to go back, but must: all, or where the others go on without lost ones,
// those that are there.
std::vector<uint32_t> Workers::MissingToGoBack() const {
  std::vector<uint32_t> ranks;
  for (uint32_t rank = 0; rank < seats_.size(); ++rank) {
    const Seat& seat = seats_[rank];
    const bool gone = seat.state == State::kLeft || seat.state == State::kLost;
    if (gone && !spec_.stop_when_lost) continue;
    const auto found = waiting_.find(seat.client);
    if (found == waiting_.end() || found->second.request.kind != Kind::kGoBack) ranks.push_back(rank);
  }
  return ranks;
}

// nullptr: the request can be served; an error: it never will; nothing: it has to wait.
std::optional<std::exception_ptr> Workers::Verdict(uint32_t rank, const WorkerRequest& request) const {
  if (request.kind == Kind::kGoBack) return std::nullopt;  // WakeGoingBack decides
  bool waits = false;
  (void)MissingFor(rank, request, &waits);
  if (!waits) return request.kind == Kind::kPush ? MayNotPush(rank) : nullptr;
  if (std::exception_ptr failure = Failure()) return failure;
  return std::nullopt;
}

void Workers::Wake(std::map<uint64_t, Waiting>::iterator waiting, std::exception_ptr error) {
  woken_.push_back({std::move(waiting->second.resume), std::move(error)});
  waiting_.erase(waiting);
}

void Workers::WakeReady() {
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    const auto waiting = it++;
    if (const auto verdict = Verdict(waiting->second.rank, waiting->second.request)) Wake(waiting, *verdict);
  }
  WakeGoingBack();
}

// When all are there, the one with the lowest rank does it: of files that travel it is the one that sends
// them.
void Workers::WakeGoingBack() {
  std::map<uint32_t, std::map<uint64_t, Waiting>::iterator> all;
  for (auto it = waiting_.begin(); it != waiting_.end(); ++it) {
    if (it->second.request.kind == Kind::kGoBack) all[it->second.rank] = it;
  }
  if (leader_ != 0 || all.empty() || !MissingToGoBack().empty()) return;
  for (const auto& [id, table] : tables_) {
    if (table.applying) return;  // who applies it looks here again
  }
  const std::string target = all.begin()->second->second.request.target;
  for (const auto& [rank, waiting] : all) {
    if (waiting->second.request.target == target) continue;
    const auto error = std::make_exception_ptr(
        CheckpointError("worker " + std::to_string(all.begin()->first) + " goes back to " + target +
                        ", but worker " + std::to_string(rank) + " to " + waiting->second.request.target +
                        "; all must go back to the same checkpoint"));
    for (const auto& [other, of_other] : all) Wake(of_other, error);
    return;
  }
  leader_ = all.begin()->second->first;
  Wake(all.begin()->second, nullptr);
}

// All workers have gone: the next may be others.
void Workers::Forget() {
  seats_.clear();
  tables_.clear();
  leader_ = 0;
  pushed_ = interrupted_ = false;
  failure_ = nullptr;
  ++life_;
}

// A higher generation than any before begins anew, even if old workers are still connected; the same one if
// all are away.
void Workers::RequireNewest(const WorkerSpec& spec) {
  if (spec.generation < generation_) {
    throw WorkerLost("the workers of this job have been started again since: this one is of generation " +
                     std::to_string(spec.generation) + ", the others are of " + std::to_string(generation_));
  }
  // Workers that are started again after the connections of all had broken.
  const bool taken = spec.rank >= seats_.size() || seats_[spec.rank].client != 0;
  const bool again = taken && std::none_of(seats_.begin(), seats_.end(),
                                           [](const Seat& seat) { return seat.client != 0 && !seat.away; });
  if (spec.generation == generation_ && !again) return;
  for (uint32_t rank = 0; rank < seats_.size(); ++rank) {
    if (seats_[rank].client != 0) Unseat(rank, kTaken);
  }
  Forget();
  generation_ = spec.generation;
}

void Workers::Join(uint64_t client, const WorkerSpec& spec) {
  Batch complete;
  Change([&] {
    RequireNewest(spec);
    if (seats_.empty()) {
      spec_ = spec;
      seats_.resize(spec.of);
    }
    RequireSame("of", spec.of, spec_.of);
    RequireSame("mode", spec.synchronous ? "sync" : "async", spec_.synchronous ? "sync" : "async");
    RequireSame("staleness", spec.staleness.value_or(UINT32_MAX), spec_.staleness.value_or(UINT32_MAX));
    RequireSame("on_lost", spec.stop_when_lost ? "stop" : "continue",
                spec_.stop_when_lost ? "stop" : "continue");
    if (seats_[spec.rank].client != 0) {
      Unseat(spec.rank, kTaken);
    }
    seats_[spec.rank].client = client;
    seats_[spec.rank].wait = spec.wait;
    Seated(spec.rank);
    complete = TakeComplete();
  });
  ApplyLater(std::move(complete));
}

void Workers::Seated(uint32_t rank) {
  Seat& seat = seats_[rank];
  const bool first = seat.state == State::kAwaited || !pushed_;
  const bool at_once = !spec_.synchronous && !interrupted_;
  for (auto& [id, table] : tables_) {
    if (first || !at_once) break;
    // As far as the slowest of the others, so that nobody waits for what was never to come.
    uint64_t slowest = UINT64_MAX;
    for (uint32_t other = 0; other < seats_.size(); ++other) {
      if (seats_[other].required()) slowest = std::min(slowest, table.pushes[other]);
    }
    if (slowest != UINT64_MAX) table.pushes[rank] = slowest;
  }
  seat.state = first || at_once ? State::kIn : State::kOut;
}

void Workers::Unseat(uint32_t rank, const std::string& why) {
  Seat& seat = seats_[rank];
  const auto waiting = waiting_.find(seat.client);
  if (waiting != waiting_.end()) Wake(waiting, std::make_exception_ptr(WorkerLost(why)));
  if (leader_ == seat.client) leader_ = 0;
  seat.client = 0;
  seat.went_back = seat.away = false;
  if (seat.state == State::kLeft) return;
  const bool was_in = seat.required();
  seat.state = pushed_ ? State::kLost : State::kAwaited;
  if (pushed_ && was_in && spec_.stop_when_lost) interrupted_ = true;
}

void Workers::End(uint64_t client) noexcept {
  try {
    Batch complete;
    Change([&] {
      const auto seat =
          std::find_if(seats_.begin(), seats_.end(), [&](const Seat& one) { return one.client == client; });
      if (seat == seats_.end()) return;
      Unseat(static_cast<uint32_t>(seat - seats_.begin()), "the connection has ended");
      const bool any =
          std::any_of(seats_.begin(), seats_.end(), [](const Seat& one) { return one.client != 0; });
      complete = TakeComplete();
      if (!any) Forget();
    });
    ApplyLater(std::move(complete));
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "server: the end of a worker's connection: %s\n", problem.what());
  }
}

void Workers::SetAway(uint64_t client, bool away) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Seat& seat : seats_) {
    if (seat.client == client) seat.away = away;
  }
}

bool Workers::Withdraw(uint64_t client) {
  bool waited = false;
  Change([&] {
    const auto found = waiting_.find(client);
    if (found == waiting_.end()) return;
    // The others are going back, and do so once.
    if (found->second.request.kind == Kind::kGoBack && leader_ != 0) return;
    waited = true;
    Wake(found, std::make_exception_ptr(WorkerLost("the connection has broken")));
  });
  return waited;
}

void Workers::Leave(uint64_t client) {
  Batch complete;
  Change([&] {
    seats_[RankOf(client)].state = State::kLeft;
    complete = TakeComplete();
  });
  ApplyLater(std::move(complete));
}

bool Workers::Ready(uint64_t client, WorkerRequest request, Resume later) {
  bool ready = false;
  Change([&] {
    const uint32_t rank = RankOf(client);
    if (leader_ == client) leader_ = 0;  // its GoBack never came
    seats_[rank].went_back = false;
    if (const auto verdict = Verdict(rank, request)) {
      if (*verdict != nullptr) std::rethrow_exception(*verdict);
      ready = true;
      return;
    }
    auto share = held_->Try(request.bytes);
    if (!share) {
      throw Error(Names({rank}) +
                  ": the server has no memory for this request until the others have pushed; " +
                  "start it with more --max-request-bytes, or use smaller batches");
    }
    waiting_[client] = Waiting{rank, std::move(request), std::move(later), std::move(*share)};
  });
  return ready;
}

void Workers::GiveUp(uint64_t client) {
  Change([&] {
    const auto found = waiting_.find(client);
    if (found == waiting_.end()) return;
    const Waiting& waiting = found->second;
    const std::string waited =
        Names({waiting.rank}) + " has waited " + Seconds(seats_[waiting.rank].wait) + " for ";
    std::string whom;
    if (waiting.request.kind == Kind::kGoBack) {
      const std::vector<uint32_t> missing = MissingToGoBack();
      whom = (missing.empty() ? "the others" : Names(missing)) + " to go back to a checkpoint too";
    } else {
      bool waits = false;
      const std::vector<uint32_t> missing = MissingFor(waiting.rank, waiting.request, &waits);
      whom = missing.empty() ? "a batch to be applied" : Names(missing) + " to push their share of the batch";
    }
    Wake(found, std::make_exception_ptr(WorkerLost(waited + whom)));
  });
}

void Workers::GoBack(uint64_t client, const std::function<void()>& go) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Seat& seat = seats_[RankOf(client)];
    if (std::exchange(seat.went_back, false)) return;
    if (leader_ != client) throw ProtocolError("this worker has not waited for the others");
  }
  std::exception_ptr failure;
  try {
    go();
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  Change([&] {
    const uint32_t leader = RankOf(client);
    if (leader_ != client) return;
    leader_ = 0;
    std::vector<bool> back(seats_.size());
    back[leader] = true;
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      const auto waiting = it++;
      if (waiting->second.request.kind != Kind::kGoBack) continue;
      back[waiting->second.rank] = true;
      seats_[waiting->second.rank].went_back = failure == nullptr;
      Wake(waiting, failure);
    }
    if (failure != nullptr) return;
    tables_.clear();
    pushed_ = interrupted_ = false;
    failure_ = nullptr;
    for (uint32_t rank = 0; rank < seats_.size(); ++rank) {
      if (back[rank]) seats_[rank].state = State::kIn;
    }
  });
  if (failure != nullptr) std::rethrow_exception(failure);
}

void Workers::RequireNone() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (seats_.empty()) return;
  throw SpecError(
      "this job has " + std::to_string(seats_.size()) +
      " workers: connect as one of them (worker=) to change rows, restore or recover, or when all have gone");
}

void Workers::Stop() {
  std::map<uint64_t, Waiting> waiting;  // holds connections, which End() when they go
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
    waiting.swap(waiting_);
  }
}

uint32_t Workers::connected() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<uint32_t>(
      std::count_if(seats_.begin(), seats_.end(), [](const Seat& seat) { return seat.client != 0; }));
}

nlohmann::json Workers::Stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (seats_.empty()) return nullptr;
  uint64_t connected = 0;
  uint64_t lost = 0;
  uint64_t left = 0;
  for (const Seat& seat : seats_) {
    connected += seat.client != 0 ? 1 : 0;
    lost += seat.state == State::kLost ? 1 : 0;
    left += seat.state == State::kLeft ? 1 : 0;
  }
  std::map<Kind, uint64_t> waits;
  for (const auto& [client, waiting] : waiting_) ++waits[waiting.request.kind];
  std::set<const Body*> bodies;
  uint64_t bytes = 0;
  for (const auto& [id, table] : tables_) {
    for (const Held& held : table.held) {
      if (held.body != nullptr && bodies.insert(held.body.get()).second) bytes += held.body->bytes.capacity();
    }
  }
  return {{"job", job_},
          {"of", seats_.size()},
          {"mode", spec_.synchronous ? "sync" : "async"},
          {"connected", connected},
          {"lost", lost},
          {"left", left},
          {"batches", batches_},
          {"held", {{"pushes", bodies.size()}, {"bytes", bytes}}},
          {"waiting",
           {{"pulls", waits[Kind::kPull]},
            {"pushes", waits[Kind::kPush]},
            {"checkpoints", waits[Kind::kState]},
            {"going_back", waits[Kind::kGoBack]}}}};
}

}  // namespace oe
