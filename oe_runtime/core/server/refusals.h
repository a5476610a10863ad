// Why a server refuses connections and requests, and how often it did.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace oe {

enum class Refusal : uint8_t {
  kForeign,      // what came first is no protocol of ours
  kVersion,      // another version of it
  kMalformed,    // a frame or body that makes no sense, or is too large
  kToken,        // another token, in a hello or in a handshake
  kClear,        // unencrypted, where encryption is asked for
  kEncrypted,    // encrypted, where it is not
  kHandshake,    // an encryption that no two sides could agree on
  kSlow,         // no hello, half a frame or an unread reply for too long
  kCut,          // the peer was gone in the middle of a frame
  kConnections,  // more connections than the server takes, with a hello or without
  kMemory,       // no memory for what it asked for
};

class Refusals {
 public:
  // In the order of Refusal; what statistics call them.
  static constexpr std::array<const char*, 11> kNames = {"foreign", "version",     "malformed", "token",
                                                         "clear",   "encrypted",   "handshake", "slow",
                                                         "cut",     "connections", "memory"};

  // Tells it on stderr too, with the peer's address: the first of each reason at once, then how many there
  // have been every ten seconds at most.
  void Count(Refusal why, const std::string& peer);
  uint64_t count(size_t i) const { return counts_[i].load(std::memory_order_relaxed); }

 private:
  struct Told {
    std::atomic<int64_t> when{0};  // steady clock, ns; 0: never
    std::atomic<uint64_t> count{0};
  };
  std::array<std::atomic<uint64_t>, kNames.size()> counts_{};
  std::array<Told, kNames.size()> told_;
};

}  // namespace oe
