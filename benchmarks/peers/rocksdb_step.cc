// Steps of a table whose rows are in RocksDB, for benchmarks/ssd/step.py.
//   rocksdb_step DIRECTORY BLOCK_CACHE_BYTES FRAME_BYTES ROWS DIM THREADS
// Reads by MultiGet, which THREADS threads share. With FRAME_BYTES, rows that are used are in a cache of rows
// (CLOCK) in front of RocksDB, and only misses are read from it and only evicted rows written to it.
// Rows are weights and Adagrad's state. Nothing is logged: a crash would lose what is in memory.

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/options.h>
#include <rocksdb/statistics.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "benchmarks/ssd/steps.h"

namespace {

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
constexpr size_t kWriteBuffer = size_t{32} << 20;

void Require(const rocksdb::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "rocksdb_step: %s\n", status.ToString().c_str());
  std::_Exit(1);
}

// Keys in the order of numbers.
using KeyBytes = std::array<char, sizeof(uint64_t)>;
KeyBytes Encode(uint64_t key) {
  const uint64_t swapped = __builtin_bswap64(key);
  KeyBytes bytes;
  std::memcpy(bytes.data(), &swapped, sizeof swapped);
  return bytes;
}
rocksdb::Slice SliceOf(const KeyBytes& bytes) { return {bytes.data(), bytes.size()}; }

class Rows {
 public:
  Rows(const std::string& directory, size_t block_cache, size_t dim, size_t threads)
      : width_(2 * dim), threads_(threads), statistics_(rocksdb::CreateDBStatistics()) {
    statistics_->set_stats_level(rocksdb::StatsLevel::kExceptHistogramOrTimers);
    rocksdb::BlockBasedTableOptions table;
    table.block_cache = rocksdb::NewLRUCache(block_cache);
    table.cache_index_and_filter_blocks = true;
    table.cache_index_and_filter_blocks_with_high_priority = true;
    table.pin_top_level_index_and_filter = true;
    table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
    rocksdb::Options options;
    options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
    options.create_if_missing = true;
    options.compression = rocksdb::kNoCompression;  // numbers of embeddings hardly compress
    options.use_direct_reads = true;
    options.use_direct_io_for_flush_and_compaction = true;
    options.write_buffer_size = kWriteBuffer;
    options.max_background_jobs = 2;
    options.level_compaction_dynamic_level_bytes = true;
    options.max_open_files = -1;
    options.statistics = statistics_;
    Require(rocksdb::DestroyDB(directory, options));
    rocksdb::DB* opened = nullptr;
    Require(rocksdb::DB::Open(options, directory, &opened));
    db_.reset(opened);
  }

  void Compact() { Require(db_->CompactRange({}, nullptr, nullptr)); }

  // Reads the rows of keys to where `to(i)` says.
  template <typename To>
  void Read(const std::vector<uint64_t>& keys, To to) {
    std::vector<size_t> order(keys.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return keys[a] < keys[b]; });
    const size_t pieces = std::min(threads_, std::max<size_t>(1, keys.size() / 64));
    std::vector<std::thread> threads;
    for (size_t piece = 0; piece < pieces; ++piece) {
      const auto read = [&, first = keys.size() * piece / pieces, last = keys.size() * (piece + 1) / pieces] {
        std::vector<KeyBytes> bytes;
        std::vector<rocksdb::Slice> slices;
        for (size_t i = first; i < last; ++i) bytes.push_back(Encode(keys[order[i]]));
        for (const KeyBytes& key : bytes) slices.push_back(SliceOf(key));
        std::vector<rocksdb::PinnableSlice> values(slices.size());
        std::vector<rocksdb::Status> statuses(slices.size());
        db_->MultiGet({}, db_->DefaultColumnFamily(), slices.size(), slices.data(), values.data(),
                      statuses.data(), /*sorted_input=*/true);
        for (size_t i = first; i < last; ++i) {
          Require(statuses[i - first]);
          std::memcpy(to(order[i]), values[i - first].data(), width_ * sizeof(float));
        }
      };
      if (piece + 1 < pieces) {
        threads.emplace_back(read);
      } else {
        read();
      }
    }
    for (std::thread& thread : threads) thread.join();
  }

  void Put(rocksdb::WriteBatch* batch, uint64_t key, const float* row) const {
    const KeyBytes bytes = Encode(key);
    Require(batch->Put(SliceOf(bytes), {reinterpret_cast<const char*>(row), width_ * sizeof(float)}));
  }

  void Write(rocksdb::WriteBatch* batch) {
    rocksdb::WriteOptions options;
    options.disableWAL = true;
    Require(db_->Write(options, batch));
    batch->Clear();
  }

  uint64_t missed_blocks() const { return statistics_->getTickerCount(rocksdb::BLOCK_CACHE_DATA_MISS); }

 private:
  const size_t width_;
  const size_t threads_;
  std::shared_ptr<rocksdb::Statistics> statistics_;
  std::unique_ptr<rocksdb::DB> db_;
};

