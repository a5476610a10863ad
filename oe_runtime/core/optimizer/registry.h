// What the file of an optimizer needs. An optimizer is one .cc file in this folder that registers its rule;
// its reference values stand in optimizer_test.cc. CONTRIBUTING.md shows the steps.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/common/half_packing.h"
#include "oe_runtime/core/common/params.h"
#include "oe_runtime/core/common/registry.h"
#include "oe_runtime/core/common/shard.h"
#include "oe_runtime/core/optimizer/optimizer.h"
#include "oe_runtime/core/optimizer/optimizer_spec.h"
#include "oe_runtime/core/optimizer/symbol.h"

namespace oe {

// The values that a parameter may have. kBeta is below 1: at 1 a bias correction divides by zero.
enum class Bound { kNotNegative, kPositive, kNotPositive, kUnit, kPositiveUnit, kBeta, kWhole, kFlag };

// Describes an optimizer: all that other code, that of the bindings too, knows of it besides the rule.
struct OptimizerEntry {
  enum Trait : unsigned { kNone = 0, kCountsPushes = 1, kDividesByLearningRate = 2 };

  struct Param {
    std::string name;  // Keras's, as is the default
    double value;
    Bound bound;
    // One that came later is left out of specifications where it has its default, as earlier versions wrote
    // them. Where it has another value, those versions refuse the specification.
    bool is_later = false;
    std::string needs = "";  // the flag without which its default is the only value
  };
  // One array of state beside a row.
  struct Slot {
    std::string name;            // Keras's or DeepRec's
    std::string initial = "";    // the parameter that it begins with; otherwise zero
    std::string only_with = "";  // the parameter without which (at 0) rows do not have it
    bool per_row = false;        // one number per row, not one per weight
    bool is_count = false;       // of whole numbers, which must stay exact
  };

  std::string name;
  std::vector<Param> params;  // the options of every rule are added where they are missing
  std::vector<Slot> slots;
  Trait trait = kNone;
  // Parameters that choose the rule's bool template arguments by being 0 or not.
  std::vector<std::string> variants = {};

  template <typename T>
  using New = std::unique_ptr<Optimizer<T>> (*)(const OptimizerEntry&, const Params&, uint32_t dim);
  New<float> new_float = nullptr;
  New<double> new_double = nullptr;
  RuleProgram (*trace)(const OptimizerEntry&,
                       const Params&) = nullptr;  // none for rules that Symbol cannot write down

  // Adds the entry to the registry.
  static void Register(OptimizerEntry entry) noexcept;

  std::vector<StateSlot> SlotsWith(const Params& values, uint32_t dim) const;
};

// The flag of rules that PyTorch has in another form than Keras: where it is set, epsilon, momenta and bias
// corrections are PyTorch's.
inline OptimizerEntry::Param TorchFlag() { return {"torch", 0, Bound::kFlag, true}; }

// What is computed once per push, in more precision than the weights have.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, Symbol>, Symbol, double>;

// A table's parameters as numbers of the rule's type.
template <typename T>
class Values {
 public:
  explicit Values(const Params& params) : params_(params) {}

  T operator[](const char* name) const { return static_cast<T>(params_.at(name)); }
  // 1 - the value, subtracted in double precision.
  T OneMinus(const char* name) const { return static_cast<T>(1.0 - params_.at(name)); }
  Wide<T> Exactly(const char* name) const { return Wide<T>(params_.at(name)); }
  bool IsSet(const char* name) const { return params_.at(name) != 0; }

 private:
  const Params& params_;
};

// The base of element-wise rules. Such a rule is a template over T (float, double or Symbol, for which sqrt,
// pow, abs, max, min and Sign stand without std::) and over a bool per variant. It has
//   kSlots, the number of its slots, at most kMostSlots;
//   a constructor that reads its parameters from a Values<T>;
//   void Begin(T rate, StepNumber<T> step), if it computes something once per push;
//   void operator()(T rate, T g, T& weight, std::array<T, kSlots>& slots) const, which updates one weight.
struct ElementwiseRule {
  template <typename T>
  void Begin(const T& /*rate*/, const StepNumber<T>& /*step*/) {}
};

using std::abs;
using std::max;
using std::min;
using std::pow;
using std::sqrt;

template <typename T>
T Sign(T x) {
  return (x > 0 ? T{1} : T{0}) - (x < 0 ? T{1} : T{0});
}

// beta^step as Keras computes it: beta and step in the variable's dtype, and the result rounded to it. With
// float32 and beta_2 = 0.999 that moves 1 - beta_2^t by 1e-5 from the exact value, so the rounding is part of
// the rules.
template <typename T>
T BetaPower(T beta, uint64_t step) noexcept;

// 1 - beta^step, by which a moving average that began at zero is divided. With the flag `torch` in double
// precision, as in PyTorch.
template <typename T>
class BiasCorrection {
 public:
  BiasCorrection(const Values<T>& value, const char* beta)
      : beta_(value[beta]), exact_(value.Exactly(beta)), is_exact_(value.IsSet("torch")) {}

