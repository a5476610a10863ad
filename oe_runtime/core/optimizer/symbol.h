// An element-wise rule written down as a program, so that Keras can run it on dense variables: the rule is
// called once with symbols in place of numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "oe_runtime/core/optimizer/optimizer.h"

namespace oe {

// Operations in the order in which they are done. Each has the numbers of earlier ones as operands.
struct RuleProgram {
  struct Operation {
    std::string name;  // "constant"; "rate", "step", "gradient", "weight", "slot_0", …; or what to compute
    double value;      // of a constant
    std::vector<size_t> operands;
  };
  std::vector<Operation> operations;
  std::vector<size_t> results;  // the new weight, then the new slots
};

// An optimizer with some parameters, for those who follow its rule elsewhere.
struct OptimizerDescription {
  struct Param {
    std::string name;
    double value;  // its default
    bool is_flag;  // whether it is true or false
  };
  std::vector<Param> params;     // in the order in which the rule declares them
  std::vector<StateSlot> slots;  // of dim 1
  RuleProgram program;           // without weight decay; empty for a rule that Symbol cannot write down
};
// Throws SpecError as Complete() does.
OptimizerDescription Describe(const OptimizerSpec& spec);

class Symbol {
 public:
  Symbol() : Symbol(0.0) {}
  explicit Symbol(double constant) : Symbol("constant", {}, constant) {}
  explicit Symbol(const std::string& name, std::vector<Symbol> operands = {}, double value = 0)
      : node_(std::make_shared<const Node>(Node{name, value, std::move(operands)})) {}

  // Adds what leads to this symbol to the program, and returns the number of its operation.
  size_t WriteTo(RuleProgram* program, std::vector<const void*>* written) const {
    for (size_t i = 0; i < written->size(); ++i) {
      if ((*written)[i] == node_.get()) return i;
    }
    std::vector<size_t> operands;
    for (const Symbol& operand : node_->operands) operands.push_back(operand.WriteTo(program, written));
    program->operations.push_back({node_->name, node_->value, std::move(operands)});
    written->push_back(node_.get());
    return written->size() - 1;
  }

  friend Symbol operator+(const Symbol& a, const Symbol& b) { return Symbol("add", {a, b}); }
  friend Symbol operator-(const Symbol& a, const Symbol& b) { return Symbol("subtract", {a, b}); }
  friend Symbol operator*(const Symbol& a, const Symbol& b) { return Symbol("multiply", {a, b}); }
  friend Symbol operator/(const Symbol& a, const Symbol& b) { return Symbol("divide", {a, b}); }
  friend Symbol operator-(const Symbol& a) { return Symbol("negative", {a}); }
  Symbol& operator+=(const Symbol& b) { return *this = *this + b; }
  Symbol& operator-=(const Symbol& b) { return *this = *this - b; }

  friend Symbol sqrt(const Symbol& a) { return Symbol("sqrt", {a}); }
  friend Symbol abs(const Symbol& a) { return Symbol("abs", {a}); }
  friend Symbol pow(const Symbol& a, const Symbol& b) { return Symbol("power", {a, b}); }
  friend Symbol max(const Symbol& a, const Symbol& b) { return Symbol("maximum", {a, b}); }
  friend Symbol min(const Symbol& a, const Symbol& b) { return Symbol("minimum", {a, b}); }
  friend Symbol Sign(const Symbol& a) { return Symbol("sign", {a}); }
  friend Symbol BetaPower(const Symbol& beta, const Symbol& step) { return pow(beta, step); }

 private:
  struct Node {
    std::string name;
    double value;
    std::vector<Symbol> operands;
  };

  std::shared_ptr<const Node> node_;
};

// The number of a push, from 1.
template <typename T>
using StepNumber = std::conditional_t<std::is_same_v<T, Symbol>, Symbol, uint64_t>;

}  // namespace oe
