// The workers of one job on one server: their seats, the requests that wait for other workers, and the pushes
// that are held until those of the others are there.
//
// No request says which batch it is for. A worker's requests follow each other, so its n-th push to a table
// is its share of batch n, and what it pulls after that is for batch n + 1:
//
//   synchronous    a push is held, and answered at once, until all workers' pushes of that batch are there;
//                  they are summed in the order of the ranks and applied as one. A worker waits while its
//                  own push to the same table is held; to save or checkpoint, while it is to any table.
//   asynchronous   a push is applied when it comes. With a staleness bound s a pull waits until no worker
//                  is more than s pushes behind (stale synchronous parallel, Ho et al., NIPS 2013).
//
// To recover, restore or drop tables (kGoBack), all workers must ask for the same; it is done once.
//
// Workers that are started again may be others, and more or fewer, while connections of those before are
// still open: of a host that has vanished, or a process that is frozen. A higher generation takes all places
// at once and is a fencing token: workers of an earlier one are not served again and may not connect.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "oe_runtime/core/server/budget.h"
#include "oe_runtime/core/server/fence.h"
#include "oe_runtime/core/server/store.h"
#include "oe_runtime/core/wire/buffer.h"
#include "oe_runtime/core/wire/worker_spec.h"

namespace oe {

// The part of a worker's request that decides whether it waits for others.
struct WorkerRequest {
  enum class Kind : uint8_t {
    kPull,
    kPush,
    kState,   // reads or changes all tables: a save, a checkpoint
    kGoBack,  // replaces them: a recovery, a restore
  };
  Kind kind = Kind::kPull;
  std::vector<uint32_t> tables;  // of a pull or push
  std::string target;            // of kGoBack: what all workers must agree on
  uint64_t bytes = 0;            // of memory, while it waits
};

// Thread-safe. Clients are numbers of connections. What throws WorkerLost does so too for a client whose rank
// another connection has taken since.
class Workers {
 public:
  using Resume = std::function<void(std::exception_ptr)>;
  using Post = std::function<void(std::function<void()>)>;

  // `held` bounds the memory of pushes that are held and of requests that wait, and `post` runs a task later;
  // both may be shared by all jobs and must outlive this.
  Workers(std::string job, Store* store, const Fence* fence, Budget* held, const Post* post);
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // The client is the worker of that rank from now on. The first one decides how many there are, and the
  // mode; throws SpecError for others that say otherwise, until all have gone or a higher generation comes.
  // Throws WorkerLost for one of an earlier generation.
  void Join(uint64_t client, const WorkerSpec& spec);
  // The worker pushes no more: batches are complete without it. Its earlier pushes count.
  void Leave(uint64_t client);
  // The connection has ended. Without a Leave the worker is lost, unless no worker has pushed yet.
  void End(uint64_t client) noexcept;

  // The connection has broken, or is there again: meanwhile the worker keeps its seat and what it has pushed.
  void SetAway(uint64_t client, bool away);
  // The client sends its request, if it still waits, again: resumes it with an error. False if it does not
  // wait, or is answered soon.
  bool Withdraw(uint64_t client);

  // True if the request can be served now. Otherwise `later` is called when it can be, or with an error if it
  // never can. Throws WorkerLost if that is known already, and Error when too many requests wait.
  bool Ready(uint64_t client, WorkerRequest request, Resume later);
  // The client's request, if it still waits, has waited too long: resumes it with an error that names the
  // ranks.
  void GiveUp(uint64_t client);

  // Takes a push that was Ready, of a client that has `seen` this epoch (fence.h), whose parts point into
  // *body: *body is empty afterwards where it is held. Applies what is complete with it. Throws SpecError for
  // another learning rate than other workers', and as Store::Push. False if it has to wait, as `pass` says:
  // nothing has happened then. What has to be applied and would have to wait goes to *rest, to be called
  // before the worker is answered, on a thread that may wait.
  bool Push(uint64_t client, uint64_t seen, const std::vector<PushPart>& parts, Buffer* body,
            Buffer* gradients, Pass* pass, std::function<void()>* rest);
  // Calls `go` for the first of the workers whose kGoBack was Ready; for the others does what that came to.
  void GoBack(uint64_t client, const std::function<void()>& go);

  // Throws SpecError if the job has workers: a push or a restore by somebody else would be in none of their
  // batches.
  void RequireNone() const;

  // Forgets the waiting requests. Nothing happens after this.
  void Stop();

  // How many are connected.
  uint32_t connected() const;

