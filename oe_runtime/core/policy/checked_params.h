#pragma once

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/params.h"

namespace oe {

// The parameters of one policy: throws SpecError for one that is missing, unknown or out of range.
class CheckedParams {
 public:
  static constexpr double kMostSteps = 2147483647;       // differences of words in rows
  static constexpr double kMostRows = 9007199254740992;  // 2^53: every whole number up to it is a double

  // `what` begins the messages.
  CheckedParams(std::string what, const Params& given, const Params& defaults,
                const std::vector<std::string>& required)
      : what_(std::move(what)) {
    Params known = defaults;
    for (const std::string& name : required) known.emplace(name, 0);
    params_ = CompleteParams(what_, given, known);
    for (const std::string& name : required) {
      if (given.count(name) == 0) throw SpecError(what_ + " needs '" + name + "'");
    }
  }

  const Params& params() const { return params_; }
  void Whole(const std::string& name, double low, double high) const {
    Between(name, low, high);
    if (std::floor(params_.at(name)) == params_.at(name)) return;
    throw SpecError(what_ + ": '" + name + "' must be a whole number, not " + NumberText(params_.at(name)));
  }
  void Between(const std::string& name, double low, double high) const {
    CheckParam(what_, params_, name, low, high);
  }
  void Positive(const std::string& name) const { CheckPositive(what_, params_, name); }

 private:
  const std::string what_;
  Params params_;
};

}  // namespace oe
