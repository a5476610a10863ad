// The servers of a run: real ones, each in a simulated process with a directory of its own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "oe_runtime/core/client/client.h"
#include "tests/simulation/processes.h"
#include "tests/simulation/swarm.h"

namespace sim {

class Cluster {
 public:
  // Starts all servers below `directory`, and returns when they listen.
  Cluster(const Swarm& swarm, std::filesystem::path directory);

  // As systemd or `oeprov` does: at the same port, with what the process before has left on its disk.
  // Or with an empty one.
  void StartServer(uint32_t index, bool empty = false);
  void EndServer(uint32_t index, End end);
  // Its host loses power: nobody is told, and its disk keeps what was synced and a part of the rest.
  void CutPower(uint32_t index);
  // Restarts what is down.
  void StartAll();
  bool is_up(uint32_t index) const { return servers_[index].up; }
  // It has ended by itself, since its disk has refused.
  bool has_refused(uint32_t index) const { return servers_[index].refused; }
  static int host(uint32_t index) { return static_cast<int>(index) + 1; }
  int process(uint32_t index) const { return servers_[index].process; }

  oe::RemoteOptions remote() const;

 private:
  struct Running {
    uint16_t port = 0;
    int process = 0;
    int starts = 0;
    bool up = false;
    bool refused = false;
    bool power_cut = false;  // by which it ended
    std::filesystem::path storage;
  };

  void Listen(uint32_t index);

  const Swarm swarm_;
  const std::filesystem::path directory_;
  std::vector<Running> servers_;
};

}  // namespace sim
