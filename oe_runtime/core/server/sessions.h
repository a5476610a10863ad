// What a server keeps of a client from its hello on, also while the client's connection is broken: it
// connects again, names its session, and goes on as if it had the same connection.
//
//   fence     its earlier connection is closed, and what that serves ends first
//   answered  the reply to its last request is kept: a client sends again what it has no reply to, and
//             what was served is not served twice (Lee et al., RIFL, SOSP 2015)
//   away      until it is there again nothing of it changes: its worker's seat, its pushes that are held, its
//             files. After kAway it is gone, as at once when it has closed the connection. A client
//             that was killed before it had read all resets the connection, and is away for so long, too
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "oe_runtime/core/server/budget.h"
#include "oe_runtime/core/server/service.h"
#include "oe_runtime/core/wire/shared_memory.h"

namespace oe {

struct OpenSession : Session {
  OpenSession() = default;
  OpenSession(const OpenSession&) = delete;
  OpenSession& operator=(const OpenSession&) = delete;
  // The client is gone.
  ~OpenSession();

  // Keeps the reply to a request, unless to serve it again does no harm.
  void NoteAnswer(uint64_t request, Op op, Op replied, const Buffer& reply);
  bool has_answered(uint64_t request) const { return request != 0 && answer.request == request; }

  std::string name;  // by which the client goes on; empty: it cannot
  bool greeted = false;
  bool may_have_files = false;                  // in the scratch directory
  std::chrono::duration<double> worker_wait{};  // as long a request may be parked
  std::optional<Nonce> nonce;                   // that was offered
  std::unique_ptr<SharedMapping> mapping;       // Session::shared
  std::vector<Budget::Share> mapping_shares;    // of it, as it grew
  std::atomic<uint64_t>* sharing = nullptr;     // counts those with a mapping
  struct Answer {
    uint64_t request = 0;  // 0: none
    Op op = Op::kError;
    std::string body;
  };
  Answer answer;  // to the last request that must not be served twice
};

// The named sessions of one server. Thread-safe.
class Sessions {
 public:
  using SessionPtr = std::shared_ptr<OpenSession>;
  using Fence = std::function<void()>;  // closes the session's connection, which then releases it
  using Granted = std::function<void(SessionPtr)>;

  static constexpr std::chrono::seconds kAway{20};

  // At most `most` are away at a time.
  explicit Sessions(uint64_t most) : most_(most) {}
  Sessions(const Sessions&) = delete;
  Sessions& operator=(const Sessions&) = delete;

  // Gives the session a name; it stays without one where the system has no random numbers.
  void Open(const SessionPtr& session, Fence fence);
  // For a connection that goes on with a session: false if there is none of that name. `granted` is called
  // when the earlier connection has released it, at once if it has already. A later claim replaces one that
  // waits.
  bool Claim(const std::string& name, Fence fence, const Granted& granted);
  // Its connection has ended. If that broke, the session stays for the time that is returned: then Expire()
  // must be called.
  std::optional<std::chrono::duration<double>> Release(SessionPtr session, bool broken);
  // Ends it if it is away for longer than that, or `at_once`.
  void Expire(const std::string& name, bool at_once = false);

  uint64_t resumed() const { return resumed_.load(); }
  uint64_t away() const;

  // Forgets the claims that wait.
  void Stop();

 private:
  struct Entry {
    Fence fence;
    SessionPtr away;  // nullptr: it has a connection
    std::chrono::steady_clock::time_point until;
    Fence next_fence;
    Granted next;  // the claim that waits
  };

  const uint64_t most_;
  mutable std::mutex mutex_;
  std::map<std::string, Entry> entries_;
  uint64_t away_ = 0;
  std::atomic<uint64_t> resumed_{0};
  bool stopped_ = false;
};

}  // namespace oe
