#include <algorithm>
#include <exception>
#include <iterator>
#include <nlohmann/json.hpp>

#include "oe_runtime/core/checkpoint/table_pack.h"
#include "oe_runtime/core/client/backend.h"
#include "oe_runtime/core/wire/errors.h"

namespace oe {
namespace {

template <typename Value>
std::vector<TablePart<Value>> PartsOf(const ServerBatch& batch) {
  std::vector<TablePart<Value>> parts;
  parts.reserve(batch.entries.size());
  for (size_t i = 0; i < batch.entries.size(); ++i) {
    const BatchEntry& entry = batch.entries[i];
    const KeyBlock& block = batch.blocks[entry.block];
    const uint32_t* counts = batch.counts.empty() ? nullptr : batch.counts[i];
    parts.push_back({entry.table, block.keys, block.size, batch.values[i], entry.learning_rate, counts});
  }
  return parts;
}

class LocalBackend : public Backend {
 public:
  LocalBackend(const StorageSpec& spec, uint32_t servers, ThreadPool* pool) {
    if (servers == 0) throw SpecError("servers is 0; at least one is needed");
    const std::shared_ptr<Storage> storage = Storage::Open(spec);
    stores_.reserve(servers);
    for (uint32_t i = 0; i < servers; ++i) {
      stores_.push_back(std::make_unique<Store>(storage, ShardInfo{i, servers}, pool));
    }
  }

  uint32_t servers() const override { return static_cast<uint32_t>(stores_.size()); }

  std::vector<uint32_t> CreateTable(const TableSpec& spec) override {
    CheckOpen();
    std::vector<uint32_t> ids;
    ids.reserve(stores_.size());
    for (const auto& store : stores_) ids.push_back(store->CreateTable(spec));
    return ids;
  }

  void Pull(const std::vector<ServerBatch>& batches) override {
    CheckOpen();
    for (size_t i = 0; i < stores_.size(); ++i) {
      if (!batches[i].skip) stores_[i]->Pull(PartsOf<void>(batches[i]));
    }
  }

  // As with servers, one that fails does not keep the others from their part.
  void Push(const std::vector<ServerBatch>& batches) override {
    CheckOpen();
    ForAll("a push", true, [&](size_t i) {
      if (!batches[i].skip) stores_[i]->Push(PartsOf<const void>(batches[i]));
      return !batches[i].skip;
    });
  }

  void Tear(const std::string& reason) override {
    for (const auto& store : stores_) store->Tear(reason);
  }

  Table::AssignCounts Assign(const std::vector<ServerRows>& parts) override {
    CheckOpen();
    Table::AssignCounts sum;
    ForAll("an assignment", true, [&](size_t i) {
      const ServerRows& part = parts[i];
      const Table::AssignCounts counts = stores_[i]->Assign(part.table, part.keys.keys, part.keys.size,
                                                            part.weights, part.states, 0, part.strides, true);
      sum.created += counts.created;
      sum.evicted += counts.evicted;
      sum.no_room += counts.no_room;
      return part.keys.size > 0;
    });
    return sum;
  }

  uint64_t Erase(const std::vector<ServerRows>& parts) override {
    CheckOpen();
    uint64_t erased = 0;
    ForAll("an erase", true, [&](size_t i) {
      erased += stores_[i]->Erase(parts[i].table, parts[i].keys.keys, parts[i].keys.size);
      return parts[i].keys.size > 0;
    });
    return erased;
  }

  void ReadRows(const std::vector<ServerRows>& parts) override {
    CheckOpen();
    for (size_t i = 0; i < stores_.size(); ++i) {
      const ServerRows& part = parts[i];
      stores_[i]->ReadRows(part.table, part.keys.keys, part.keys.size, part.weights, part.states, part.found,
                           part.strides);
    }
  }
  bool TakesInPlace(const std::byte* /*values*/, bool /*dense*/) const override { return true; }

  std::vector<Key> Keys(const std::vector<uint32_t>& ids, uint32_t part) override {
    CheckOpen();
    std::vector<Key> all;
    for (size_t i = 0; i < stores_.size(); ++i) {
      const std::vector<Key> keys = stores_[i]->Keys(ids[i], part);
      all.insert(all.end(), keys.begin(), keys.end());
    }
    return all;
  }

