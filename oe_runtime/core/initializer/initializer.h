#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "oe_runtime/core/common/params.h"
#include "oe_runtime/core/common/shard.h"

namespace oe {

// "zeros"; "constant" {value}; "uniform" {minval, maxval}; "normal" {mean, stddev}; "truncated_normal" {mean,
// stddev}: a normal distribution cut off at two stddev from the mean, as in Keras (stddev is that of the
// whole distribution; the rest has 0.8796 times it). Keras's Ones and variance scaling (Glorot, He, Lecun)
// are these with other parameters; oe_runtime/keras/translate.py computes them.
struct InitializerSpec {
  std::string name = "uniform";
  Params params;
  uint64_t seed = 0;
};

// The first weights of a row: a pure function of (seed, table name, key, element), so that every tier, server
// count and order of arrival gives the same bits.
//
// Generator: start = Mix64(Mix64(Mix64(seed + G) ^ XXH3_64(table name)) + G·(key + 1)); word j of a row is
// Mix64(start + G·(j + 1)) with G = 2^64/φ (one SplitMix64 stream per row); its low half makes element 2j,
// its high half element 2j + 1. Only IEEE additions, multiplications, divisions and square roots follow, no
// libm, so the bits do not depend on the machine either. As float64 an element is the same function of the
// same 32 bits with more digits: the float32 of it differs from the float32 element by rounding only.
class Initializer {
 public:
  // Throws SpecError for an unknown name, an unsupported parameter or a value out of range.
  static std::unique_ptr<Initializer> Create(const InitializerSpec& spec, const std::string& table);

  // `spec` with every default filled in; throws as Create does.
  static InitializerSpec Complete(const InitializerSpec& spec);

  virtual ~Initializer() = default;

  // Writes the `dim` weights of `key`'s new row.
  virtual void Fill(Key key, float* weights, uint32_t dim) const noexcept = 0;
  virtual void Fill(Key key, double* weights, uint32_t dim) const noexcept = 0;
};

}  // namespace oe
