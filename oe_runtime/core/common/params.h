#pragma once

#include <map>
#include <string>

namespace oe {

using Params = std::map<std::string, double>;

// `given` completed with `defaults`. Throws SpecError for a name that `defaults` lacks and for a value that
// is not finite; `what` ("optimizer 'adam'") begins the message.
Params CompleteParams(const std::string& what, const Params& given, const Params& defaults);

// Throws SpecError unless params.at(name) lies in [low, high].
void CheckParam(const std::string& what, const Params& params, const std::string& name, double low,
                double high);

// Throws SpecError unless params.at(name) is above 0.
void CheckPositive(const std::string& what, const Params& params, const std::string& name);

// Throws SpecError unless params.at(name) is 0 or 1.
void CheckFlag(const std::string& what, const Params& params, const std::string& name);

// A number as it would be typed: 0.1, 1e-07, 3.
std::string NumberText(double value);

}  // namespace oe
