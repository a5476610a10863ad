#include "tests/simulation/swarm.h"

#include <algorithm>
#include <array>
#include <sstream>

namespace sim {
namespace {

constexpr std::array kNames = {"kill a server",
                               "lose a server's host",
                               "cut the power of servers",
                               "fill a disk",
                               "let a disk fail",
                               "let a disk lie",
                               "slow a disk down",
                               "stop a server for a while",
                               "break a connection",
                               "part a server from a worker",
                               "kill a worker",
                               "start the job again beside its old workers",
                               "stop a worker for a while"};
static_assert(kNames.size() == static_cast<size_t>(Fault::kStopWorker) + 1);

std::string RuleText(const Swarm& swarm) {
  const std::string number = std::to_string(swarm.rule_number);
  switch (swarm.rule) {
    case Rule::kAll:
      return "";
    case Rule::kErase:
      return ", keys erased each " + number + " steps";
    case Rule::kAdmit:
      return ", admission after " + number + " times";
    case Rule::kEvict:
      return ", eviction after " + number + " steps";
  }
  return "";
}

}  // namespace

const char* NameOf(Fault fault) { return kNames[static_cast<size_t>(fault)]; }

std::vector<std::string> FaultNames() { return {kNames.begin(), kNames.end()}; }

std::optional<std::vector<Fault>> FaultsNamed(const std::string& names) {
  std::vector<Fault> faults;
  std::stringstream list(names);
  for (std::string name; std::getline(list, name, ',');) {
    const auto* const found = std::find(kNames.begin(), kNames.end(), name);
    if (found == kNames.end()) return std::nullopt;
    faults.push_back(static_cast<Fault>(found - kNames.begin()));
  }
  return faults;
}

Swarm DrawSwarm(uint64_t seed, const std::vector<Fault>& kinds) {
  Random random(seed ^ 0x737761726d);
  Swarm swarm;
  swarm.servers = static_cast<uint32_t>(random.Between(1, 4));
  swarm.workers = static_cast<uint32_t>(random.Between(1, 3));
  const std::vector<std::string> storages = {"dram", "pmem_libpmem", "pmem_libpmem", "dram_pmem", "dram_ssd"};
  swarm.storage = storages[random.Below(storages.size())];
  swarm.threads = static_cast<unsigned>(random.Between(1, 2));
  swarm.encrypted = random.OneIn(8);
  swarm.tables = static_cast<uint32_t>(random.Between(1, 2));
  swarm.keys = static_cast<uint32_t>(random.Between(4, 96));
  swarm.think = random.Between(1, 60) * kMillisecond;
  swarm.checkpoint_every = random.Between(3, 20);
  if (random.OneIn(2)) swarm.increments = random.Between(1, 4);
  swarm.timeout = static_cast<double>(random.Between(3, 20));
  for (const Fault fault :
       {Fault::kKillServer, Fault::kVanishServer, Fault::kCutPower, Fault::kStopServer, Fault::kBreak,
        Fault::kPart, Fault::kKillJob, Fault::kLeaveBehind, Fault::kStopWorker, Fault::kFullDisk,
        Fault::kFailingDisk, Fault::kLyingDisk, Fault::kSlowDisk}) {
    if (random.OneIn(3)) swarm.faults.push_back(fault);
  }
  if (swarm.faults.empty()) swarm.faults.push_back(Fault::kKillServer);
  // Nothing but broken connections, which cost no step. Servers that are only slow must not be taken for
  // lost.
  if (seed % 8 == 5) swarm.faults = {Fault::kBreak};
  if (!kinds.empty()) swarm.faults = kinds;
  swarm.only_breaks = swarm.faults == std::vector<Fault>{Fault::kBreak};
  if (swarm.only_breaks) swarm.timeout = 60;
  swarm.fault_pause = random.Between(100, 2500) * kMillisecond;
  swarm.fault_time = random.Between(5, 30) * kSecond;
  swarm.policy.yield_every = random.OneIn(3) ? 0 : random.Between(2, 50);
  swarm.policy.by_priority = random.OneIn(2);
  swarm.policy.change_every = random.Between(3, 200);
  if (random.OneIn(3)) {
    swarm.policy.stall_every = random.Between(200, 20000);
    swarm.policy.stall = random.Between(1, 3000) * kMillisecond;
  }
  swarm.network.least_delay = random.Between(5, 100) * kMicrosecond;
  swarm.network.most_delay = swarm.network.least_delay + random.Between(10, 5000) * kMicrosecond;
  if (random.OneIn(3)) {
    swarm.network.spike_every = random.Between(20, 500);
    swarm.network.spike = random.Between(10, 4000) * kMillisecond;
  }
  if (random.OneIn(3)) swarm.network.segment = random.Between(20, 4000);
  if (random.OneIn(3)) swarm.network.window = random.Between(500, 20000);
  if (random.OneIn(3)) swarm.staleness = static_cast<uint32_t>(random.Below(6));
  if (random.OneIn(2)) {
    // Of asynchronous workers nobody knows in which order they push.
    swarm.rule = swarm.staleness ? Rule::kErase : static_cast<Rule>(random.Between(1, 3));
    swarm.rule_number = static_cast<uint32_t>(random.Between(1, 12));
  }
  swarm.disk.persistent = random.OneIn(2);
  if (random.OneIn(2)) swarm.disk.sync = random.Between(1, 50) * kMillisecond;
  if (random.OneIn(2)) swarm.disk.fence = random.Between(1, 200) * kMicrosecond;
  if (random.OneIn(2)) swarm.log_bytes = random.Between(12, 32) << 20;
  return swarm;
}

std::string Describe(const Swarm& swarm) {
  std::string text =
      std::to_string(swarm.servers) + " servers with " + swarm.storage + ", " +
      std::to_string(swarm.workers) +
      (swarm.staleness ? " asynchronous workers with staleness " + std::to_string(*swarm.staleness) + ", "
                       : " workers, ") +
      std::to_string(swarm.tables) + " tables, " + std::to_string(swarm.keys) + " keys, a checkpoint each " +
      std::to_string(swarm.checkpoint_every) + " steps" +
      (swarm.increments > 0 ? ", " + std::to_string(swarm.increments) + " increments" : "") +
      RuleText(swarm) + (swarm.disk.persistent ? ", persistent memory" : "") +
      (swarm.encrypted ? ", TLS" : "") + "; faults:";
  for (const Fault fault : swarm.faults)
    text += std::string(fault == swarm.faults.front() ? " " : ", ") + NameOf(fault);
  return text;
}

}  // namespace sim
