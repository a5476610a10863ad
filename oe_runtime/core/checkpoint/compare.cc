#include "oe_runtime/core/checkpoint/compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "oe_runtime/core/checkpoint/filter_file.h"
#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/optimizer/optimizer.h"

namespace oe {
namespace {

constexpr size_t kRowOverhead = 40;  // of the index, at its emptiest, and a mark

float Distance(const float* left, const float* right, size_t n) {
  float largest = 0;
  for (size_t i = 0; i < n; ++i) {
    if (left[i] == right[i] || (std::isnan(left[i]) && std::isnan(right[i]))) continue;
    const float distance = std::fabs(left[i] - right[i]);
    largest = std::isnan(distance) ? std::numeric_limits<float>::infinity() : std::max(largest, distance);
  }
  return largest;
}

// The rows of the keys that fall into one of `parts`.
struct Part {
  uint64_t number = 0;
  uint64_t parts = 1;

  bool Has(Key key) const { return parts == 1 || XXH3_64bits(&key, sizeof(key)) % parts == number; }
};

class Rows {
 public:
  Rows(const std::vector<const TableChain*>& chains, const Part& part, uint64_t expected, size_t floats)
      : index_(NewHashIndex()), floats_(floats) {
    rows_.reserve(expected * floats);
    for (const TableChain* chain : chains) {
      TableChainReader reader(*chain);
      while (const size_t n = reader.NextBlock()) {
        for (size_t i = 0; i < n; ++i) {
          if (part.Has(reader.keys()[i])) Add(reader.keys()[i], reader.rows() + i * floats);
        }
      }
    }
  }

  uint64_t size() const { return rows_.size() / floats_; }
  const float* Find(Key key) const {
    uint32_t number = kNoRow;
    index_->Find(&key, 1, &number);
    return number == kNoRow ? nullptr : &rows_[number * floats_];
  }

 private:
  void Add(Key key, const float* row) {
    index_->Reserve(key);
    index_->Add(key, static_cast<uint32_t>(size()));
    rows_.insert(rows_.end(), row, row + floats_);
  }

  const std::unique_ptr<Index> index_;
  const size_t floats_;
  std::vector<float> rows_;
};

class Comparison {
 public:
  Comparison(const TableFileInfo& before, const TableFileInfo& after, size_t memory)
      : before_(before), after_(after), memory_(std::max<size_t>(memory, 1)) {
    if (before.spec.dim == after.spec.dim) weights_ = before.spec.dim;
    // Behind the optimizer's state lies what policies know of the row, which is not floats.
    const size_t floats = Optimizer::Create(before.spec.optimizer, before.spec.dim)->row_floats();
    if (weights_ > 0 && before.spec.optimizer.name == after.spec.optimizer.name &&
        Optimizer::Create(after.spec.optimizer, after.spec.dim)->row_floats() == floats) {
      all_ = floats;
    }
  }

  void Compare(const std::vector<const TableChain*>& before, const std::vector<const TableChain*>& after) {
    uint64_t rows = 0;
    for (const TableChain* chain : before) {
      for (const std::string& file : *chain) rows += ReadTableFileInfo(file).rows;
    }
    const uint64_t row_bytes = before_.row_floats * sizeof(float) + kRowOverhead;
    Part part;
    // A row's number has 32 bits, and one of them says that there is none.
    part.parts = 1 + std::max(rows * row_bytes / memory_, rows >> 31);
    for (part.number = 0; part.number < part.parts; ++part.number) {
      ComparePart(Rows(before, part, rows / part.parts, before_.row_floats), after, part);
    }
  }

  const TableDifference& result() const { return result_; }

 private:
  void ComparePart(const Rows& before, const std::vector<const TableChain*>& after, const Part& part) {
    uint64_t common = 0;
    for (const TableChain* chain : after) {
      TableChainReader reader(*chain);
      while (const size_t n = reader.NextBlock()) {
        for (size_t i = 0; i < n; ++i) {
          const Key key = reader.keys()[i];
          if (!part.Has(key)) continue;
          ++result_.after;
          const float* row = before.Find(key);
          if (row == nullptr) {
            ++result_.only_after;
            continue;
          }
          ++common;
          CompareRow(row, reader.rows() + i * after_.row_floats);
        }
      }
    }
    result_.before += before.size();
    result_.only_before += before.size() - common;
  }