// A cache of rows in front; the rows of a batch must fit into it.
class Frames {
 public:
  Frames(size_t bytes, uint64_t rows, size_t width)
      : width_(width),
        frame_of_(rows, kNone),
        frames_(bytes / (width * sizeof(float))),
        data_(frames_.size() * width) {}

  // Brings the rows of keys in, and writes changed rows that make room.
  void Fetch(const std::vector<uint64_t>& keys, Rows* rows) {
    ++batch_;
    std::vector<uint64_t> missed;
    for (const uint64_t key : keys) {
      if (frame_of_[key] == kNone) {
        missed.push_back(key);
      } else {
        frames_[frame_of_[key]].batch = batch_;
      }
    }
    misses_ += missed.size();
    rocksdb::WriteBatch evicted;
    for (const uint64_t key : missed) {
      const uint32_t frame = Victim();
      if (frames_[frame].key != kNoKey) {
        frame_of_[frames_[frame].key] = kNone;
        if (frames_[frame].is_dirty) rows->Put(&evicted, frames_[frame].key, row(frame));
      }
      frames_[frame] = {key, batch_, true, false};
      frame_of_[key] = frame;
    }
    if (evicted.Count() > 0) rows->Write(&evicted);
    rows->Read(missed, [&](size_t i) { return row(frame_of_[missed[i]]); });
  }

  float* Find(uint64_t key, bool changes) {
    Frame& frame = frames_[frame_of_[key]];
    frame.is_used = true;
    frame.is_dirty |= changes;
    return row(frame_of_[key]);
  }

  uint64_t misses() const { return misses_; }

 private:
  static constexpr uint64_t kNoKey = std::numeric_limits<uint64_t>::max();
  struct Frame {
    uint64_t key = kNoKey;
    uint64_t batch = 0;  // which needs it
    bool is_used = false;
    bool is_dirty = false;
  };

  float* row(uint32_t frame) { return data_.data() + frame * width_; }

  uint32_t Victim() {
    for (;; hand_ = (hand_ + 1) % static_cast<uint32_t>(frames_.size())) {
      Frame& frame = frames_[hand_];
      if (frame.key == kNoKey || (frame.batch != batch_ && !frame.is_used)) return hand_;
      if (frame.batch != batch_) frame.is_used = false;
    }
  }

  const size_t width_;
  std::vector<uint32_t> frame_of_;
  std::vector<Frame> frames_;
  std::vector<float> data_;
  uint64_t batch_ = 0;
  uint64_t misses_ = 0;
  uint32_t hand_ = 0;
};

// A step of Adagrad with gradients of 0.01.
void Update(float* row, size_t dim) {
  constexpr float kRate = 0.01F;
  constexpr float kGradient = 0.01F;
  for (size_t i = 0; i < dim; ++i) {
    row[dim + i] += kGradient * kGradient;
    row[i] -= kRate * kGradient / (std::sqrt(row[dim + i]) + 1e-7F);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) return 2;
  const size_t frame_bytes = std::strtoull(argv[3], nullptr, 10);
  const uint64_t rows = std::strtoull(argv[4], nullptr, 10);
  const size_t dim = std::strtoull(argv[5], nullptr, 10);
  const size_t width = 2 * dim;
  Rows store(argv[1], std::strtoull(argv[2], nullptr, 10), dim, std::strtoull(argv[6], nullptr, 10));
  rocksdb::WriteBatch batch;
  const std::vector<float> fresh(width, 0.1F);
  for (uint64_t key = 0; key < rows; ++key) {
    store.Put(&batch, key, fresh.data());
    if (batch.Count() == 65536 || key + 1 == rows) store.Write(&batch);
  }
  store.Compact();
  Frames frames(frame_bytes, frame_bytes > 0 ? rows : 0, width);
  std::vector<float> weights(steps::kIdsPerBatch * dim);
  std::vector<float> read(frame_bytes > 0 ? 0 : steps::kIdsPerBatch * width);
  const auto step = [&](const std::vector<uint64_t>& keys) {
    if (frame_bytes > 0) {
      frames.Fetch(keys, &store);
    } else {
      store.Read(keys, [&](size_t i) { return read.data() + i * width; });
    }
    const auto row = [&](size_t i, bool changes) {
      return frame_bytes > 0 ? frames.Find(keys[i], changes) : read.data() + i * width;
    };
    for (size_t i = 0; i < keys.size(); ++i) {
      std::memcpy(weights.data() + i * dim, row(i, false), dim * sizeof(float));
    }
    for (size_t i = 0; i < keys.size(); ++i) {
      Update(row(i, true), dim);
      if (frame_bytes == 0) store.Put(&batch, keys[i], row(i, false));
    }
    if (frame_bytes == 0) store.Write(&batch);
  };
  const auto counts = [&] {
    steps::Counts now = steps::DriveBytes();
    now.misses = frame_bytes > 0 ? frames.misses() : store.missed_blocks();
    return now;
  };
  steps::Serve(rows, step, [] {}, counts);
  std::_Exit(0);
}
