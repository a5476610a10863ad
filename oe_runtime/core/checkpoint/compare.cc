#include "oe_runtime/core/checkpoint/compare.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>

#include "oe_runtime/core/checkpoint/convert_rows.h"
#include "oe_runtime/core/checkpoint/filter_file.h"
#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/shard.h"
#include "oe_runtime/core/spec/row_format.h"

namespace oe {
namespace {

constexpr size_t kRowOverhead = 40;  // of the index, at its emptiest, and a mark

double WeightOf(const std::byte* row, const RowFormat& format, size_t d) {
  return NumberAt(row + d * WeightBytes(format.dtype), format.dtype);
}

double StateOf(const std::byte* row, const RowFormat& format, size_t i) {
  return NumberAt(row + format.state_at + i * WeightBytes(format.state_dtype), format.state_dtype);
}

double Distance(double left, double right) {
  if (left == right || (std::isnan(left) && std::isnan(right))) return 0;
  const double distance = std::fabs(left - right);
  return std::isnan(distance) ? std::numeric_limits<double>::infinity() : distance;
}

// The rows of the keys that fall into one of `parts`.
struct KeyPart {
  uint64_t number = 0;
  uint64_t parts = 1;

  bool Has(Key key) const { return parts == 1 || Mix64(~key) % parts == number; }
};

class Rows {
 public:
  Rows(const std::vector<const TableChain*>& chains, const KeyPart& part, uint64_t expected, size_t bytes)
      : index_(NewHashIndex()), bytes_(bytes) {
    rows_.reserve(expected * bytes);
    for (const TableChain* chain : chains) {
      TableChainReader reader(*chain);
      while (const size_t n = reader.NextBlock()) {
        for (size_t i = 0; i < n; ++i) {
          if (part.Has(reader.keys()[i])) Add(reader.keys()[i], reader.rows() + i * bytes);
        }
      }
    }
  }

  uint64_t size() const { return rows_.size() / bytes_; }
  const std::byte* Find(Key key) const {
    uint32_t number = kNoRow;
    index_->Find(&key, 1, &number);
    return number == kNoRow ? nullptr : &rows_[number * bytes_];
  }

 private:
  void Add(Key key, const std::byte* row) {
    index_->Reserve(key);
    index_->Add(key, static_cast<uint32_t>(size()));
    rows_.insert(rows_.end(), row, row + bytes_);
  }

  const std::unique_ptr<Index> index_;
  const size_t bytes_;
  std::vector<std::byte> rows_;
};

class Comparison {
 public:
  Comparison(const TableFileInfo& before, const TableFileInfo& after, size_t memory)
      : before_(before),
        after_(after),
        before_format_(FormatOf(before.spec)),
        after_format_(FormatOf(after.spec)),
        same_dtypes_(before_format_.dtype == after_format_.dtype &&
                     before_format_.state_dtype == after_format_.state_dtype),
        memory_(std::max<size_t>(memory, 1)) {
    if (before.spec.dim != after.spec.dim) return;
    weights_ = before.spec.dim;
    // Behind the optimizer's state lies what policies know of the row, which is not compared.
    if (before.spec.optimizer.name == after.spec.optimizer.name &&
        before_format_.state_values == after_format_.state_values) {
      state_ = before_format_.state_values;
    }
  }

  void Compare(const std::vector<const TableChain*>& before, const std::vector<const TableChain*>& after) {
    uint64_t rows = 0;
    for (const TableChain* chain : before) {
      for (const std::string& file : *chain) rows += ReadTableFileInfo(file).rows;
    }
    const uint64_t row_bytes = before_.row_bytes + kRowOverhead;
    KeyPart part;
    // A row's number has 32 bits, and one of them says that there is none.
    part.parts = 1 + std::max(rows * row_bytes / memory_, rows >> 31);
    for (part.number = 0; part.number < part.parts; ++part.number) {
      ComparePart(Rows(before, part, rows / part.parts, before_.row_bytes), after, part);
    }
  }

  const TableDifference& result() const { return result_; }

 private:
  void ComparePart(const Rows& before, const std::vector<const TableChain*>& after, const KeyPart& part) {
    uint64_t common = 0;
    for (const TableChain* chain : after) {
      TableChainReader reader(*chain);
      while (const size_t n = reader.NextBlock()) {
        for (size_t i = 0; i < n; ++i) {
          const Key key = reader.keys()[i];
          if (!part.Has(key)) continue;
          ++result_.after;
          const std::byte* row = before.Find(key);
          if (row == nullptr) {
            ++result_.only_after;
            continue;
          }
          ++common;
          CompareRow(row, reader.rows() + i * after_.row_bytes);
        }
      }
    }
    result_.before += before.size();
    result_.only_before += before.size() - common;
  }

