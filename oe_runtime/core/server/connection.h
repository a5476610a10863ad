// One client's connection to a server.
#pragma once

#include <array>
#include <asio/ip/tcp.hpp>
#include <asio/steady_timer.hpp>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/common/histogram.h"
#include "oe_runtime/core/server/budget.h"
#include "oe_runtime/core/server/jobs.h"
#include "oe_runtime/core/server/limits.h"
#include "oe_runtime/core/server/memory_budget.h"
#include "oe_runtime/core/server/read_ahead.h"
#include "oe_runtime/core/server/refusals.h"
#include "oe_runtime/core/server/sessions.h"
#include "oe_runtime/core/server/slots.h"
#include "oe_runtime/core/server/task_threads.h"
#include "oe_runtime/core/wire/stream.h"

namespace oe {

// Shared by the connections of one server.
struct ConnectionContext {
  ConnectionContext(const ServerLimits& of_server, unsigned serving)
      : limits(of_server),
        request_bytes(limits.bytes),
        reply_bytes(limits.bytes),
        shared_bytes(limits.bytes),
        sessions(limits.connections),
        // Of the requests that are served at once, one place is never the same job's as all others; and the
        // same of those that take long.
        slots(serving, serving > 1 ? serving - 1 : 1),
        slow_slots(kSlow, kSlowOfJob) {}

  static constexpr unsigned kSlow = 64;  // threads: they mostly wait, for files or for pushes to end
  static constexpr unsigned kSlowOfJob = 16;

  const ServerLimits limits;
  Jobs* jobs = nullptr;
  Scratch* scratch = nullptr;  // may be nullptr
  TlsContext* tls = nullptr;   // nullptr: connections are not encrypted
  std::string token;
  nlohmann::json hello;                // the reply to a good hello
  bool shares = false;                 // whether clients of this host may share memory
  std::function<std::string()> stats;  // the reply to kStats
  std::function<void()> on_shutdown;   // a client asked the server to end, and was answered

  MemoryBudget request_bytes;
  MemoryBudget reply_bytes;
  Budget shared_bytes;       // of clients' memory
  Sessions sessions;         // of clients that can go on with another connection
  Slots slots;               // requests that are served at once, none of which waits for long
  Slots slow_slots;          // and those of IsSlow(), which have threads of their own
  Slots::Owner stats_slots;  // of these, statistics, which are of all jobs
  TaskThreads* threads = nullptr;
  ReadAhead* read_ahead = nullptr;  // nullptr: the rows are not on a drive
  std::atomic<uint64_t> kept{0};    // bytes of buffers that connections have had since their last request
  std::atomic<uint64_t> open{0};
  std::atomic<uint64_t> arrivals{0};  // that have not said hello
  std::atomic<uint64_t> clients{0};   // that have
  std::atomic<uint64_t> sharing{0};   // connections that share memory
  std::atomic<uint64_t> accepted{0};
  Refusals refusals;
  std::atomic<uint64_t> requests{0};   // that were read whole
  std::atomic<uint64_t> bytes_in{0};   // of their frames
  std::atomic<uint64_t> bytes_out{0};  // of the replies' frames
  std::atomic<uint64_t> queued{0};     // requests that were read whole and are not being served yet
  std::atomic<int64_t> saved{0};       // when all tables were last saved, Unix seconds; 0: never
  Histogram queue_wait;
  Histogram pull_time;
  Histogram push_time;
};

// Lives as long as one of its operations is under way. One request at a time; the handlers of one connection
// never run beside each other.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(asio::ip::tcp::socket socket, ConnectionContext* context);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void Start();
  bool greeted() const { return greeted_.load(); }
  // Closes it, unless it says hello first: others wait for its place.
  void PushOut();

 private:
  enum class Phase : uint8_t { kHeader, kBody, kServer, kReply };  // what is waited for

  void SetDeadline(std::chrono::milliseconds time, bool counts);
  void Watch();
  void LookAtProgress();
  void Enter(Phase phase);
  auto Moving(size_t before = 0);

  // Between requests the buffers stay for the next one, as long as there is room.
  void KeepBuffers();
  void DropBuffers();

