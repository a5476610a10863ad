#include "oe_runtime/core/common/params.h"

#include <cmath>
#include <limits>
#include <sstream>

#include "oe_runtime/core/common/error.h"

namespace oe {

std::string NumberText(double value) {
  std::ostringstream text;
  text.precision(10);
  text << value;
  return text.str();
}

Params CompleteParams(const std::string& what, const Params& given, const Params& defaults) {
  Params complete = defaults;
  for (const auto& [name, value] : given) {
    const auto found = complete.find(name);
    if (found == complete.end()) {
      std::string known;
      for (const auto& item : defaults) known += (known.empty() ? "" : ", ") + item.first;
      throw SpecError(what + " does not support '" + name + "'; it supports " +
                      (known.empty() ? "no parameters" : known));
    }
    if (!std::isfinite(static_cast<float>(value))) {  // as float32: rows would begin with it
      throw SpecError(what + ": '" + name + "' must be a finite number, not " + NumberText(value));
    }
    found->second = value;
  }
  return complete;
}

void CheckParam(const std::string& what, const Params& params, const std::string& name, double low,
                double high) {
  const double value = params.at(name);
  if (value >= low && value <= high) return;
  std::string wanted = "between " + NumberText(low) + " and " + NumberText(high);
  if (high == std::numeric_limits<double>::infinity()) wanted = "at least " + NumberText(low);
  if (low == -std::numeric_limits<double>::infinity()) wanted = "at most " + NumberText(high);
  throw SpecError(what + ": '" + name + "' must be " + wanted + ", not " + NumberText(value));
}

void CheckPositive(const std::string& what, const Params& params, const std::string& name) {
  const double value = params.at(name);
  if (value > 0) return;
  throw SpecError(what + ": '" + name + "' must be above 0, not " + NumberText(value));
}

void CheckFlag(const std::string& what, const Params& params, const std::string& name) {
  const double value = params.at(name);
  if (value == 0 || value == 1) return;
  throw SpecError(what + ": '" + name + "' must be true or false, not " + NumberText(value));
}

}  // namespace oe