  void CompareRow(const std::byte* before, const std::byte* after) {
    if (weights_ == 0) return;
    if (same_dtypes_) {
      const size_t bytes =
          state_ > 0 ? before_format_.facts_at : weights_ * WeightBytes(before_format_.dtype);
      if (std::memcmp(before, after, bytes) == 0) return;
      ++result_.changed;
    }
    double of_weights = 0;
    double of_state = 0;
    for (size_t d = 0; d < weights_; ++d) {
      of_weights = std::max(of_weights,
                            Distance(WeightOf(before, before_format_, d), WeightOf(after, after_format_, d)));
    }
    for (size_t i = 0; i < state_; ++i) {
      of_state =
          std::max(of_state, Distance(StateOf(before, before_format_, i), StateOf(after, after_format_, i)));
    }
    if (!same_dtypes_ && std::max(of_weights, of_state) > 0) ++result_.changed;
    result_.weights = std::max(result_.weights, of_weights);
    result_.state = std::max(result_.state, of_state);
  }

  const TableFileInfo before_;
  const TableFileInfo after_;
  const RowFormat before_format_;
  const RowFormat after_format_;
  const bool same_dtypes_;
  const size_t memory_;
  size_t weights_ = 0;  // numbers of a row that are compared; 0 for those of other meaning
  size_t state_ = 0;
  TableDifference result_;
};

TableFileInfo Check(const std::vector<TableChain>& chains) {
  if (chains.empty()) throw CheckpointError("there is no file of a table");
  const TableFileInfo info = ReadTableFileInfo(chains.front().back());
  return CheckChains(info.spec, info.row_bytes, chains).front();
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
  Output(const TableFileInfo& info, PendingFiles* files) : bytes_(info.row_bytes), writer_(info, files) {
    keys_.reserve(writer_.block_rows());
    rows_.reserve(writer_.block_rows() * bytes_);
  }

  void Add(Key key, const std::byte* row) {
    keys_.push_back(key);
    rows_.insert(rows_.end(), row, row + bytes_);
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

  const size_t bytes_;
  TableFileWriter writer_;
  std::vector<Key> keys_;
  std::vector<std::byte> rows_;
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
                                        const std::vector<std::string>& files, const RowDtypes& dtypes) {
  TableFileInfo info = Check(chains);
  const size_t row_bytes = info.row_bytes;
  std::optional<RowConverter> converter;
  if (!dtypes.weights.empty() || !dtypes.state.empty()) {
    TableSpec spec = info.spec;
    if (!dtypes.weights.empty()) spec.dtype = dtypes.weights;
    // That of float64 tables goes with them.
    if (!dtypes.state.empty() || spec.dtype == "float64" || info.spec.dtype == "float64") {
      spec.state_dtype = dtypes.state;
    }
    spec = Complete(spec);
    converter.emplace(info.spec, spec);
    info.spec = spec;
    info.row_bytes = converter->row_bytes();
  }
  const auto servers = static_cast<uint32_t>(files.size());
  const bool array = info.spec.index == "array";
  std::vector<uint64_t> rows(servers);
  for (const TableChain& chain : chains) AddRowsByServer(chain, &rows);
  info.base = std::nullopt;
  info.tombstones = 0;
  PendingFiles pending;
  std::vector<std::unique_ptr<Output>> outputs;
  for (uint32_t server = 0; server < servers; ++server) {
    info.file = files[server];
    info.shard = {server, servers};
    info.rows = rows[server];
    outputs.push_back(std::make_unique<Output>(info, &pending));
  }
  std::vector<std::byte> converted(info.row_bytes);
  for (const TableChain& chain : chains) {
    TableChainReader reader(chain);
    while (const size_t n = reader.NextBlock()) {
      for (size_t i = 0; i < n; ++i) {
        const Key key = reader.keys()[i];
        const std::byte* row = reader.rows() + i * row_bytes;
        if (converter) {
          converter->Convert(key, row, converted.data());
          row = converted.data();
        }
        outputs[server_of(key, servers, array)]->Add(key, row);
      }
    }
  }
  std::vector<TableFileInfo> written;
  written.reserve(outputs.size());
  for (const auto& output : outputs) written.push_back(output->Finish());
  const uint32_t filters = info.spec.admission.name.empty() ? 0 : servers;
  for (uint32_t server = 0; server < filters; ++server) {
    const auto filter = FilterOf(Newest(chains), info.spec, info.version, {server, servers});
    if (filter == nullptr) break;
    SaveFilter(*filter, info.spec, {server, servers}, info.version, FilterFileName(files[server]), &pending);
  }
  pending.Publish();
  return written;
}

}  // namespace oe