  nlohmann::json Save(const std::string& directory, const std::string& since, Contents* contents) override {
    CheckOpen();
    const nlohmann::json checksums =
        since.empty() ? nlohmann::json::object() : TableChecksums(since, stores_.front()->TableNames());
    nlohmann::json all = nlohmann::json::array();
    for (const auto& store : stores_) {
      std::vector<std::string> held;
      nlohmann::json saved = store->Save(directory, checksums, true, contents != nullptr ? &held : nullptr);
      std::vector<std::pair<std::string, std::string_view>> files;
      files.reserve(held.size());
      for (size_t i = 0; i < held.size(); ++i) files.emplace_back(saved[i]["file"], held[i]);
      if (contents != nullptr && !files.empty())
        (*contents)[PackName({saved[0]["server"], servers()})] = EncodePack(files);
      for (auto& entry : saved) all.push_back(std::move(entry));
    }
    return all;
  }

  void Restore(const std::vector<std::string>& directories) override {
    CheckOpen();
    ForAll("a restore", false, [&](size_t i) {
      stores_[i]->Restore(directories);
      return true;
    });
  }

  void ApplyIncrement(std::vector<Increment>* increment) override {
    CheckOpen();
    if (increment->size() != stores_.size()) {
      throw SpecError("the increment was read for another number of servers than " +
                      std::to_string(stores_.size()));
    }
    for (size_t i = 0; i < stores_.size(); ++i) stores_[i]->ApplyIncrement(&(*increment)[i]);
  }

  void WaitDurable() override {
    CheckOpen();
    for (const auto& store : stores_) store->WaitDurable();
  }

  void Checkpoint(uint64_t id, bool wait) override {
    CheckOpen();
    for (const auto& store : stores_) store->Checkpoint(id, wait);
  }

  std::vector<uint64_t> Checkpoints() override {
    CheckOpen();
    std::vector<std::vector<uint64_t>> lists;
    lists.reserve(stores_.size());
    for (const auto& store : stores_) lists.push_back(store->Checkpoints());
    return CommonIds(lists);
  }

  void Recover(uint64_t id) override {
    CheckOpen();
    ForAll("a recovery", false, [&](size_t i) {
      stores_[i]->Recover(id);
      return true;
    });
  }

  std::optional<uint64_t> Drop(const std::vector<std::string>& tables, const std::optional<std::string>& job,
                               bool /*force*/) override {
    CheckOpen();
    if (job && !job->empty())
      throw SpecError("tables in one process are of no job; there is no '" + *job + "'");
    uint64_t dropped = 0;
    for (const auto& store : stores_) {
      if (tables.empty()) dropped += store->Drop(std::nullopt);
      for (const std::string& table : tables) dropped += store->Drop(table);
    }
    return dropped;
  }

  uint64_t Evict() override {
    CheckOpen();
    uint64_t evicted = 0;
    for (const auto& store : stores_) evicted += store->Evict();
    return evicted;
  }

  nlohmann::json Stats() override {
    CheckOpen();
    nlohmann::json all = nlohmann::json::array();
    for (const auto& store : stores_) all.push_back(store->Stats());
    return all;
  }

  SharedReply ExchangeShared(const SharedRequest& /*request*/) override {
    throw SpecError("tables in one process have one client: it shares no values with others");
  }

  void Leave() override { CheckOpen(); }
  void Shutdown() override { Close(); }
  void Close() override { stores_.clear(); }

 private:
  // Calls change(store) for each, which says whether it has changed it, or up to the first that fails; the
  // first error is thrown. Where some have changed and others failed, all are torn.
  template <typename Change>
  void ForAll(const std::string& what, bool all, const Change& change) {
    std::exception_ptr error;
    std::string message;
    bool changed = false;
    for (size_t i = 0; i < stores_.size(); ++i) {
      try {
        changed = change(i) || changed;
      } catch (const Error& problem) {
        if (!error) message = problem.what();
        if (!error) error = std::current_exception();
        if (!all) break;
      }
    }
    if (!error) return;
    if (changed) Tear(what + " failed on one server and not on another: " + message);
    std::rethrow_exception(error);
  }

  void CheckOpen() const {
    if (stores_.empty()) throw Error("this client is closed");
  }

  std::vector<std::unique_ptr<Store>> stores_;
};

}  // namespace

std::vector<uint64_t> CommonIds(const std::vector<std::vector<uint64_t>>& lists) {
  std::vector<uint64_t> common = lists.empty() ? std::vector<uint64_t>{} : lists.front();
  for (const std::vector<uint64_t>& list : lists) {
    std::vector<uint64_t> both;
    std::set_intersection(common.begin(), common.end(), list.begin(), list.end(), std::back_inserter(both));
    common = std::move(both);
  }
  return common;
}

std::unique_ptr<Backend> NewLocalBackend(const StorageSpec& storage, uint32_t servers, ThreadPool* pool) {
  return std::make_unique<LocalBackend>(storage, servers, pool);
}

}  // namespace oe
