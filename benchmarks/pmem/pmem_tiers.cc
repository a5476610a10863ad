// The lines of the paper ("OpenEmbedding", ICDE 2023) at our scale: a table in DRAM, in a pool with a cache
// in DRAM, in a pool without one, and their Ori-Cache, with persistent memory as in model.h.
//   pmem_tiers DIRECTORY ROWS DIM THREADS DIMMS BATCHES [CHECKPOINT EVERY=0]
// DIMMS 0 is without the model: what the directory has. Every batch goes to each in turn; with checkpoints,
// all batches between two of them, after a checkpoint, so that each pays for its own. A step is the client's
// part (ids made unique, a row for each id, a gradient of each id summed: the same for all), pull, upkeep of
// the cache, push; "hidden" is without the upkeep, which a server does after its reply, when a worker
// computes. Prints lines of a Markdown table.

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/pmem/model.h"
#include "benchmarks/pmem/ori_cache.h"
#include "benchmarks/pmem/workload.h"
#include "oe_runtime/core/common/thread_pool.h"

namespace {

using oe::Key;

constexpr int kWarmup = 100;
constexpr double kRate = 0.01;
constexpr double kCached = 0.02;  // of the rows' bytes

class Contender {
 public:
  explicit Contender(std::string its_name) : name(std::move(its_name)) {}
  virtual ~Contender() = default;
  virtual void Pull(const std::vector<Key>& keys, float* out) = 0;
  virtual void Upkeep() {}
  virtual void Push(const std::vector<Key>& keys, const float* grads) = 0;
  virtual void Checkpoint(uint64_t /*id*/) {}
  virtual void WaitDurable() {}
  // Of the unique keys since the last call, in percent; below 0: has no cache.
  virtual double Misses() { return -1; }

  const std::string name;
  // Milliseconds of each batch.
  std::vector<double> pull;
  std::vector<double> upkeep;
  std::vector<double> push;
};

// A table of the runtime.
class Ours final : public Contender {
 public:
  Ours(const std::string& its_name, const oe::TableSpec& spec, std::shared_ptr<oe::Storage> storage,
       oe::PmemModel* model, oe::ThreadPool* pool)
      : Contender(its_name), model_(model), pool_(pool), table_(oe::Table::Create(spec, storage)) {
    const std::string& type = storage->spec().type;
    cached_ = type == "dram_pmem";
    on_pmem_ = type != "dram";
    pull_lines_ = oe::PmemModel::Lines(spec.dim * sizeof(float));
    row_lines_ = oe::PmemModel::Lines(table_->row_bytes());
  }

  void Pull(const std::vector<Key>& keys, float* out) override {
    const oe::CacheStats before = table_->cache();
    table_->Pull(keys.data(), keys.size(), out, pool_);
    const oe::CacheStats after = table_->cache();
    missed_ = cached_ ? after.misses - before.misses : keys.size();
    all_missed_ += missed_;
    all_ += keys.size();
    cached_rows_ = before.rows;
    if (on_pmem_) model_->Read(missed_ * pull_lines_, pool_->threads());
  }

  void Upkeep() override {
    const oe::CacheStats before = table_->cache();
    table_->Upkeep(pool_);
    Charge(before, 0);
  }

  // Of the keys of a batch, no more are outside of the cache when it is pushed than when it was pulled but
  // for those that were put out since.
  void Push(const std::vector<Key>& keys, const float* grads) override {
    const oe::CacheStats before = table_->cache();
    table_->Push(keys.data(), keys.size(), grads, kRate, pool_);
    uint64_t outside = keys.size();
    if (cached_) {
      const uint64_t rows = table_->cache().rows;
      outside =
          std::min<uint64_t>(keys.size(), missed_ - std::min(missed_, rows - std::min(rows, cached_rows_)));
    }
    Charge(before, outside);
  }

