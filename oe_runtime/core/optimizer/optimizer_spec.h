// An optimizer as a table's specification has it: name and parameters. The update rules are in optimizer.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "oe_runtime/core/common/params.h"

namespace oe {

// An update rule by name, with the parameter names and defaults of Keras 3. Each rule also takes
// `weight_decay`. The learning rate is not part of the specification: each push brings its own.
struct OptimizerSpec {
  std::string name = "adagrad";
  Params params;
};

// Fills in every default. Throws SpecError for an unknown name, an unsupported parameter or a value out of
// range.
OptimizerSpec Complete(const OptimizerSpec& spec);

// One array of an optimizer's state beside a row, by its name in Keras or DeepRec.
struct OptimizerSlot {
  std::string name;
  size_t values = 0;
  bool is_count = false;  // of whole numbers, which must stay exact
};
// An optimizer has at most so many for each weight.
constexpr size_t kMostSlots = 3;
// The slots of a complete specification, in the order in which they lie in a row's state.
std::vector<OptimizerSlot> SlotsOf(const OptimizerSpec& spec, uint32_t dim);

// The sum of the slots' values: how many numbers of state a row has.
size_t ValuesOf(const std::vector<OptimizerSlot>& slots);

// Throws SpecError for a learning rate that the optimizer cannot be pushed with.
void CheckLearningRate(const OptimizerSpec& spec, double learning_rate);

struct OptimizerInfo {
  std::string name;
  Params defaults;
  bool counts_pushes;  // whether an update depends on the number of the push
};
// All registered optimizers, sorted by name.
std::vector<OptimizerInfo> Optimizers();

}  // namespace oe
