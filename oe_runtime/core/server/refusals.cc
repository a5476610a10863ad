#include "oe_runtime/core/server/refusals.h"

#include <chrono>
#include <cstdio>

namespace oe {
namespace {

constexpr int64_t kEvery = std::chrono::nanoseconds(std::chrono::seconds(10)).count();

// In the order of Refusal.
constexpr std::array<const char*, Refusals::kNames.size()> kReasons = {
    "it does not speak the oe_runtime protocol",
    "it speaks another version of the protocol",
    "its request makes no sense, or is too large",
    "its token is not this server's",
    "it does not encrypt, and this server does",
    "it encrypts, and this server does not",
    "its TLS handshake failed",
    "it sent no hello, half a request, or did not read its reply for too long",
    "its connection broke in the middle of a request",
    "too many connections: before the hello, or of clients (--max-connections)",
    "this server is out of memory",
};

}  // namespace

void Refusals::Count(Refusal why, const std::string& peer) {
  const auto i = static_cast<size_t>(why);
  const uint64_t count = counts_[i].fetch_add(1, std::memory_order_relaxed) + 1;
  Told& told = told_[i];
  const int64_t now = std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  int64_t before = told.when.load();
  if ((before != 0 && now - before < kEvery) || !told.when.compare_exchange_strong(before, now)) return;
  const uint64_t more = count - told.count.exchange(count) - 1;
  const std::string others = more == 0 ? "" : " (and " + std::to_string(more) + " more since the last time)";
  std::fprintf(stderr, "server: refused %s: %s%s\n", peer.c_str(), kReasons[i], others.c_str());
}

}  // namespace oe