  T operator()(const StepNumber<T>& step) const {
    if (is_exact_) return static_cast<T>(Wide<T>(1) - pow(exact_, Wide<T>(step)));
    return T{1} - BetaPower(beta_, step);
  }

 private:
  T beta_;
  Wide<T> exact_;
  bool is_exact_;
};

// Updates the weights of a row.
template <typename Rule, typename T>
void UpdateRow(const Rule& rule, const T* __restrict gradients, T* __restrict weights, T* state, size_t dim,
               T rate) noexcept {
  constexpr size_t kSlots = Rule::kSlots;
  static_assert(kSlots <= kMostSlots);
  T* __restrict slot_0 = state;
  T* __restrict slot_1 = state + (kSlots > 1 ? 1 : 0) * dim;
  T* __restrict slot_2 = state + (kSlots > 2 ? 2 : 0) * dim;
#ifndef __clang__  // GCC does not take __restrict's word for it: it would compare all addresses for each row
#pragma GCC ivdep
#endif
  for (size_t d = 0; d < dim; ++d) {
    T weight = weights[d];
    std::array<T, kSlots> slots;
    if constexpr (kSlots > 0) slots[0] = slot_0[d];
    if constexpr (kSlots > 1) slots[1] = slot_1[d];
    if constexpr (kSlots > 2) slots[2] = slot_2[d];
    rule(rate, gradients[d], weight, slots);
    weights[d] = weight;
    if constexpr (kSlots > 0) slot_0[d] = slots[0];
    if constexpr (kSlots > 1) slot_1[d] = slots[1];
    if constexpr (kSlots > 2) slot_2[d] = slots[2];
  }
}

// Updates all weights of all rows. The rule is a copy, so that its fields can stay in registers.
template <bool kIsPlain, typename Rule, typename T>
void UpdateElementsOf(const Optimizer<T>& optimizer, Rule rule, const RowRefs<T>& rows, size_t dim,
                      T rate) noexcept {
  for (size_t i = 0; i < rows.n; ++i) {
    const T* gradients = kIsPlain ? rows.gradients[i] : optimizer.Begin(rows, i, rate);
    UpdateRow(rule, gradients, rows.weights[i], rows.states[i], dim, rate);
    if (!kIsPlain) Optimizer<T>::End(rows, i);
  }
}

// The same of rows of bfloat16: each is loaded, updated, rounded and stored before the next.
template <typename Rule>
__attribute__((flatten)) void UpdateBfloat16(Rule rule, const RowRefs<float>& rows, size_t dim,
                                             float rate) noexcept {
  constexpr size_t kMost = Bfloat16Rows::kMostDim + kSlack;
  std::array<float, kMost> weights{};
  std::array<float, std::max<size_t>(Rule::kSlots, 1) * kMost> state{};
  const auto values = static_cast<uint32_t>(dim);
  const auto state_values = static_cast<uint32_t>(Rule::kSlots * dim);
  for (size_t i = 0; i < rows.n; ++i) {
    std::byte* row = rows.bfloat16->rows[i];
    std::byte* of_state = row + rows.bfloat16->state_at;
    Unpack<Bfloat16>(row, values, weights.data());
    if (Rule::kSlots > 0) Unpack<Bfloat16>(of_state, state_values, state.data());
    UpdateRow(rule, rows.gradients[i], weights.data(), state.data(), dim, rate);
    const uint64_t seed = rows.bfloat16->seeds[i];
    Pack<Bfloat16, false>(weights.data(), values, seed, row);
    if (Rule::kSlots > 0) Pack<Bfloat16, true>(state.data(), state_values, Mix64(~seed), of_state);
  }
}
#ifdef OE_AVX512
// With AVX-512, for dims that are multiples of kWideLanes; the bits are the same.
template <typename Rule>
OE_AVX512 __attribute__((flatten)) void UpdateBfloat16Wide(Rule rule, const RowRefs<float>& rows, size_t dim,
                                                           float rate) noexcept {
  constexpr size_t kSlots = Rule::kSlots;
  for (size_t i = 0; i < rows.n; ++i) {
    auto* weights = reinterpret_cast<uint16_t*>(rows.bfloat16->rows[i]);
    auto* state = reinterpret_cast<uint16_t*>(rows.bfloat16->rows[i] + rows.bfloat16->state_at);
    const uint64_t seed = rows.bfloat16->seeds[i];
    const uint64_t state_seed = Mix64(~seed);
    for (uint32_t d = 0; d < dim; d += kWideLanes) {
      std::array<float, (1 + kSlots) * kWideLanes> block;
      UnpackWide(weights + d, block.data());
      for (size_t slot = 0; slot < kSlots; ++slot) {
        UnpackWide(state + slot * dim + d, block.data() + (1 + slot) * kWideLanes);
      }
      UpdateRow(rule, rows.gradients[i] + d, block.data(), block.data() + kWideLanes, kWideLanes, rate);
      PackWide<false>(block.data(), d, seed, weights + d);
      for (size_t slot = 0; slot < kSlots; ++slot) {
        const auto number = static_cast<uint32_t>(slot * dim + d);
        PackWide<true>(block.data() + (1 + slot) * kWideLanes, number, state_seed, state + number);
      }
    }
  }
}
#endif

template <typename Rule, typename T>
void UpdateElements(const Optimizer<T>& optimizer, const Rule& rule, const RowRefs<T>& rows, size_t dim,
                    T rate) noexcept {
  if constexpr (std::is_same_v<T, float>) {
#ifdef OE_AVX512
    if (optimizer.TakesBfloat16(rows) && rows.bfloat16->wide && dim % kWideLanes == 0) {
      return UpdateBfloat16Wide(rule, rows, dim, rate);
    }
#endif
    if (optimizer.TakesBfloat16(rows)) return UpdateBfloat16(rule, rows, dim, rate);
  }
  if (optimizer.IsPlain(rows)) return UpdateElementsOf<true>(optimizer, rule, rows, dim, rate);
  UpdateElementsOf<false>(optimizer, rule, rows, dim, rate);
}

template <typename Rule, typename T>
class ElementwiseOptimizer final : public Optimizer<T> {
 public:
  ElementwiseOptimizer(const Params& params, uint32_t dim, const std::vector<StateSlot>& slots)
      : Optimizer<T>(params, dim, slots), rule_(Values<T>(params)) {}

