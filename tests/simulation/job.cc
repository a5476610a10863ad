#include "tests/simulation/job.h"

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "oe_runtime/core/wire/errors.h"
#include "tests/simulation/meeting.h"
#include "tests/simulation/processes.h"

namespace sim {
namespace {

constexpr auto kPause = std::chrono::milliseconds(300);  // between attempts to reach the servers again
constexpr size_t kKeep = 3;                              // checkpoints
constexpr int kFirstProcess = 100000;
constexpr int kMostWorkers = 100;

struct Lost {};        // some worker has lost a server
struct LeftBehind {};  // there is a new generation: what this one notes or publishes reaches nobody

}  // namespace

class Worker {
 public:
  Worker(Job* job, uint32_t rank)
      : job_(job),
        rank_(rank),
        workers_(job->workers_),
        generation_(job->generation_),
        meeting_(job->meeting_),
        swarm_(job->swarm_) {}

  void Run() {
    try {
      ConnectFirst();
      bool go_back = !job_->directory_.checkpoints.empty();
      bool first = !go_back;
      for (;;) {
        try {
          if (std::exchange(go_back, false)) throw Lost();
          if (std::exchange(first, false)) Take(true);
          if (!Step()) break;
        } catch (const Lost&) {
          Recover();
        }
      }
      End();
    } catch (const LeftBehind&) {
      Note(Name() + " of generation " + std::to_string(generation_) + " ends: it was left behind");
    } catch (const std::exception& error) {
      if (left_behind()) return;
      FailRun(Name() + " ends: " + error.what());
    }
  }

 private:
  bool left_behind() const { return generation_ != job_->generation_; }
  void RequireCurrent() const {
    if (left_behind()) throw LeftBehind();
  }

  std::string Name() const { return "worker " + std::to_string(rank_); }

  std::unique_ptr<oe::Client> Connected(const std::string& torn) {
    oe::RemoteOptions options = job_->cluster_->remote();
    options.worker.rank = rank_;
    options.worker.of = workers_;
    options.worker.wait = 60;
    options.worker.generation = generation_ - 1;
    auto client = oe::Client::Connect(options, 1);
    if (!torn.empty()) client->Tear(torn);
    for (uint32_t i = 0; i < swarm_.tables; ++i) (void)client->CreateTable(Counters::Spec(i));
    return client;
  }

  void ConnectFirst() {
    while (client_ == nullptr) {
      RequireCurrent();
      try {
        client_ = Connected("");
      } catch (const oe::ServerLost& error) {
        Note(Name() + " waits for a server: " + error.what());
        std::this_thread::sleep_for(kPause);
      }
    }
  }

  // oe_runtime.run.ranks.deferring_losses
  template <typename Function>
  void Defer(const Function& function) {
    if (lost_) return;
    try {
      function();
    } catch (const oe::ServerLost& error) {
      Lose(error);
    } catch (const oe::TornError& error) {
      Lose(error);
    } catch (const oe::WorkerLost& error) {
      Lose(error);
    }
  }

  void Lose(const std::exception& error) {
    Note(Name() + " at step " + std::to_string(step_) + ": " + error.what());
    lost_ = true;
  }

  uint64_t Agree(uint64_t value = 0) {
    RequireCurrent();
    const Meeting::Outcome outcome = meeting_->Meet(rank_, lost_, value);
    RequireCurrent();
    if (!outcome.lost) return outcome.value;
    lost_ = false;
    throw Lost();
  }

  // False after the job's last one.
  bool Step() {
    const std::vector<oe::Key> ids = job_->counters_.Ids(rank_, step_);
    Defer([&] {
      std::vector<oe::IdsView> views;
      std::vector<std::pair<uint32_t, uint32_t>> lookups;
      for (uint32_t i = 0; i < swarm_.tables; ++i) {
        views.push_back({ids.data(), ids.size()});
        lookups.emplace_back(i, i);
      }
      // Tables of one dimension are one group: their rows come one table after the other.
      const auto pulled = client_->Pull(views, lookups);
      const size_t values = ids.size() * Counters::kDim;
      std::vector<float> rows(swarm_.tables * values);
      client_->Embeddings(*pulled, 0, rows.data());
      for (uint32_t i = 0; i < swarm_.tables && !left_behind(); ++i) {
        job_->counters_.Check("pulled", rank_, step_, ids, rows.data() + i * values);
      }
      std::this_thread::sleep_for(std::chrono::nanoseconds(swarm_.think));
      const std::vector<float> gradients(rows.size(), -1.0F);
      client_->Push(*pulled, {{gradients.data(), swarm_.tables * ids.size(), Counters::kDim}}, {1.0});
    });
    const bool finish = Agree(job_->finish_ ? 1 : 0) != 0;
    ++step_;
    ++job_->steps_[rank_];
    if (rank_ == 0) ++job_->total_steps_;
    if (rank_ == 0) Defer([this] { Settle(); });
    if (step_ % swarm_.checkpoint_every == 0) {
      Agree();
      Take(false);
    }
    return !finish;
  }

  void Take(bool wait) {
    if (rank_ == 0) Defer([&] { in_storage() ? Mark(wait) : Save(); });
    Agree();
  }

  bool in_storage() const { return swarm_.storage != "dram"; }

  // A later checkpoint of this number is of a run that went back behind it.
  void RemoveFrom(uint64_t step) {
    auto& all = job_->directory_.checkpoints;
    all.erase(std::remove_if(all.begin(), all.end(), [&](const auto& one) { return one.step >= step; }),
              all.end());
  }

