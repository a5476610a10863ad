#include "tests/simulation/run.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "tests/simulation/cluster.h"
#include "tests/simulation/disk.h"
#include "tests/simulation/job.h"
#include "tests/simulation/network.h"
#include "tests/simulation/processes.h"
#include "tests/simulation/swarm.h"

namespace sim {
namespace {

constexpr uint64_t kRecovers = 120 * kSecond;  // within which a job goes on once faults have ended
constexpr uint64_t kSteps = 10;                // that it makes then

void Sleep(uint64_t nanoseconds) { std::this_thread::sleep_for(std::chrono::nanoseconds(nanoseconds)); }

class Faults {
 public:
  Faults(const Swarm& swarm, Cluster* cluster, Job* job, std::optional<std::set<unsigned>> only)
      : swarm_(swarm), cluster_(cluster), job_(job), only_(std::move(only)) {}

  void InjectAll() {
    const auto ills = {Fault::kFullDisk, Fault::kFailingDisk, Fault::kLyingDisk, Fault::kSlowDisk};
    if (std::find_first_of(swarm_.faults.begin(), swarm_.faults.end(), ills.begin(), ills.end()) !=
        swarm_.faults.end())
      StartProcess(0, [this] { Operate(); });
    Random pauses(Seed() ^ 0x7061757365);
    const uint64_t end = Now() + swarm_.fault_time;
    for (uint64_t at = Now(); std::max(at, Now()) < end; ++count_) {  // some faults take a while
      at += pauses.Below(2 * swarm_.fault_pause);
      if (at > Now()) Sleep(at - Now());
      // Of its own, so that one that is left out changes nothing of the next.
      random_ = Random(Seed() ^ 0x6661756c74 ^ uint64_t{count_} << 32);
      const Fault fault = swarm_.faults[random_.Below(swarm_.faults.size())];
      if (!only_ || only_->count(count_) > 0) Inject(fault);
    }
    HealAll();
    HealDisks();
    Policy calm = swarm_.policy;
    calm.stall_every = 0;
    SetPolicy(calm);
    const std::lock_guard<std::mutex> lock(repairs_);
    cluster_->StartAll();
    Note("no more faults");
  }

 private:
  void Inject(Fault fault) {
    const auto server = static_cast<uint32_t>(random_.Below(swarm_.servers));
    const auto worker = static_cast<uint32_t>(random_.Below(job_->workers()));
    const uint64_t duration = random_.OneIn(3) ? random_.Below(20 * kSecond) : random_.Below(kSecond);
    const std::string whose = " (server " + std::to_string(server) + ", worker " + std::to_string(worker) +
                              ", " + std::to_string(duration / kMillisecond) + " ms)";
    Note(std::to_string(count_) + ": " + NameOf(fault) + whose);
    switch (fault) {
      case Fault::kKillServer:
      case Fault::kVanishServer:
        if (!cluster_->is_up(server)) return;
        cluster_->EndServer(server, fault == Fault::kVanishServer ? End::kVanish : End::kKill);
        return StartAgain(server, duration);
      case Fault::kCutPower:
        return CutPower(server, duration);
      case Fault::kFullDisk:
        return TroubleDisk(Cluster::host(server), Trouble::kFull, Now() + duration);
      case Fault::kFailingDisk:
        failed_.insert(server);
        return TroubleAndCut(server, Trouble::kFailing, duration);
      case Fault::kLyingDisk:
        return TroubleAndCut(server, Trouble::kLying, duration);
      case Fault::kSlowDisk:
        return TroubleDisk(Cluster::host(server), Trouble::kSlow, Now() + duration);
      case Fault::kStopServer:
        return StopProcess(cluster_->process(server), duration);
      case Fault::kBreak:
        return BreakConnection(cluster_->process(server), random_.OneIn(3) ? 0 : random_.Between(1, 5000));
      case Fault::kPart:
        return Part(cluster_->process(server), job_->process(worker), Now() + duration);
      case Fault::kKillJob:
        return RestartJob(worker);
      case Fault::kLeaveBehind:
        return LeaveBehind(duration);
      case Fault::kStopWorker:
        return StopProcess(job_->process(worker), duration);
    }
  }

  void StartAgain(uint32_t server, uint64_t after) {
    StartProcess(0, [this, server, after] {
      Sleep(after);
      const std::lock_guard<std::mutex> lock(repairs_);
      if (!cluster_->is_up(server)) cluster_->StartServer(server);
    });
  }

  // Starts servers again that have refused their disks. If the job has ended with an error of a disk, waits
  // until all are well, starts the servers whose disks have failed, and resumes the job.
  void Operate() {
    for (;; Sleep(500 * kMillisecond)) {
      const std::lock_guard<std::mutex> lock(repairs_);
      bool ill = false;
      for (uint32_t i = 0; i < swarm_.servers; ++i) {
        ill = ill || HasTrouble(Cluster::host(i));
        if (cluster_->is_up(i) && cluster_->has_refused(i)) {
          cluster_->EndServer(i, End::kKill);
          if (DisksLost() && !HasTrouble(Cluster::host(i))) job_->StartOver();
          cluster_->StartServer(i, job_->starts_over());
        }
      }
      if (!job_->failed() || ill) continue;
      for (uint32_t rank = 0; rank < job_->workers(); ++rank) job_->EndWorker(rank, false);
      for (uint32_t i = 0; i < swarm_.servers; ++i) {
        if (!job_->starts_over() && failed_.count(i) == 0) continue;
        if (cluster_->is_up(i)) cluster_->EndServer(i, End::kKill);
        cluster_->StartServer(i, job_->starts_over());
      }
      failed_.clear();
      StartJob();
    }
  }