 private:
  void Update(const RowRefs<T>& rows, T learning_rate, uint64_t step) const noexcept override {
    Rule rule = rule_;
    rule.Begin(learning_rate, step);
    UpdateElements(*this, rule, rows, this->dim(), learning_rate);
  }

  const Rule rule_;
};

// Registers an optimizer of whole rows, Kind<float> and Kind<double>, or with RegisterRule an element-wise
// rule: a constant of this type in an unnamed namespace does.
template <template <typename> class Kind>
struct RegisterOptimizer {
  explicit RegisterOptimizer(OptimizerEntry entry) noexcept {
    entry.new_float = New<float>;
    entry.new_double = New<double>;
    OptimizerEntry::Register(std::move(entry));
  }

 private:
  template <typename T>
  static std::unique_ptr<Optimizer<T>> New(const OptimizerEntry& entry, const Params& params, uint32_t dim) {
    return std::make_unique<Kind<T>>(params, dim, entry.SlotsWith(params, dim));
  }
};

// kTraced: whether it works with Symbol.
template <template <typename, bool...> class Rule, size_t kVariants = 0, bool kTraced = true>
struct RegisterRule {
  explicit RegisterRule(OptimizerEntry entry) noexcept {
    entry.new_float = New<float>;
    entry.new_double = New<double>;
    if constexpr (kTraced) entry.trace = Trace;
    OptimizerEntry::Register(std::move(entry));
  }

 private:
  // Calls `make(type)` with the variant of the rule that the parameters choose.
  template <typename T, bool... kChosen, typename Make>
  static auto Choose(const OptimizerEntry& entry, const Params& params, const Make& make) {
    if constexpr (sizeof...(kChosen) == kVariants) {
      return make(static_cast<Rule<T, kChosen...>*>(nullptr));
    } else if (params.at(entry.variants[sizeof...(kChosen)]) != 0) {
      return Choose<T, kChosen..., true>(entry, params, make);
    } else {
      return Choose<T, kChosen..., false>(entry, params, make);
    }
  }

  template <typename T>
  static std::unique_ptr<Optimizer<T>> New(const OptimizerEntry& entry, const Params& params, uint32_t dim) {
    return Choose<T>(entry, params, [&](auto* rule) -> std::unique_ptr<Optimizer<T>> {
      return std::make_unique<ElementwiseOptimizer<std::remove_pointer_t<decltype(rule)>, T>>(
          params, dim, entry.SlotsWith(params, dim));
    });
  }

  static RuleProgram Trace(const OptimizerEntry& entry, const Params& params) {
    return Choose<Symbol>(entry, params, [&](auto* type) { return TraceRule(type, params); });
  }

  template <typename Kind>
  static RuleProgram TraceRule(const Kind* /*chosen*/, const Params& params) {
    Kind rule{Values<Symbol>(params)};
    const Symbol rate("rate");
    rule.Begin(rate, Symbol("step"));
    std::array<Symbol, Kind::kSlots> slots;
    for (size_t i = 0; i < slots.size(); ++i) slots[i] = Symbol("slot_" + std::to_string(i));
    Symbol weight("weight");
    rule(rate, Symbol("gradient"), weight, slots);
    RuleProgram program;
    std::vector<const void*> written;
    program.results.push_back(weight.WriteTo(&program, &written));
    for (const Symbol& slot : slots) program.results.push_back(slot.WriteTo(&program, &written));
    return program;
  }
};

}  // namespace oe