  void CompareRow(const float* before, const float* after) {
    const size_t floats = std::max(weights_, all_);
    if (floats == 0 || std::memcmp(before, after, floats * sizeof(float)) == 0) return;
    ++result_.changed;
    result_.weights = std::max(result_.weights, Distance(before, after, weights_));
    if (all_ == 0) return;
    result_.state = std::max(result_.state, Distance(before + weights_, after + weights_, all_ - weights_));
  }

  const TableFileInfo before_;
  const TableFileInfo after_;
  const size_t memory_;
  size_t weights_ = 0;  // floats that are compared; 0 for those of other meaning
  size_t all_ = 0;
  TableDifference result_;
};

TableFileInfo Check(const std::vector<TableChain>& chains) {
  if (chains.empty()) throw CheckpointError("there is no file of a table");
  const TableFileInfo info = ReadTableFileInfo(chains.front().back());
  return CheckChains(info.spec, info.row_floats, chains).front();
}

std::vector<const TableChain*> Pointers(const std::vector<TableChain>& chains) {
  std::vector<const TableChain*> pointers;
  pointers.reserve(chains.size());
  for (const TableChain& chain : chains) pointers.push_back(&chain);
  return pointers;
}

// A file that is written in whole blocks.
class Output {
 public:
  explicit Output(const TableFileInfo& info) : floats_(info.row_floats), writer_(info) {
    keys_.reserve(writer_.block_rows());
    rows_.reserve(writer_.block_rows() * floats_);
  }

  void Add(Key key, const float* row) {
    keys_.push_back(key);
    rows_.insert(rows_.end(), row, row + floats_);
    if (keys_.size() == writer_.block_rows()) Write();
  }
  TableFileInfo Finish() {
    if (!keys_.empty()) Write();
    return writer_.Finish();
  }

 private:
  void Write() {
    writer_.WriteBlock(keys_.data(), rows_.data(), keys_.size());
    keys_.clear();
    rows_.clear();
  }

  const size_t floats_;
  TableFileWriter writer_;
  std::vector<Key> keys_;
  std::vector<float> rows_;
};

}  // namespace

TableDifference CompareTables(const std::vector<TableChain>& before, const std::vector<TableChain>& after,
                              size_t memory) {
  const TableFileInfo old = Check(before);
  const TableFileInfo now = Check(after);
  Comparison comparison(old, now, memory);
  // With the same servers, a key is in the file of the same one.
  if (old.shard.servers == now.shard.servers && old.spec.index == now.spec.index) {
    for (const TableChain& left : before) {
      const uint32_t server = ReadTableFileInfo(left.back()).shard.server;
      for (const TableChain& right : after) {
        if (ReadTableFileInfo(right.back()).shard.server == server) comparison.Compare({&left}, {&right});
      }
    }
  } else {
    comparison.Compare(Pointers(before), Pointers(after));
  }
  return comparison.result();
}

std::vector<TableFileInfo> ReshardTable(const std::vector<TableChain>& chains,
                                        const std::vector<std::string>& files) {
  TableFileInfo info = Check(chains);
  const auto servers = static_cast<uint32_t>(files.size());
  const bool array = info.spec.index == "array";
  std::vector<uint64_t> rows(servers);
  for (const TableChain& chain : chains) AddRowsByServer(chain, &rows);
  info.base = std::nullopt;
  info.tombstones = 0;
  std::vector<std::unique_ptr<Output>> outputs;
  for (uint32_t server = 0; server < servers; ++server) {
    info.file = files[server];
    info.shard = {server, servers};
    info.rows = rows[server];
    outputs.push_back(std::make_unique<Output>(info));
  }
  for (const TableChain& chain : chains) {
    TableChainReader reader(chain);
    while (const size_t n = reader.NextBlock()) {
      for (size_t i = 0; i < n; ++i) {
        const Key key = reader.keys()[i];
        outputs[server_of(key, servers, array)]->Add(key, reader.rows() + i * info.row_floats);
      }
    }
  }
  std::vector<TableFileInfo> written;
  written.reserve(outputs.size());
  for (const auto& output : outputs) written.push_back(output->Finish());
  if (info.spec.admission.name.empty()) return written;
  for (uint32_t server = 0; server < servers; ++server) {
    const auto filter = FilterOf(Newest(chains), info.spec, info.version, {server, servers});
    if (filter == nullptr) break;
    SaveFilter(*filter, info.spec, {server, servers}, info.version, FilterFileName(files[server]));
  }
  return written;
}

}  // namespace oe