  void Checkpoint(uint64_t id) override {
    if (on_pmem_) table_->Checkpoint(id);
  }
  void WaitDurable() override {
    if (on_pmem_) table_->WaitDurable();
  }
  double Misses() override {
    const double share =
        100.0 * static_cast<double>(all_missed_) / static_cast<double>(std::max<uint64_t>(1, all_));
    all_missed_ = all_ = 0;
    return cached_ ? share : -1;
  }

 private:
  // Rows that were taken into the cache are read, those that were put out written; `outside` were read and
  // written where they are. The lines with their weights, which the pull of the same batch has read, 1 MB,
  // are in the processor's caches.
  void Charge(const oe::CacheStats& before, uint64_t outside) {
    if (!on_pmem_ || !model_->on()) return;
    const oe::CacheStats after = table_->cache();
    const uint64_t taken = after.rows + after.evictions - before.rows - before.evictions;
    model_->Read((taken + outside) * (row_lines_ - pull_lines_), pool_->threads());
    model_->Write((after.write_backs - before.write_backs + outside) * row_lines_);
  }

  oe::PmemModel* const model_;
  oe::ThreadPool* const pool_;
  const std::unique_ptr<oe::Table> table_;
  bool cached_ = false;
  bool on_pmem_ = false;
  size_t pull_lines_ = 0;
  size_t row_lines_ = 0;
  uint64_t missed_ = 0;       // by the last pull
  uint64_t cached_rows_ = 0;  // before it
  uint64_t all_missed_ = 0;
  uint64_t all_ = 0;
};

class Theirs final : public Contender {
 public:
  Theirs(const oe::TableSpec& spec, uint64_t cache_bytes, uint64_t rows, oe::PmemModel* model,
         oe::ThreadPool* pool)
      : Contender("Ori-Cache"),
        pool_(pool),
        cache_(model, oe::Complete(spec).optimizer, spec.dim, cache_bytes) {
    oe::ForAllRows(rows, [&](const std::vector<Key>& keys) {
      for (const Key key : keys) cache_.Add(key);
    });
  }
  void Pull(const std::vector<Key>& keys, float* out) override {
    cache_.Pull(keys.data(), keys.size(), out, pool_);
  }
  void Push(const std::vector<Key>& keys, const float* grads) override {
    cache_.Push(keys.data(), keys.size(), grads, static_cast<float>(kRate), pool_);
  }
  void Checkpoint(uint64_t /*id*/) override { cache_.Checkpoint(); }

 private:
  oe::ThreadPool* const pool_;
  oe::OriCache cache_;
};

double Mean(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 7) {
    std::fprintf(stderr, "pmem_tiers DIRECTORY ROWS DIM THREADS DIMMS BATCHES [CHECKPOINT EVERY]\n");
    return 2;
  }
  const std::string directory = argv[1];
  const uint64_t rows = std::strtoull(argv[2], nullptr, 10);
  const auto dim = static_cast<uint32_t>(std::strtoul(argv[3], nullptr, 10));
  oe::ThreadPool pool(static_cast<unsigned>(std::strtoul(argv[4], nullptr, 10)));
  const auto dimms = static_cast<unsigned>(std::strtoul(argv[5], nullptr, 10));
  oe::PmemModel model(dimms);
  const int batches = std::atoi(argv[6]);
  const int every = argc > 7 ? std::atoi(argv[7]) : 0;

  const oe::TableSpec spec = oe::AdagradTable(dim);
  const auto cache_bytes =
      static_cast<uint64_t>(kCached * static_cast<double>(rows) * 2 * dim * sizeof(float));
  std::vector<std::unique_ptr<Contender>> contenders;
  const auto add = [&](const std::string& name, std::shared_ptr<oe::Storage> storage) {
    contenders.push_back(std::make_unique<Ours>(name, spec, std::move(storage), &model, &pool));
  };
  add("`dram`", oe::Storage::Open({"dram", ""}));
  add("`dram_pmem`", std::make_shared<oe::ModelledStorage>(&model, directory + "/cached", cache_bytes));
  add("`pmem_libpmem`", std::make_shared<oe::ModelledStorage>(&model, directory + "/pool", 0));
  std::vector<float> grads(oe::kIds * dim, 0.01F);
  for (const auto& contender : contenders) {
    oe::ForAllRows(rows, [&](const std::vector<Key>& keys) { contender->Push(keys, grads.data()); });
  }
  // Until as many slots are in use as ever will be, and come back.
  uint64_t id = 0;
  for (int i = 0; every > 0 && i < 4; ++i) {
    ++id;
    for (const auto& contender : contenders) {
      contender->Checkpoint(id);
      oe::ForAllRows(rows, [&](const std::vector<Key>& keys) { contender->Push(keys, grads.data()); });
      contender->WaitDurable();
    }
  }
  contenders.push_back(std::make_unique<Theirs>(spec, cache_bytes, rows, &model, &pool));

