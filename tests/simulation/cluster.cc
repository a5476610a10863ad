#include "tests/simulation/cluster.h"

#include <poll.h>

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "oe_runtime/core/server/server.h"
#include "oe_runtime/core/storage/pread_queue.h"
#include "tests/simulation/disk.h"

namespace sim {
namespace {

constexpr const char* kToken = "0123456789abcdef0123456789abcdef";
constexpr uint16_t kFirstPort = 7000;

// Starts all threads of the pool that reads logs, which all servers of this program share: it must outlive
// each.
void StartReaders() {
  static const std::shared_ptr<oe::PreadPool> pool = oe::PreadPool::Shared();
  std::vector<oe::BlockRead> refused(128);  // of no bytes
  oe::ReadCounts counts;
  const auto queue = pool->NewQueue(-1, &counts);
  queue->Wait(queue->Submit(refused.data(), refused.size()));
}

}  // namespace

Cluster::Cluster(const Swarm& swarm, std::filesystem::path directory)
    : swarm_(swarm), directory_(std::move(directory)), servers_(swarm.servers) {
  if (swarm_.storage == "dram_ssd") StartReaders();
  for (uint32_t i = 0; i < swarm_.servers; ++i) {
    servers_[i].port = static_cast<uint16_t>(kFirstPort + i);
    StartServer(i);
  }
}

void Cluster::StartServer(uint32_t index, bool empty) {
  Running& server = servers_[index];
  if (server.process != 0) RestoreHost(server.process);
  ++server.starts;
  server.process = static_cast<int>(host(index)) * kProcessesPerHost + server.starts;
  server.up = true;
  server.refused = false;
  const bool power_cut = std::exchange(server.power_cut, false);
  const auto before = server.storage;
  server.storage = directory_ / ("server-" + std::to_string(index) + "-" + std::to_string(server.starts));
  if (before.empty() || empty) {
    std::filesystem::create_directory(server.storage);
    AddDisk(server.storage);
  } else if (power_cut) {
    CopyDiskAfterCut(before, server.storage);
  } else {
    ReleaseDisk(before, server.storage);
  }
  Note("server " + std::to_string(index) + " starts");
  StartProcess(server.process, [this, index] { Listen(index); });
}

void Cluster::Listen(uint32_t index) {
  oe::ServerOptions options;
  options.port = servers_[index].port;
  options.shard = {index, swarm_.servers};
  options.threads = swarm_.threads;
  options.storage.type = swarm_.storage;
  if (swarm_.storage != "dram") {
    options.storage.path = servers_[index].storage.string();
    options.storage.recover = true;
    options.storage.kept_checkpoints = 3;
    if (swarm_.storage == "dram_ssd") options.storage.capacity_bytes = swarm_.log_bytes;
    if (swarm_.storage != "pmem_libpmem") options.storage.cache_bytes = uint64_t{1} << 18;
  }
  if (swarm_.encrypted) {
    options.tls = oe::TlsMode::kOn;
    options.token = kToken;
  }
  try {
    const oe::Server server(options);
    pollfd end{server.stop_fd(), POLLIN, 0};
    while (poll(&end, 1, -1) == 0) {
    }
  } catch (const oe::StorageError& error) {
    const std::string text = "server " + std::to_string(index) + " does not start: " + error.what();
    if (!HasTrouble(host(index)) && !DisksLost()) FailRun(text);
    Note(text);
    servers_[index].refused = true;
  } catch (const std::exception& error) {
    FailRun("server " + std::to_string(index) + " does not start: " + error.what());
  }
}

void Cluster::EndServer(uint32_t index, End end) {
  Running& server = servers_[index];
  server.up = false;
  EndProcess(server.process, end);
}

void Cluster::CutPower(uint32_t index) {
  servers_[index].power_cut = true;
  EndServer(index, End::kVanish);
}

void Cluster::StartAll() {
  for (uint32_t i = 0; i < swarm_.servers; ++i) {
    if (!servers_[i].up) StartServer(i);
  }
}

oe::RemoteOptions Cluster::remote() const {
  oe::RemoteOptions remote;
  for (const Running& server : servers_)
    remote.endpoints.push_back("127.0.0.1:" + std::to_string(server.port));
  remote.share_memory = false;
  remote.timeout = swarm_.timeout;
  if (swarm_.encrypted) {
    remote.tls = oe::TlsMode::kOn;
    remote.token = kToken;
  }
  return remote;
}

}  // namespace sim
