#include "oe_runtime/core/optimizer/optimizer.h"

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

struct Entry {
  const char* name;
  Params (*complete)(const Params&);
  std::unique_ptr<Optimizer> (*create)(const Params&, uint32_t);
};

const Entry kOptimizers[] = {
    {"adagrad", CompleteAdagrad, NewAdagrad},
    {"adam", CompleteAdam, NewAdam},
    {"ftrl", CompleteFtrl, NewFtrl},
    {"sgd", CompleteSgd, NewSgd},
};

const Entry& Find(const std::string& name) {
  std::string known;
  for (const Entry& entry : kOptimizers) {
    if (name == entry.name) return entry;
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
  }
  throw SpecError("optimizer '" + name + "' is not one of " + known);
}

}  // namespace

OptimizerSpec Optimizer::Complete(const OptimizerSpec& spec) {
  return {spec.name, Find(spec.name).complete(spec.params)};
}

std::unique_ptr<Optimizer> Optimizer::Create(const OptimizerSpec& spec, uint32_t dim) {
  const Entry& entry = Find(spec.name);
  return entry.create(entry.complete(spec.params), dim);
}

}  // namespace oe
