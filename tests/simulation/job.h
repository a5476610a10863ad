// The workers of a training job: real clients, which recover as oe_runtime/run/lost_server.py,
// run/checkpoints.py and run/followers.py do. A change there is made here too.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tests/simulation/cluster.h"
#include "tests/simulation/counters.h"

namespace sim {

// What is on disk of a job: it outlives the workers.
struct RunDirectory {
  struct Published {
    uint64_t step = 0;
    std::vector<std::string>
        files;  // the first with all rows, then increments; none: in the servers' storage
  };
  std::filesystem::path path;
  std::vector<Published> checkpoints;  // the newest last
  uint64_t saves = 0;
  std::vector<std::string> newest_files;  // of the servers' last save or restore: a base for an increment
};

class Meeting;

class Job {
 public:
  Job(const Swarm& swarm, Cluster* cluster, std::filesystem::path directory);

  // So many workers, as a new generation. Those of the one before that still run are left behind.
  void Start(uint32_t workers);
  uint32_t workers() const { return workers_; }
  int process(uint32_t rank) const;
  void EndWorker(uint32_t rank, bool vanish);
  // What each worker has reached, ever.
  uint64_t least_steps() const;
  // All end after the step that they are in.
  void Finish() { finish_ = true; }
  // It has ended with an error of a disk.
  bool failed() const { return failed_; }
  // Its checkpoints are lost.
  void StartOver() { failed_ = starts_over_ = true; }
  // No checkpoint is left: the servers are to be started without rows.
  bool starts_over() const { return starts_over_; }
  bool finished() const { return finished_ == workers_; }
  uint64_t losses() const { return losses_; }
  uint64_t total_steps() const { return total_steps_; }
  uint64_t published() const { return published_; }

 private:
  friend class Worker;

  const Swarm swarm_;
  Cluster* const cluster_;
  RunDirectory directory_;
  Counters counters_;
  uint32_t workers_ = 0;
  uint32_t generation_ = 0;
  std::shared_ptr<Meeting> meeting_;  // of this generation
  std::vector<int> ended_;            // processes, since the job last started
  std::vector<uint64_t> steps_;
  bool finish_ = false;
  uint32_t finished_ = 0;
  bool failed_ = false;
  bool starts_over_ = false;
  uint64_t losses_ = 0;
  uint64_t total_steps_ = 0;
  uint64_t published_ = 0;
};

}  // namespace sim