  void Mark(bool wait) {
    if (pending_) wait = true;
    RemoveFrom(step_);
    pending_.reset();
    if (step_ > 0 || client_->Checkpoints() != std::vector<uint64_t>{0}) client_->Checkpoint(step_, wait);
    pending_ = step_;
    RequireCurrent();
    if (wait) Publish({});
  }

  void Save() {
    RunDirectory& directory = job_->directory_;
    const auto files = directory.path / ("save-" + std::to_string(directory.saves++));
    std::filesystem::create_directory(files);
    std::vector<std::string> chain = directory.newest_files;
    if (chain.size() > swarm_.increments) chain.clear();
    (void)client_->Save(files.string(), chain.empty() ? "" : chain.back());
    RequireCurrent();
    RemoveFrom(step_);
    pending_ = step_;
    chain.push_back(files.string());
    Publish(chain);
    directory.newest_files = chain;
  }

  void Settle() {
    if (!pending_ || !in_storage()) return;
    const std::vector<uint64_t> all = client_->Checkpoints();
    RequireCurrent();
    if (std::find(all.begin(), all.end(), *pending_) != all.end()) Publish({});
  }

  void Publish(const std::vector<std::string>& files) {
    auto& all = job_->directory_.checkpoints;
    all.push_back({*pending_, files});
    Note("checkpoint " + std::to_string(*pending_) + " is published");
    pending_.reset();
    ++job_->published_;
    if (all.size() > kKeep) all.erase(all.begin());
  }

  // oe_runtime.run.lost_server.ServerRecovery.recover
  void Recover() {
    if (rank_ == 0) ++job_->losses_;
    for (;;) {
      try {
        Agree();
        Defer([this] {
          const std::string torn = client_->torn();
          client_->Close();
          client_ = Connected(torn);
        });
        Agree();
        RollBack();
        return;
      } catch (const Lost&) {
        std::this_thread::sleep_for(kPause);
      }
    }
  }

  void RollBack() {
    if (rank_ == 0) {
      Defer([this] {
        Settle();
        RequireNewest();
      });
      pending_.reset();
    }
    Agree();
    // All workers read the same run directory here; worker 0 alone changes it, between two meetings.
    const RunDirectory::Published target = job_->directory_.checkpoints.back();
    Defer([&] {
      if (target.files.empty()) {
        (void)client_->Recover(target.step);
      } else {
        client_->Restore(target.files);
      }
    });
    Agree();
    step_ = target.step;
    if (rank_ == 0) job_->directory_.newest_files = target.files;
    if (rank_ == 0) Note("all go on from step " + std::to_string(step_));
  }

  // The oracle that no acknowledged checkpoint is lost.
  void RequireNewest() const {
    const auto& all = job_->directory_.checkpoints;
    if (all.empty()) FailRun("there is no checkpoint to go back to");
    if (!all.back().files.empty()) return;
    const std::vector<uint64_t> kept = client_->Checkpoints();
    RequireCurrent();
    if (std::find(kept.begin(), kept.end(), all.back().step) != kept.end()) return;
    std::string text;
    for (const uint64_t one : kept) text += " " + std::to_string(one);
    FailRun("checkpoint " + std::to_string(all.back().step) +
            " was published and is lost; all servers have:" + text);
  }

  void End() {
    std::vector<oe::Key> keys(swarm_.keys);
    std::iota(keys.begin(), keys.end(), 0);
    std::vector<float> rows(keys.size() * Counters::kDim);
    for (uint32_t i = 0; i < swarm_.tables; ++i) {
      client_->PullRows(i, keys.data(), keys.size(), rows.data());
      job_->counters_.Check("at the end", rank_, step_, keys, rows.data());
    }
    client_->Leave();
    client_->Close();
    ++job_->finished_;
  }

  Job* const job_;
  const uint32_t rank_;
  const uint32_t workers_;
  const uint32_t generation_;
  const std::shared_ptr<Meeting> meeting_;
  const Swarm& swarm_;
  std::unique_ptr<oe::Client> client_;
  bool lost_ = false;
  uint64_t step_ = 0;
  std::optional<uint64_t> pending_;  // a checkpoint that is marked, not published
};

Job::Job(const Swarm& swarm, Cluster* cluster, std::filesystem::path directory)
    : swarm_(swarm),
      cluster_(cluster),
      directory_{std::move(directory), {}, 0, {}},
      counters_(swarm),
      steps_(kMostWorkers) {
  std::filesystem::create_directory(directory_.path);
}

void Job::Start(uint32_t workers) {
  for (const int process : std::exchange(ended_, {})) RestoreHost(process);
  ++generation_;
  workers_ = workers;
  Note("the job starts with " + std::to_string(workers) + " workers, generation " +
       std::to_string(generation_));
  counters_.SetWorkers(workers, directory_.checkpoints.empty() ? 0 : directory_.checkpoints.back().step);
  meeting_ = std::make_shared<Meeting>(workers);
  for (uint32_t rank = 0; rank < workers; ++rank) {
    const auto worker = std::make_shared<Worker>(this, rank);  // of this generation, whenever it runs first
    StartProcess(process(rank), [worker] { worker->Run(); });
  }
}

int Job::process(uint32_t rank) const {
  return kFirstProcess + static_cast<int>(generation_) * kMostWorkers + static_cast<int>(rank);
}

void Job::EndWorker(uint32_t rank, bool vanish) {
  EndProcess(process(rank), vanish ? End::kVanish : End::kKill);
  ended_.push_back(process(rank));
}

uint64_t Job::least_steps() const { return *std::min_element(steps_.begin(), steps_.begin() + workers_); }

}  // namespace sim
