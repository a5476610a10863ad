// Orders saves and changes of one job's tables over its servers: what is saved has every change of a client
// on all servers, or on none.
//
// A client sends each change (a push, an assignment, a restore) to all servers, under one number, and waits
// for all replies before the next. So how far a client is on a server is one number. To save, a client opens
// a cut on every server: from then on changes that have not begun wait. It reads how far each client is on
// each server, and lets through what one server has and another has not (Chandy and Lamport's channels, TOCS
// 1985, of which each holds one change at most). Then all servers are between the same two changes of every
// client, and are saved.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <utility>
#include <vector>

namespace oe {

// The cut of one job on one server. Thread-safe. Clients of this version name themselves in the upper half of
// the numbers of their requests (wire/frame.h); all others are client 0, and their changes are counted
// instead.
class Cut {
 public:
  using Resume = std::function<void()>;

  // As long a cut holds changes unless its save has begun.
  static constexpr std::chrono::seconds kLongest{10};

  Cut() = default;
  Cut(const Cut&) = delete;
  Cut& operator=(const Cut&) = delete;

  // A connection has said hello, with that request.
  void Join(uint64_t connection, uint64_t request);
  // It has ended. Closes its cut.
  void Leave(uint64_t connection) noexcept;

  // A change begins; End() must follow. False if it has to wait: `later` is called when it has begun.
  bool Begin(uint64_t connection, uint64_t request, Resume later);
  // Does nothing if none has begun.
  void End(uint64_t connection, bool done) noexcept;
  // All tables went back: nobody's earlier changes are there.
  void GoBack();

  // False if another connection has one open.
  bool Open(uint64_t connection);
  // Of a client and the number of its last change that may begin.
  using Allowed = std::pair<uint64_t, uint64_t>;
  void Let(uint64_t connection, const std::vector<Allowed>& allowed);
  void Close(uint64_t connection);
  // Closes a cut that is open for too long.
  void Expire();
  // The save of an open cut begins; the cut is closed when the result ends. Throws CheckpointError if it is
  // not open any more.
  std::shared_ptr<void> Take(uint64_t connection);

  // {"open": whether the cut of this connection is, "running": how many changes are, "clients": [[client, the
  // number of its last change that was done], ...] of those that are connected}
  nlohmann::json State(uint64_t connection) const;

  // Forgets the waiting changes. Nothing begins after this.
  void Stop();

 private:
  struct Client {
    uint64_t done = 0;     // the last change that was
    uint64_t allowed = 0;  // while a cut is open
    uint32_t running = 0;
    uint32_t connections = 0;
  };
  struct Running {
    uint64_t client = 0;
    uint64_t change = 0;  // 0: none
  };
  struct Waiting {
    uint64_t connection = 0;
    uint64_t request = 0;
    Resume resume;
  };

  void Rename(Running* of_connection, uint64_t client);
  bool TryBegin(uint64_t connection, uint64_t request);
  void EndNow(Running* running, bool done);
  // Ends the cut; what has to be resumed when the mutex is free.
  std::vector<Resume> CloseNow();
  // The same of what may begin.
  std::vector<Resume> Ready();
  void Finish(uint64_t connection);

  mutable std::mutex mutex_;
  std::map<uint64_t, Client> clients_;
  std::map<uint64_t, Running> running_;  // by connection
  std::vector<Waiting> waiting_;         // in the order in which they came
  uint64_t owner_ = 0;                   // the connection whose cut is open; 0: none is
  bool taken_ = false;
  std::chrono::steady_clock::time_point end_;
  uint64_t changes_ = 0;  // that are running
  bool stopped_ = false;
};

}  // namespace oe