  // The power may go while the disk is in trouble, or soon after.
  void TroubleAndCut(uint32_t server, Trouble trouble, uint64_t duration) {
    TroubleDisk(Cluster::host(server), trouble, Now() + duration);
    const bool cuts = std::count(swarm_.faults.begin(), swarm_.faults.end(), Fault::kCutPower) > 0;
    if (!cuts || random_.OneIn(2)) return;
    Sleep(random_.Below(std::min(duration, 3 * kSecond) + kSecond));
    CutPower(server, random_.Below(kSecond));
  }

  // Of one, or of all; at any time, between two writes, or while a server that was killed recovers, or while
  // one goes back to a checkpoint because another one was killed.
  void CutPower(uint32_t server, uint64_t off) {
    const bool all = random_.OneIn(3);
    const bool kills = random_.OneIn(3);
    const uint32_t killed = random_.OneIn(2) ? server : (server + 1) % swarm_.servers;
    const bool recovers = kills && cluster_->is_up(server) && cluster_->is_up(killed);
    if (recovers) {
      const std::lock_guard<std::mutex> lock(repairs_);
      cluster_->EndServer(killed, End::kKill);
      cluster_->StartServer(killed);
    }
    if (recovers || random_.OneIn(2)) {
      const bool syncs = random_.OneIn(2);
      const uint64_t steps = random_.Between(1, syncs ? 20 : 300);
      const uint64_t most = killed == server ? 3 * kSecond : 10 * kSecond;  // all workers connect again first
      AwaitWrites(cluster_->process(server), syncs, steps, Now() + most);
    }
    for (uint32_t i = 0; i < swarm_.servers; ++i) {
      if ((i != server && !all) || !cluster_->is_up(i)) continue;
      cluster_->CutPower(i);
      StartAgain(i, off);
    }
  }

  // As the launcher does when it has lost a worker.
  void RestartJob(uint32_t first) {
    const std::lock_guard<std::mutex> lock(repairs_);
    if (job_->published() == 0) return;
    job_->EndWorker(first, random_.OneIn(3));
    Sleep(random_.Below(2 * kSecond));
    for (uint32_t rank = 0; rank < job_->workers(); ++rank) {
      if (rank != first) job_->EndWorker(rank, random_.OneIn(3));
    }
    Sleep(random_.Below(2 * kSecond));
    StartJob();
  }

  // Its launcher takes the workers for lost, because their hosts do not answer for a while.
  void LeaveBehind(uint64_t duration) {
    const std::lock_guard<std::mutex> lock(repairs_);
    if (job_->published() == 0) return;
    for (uint32_t rank = 0; rank < job_->workers(); ++rank) {
      if (!random_.OneIn(3)) StopProcess(job_->process(rank), random_.Below(duration + 1));
    }
    StartJob();
  }

  void StartJob() {
    job_->Start(random_.OneIn(2) ? job_->workers() : static_cast<uint32_t>(random_.Between(1, 3)));
  }

  const Swarm& swarm_;
  Cluster* const cluster_;
  Job* const job_;
  const std::optional<std::set<unsigned>> only_;
  std::mutex repairs_;
  std::set<uint32_t> failed_;  // servers whose disks have failed since they started
  unsigned count_ = 1;
  Random random_;  // of the next fault
};

template <typename Condition>
void Await(const char* what, const Condition& holds) {
  const uint64_t limit = Now() + kRecovers;
  while (!holds()) {
    if (Now() > limit)
      FailRun(std::string("no progress: ") + what + " 120 simulated seconds after the last fault");
    Sleep(100 * kMillisecond);
  }
}

}  // namespace

void RunSeed(uint64_t seed, bool show, const std::optional<std::set<unsigned>>& only,
             const std::vector<Fault>& kinds) {
  ShowNotes(show);
  SetSeed(seed);
  Start(seed);
  const Swarm swarm = DrawSwarm(seed, kinds);
  Note(Describe(swarm));
  SetPolicy(swarm.policy);
  SetNetworkPolicy(swarm.network);
  SetDiskPolicy(swarm.disk);
  const uint64_t begin = Now();
  // Paths cross the wire, and so are in the trace.
  Cluster cluster(swarm, "/proc/self/cwd/servers");
  Job job(swarm, &cluster, "/proc/self/cwd/run");
  job.Start(swarm.workers);
  Await("the job has not begun", [&] { return job.least_steps() > 0; });
  Faults faults(swarm, &cluster, &job, only);
  faults.InjectAll();
  const uint64_t steps = job.least_steps();
  Await("a worker has not made ten steps", [&] { return job.least_steps() >= steps + kSteps; });
  job.Finish();
  Await("the job has not ended", [&] { return job.finished(); });
  if (swarm.only_breaks && job.losses() > 0)
    FailRun(std::to_string(job.losses()) + " losses of servers, though only connections broke");
  std::printf("passed trace %016" PRIx64 " steps %" PRIu64 " losses %" PRIu64 " checkpoints %" PRIu64
              " simulated %.1f processor %.3f switches %" PRIu64 " events %" PRIu64 "\n",
              TraceHash(), job.total_steps(), job.losses(), job.published(),
              static_cast<double>(Now() - begin) / 1e9, static_cast<double>(ProcessorTime()) / 1e9,
              Switches(), Events());
  std::fflush(stdout);
  _exit(0);
}

}  // namespace sim
