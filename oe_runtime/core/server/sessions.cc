#include "oe_runtime/core/server/sessions.h"

#include <algorithm>
#include <utility>

#include "oe_runtime/core/wire/errors.h"
#include "oe_runtime/core/wire/messages.h"

namespace oe {
namespace {

using std::chrono::steady_clock;

constexpr size_t kMostAnswer = size_t{64} << 10;  // bytes

// Whether it changes nothing, so that it may be served twice.
bool OnlyReads(Op op) {
  switch (op) {
    case Op::kHello:
    case Op::kPull:
    case Op::kReadAhead:
    case Op::kKeys:
    case Op::kReadRows:
    case Op::kReadFile:
    case Op::kStats:
    case Op::kVersions:
    case Op::kCheckpoints:
    case Op::kShare:
    case Op::kSession:
      return true;
    default:
      return false;
  }
}

}  // namespace

OpenSession::~OpenSession() {
  if (greeted) job->clients.fetch_sub(1);
  if (greeted) job->shared.End(client);
  if (worker) job->workers.End(client);
  if (greeted) job->cut.Leave(client);
  if (may_have_files) scratch->Drop(client);
  if (mapping != nullptr) sharing->fetch_sub(1);
}

void OpenSession::NoteAnswer(uint64_t request, Op op, Op replied, const Buffer& reply) {
  if (name.empty() || OnlyReads(op)) return;
  answer.request = 0;  // until the body is its own
  if (reply.size() <= kMostAnswer) {
    answer.op = replied;
    answer.body = std::string(reply.as<char>(), reply.size());
  } else {  // of a save that returns files: what it has begun is not begun twice
    answer.op = Op::kError;
    answer.body = EncodeError({ErrorCode::kCheckpoint,
                               "the reply to this save was lost, because its connection broke: save again"});
  }
  answer.request = request;
}

void Sessions::Open(const SessionPtr& session, Fence fence) {
  const std::optional<Nonce> nonce = NewNonce();
  if (!nonce || !session->name.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string name = NonceText(*nonce);
  entries_[name].fence = std::move(fence);
  session->name = std::move(name);
}

bool Sessions::Claim(const std::string& name, Fence fence, const Granted& granted) {
  SessionPtr session;
  Fence close;
  Granted replaced;  // holds a connection
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(name);
    if (found == entries_.end() || stopped_) return false;
    Entry& entry = found->second;
    resumed_.fetch_add(1);
    if (entry.away != nullptr) {
      session = std::exchange(entry.away, nullptr);
      --away_;
      entry.fence = std::move(fence);
      if (session->worker) session->job->workers.SetAway(session->client, false);
    } else {
      close = entry.fence;
      entry.next_fence = std::move(fence);
      replaced = std::exchange(entry.next, granted);
    }
  }
  if (session != nullptr) {
    granted(std::move(session));
  } else {
    close();
  }
  return true;
}

std::optional<std::chrono::duration<double>> Sessions::Release(SessionPtr session, bool broken) {
  session->pass = nullptr;
  session->job->cut.End(session->client, false);  // of a change whose reply never came
  Granted next;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = entries_.find(session->name);
    Entry& entry = found->second;
    if (entry.next) {
      next = std::exchange(entry.next, nullptr);
      entry.fence = std::move(entry.next_fence);
    } else if (broken && away_ < most_ && !stopped_) {
      std::chrono::duration<double> time = kAway;
      if (session->worker) {
        time = std::min(time, session->worker_wait / 2);  // others that wait for it outlast it
        session->job->workers.SetAway(session->client, true);
      }
      ++away_;
      entry.until = steady_clock::now() + std::chrono::duration_cast<steady_clock::duration>(time);
      entry.away = std::move(session);
      return time;
    } else {
      entries_.erase(found);
    }
  }
  if (next) next(std::move(session));
  return std::nullopt;
}

void Sessions::Expire(const std::string& name, bool at_once) {
  SessionPtr ended;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = entries_.find(name);
  if (found == entries_.end() || found->second.away == nullptr) return;
  if (!at_once && steady_clock::now() < found->second.until) return;  // it was there meanwhile
  ended = std::move(found->second.away);
  --away_;
  entries_.erase(found);
}

uint64_t Sessions::away() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return away_;
}

void Sessions::Stop() {
  std::vector<Granted> waiting;  // which hold connections
  const std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  waiting.reserve(entries_.size());
  for (auto& [name, entry] : entries_) waiting.push_back(std::exchange(entry.next, nullptr));
}

}  // namespace oe