  oe::Workload workload(rows);
  oe::ClientPart client_part(dim);
  std::vector<float> out(oe::kIds * dim);
  std::vector<double> client;
  size_t keys = 0;
  const size_t at_once = every > 0 ? static_cast<size_t>(every) : 1;
  uint64_t turn = 0;
  for (int done = -kWarmup; done < batches; ++turn) {
    const bool counts = done >= 0;
    ++id;
    std::vector<std::vector<Key>> block;
    for (size_t i = 0; i < (counts ? at_once : kWarmup); ++i) {
      const std::vector<Key> ids = workload.Next();
      std::vector<Key> batch;
      // The same for all, so it is done and timed once.
      double time = oe::Milliseconds([&] { batch = client_part.Unique(ids); });
      std::fill(client_part.rows(), client_part.rows() + batch.size() * dim, 0.001F);
      time += oe::Milliseconds([&] { (void)client_part.RowsToGradients(); });
      if (counts) client.push_back(time);
      if (counts) keys += batch.size();
      block.push_back(std::move(batch));
    }
    done += static_cast<int>(block.size());
    for (size_t i = 0; i < contenders.size(); ++i) {
      Contender& contender = *contenders[(turn + i) % contenders.size()];
      double checkpoint = 0;
      if (every > 0) checkpoint = oe::Milliseconds([&] { contender.Checkpoint(id); });
      for (const std::vector<Key>& batch : block) {
        const double pull = oe::Milliseconds([&] { contender.Pull(batch, out.data()); });
        const double upkeep = oe::Milliseconds([&] { contender.Upkeep(); });
        const double push = oe::Milliseconds([&] { contender.Push(batch, grads.data()); });
        if (!counts) continue;
        contender.pull.push_back(pull);
        contender.upkeep.push_back(upkeep);
        contender.push.push_back(push + std::exchange(checkpoint, 0));
      }
      contender.WaitDurable();
      if (!counts) (void)contender.Misses();
    }
  }

  // Means, since a checkpoint, or the rows that are copied after it, are in few of the batches.
  const double around = Mean(client);
  const auto step = [&](const Contender& of, bool upkeep) {
    return around + Mean(of.pull) + Mean(of.push) + (upkeep ? Mean(of.upkeep) : 0);
  };
  for (const auto& contender : contenders) {
    const Contender& of = *contender;
    const Contender& dram = *contenders.front();
    std::printf("| %u | %u | %s | %s | %s | %.2f | %.2f | %.2f | %.1f | **%.2f** | %.2f | %.2f |", dim,
                pool.threads(), dimms == 0 ? "none" : (std::to_string(dimms) + " DIMM").c_str(),
                every == 0 ? "none" : std::to_string(every).c_str(), of.name.c_str(), Mean(of.pull),
                Mean(of.upkeep), Mean(of.push), static_cast<double>(oe::kIds) / step(of, true) / 1e3,
                step(dram, true) / step(of, true), step(dram, true) / step(of, false),
                (Mean(dram.pull) + Mean(dram.push)) / (Mean(of.pull) + Mean(of.push)));
    const double misses = contender->Misses();
    std::printf(misses < 0 ? " |\n" : " %.0f %% |\n", misses);
  }
  std::fprintf(stderr, "%zu unique keys a batch, client's part %.2f ms\n",
               keys / static_cast<size_t>(batches), around);
  return 0;
}
