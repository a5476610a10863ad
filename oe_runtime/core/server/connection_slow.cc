// What of a connection's requests takes long or waits: it has a thread of its own or none, never one that
// others' requests need, and the client hears that it is under way.
#include <asio/buffer.hpp>
#include <asio/post.hpp>
#include <asio/write.hpp>
#include <nlohmann/json.hpp>
#include <utility>

#include "oe_runtime/core/server/connection.h"

namespace oe {
namespace {

using std::chrono::steady_clock;

// More often than the shortest time-outs that make sense.
constexpr auto kBusyInterval = std::chrono::milliseconds(250);

}  // namespace

// Runs `work` on a thread that may wait; then, among this connection's handlers, `then` or what it threw.
void Connection::RunSlow(Slots::Share slot, std::function<void()> work, void (Connection::*then)()) {
  slow_slot_ = std::move(slot);
  Waits("a save, a restore or another operation of its job to end, or it takes that long itself");
  context_->threads->Run([self = shared_from_this(), work = std::move(work), then] {
    std::exception_ptr error;
    try {
      work();
    } catch (const std::exception&) {
      error = std::current_exception();
    }
    asio::post(self->stream_.get_executor(), [self, error, then] {
      if (error == nullptr) return (self.get()->*then)();
      self->slow_slot_.Release();
      try {
        std::rethrow_exception(error);
      } catch (const std::exception&) {
        self->AnswerFailure();
      }
    });
  });
}

// The memory that the reply to kKeys takes.
void Connection::CountKeys(Slots::Share slot) {
  RunSlow(
      std::move(slot),
      [this] { reply_bytes_ = ReplyBytes(*session_, header_.op, {body_.data(), body_.size()}); },
      &Connection::AwaitMemory);
}

void Connection::ServeSlow(Slots::Share slot) {
  served_since_ = steady_clock::now();
  context_->queued.fetch_sub(1, std::memory_order_relaxed);
  context_->queue_wait.Add(served_since_ - read_);
  if (header_.op == Op::kSave || header_.op == Op::kReceive)
    session_->may_have_files = session_->scratch != nullptr;
  RunSlow(
      std::move(slot), [this] { (void)Serve(session_.get(), header_.op, &body_, &reply_); },
      &Connection::Finish);
}

void Connection::ServeStats(Slots::Share slot) {
  RunSlow(std::move(slot), [this] { SetReply(context_->stats()); }, &Connection::Finish);
}

void Connection::ServeRest(Slots::Share slot) {
  RunSlow(std::move(slot), [this] { std::exchange(rest_, nullptr)(); }, &Connection::Finish);
}

void Connection::Finish() {
  slow_slot_.Release();
  if (header_.op == Op::kPush) context_->push_time.Add(steady_clock::now() - served_since_);
  if (header_.op == Op::kSave) {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    context_->saved.store(std::chrono::duration_cast<std::chrono::seconds>(now).count());
  }
  Reply(header_.op, false);
}

void Connection::AwaitCut() {
  if (!IsOrdered(*session_, header_.op)) return Admit();
  // Only pushes of clients without a name are counted (Store::Versions).
  if (ClientOf(header_.request) == 0 && header_.op != Op::kPush) return Admit();
  const bool begun = session_->job->cut.Begin(session_->client, header_.request, [self = shared_from_this()] {
    asio::post(self->stream_.get_executor(), [self] {
      self->context_->queued.fetch_sub(1, std::memory_order_relaxed);
      self->awaits_cut_ = false;
      self->deadline_.cancel();
      self->read_ = steady_clock::now();
      self->Admit();
    });
  });
  if (begun) return Admit();
  awaits_cut_ = true;
  context_->queued.fetch_add(1, std::memory_order_relaxed);
  pushing_.reset();  // the save that it waits for must not wait for it
  Waits("a save of its job that is about to begin on all servers");
  AwaitEndOfCut();
}

void Connection::AwaitEndOfCut() {
  deadline_.expires_after(kBusyInterval);
  deadline_.async_wait([weak = weak_from_this()](const asio::error_code& error) {
    const auto self = weak.lock();
    if (error || self == nullptr || !self->awaits_cut_) return;
    self->session_->job->cut.Expire();
    self->AwaitEndOfCut();
  });
}

void Connection::AwaitPass() {
  context_->queued.fetch_add(1, std::memory_order_relaxed);
  Waits("a save, a restore or another operation of its job that has its tables");
}

void Connection::PassGranted() {
  pass_.Resume();
  read_ = steady_clock::now();
  AwaitSlot(std::move(reply_share_));
}

void Connection::Waits(const char* what) {
  waits_for_ = what;
  if (!understands_busy_ || busy_set_) return;
  busy_set_ = true;
  busy_timer_.expires_after(kBusyInterval);
  busy_timer_.async_wait([weak = weak_from_this()](const asio::error_code& error) {
    const auto self = weak.lock();
    if (!error && self != nullptr) self->SayBusy();
  });
}

void Connection::SayBusy() {
  busy_set_ = false;
  if (phase_ != Phase::kServer) return;  // it has been answered since
  if (!saying_busy_) {
    saying_busy_ = true;
    busy_body_ = nlohmann::json{{"for", waits_for_}}.dump();
    busy_header_ = EncodeHeader({Op::kBusy, header_.request, busy_body_.size()});
    context_->bytes_out.fetch_add(kHeaderBytes + busy_body_.size(), std::memory_order_relaxed);
    stream_.Sending(kHeaderBytes + busy_body_.size());
    const std::array<asio::const_buffer, 2> message = {asio::buffer(busy_header_), asio::buffer(busy_body_)};
    asio::async_write(stream_, message, [self = shared_from_this()](const asio::error_code& error, size_t) {
      self->saying_busy_ = false;
      if (error) {  // a part of it may have gone out
        self->NoteBreak(error);
        self->Close();
      }
      if (error || std::exchange(self->end_seen_, false)) self->EndParked();
      if (const auto reply = std::exchange(self->reply_after_, std::nullopt)) {
        self->SendReply(reply->first, reply->second);
      }
    });
  }
  Waits(waits_for_);
}

}  // namespace oe
