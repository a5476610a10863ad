#include "tests/simulation/job.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>

#include "oe_runtime/core/wire/errors.h"
#include "tests/simulation/disk.h"
#include "tests/simulation/meeting.h"
#include "tests/simulation/processes.h"

namespace sim {
namespace {

constexpr auto kPause = std::chrono::milliseconds(300);  // between attempts to reach the servers again
constexpr auto kRetry = std::chrono::seconds(1);         // oe_runtime.run.course: _PAUSE and _MORE
constexpr int kMore = 2;
constexpr size_t kKeep = 3;  // checkpoints
constexpr int kFirstProcess = 100000;
constexpr int kMostWorkers = 100;

class Lost : public std::exception {};  // some worker has lost a server
// There is a new generation: what this one notes or publishes reaches nobody
class LeftBehind : public std::exception {};

}  // namespace

class Worker {
 public:
  Worker(Job* job, uint32_t rank)
      : job_(job),
        rank_(rank),
        workers_(job->workers_),
        generation_(job->generation_),
        meeting_(job->meeting_),
        swarm_(job->swarm_),
        resumes_(!job->directory_.checkpoints.empty()) {}

  void Run() {
    try {
      ConnectFirst();
      bool go_back = resumes_;
      bool first = !resumes_;
      for (;;) {
        try {
          if (std::exchange(go_back, false)) throw Lost();
          if (std::exchange(first, false)) Take(false);
          if (!Step()) {
            Finish();
            break;
          }
        } catch (const Lost&) {
          Recover();
        }
      }
      End();
    } catch (const LeftBehind&) {
      Note(Name() + " of generation " + std::to_string(generation_) + " ends: it was left behind");
    } catch (const Counters::Wrong& wrong) {
      if (left_behind()) return;
      if (!wrong.excused) FailRun(wrong.what());
      Note(Name() + " starts the job over: " + wrong.what());
      job_->StartOver();
    } catch (const oe::StorageError& error) {
      Fail(error);
    } catch (const oe::CheckpointError& error) {
      Fail(error);
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

  // Of its tables or files: only a disk is an excuse. The run ends, and is resumed when the disk is well.
  void Fail(const oe::Error& error) {
    if (left_behind()) return;
    const std::string text = error.what();
    const bool named = text.find("/servers/server-") != std::string::npos ||
                       text.find("/run/") != std::string::npos || text.find("table '") != std::string::npos;
    if (!DisksHadTrouble() || !named) FailRun(Name() + " ends: " + text);
    Note(Name() + " ends the job: " + text);
    job_->failed_ = true;
    job_->starts_over_ = DisksLost();
  }

  std::string Name() const { return "worker " + std::to_string(rank_); }

  std::unique_ptr<oe::Client> Connected(const std::string& torn) {
    oe::RemoteOptions options = job_->cluster_->remote();
    options.worker.rank = rank_;
    options.worker.of = workers_;
    options.worker.synchronous = !swarm_.staleness;
    options.worker.staleness = swarm_.staleness;
    options.worker.wait = 60;
    options.worker.generation = generation_ - 1;
    auto client = oe::Client::Connect(options, 1);
    if (!torn.empty()) client->Tear(torn);
    for (uint32_t i = 0; i < swarm_.tables; ++i) (void)client->CreateTable(job_->counters_.Spec(i));
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

  struct Pulled {
    std::vector<oe::Key> ids;
    std::shared_ptr<oe::PulledBatch> batch;
    std::vector<float> rows;  // of one table after the other
  };

  Pulled Pull(uint64_t step) {
    Pulled pulled{job_->counters_.Ids(rank_, step), nullptr, {}};
    std::vector<oe::IdsView> views;
    std::vector<std::pair<uint32_t, uint32_t>> lookups;
    for (uint32_t i = 0; i < swarm_.tables; ++i) {
      views.push_back({pulled.ids.data(), pulled.ids.size()});
      lookups.emplace_back(i, i);
    }
    pulled.batch = client_->Pull(views, lookups);
    pulled.rows.resize(swarm_.tables * pulled.ids.size() * Counters::kDim);
    client_->Embeddings(*pulled.batch, 0, pulled.rows.data());  // tables of one dimension are one group
    return pulled;
  }

  void Push(const Pulled& pulled) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(swarm_.think));
    const std::vector<float> gradients(pulled.rows.size(), -1.0F);
    client_->Push(*pulled.batch, {{gradients.data(), swarm_.tables * pulled.ids.size(), Counters::kDim}},
                  {1.0});
  }

  template <typename Check>
  void ForTables(const Pulled& pulled, const Check& check) {
    const size_t values = pulled.ids.size() * Counters::kDim;
    for (uint32_t i = 0; i < swarm_.tables && !left_behind(); ++i) check(i, pulled.rows.data() + i * values);
  }

  // False after the job's last one.
  bool Step() {
    const uint64_t every = swarm_.checkpoint_every;
    const uint64_t end = swarm_.staleness ? step_ / every * every + every : step_ + 1;
    Defer([&] { swarm_.staleness ? TrainUntil(end) : TrainTogether(); });
    if (lost_ && swarm_.staleness && client_ != nullptr) client_->Close();  // nobody waits for this one
    const bool finish = Agree(job_->finish_ ? 1 : 0) != 0;
    job_->steps_[rank_] += end - step_;
    if (rank_ == 0) job_->total_steps_ += end - step_;
    step_ = end;
    if (rank_ == 0) Defer([this] { Settle(); });
    const std::vector<oe::Key> erased = job_->counters_.Erased(step_);
    if (!erased.empty()) {
      if (rank_ == 0) Defer([&] { Erase(erased); });
      Agree();
    }
    if (step_ % every == 0) {
      if (rank_ == 0 && swarm_.rule == Rule::kEvict) Defer([this] { (void)client_->Evict(); });
      Agree();
      Take(true);
    }
    return !finish;
  }

  void Erase(const std::vector<oe::Key>& keys) {
    for (uint32_t i = 0; i < swarm_.tables; ++i) (void)client_->Erase(i, keys.data(), keys.size());
  }

  void TrainTogether() {
    const Pulled pulled = Pull(step_);
    ForTables(pulled, [&](uint32_t table, const float* rows) {
      job_->counters_.Check("pulled", rank_, step_, table, pulled.ids, rows);
    });
    Push(pulled);
  }

  // Beside the other workers, which are up to `staleness` steps behind, unless one is lost: then pushes fail.
  void TrainUntil(uint64_t end) {
    for (uint64_t step = step_; step < end; ++step) {
      RequireCurrent();
      const Pulled pulled = Pull(step);
      Push(pulled);
      ForTables(pulled, [&](uint32_t table, const float* rows) {
        job_->counters_.CheckBetween(rank_, step_, step, end, table, pulled.ids, rows);
      });
    }
  }

  // `again`: a later step has another checkpoint.
  void Take(bool again) {
    if (rank_ == 0) Defer([&] { Attempt(again, in_storage()); });
    Agree();
  }

  // oe_runtime.run.course.Course._attempt
  void Attempt(bool again, bool in_storage) {
    for (int left = again ? 0 : kMore;; --left) {
      try {
        return in_storage ? Mark(!again) : Save();
      } catch (const oe::CheckpointError& error) {
        if (!again && left == 0) throw;
        Note("no checkpoint of step " + std::to_string(step_) + ": " + error.what());
      }
      if (again) return;
      std::this_thread::sleep_for(kRetry);
      in_storage = false;
    }
  }

  // oe_runtime.run.course.Course._finish: the last checkpoint has its rows in files. They are what was
  // pushed.
  void Finish() {
    const auto& all = job_->directory_.checkpoints;
    if (rank_ == 0) Defer([this] { Settle(); });
    if (rank_ == 0 && (all.back().step != step_ || all.back().files.empty()))
      Defer([this] { Attempt(false, false); });
    Agree();
    Defer([&] { client_->Restore(all.back().files); });
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
    if (wait) Publish(step_, {});
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
    pending_.reset();
    chain.push_back(files.string());
    Publish(step_, chain);
    directory.newest_files = std::move(chain);
  }

  void Settle() {
    if (!pending_ || !in_storage()) return;
    const std::vector<uint64_t> all = client_->Checkpoints();
    RequireCurrent();
    if (std::find(all.begin(), all.end(), *pending_) != all.end()) Publish(*pending_, {});
  }

  void Publish(uint64_t step, const std::vector<std::string>& files) {
    auto& all = job_->directory_.checkpoints;
    all.push_back({step, files});
    Note("checkpoint " + std::to_string(step) + " is published");
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
        Choose();
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

  // oe_runtime.run.checkpoints.Checkpoints._choose, and the oracle that no published checkpoint is lost.
  void Choose() {
    auto& all = job_->directory_.checkpoints;
    if (all.empty()) {
      // Faults come before a job that began anew has its first checkpoint; not before that of a run.
      if (generation_ == 1) FailRun("there is no checkpoint to go back to");
      throw oe::CheckpointError("of table 't0' there is no checkpoint to go back to");
    }
    if (!all.back().files.empty()) return;
    const std::vector<uint64_t> kept = client_->Checkpoints();
    RequireCurrent();
    const auto usable = std::find_if(all.rbegin(), all.rend(), [&](const auto& one) {
      return !one.files.empty() || std::find(kept.begin(), kept.end(), one.step) != kept.end();
    });
    if (usable == all.rbegin()) return;
    std::string text;
    for (const uint64_t one : kept) text += " " + std::to_string(one);
    text = "checkpoint " + std::to_string(all.back().step) +
           " was published and is lost; all servers have:" + text;
    if (!DisksLost()) FailRun(text);
    Note(text);
    if (usable == all.rend()) throw oe::CheckpointError("of table 't0' no older checkpoint can be used");
    all.erase(usable.base(), all.end());
    job_->counters_.SetWorkers(workers_, all.back().step);
  }

  void End() {
    std::vector<oe::Key> keys(swarm_.keys);
    std::iota(keys.begin(), keys.end(), 0);
    std::vector<float> rows(keys.size() * Counters::kDim);
    for (uint32_t i = 0; i < swarm_.tables; ++i) {
      client_->PullRows(i, keys.data(), keys.size(), rows.data());
      job_->counters_.Check("at the end", rank_, step_, i, keys, rows.data(), true);
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
  const bool resumes_;
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
  finished_ = 0;
  failed_ = false;
  if (std::exchange(starts_over_, false)) {
    directory_.checkpoints.clear();
    ForgetRemovals();
  }
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
