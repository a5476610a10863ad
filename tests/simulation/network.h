// TCP connections between simulated processes, with the faults that a network has.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sim {

struct NetworkPolicy {
  uint64_t least_delay = 0;  // of a segment, in nanoseconds
  uint64_t most_delay = 0;
  uint64_t spike_every = 0;  // one in so many segments is late by up to `spike`; 0: none
  uint64_t spike = 0;
  size_t segment = 65536;  // most bytes that one call sends
  size_t window = 262144;  // most bytes under way and unread
};

void SetNetworkPolicy(const NetworkPolicy& policy);

// Breaks a connection of the process, chosen by chance, after up to `within` more bytes in one direction, so
// that both ends see a reset.
void BreakConnection(int process, uint64_t within);
// Nothing passes between the two processes until `until`; what was sent arrives later.
void Part(int process, int other, uint64_t until);
void HealAll();

// The process has ended: its ends of connections close, or go silent.
void DropSockets(int process, bool silent);
// Silent ends answer with a reset from now on.
void AnswerForHost(int process);

}  // namespace sim