  // null without workers; oe_runtime/server/metrics.py documents it.
  nlohmann::json Stats() const;

 private:
  // What the errors advise.
  static constexpr const char* kGoBackTogether =
      "; all workers can go back to a checkpoint together (reconnect, then recover or restore), or the job "
      "be started again";

  enum class State : uint8_t {
    kAwaited,  // has not come yet
    kIn,
    kOut,   // has come back after it was lost or had left: takes part again when all go back
    kLost,  // its connection has ended
    kLeft,
  };
  struct Seat {
    State state = State::kAwaited;
    uint64_t client = 0;  // 0: none is connected
    double wait = 0;
    bool went_back = false;  // by what another worker did
    bool away = false;       // the client's connection has broken
    // Whether a batch is not complete without its push.
    bool required() const { return state == State::kIn || state == State::kAwaited; }
  };
  struct Body {
    Buffer bytes;
    Buffer gradients;  // those that came in two bytes each
    Budget::Share share;
  };
  struct Held {
    std::shared_ptr<Body> body;  // nullptr: nothing is held
    PushPart part;
  };
  struct Table {
    std::vector<Held> held;        // by rank
    std::vector<uint64_t> pushes;  // asynchronous: of each rank
    bool applying = false;         // what is held, on some thread
  };
  struct Batch {
    uint64_t life = 0;
    uint64_t seen = 0;  // by all who pushed it
    std::map<uint32_t, std::vector<Held>> tables;
  };
  struct Waiting {
    uint32_t rank = 0;
    WorkerRequest request;
    Resume resume;
    Budget::Share share;
  };
  struct Woken {
    Resume resume;
    std::exception_ptr error;
  };

  // Calls `change` under the mutex, then resumes the requests that need not wait any more.
  template <typename Function>
  void Change(Function change) {
    std::vector<Woken> woken;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stopped_) return;
      change();
      WakeReady();
      woken.swap(woken_);
    }
    for (const Woken& one : woken) one.resume(one.error);
  }
  uint32_t RankOf(uint64_t client) const;
  std::string Names(const std::vector<uint32_t>& ranks) const;
  std::exception_ptr Failure() const;
  std::exception_ptr MayNotPush(uint32_t rank) const;
  Table* TableOf(uint32_t id);
  // Whether there is a whole batch to apply, once the worker `with` has pushed too.
  bool Complete(const Table& table, std::optional<uint32_t> with = std::nullopt) const;
  std::vector<uint32_t> MissingFor(uint32_t rank, const WorkerRequest& request, bool* waits) const;
  std::vector<uint32_t> MissingToGoBack() const;
  std::optional<std::exception_ptr> Verdict(uint32_t rank, const WorkerRequest& request) const;
  void Seated(uint32_t rank);
  void Unseat(uint32_t rank, const std::string& why);
  void RequireNewest(const WorkerSpec& spec);
  void Wake(std::map<uint64_t, Waiting>::iterator waiting, std::exception_ptr error);
  void WakeReady();
  void WakeGoingBack();
  void Forget();
  void Hold(uint32_t rank, const std::vector<PushPart>& parts, Buffer* body, Buffer* gradients);
  // Takes the pushes of all complete batches; no other thread does. Apply must follow.
  Batch TakeComplete();
  // False if it cannot have the locks, and `pass` is impatient.
  bool Apply(const Batch& batch, Pass* pass);
  // For batches that became complete because a worker has gone: the thread that noticed must not do the work.
  void ApplyLater(Batch batch);

  const std::string job_;
  Store* const store_;
  const Fence* const fence_;
  Budget* const held_;
  const Post* const post_;

  mutable std::mutex mutex_;
  bool stopped_ = false;
  WorkerSpec spec_;          // what all agree on
  std::vector<Seat> seats_;  // by rank; empty: there are no workers
  uint64_t life_ = 0;        // counts how often all workers have gone
  uint32_t generation_ = 0;  // the highest that has come; outlives its workers
  std::map<uint32_t, Table> tables_;
  std::map<uint64_t, Waiting> waiting_;  // by client
  std::vector<Woken> woken_;             // to be resumed when the mutex is free
  uint64_t leader_ = 0;                  // the client that goes back for all; 0: none
  bool pushed_ = false;                  // since the workers came, or went back
  bool interrupted_ = false;             // one was lost that the others must not go on without
  std::exception_ptr failure_;           // a batch could not be applied
  uint64_t batches_ = 0;                 // that were applied, of all tables
};

}  // namespace oe
