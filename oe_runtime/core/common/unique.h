// Duplicates out of a batch, and the gradients of duplicates summed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "oe_runtime/core/common/shard.h"

namespace oe {

struct UniqueKeys {
  std::vector<Key> keys;         // in the order of their first occurrence
  std::vector<int32_t> inverse;  // position -> place in keys
};

// `n` must be below 2^31. The result depends on the ids alone. inverse: n elements, for positions' places.
std::vector<Key> FindUnique(const Key* ids, size_t n, int32_t* inverse);
UniqueKeys FindUnique(const Key* ids, size_t n);

// Leaves out most keys of keys[n] that came before, 0 < n <= 2^16, with no memory but the first cache's:
// keys[i] is distinct[which[i]], of which there are as many as it returns, in the order of their first
// occurrence. Some keys may still come more than once.
size_t LeaveOutRepeated(const Key* keys, size_t n, Key* distinct, uint16_t* which);
// Whether enough of keys[n] came before that it pays, as far as the first of them tell. False for few keys.
bool RepeatMuch(const Key* keys, size_t n);

// Sets (*common)[i], one byte a key, to 1 where keys[i] is among `others`. Either has each key once.
void MarkCommon(const std::vector<Key>& keys, const std::vector<Key>& others, std::vector<uint8_t>* common);

// sums[rows[i] * dim ...] += gradients[i * dim ...], in the order of the positions, so that the same batch
// gives the same bits on every run and for every number of servers and threads. A row that is not in `seen`,
// one byte a row, is set and not read, and is in it afterwards; without `seen`, all rows have begun. With
// `step`, the gradients of successive positions lie that many gradients apart.
void SumByRow(const float* gradients, const int32_t* rows, size_t n, size_t dim, float* sums, uint8_t* seen,
              size_t step = 1);
void SumByRow(const double* gradients, const int32_t* rows, size_t n, size_t dim, double* sums, uint8_t* seen,
              size_t step = 1);

// What a sum begins with so that its first term stays what it is, bit for bit: 0.0 would make 0.0 of -0.0.
constexpr float kNoTerm = -0.0F;

}  // namespace oe
