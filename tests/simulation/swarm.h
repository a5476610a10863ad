// What a seed draws: the cluster, and which faults exist at all. A run that has few kinds of faults reaches
// states that one with all of them never sees (Groce et al., Swarm Testing, ISSTA 2012).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/simulation/disk.h"
#include "tests/simulation/network.h"
#include "tests/simulation/scheduler.h"

namespace sim {

enum class Fault {
  kKillServer,
  kVanishServer,
  kCutPower,
  kFullDisk,
  kFailingDisk,
  kLyingDisk,
  kSlowDisk,
  kStopServer,
  kBreak,
  kPart,
  kKillJob,
  kLeaveBehind,
  kStopWorker,
};

// Whether and when keys have rows.
enum class Rule {
  kAll,
  kErase,  // worker 0 erases some keys after every `rule_number`-th step
  kAdmit,  // only keys that were in batches `rule_number` times
  kEvict,  // before each checkpoint rows go whose last batch was more than `rule_number` batches before
};

struct Swarm {
  uint32_t servers = 1;
  uint32_t workers = 1;
  std::string storage = "dram";
  uint64_t log_bytes = 0;  // of the logs of a server at most; 0: as many as there are
  unsigned threads = 1;
  bool encrypted = false;
  uint32_t tables = 1;
  uint32_t keys = 64;
  uint64_t think = 0;                 // nanoseconds of a worker between a pull and its push
  uint64_t checkpoint_every = 10;     // steps
  std::optional<uint32_t> staleness;  // of asynchronous workers; none: synchronous ones
  Rule rule = Rule::kAll;
  uint32_t rule_number = 0;
  uint64_t increments = 0;  // checkpoints in files with changes only, after one with all rows
  double timeout = 20;      // seconds that a server may take to answer
  std::vector<Fault> faults;
  bool only_breaks = false;  // of connections: then no worker loses a server
  uint64_t fault_pause = 0;  // nanoseconds between two, in the mean
  uint64_t fault_time = 0;   // nanoseconds, after which no more come
  Policy policy;
  NetworkPolicy network;
  DiskPolicy disk;
};

// With `kinds`, unless it is empty, these faults and no others.
Swarm DrawSwarm(uint64_t seed, const std::vector<Fault>& kinds = {});
std::string Describe(const Swarm& swarm);
const char* NameOf(Fault fault);
// All of their names, in the order of Fault.
std::vector<std::string> FaultNames();
// Those of a list of names with commas; nullopt: one is unknown.
std::optional<std::vector<Fault>> FaultsNamed(const std::string& names);

}  // namespace sim
