// Small values that the clients of one job share, such as the work queue of asynchronous workers. A write
// names the version that it replaces (compare-and-set), so no client overwrites what it has not read.
//
// A client takes part from its first request until its connection ends; each reply names those that take
// part. So a connection is a lease: clients take back what a lost one held. Values are in this process's
// memory, and are forgotten when nobody takes part any more.
//
// Values under names that begin with kServed are for processes that serve what the job trains. Read-only
// clients read these too, whoever exchanges them takes no part, and they last as the tables do.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "oe_runtime/core/server/budget.h"
#include "oe_runtime/core/wire/messages.h"

namespace oe {

// Thread-safe. Clients are numbers of connections.
class SharedValues {
 public:
  static constexpr size_t kMostNames = 1024;
  static constexpr char kServed[] = "served/";

  // `memory` bounds the values; it may be shared by all jobs and must outlive this.
  explicit SharedValues(Budget* memory);

  // Writes the value if the request says so and names its present version, 0 for one that does not exist. An
  // empty value removes it. The reply has the present value, unless it is what was just written. Throws
  // SpecError for one name too many, and Error when the values take too much memory; then nothing has
  // changed.
  SharedReply Exchange(uint64_t client, const SharedRequest& request);
  static bool IsServed(const std::string& name) { return name.rfind(kServed, 0) == 0; }
  // Of the present value; 0 for one that does not exist.
  uint64_t Bytes(const std::string& name) const;
  // The connection has ended.
  void End(uint64_t client) noexcept;
  // Forgets the values that are served.
  void ForgetServed();

 private:
  struct Value {
    uint64_t version = 0;
    std::shared_ptr<const std::string> bytes;
    Budget::Share share;
  };

  void Forget(bool served) noexcept;

  Budget* const memory_;
  mutable std::mutex mutex_;
  uint64_t last_version_;  // begins anywhere, so that versions of a server that was restarted differ
  std::map<std::string, Value> values_;
  std::set<uint64_t> members_;
};

}  // namespace oe
