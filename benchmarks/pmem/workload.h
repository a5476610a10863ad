// Batches of 4096 x 26 ids, of which 85.7 % fall on 0.05 % of the rows and 95.7 % on 1 % (the production
// trace in "OpenEmbedding: A Distributed Parameter Server for Deep Learning Recommendation Models using
// Persistent Memory", ICDE 2023), and how times are told.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>

#include "oe_runtime/core/common/unique.h"
#include "oe_runtime/core/table/table.h"

namespace oe {

constexpr size_t kIds = size_t{4096} * 26;

class Workload {
 public:
  explicit Workload(uint64_t rows) : rows_(rows), hot_(rows / 2000 + 1), warm_(rows / 100 + 1) {}

  std::vector<Key> Next() {
    std::vector<Key> ids(kIds);
    for (Key& id : ids) {
      const uint64_t kind = Random() % 1000;
      const uint64_t from = kind < 857 ? 0 : kind < 957 ? hot_ : warm_;
      const uint64_t to = kind < 857 ? hot_ : kind < 957 ? warm_ : rows_;
      id = Mix64(from + Random() % (to - from));
    }
    return ids;
  }

 private:
  uint64_t Random() { return Mix64(drawn_++); }  // SplitMix64 in other words

  const uint64_t rows_;
  const uint64_t hot_;
  const uint64_t warm_;
  uint64_t drawn_ = uint64_t{7} << 40;
};

using Clock = std::chrono::steady_clock;

template <typename Work>
double Milliseconds(const Work& work) {
  const auto start = Clock::now();
  work();
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

inline double Quantile(std::vector<double> values, double at) {
  std::sort(values.begin(), values.end());
  return values[std::min(values.size() - 1, static_cast<size_t>(at * static_cast<double>(values.size())))];
}

// What a client does around a pull and a push: ids made unique, a row for each id, and the gradients of an
// id's duplicates summed.
class ClientPart {
 public:
  explicit ClientPart(uint32_t dim) : dim_(dim), by_id_(kIds * dim, 0.01F) {}

  const std::vector<Key>& Unique(const std::vector<Key>& ids) {
    unique_ = FindUnique(ids.data(), ids.size());
    rows_.resize(unique_.keys.size() * dim_);
    return unique_.keys;
  }
  float* rows() { return rows_.data(); }
  // Sums what it took for gradients, of the batch of Unique().
  const float* RowsToGradients() {
    for (size_t i = 0; i < kIds; ++i) {
      std::memcpy(&by_id_[i * dim_], &rows_[static_cast<size_t>(unique_.inverse[i]) * dim_],
                  dim_ * sizeof(float));
    }
    sums_.resize(rows_.size());
    seen_.assign(unique_.keys.size(), 0);
    SumByRow(by_id_.data(), unique_.inverse.data(), kIds, dim_, sums_.data(), seen_.data());
    return sums_.data();
  }

 private:
  const size_t dim_;
  UniqueKeys unique_;
  std::vector<float> rows_;
  std::vector<float> by_id_;
  std::vector<float> sums_;
  std::vector<uint8_t> seen_;
};

// Calls push(keys) with all rows' keys.
template <typename Push>
void ForAllRows(uint64_t rows, const Push& push) {
  std::vector<Key> keys;
  for (uint64_t rank = 0; rank < rows;) {
    keys.clear();
    for (; keys.size() < kIds && rank < rows; ++rank) keys.push_back(Mix64(rank));
    push(keys);
  }
}

inline TableSpec AdagradTable(uint32_t dim) {
  TableSpec spec;
  spec.name = "bench";
  spec.dim = dim;
  return spec;
}

}  // namespace oe