  void LookAtFirstByte();
  void Handshake();
  void ReadHeader();
  // Charges and reads the body: the first part, then all the rest where there is memory enough, else as much
  // again as has arrived.
  void ReadBody(MemoryBudget::Share share);
  void ReadMore();
  void Answer();
  // A worker's request waits for other workers; their pushes or the deadline resume it.
  void Park();
  void Resume(const std::exception_ptr& error);
  void WatchForEnd();
  // A change of tables waits for a cut.
  void AwaitCut();
  void AwaitEndOfCut();
  void Admit();
  void AwaitSlot(MemoryBudget::Share share);
  void ServeOne(Slots::Share slot);
  // What takes long or waits for long (connection_slow.cc).
  void CountKeys(Slots::Share slot);
  void AwaitMemory();
  void ServeSlow(Slots::Share slot);
  void ServeStats(Slots::Share slot);
  void ServeRest(Slots::Share slot);
  void RunSlow(Slots::Share slot, std::function<void()> work, void (Connection::*then)());
  void Finish();
  void AwaitPass();
  void PassGranted();
  // While a request waits or is served on another thread, the client is told so from time to time.
  void Waits(const char* what);
  void SayBusy();
  void AnswerFailure();
  void AnswerAgain();
  void Hello();
  void GoOn(const std::string& session);
  void Greet();
  void LetGo();
  Sessions::Fence NewFence();
  void Withdraw();
  void EndParked();
  void NoteBreak(const asio::error_code& error);
  // The keys of a batch that is going to be pulled.
  void TakeReadAhead();
  // Looks at the client's memory, instead of what it had before; whether it has it.
  bool Share(const ShareRequest& request);
  void SetReply(const std::string& text);
  void Reply(Op op, bool last);
  void Refuse(Refusal why, ErrorCode code, const std::string& message);
  void RefuseTls(Refusal why, uint8_t alert);
  void Cut();
  void Close();
  void Linger();
  void Discard();
  // Goes on with `next` once the budget has that much.
  void WhenFree(MemoryBudget* memory, uint64_t amount, const MemoryBudget::Share& held,
                void (Connection::*next)(MemoryBudget::Share));
  void CountRefusal(Refusal why);
  // The same once there is a slot.
  void WhenSlot(Slots* slots, Slots::Owner* owner, void (Connection::*next)(Slots::Share));
  void SendReply(Op op, bool last);

  Stream stream_;
  ConnectionContext* const context_;
  Sessions::SessionPtr session_;
  bool broken_ = false;  // on its way: the client may connect again
  bool parked_ = false;
  bool fenced_ = false;     // the client goes on with another one
  bool end_seen_ = false;   // of the stream, by WatchForEnd(), while a busy frame was written
  bool withdrawn_ = false;  // what was parked
  bool awaits_cut_ = false;
  asio::steady_timer deadline_;       // for the hello, for what is parked, and for the farewell
  asio::steady_timer watch_;          // for progress
  std::atomic<bool> greeted_{false};  // whether it has said hello, which others look at
  bool client_ = false;               // whether it is counted in `clients`
  bool handshaken_ = false;           // whether it is encrypted
  bool refused_ = false;              // it is being closed
  bool clear_ = false;                // on a server that encrypts

  Phase phase_ = Phase::kHeader;
  uint64_t phases_ = 0;       // so far
  size_t moved_ = 0;          // bytes in this phase
  uint64_t seen_phases_ = 0;  // the two at the last look
  size_t seen_moved_ = 0;
  unsigned looks_ = 0;  // in this window of the silence
  size_t window_moved_ = 0;

  HeaderBytes header_bytes_{};
  // What a refusal before the first header replies to: in the version that every client reads.
  FrameHeader header_{Op::kError, 0, 0, kOldestProtocol};
  Buffer body_;
  size_t arrived_ = 0;  // bytes of it
  HeaderBytes reply_header_{};
  Buffer reply_;
  uint64_t kept_ = 0;
  MemoryBudget::Share request_share_;
  MemoryBudget::Share reply_share_;
  uint64_t reply_bytes_ = 0;
  Slots::Share slow_slot_;
  Pass pass_;
  Store::Pushing pushing_;      // of a push, assign or erase that is read or served
  std::function<void()> rest_;  // of a request that was served but for what may wait
  std::chrono::steady_clock::time_point served_since_;

  bool understands_busy_ = false;
  const char* waits_for_ = "";
  bool busy_set_ = false;                           // the timer
  bool saying_busy_ = false;                        // the frame is on its way
  std::optional<std::pair<Op, bool>> reply_after_;  // what follows it
  HeaderBytes busy_header_{};
  std::string busy_body_;
  asio::steady_timer busy_timer_;
  std::chrono::steady_clock::time_point read_;  // when the request was read whole
  std::array<uint8_t, 4096> discarded_{};
};

}  // namespace oe
