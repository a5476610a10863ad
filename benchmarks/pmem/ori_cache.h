// What "OpenEmbedding" (ICDE 2023) compares itself with as Ori-Cache: a concurrent hash map of rows on
// persistent memory behind an ordinary cache, with a list in LRU order under locks, where all upkeep is done
// while the request waits: a miss writes the oldest row back, flushed and fenced, and reads its own; every
// hit moves a row to the front. A checkpoint writes the rows that changed since the last one while everything
// waits. The map is the runtime's index (plain maps are slower), in 16 parts with a lock each.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "benchmarks/pmem/model.h"
#include "oe_runtime/core/common/executor.h"
#include "oe_runtime/core/index/index.h"
#include "oe_runtime/core/optimizer/optimizer.h"
#include "oe_runtime/core/storage/storage.h"

namespace oe {

class OriCache {
 public:
  OriCache(PmemModel* model, const OptimizerSpec& optimizer, uint32_t dim, uint64_t cache_bytes)
      : model_(model), optimizer_(Optimizer<float>::Create(optimizer, dim)), dim_(dim) {
    const size_t frames = cache_bytes / (row_bytes() + sizeof(Frame)) / kParts;
    memory_ = Storage::Open({"dram", ""});
    arena_ = memory_->NewArena("Ori-Cache");
    for (Part& part : parts_) {
      part.index = NewHashIndex();
      part.frames.resize(frames);
      part.copies.resize(frames * floats());
      for (uint32_t i = 0; i < frames; ++i) part.free.push_back(i);
    }
  }

  // Adds a row of zeros.
  void Add(Key key) {
    Part& part = PartOf(key);
    part.index->Reserve(key);
    auto* row = reinterpret_cast<float*>(arena_->Allocate(row_bytes()));
    std::fill(row, row + dim_, 0.0F);
    optimizer_->InitState(row + dim_);
    part.index->Add(key, static_cast<uint32_t>(part.rows.size()));
    part.rows.push_back({row, kNone, false});
  }

  void Pull(const Key* keys, size_t n, float* out, Executor* executor) {
    InPieces(n, executor, [&](size_t i) {
      Part& part = PartOf(keys[i]);
      const std::lock_guard<std::mutex> lock(part.mutex);
      std::memcpy(out + i * dim_, Use(&part, keys[i]), dim_ * sizeof(float));
    });
  }

  void Push(const Key* keys, size_t n, const float* grads, float rate, Executor* executor) {
    ++step_;
    InPieces(n, executor, [&](size_t i) {
      Part& part = PartOf(keys[i]);
      const std::lock_guard<std::mutex> lock(part.mutex);
      float* row = Use(&part, keys[i]);
      part.frames[part.newest].dirty = true;
      part.rows[part.frames[part.newest].row].changed = true;
      const float* gradient = grads + i * dim_;
      float* state = row + dim_;
      optimizer_->Apply({&row, &state, &gradient, 1}, rate, step_);
    });
  }

  void Checkpoint() {
    for (Part& part : parts_) {
      for (Row& row : part.rows) {
        if (!row.changed) continue;
        row.changed = false;
        const bool cached = row.frame != kNone;
        if (!cached) model_->Read(lines());
        const float* from = cached ? &part.copies[row.frame * floats()] : row.data;
        saved_.insert(saved_.end(), from, from + floats());
        model_->Write(lines());
      }
    }
    model_->Fence();
    saved_.clear();
  }

 private:
  static constexpr size_t kParts = 16;
  static constexpr uint32_t kNone = kNoRow;

  struct Row {
    float* data = nullptr;  // on persistent memory
    uint32_t frame = kNone;
    bool changed = false;  // since the last checkpoint
  };
  struct Frame {
    uint32_t row = kNone;
    uint32_t newer = kNone;
    uint32_t older = kNone;
    bool dirty = false;
  };
  struct Part {
    std::mutex mutex;
    std::unique_ptr<Index> index;
    std::vector<Row> rows;
    std::vector<Frame> frames;
    std::vector<float> copies;
    std::vector<uint32_t> free;
    uint32_t newest = kNone;
    uint32_t oldest = kNone;
  };

  size_t floats() const { return dim_ + optimizer_->state_values(); }
  size_t row_bytes() const { return floats() * sizeof(float); }
  size_t lines() const { return PmemModel::Lines(row_bytes()); }
  Part& PartOf(Key key) { return parts_[Mix64(key) >> 60]; }

  template <typename Work>
  static void InPieces(size_t n, Executor* executor, const Work& work) {
    constexpr size_t kPiece = 256;
    executor->ParallelFor((n + kPiece - 1) / kPiece, [&](size_t piece) {
      for (size_t i = piece * kPiece; i < std::min(n, (piece + 1) * kPiece); ++i) work(i);
    });
  }

  void Unlink(Part* part, uint32_t at) {
    const Frame& frame = part->frames[at];
    (frame.newer == kNone ? part->newest : part->frames[frame.newer].older) = frame.older;
    (frame.older == kNone ? part->oldest : part->frames[frame.older].newer) = frame.newer;
  }

  // The copy of the row of `key`, which becomes the newest.
  float* Use(Part* part, Key key) {
    uint32_t number = 0;
    part->index->Find(&key, 1, &number);
    Row& row = part->rows[number];
    if (row.frame != kNone) {
      Unlink(part, row.frame);
    } else {
      if (part->free.empty()) Evict(part);
      row.frame = part->free.back();
      part->free.pop_back();
      model_->Read(lines());
      std::memcpy(&part->copies[row.frame * floats()], row.data, row_bytes());
    }
    Frame& frame = part->frames[row.frame];
    frame.row = number;
    frame.newer = kNone;
    frame.older = part->newest;
    if (part->newest != kNone) part->frames[part->newest].newer = row.frame;
    part->newest = row.frame;
    if (part->oldest == kNone) part->oldest = row.frame;
    return &part->copies[row.frame * floats()];
  }

  void Evict(Part* part) {
    const uint32_t at = part->oldest;
    Unlink(part, at);
    Frame& frame = part->frames[at];
    Row& row = part->rows[frame.row];
    if (frame.dirty) {
      std::memcpy(row.data, &part->copies[at * floats()], row_bytes());
      model_->Write(lines());
      model_->Fence();
    }
    row.frame = kNone;
    frame = {};
    part->free.push_back(at);
  }

  PmemModel* const model_;
  const std::unique_ptr<const Optimizer<float>> optimizer_;
  const uint32_t dim_;
  std::shared_ptr<Storage> memory_;
  std::unique_ptr<Arena> arena_;
  std::array<Part, kParts> parts_;
  std::vector<float> saved_;
  uint64_t step_ = 0;
};

}  // namespace oe
