// The pushes of the workers: held, complete, applied.
#include <cstdio>
#include <memory>
#include <set>
#include <utility>

#include "oe_runtime/core/common/params.h"
#include "oe_runtime/core/server/workers.h"
#include "oe_runtime/core/wire/errors.h"

namespace oe {
namespace {

// What all workers but the one that pushed last get to know.
std::exception_ptr FailureOf(const std::exception_ptr& error, const char* advice) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& problem) {
    try {
      ThrowAs(CodeOf(problem),
              std::string("a batch of all workers could not be applied: ") + problem.what() + advice);
    } catch (...) {
      return std::current_exception();
    }
  }
}

}  // namespace

bool Workers::Complete(const Table& table, std::optional<uint32_t> with) const {
  if (table.applying) return false;
  bool any = with.has_value();
  for (uint32_t rank = 0; rank < seats_.size(); ++rank) {
    const bool has = table.held[rank].body != nullptr || with == rank;
    if (!has && seats_[rank].required()) return false;
    any = any || has;
  }
  return any;
}

bool Workers::Push(uint64_t client, uint64_t seen, const std::vector<PushPart>& parts, Buffer* body,
                   Buffer* gradients, Pass* pass, std::function<void()>* rest) {
  bool synchronous = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint32_t rank = RankOf(client);
    if (const std::exception_ptr problem = MayNotPush(rank)) std::rethrow_exception(problem);
    synchronous = spec_.synchronous;
  }
  if (!synchronous) {
    store_->Check(parts);
    if (!fence_->Change(seen, pass) || !store_->LockPush(TablesOf(parts), pass)) return false;
    store_->PushLocked(parts);
    Change([&] {
      batches_ += parts.size();
      // It is applied, also where another connection has taken the place meanwhile.
      for (uint32_t rank = 0; rank < seats_.size(); ++rank) {
        if (seats_[rank].client != client) continue;
        for (const PushPart& part : parts) ++TableOf(part.table)->pushes[rank];
        pushed_ = true;
      }
    });
    return true;
  }
  store_->Check(parts);
  Batch complete;
  Change([&] {
    Hold(RankOf(client), parts, body, gradients);
    complete = TakeComplete();
  });
  Pass impatient = Pass::Impatient();
  if (Apply(complete, &impatient)) return true;
  impatient.Release();
  *rest = [this, batch = std::make_shared<const Batch>(std::move(complete))] {
    Pass patient;
    (void)Apply(*batch, &patient);
  };
  return true;
}

void Workers::Hold(uint32_t rank, const std::vector<PushPart>& parts, Buffer* body, Buffer* gradients) {
  if (const std::exception_ptr problem = MayNotPush(rank)) std::rethrow_exception(problem);
  std::set<uint32_t> seen;
  bool completes = true;
  for (const PushPart& part : parts) {
    const Table& table = *TableOf(part.table);
    if (!seen.insert(part.table).second || table.held[rank].body != nullptr) {
      throw ProtocolError("table " + std::to_string(part.table) + " is pushed twice in a batch");
    }
    for (uint32_t other = 0; other < seats_.size(); ++other) {
      const Held& held = table.held[other];
      if (held.body == nullptr || held.part.learning_rate == part.learning_rate) continue;
      throw SpecError(Names({rank}) + " pushes with learning rate " + NumberText(part.learning_rate) +
                      ", but worker " + std::to_string(other) + " has pushed the same batch with " +
                      NumberText(held.part.learning_rate));
    }
    completes = completes && Complete(table, rank);
  }
  const auto held = std::make_shared<Body>();
  // Without content it may still have the memory of an earlier reply, which stays the connection's.
  const bool widened = gradients->size() > 0;
  if (!completes) {
    auto share = held_->Try(body->capacity() + (widened ? gradients->capacity() : 0));
    if (!share) {
      throw Error(Names({rank}) +
                  ": the server has no memory to hold this push until the others' are there; " +
                  "start it with more --max-request-bytes, or use smaller batches");
    }
    held->share = std::move(*share);
  }
  held->bytes = std::move(*body);
  if (widened) held->gradients = std::move(*gradients);
  for (const PushPart& part : parts) tables_[part.table].held[rank] = {held, part};
  pushed_ = true;
}

Workers::Batch Workers::TakeComplete() {
  Batch batch;
  batch.life = life_;
  batch.seen = fence_->seen();
  if (Failure() != nullptr) return batch;
  for (auto& [id, table] : tables_) {
    if (!Complete(table)) continue;
    batch.tables[id] = table.held;
    table.applying = true;
  }
  return batch;
}

bool Workers::Apply(const Batch& batch, Pass* pass) {
  if (batch.tables.empty()) return true;
  std::exception_ptr failure;
  try {
    std::vector<std::vector<PushPart>> tables;
    for (const auto& [id, all] : batch.tables) {
      tables.emplace_back().reserve(all.size());
      for (const Held& held : all) {
        if (held.body != nullptr) tables.back().push_back(held.part);
      }
    }
    std::vector<uint32_t> ids;
    ids.reserve(batch.tables.size());
    for (const auto& [id, all] : batch.tables) ids.push_back(id);
    if (!fence_->Change(batch.seen, pass) || !store_->LockPush(ids, pass)) return false;
    try {
      store_->PushSums(tables);
    } catch (const std::exception& problem) {
      store_->Tear(problem.what());  // other servers may have applied it, and its pushes were answered
      throw;
    }
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  Change([&] {
    if (life_ != batch.life) return;
    for (const auto& [id, all] : batch.tables) {
      Table& table = tables_[id];
      for (Held& held : table.held) held = {};
      table.applying = false;
    }
    batches_ += failure == nullptr ? batch.tables.size() : 0;
    if (failure != nullptr) failure_ = FailureOf(failure, kGoBackTogether);
  });
  if (failure != nullptr) std::rethrow_exception(failure);
  return true;
}

void Workers::ApplyLater(Batch batch) {
  if (batch.tables.empty()) return;
  (*post_)([this, batch = std::move(batch)] {
    try {
      Pass pass;
      (void)Apply(batch, &pass);
    } catch (const std::exception& problem) {  // all workers are told
      std::fprintf(stderr, "server: %s\n", problem.what());
    }
  });
}

}  // namespace oe
