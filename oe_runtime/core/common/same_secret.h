#pragma once

#include <cstddef>
#include <string>

namespace oe {

// Takes as long for a wrong secret as for the right one.
inline bool IsSameSecret(const std::string& given, const std::string& wanted) {
  volatile unsigned char different = given.size() == wanted.size() ? 0 : 1;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const char c = given.empty() ? '\0' : given[i % given.size()];
    different = static_cast<unsigned char>(different | static_cast<unsigned char>(c ^ wanted[i]));
  }
  return different == 0;
}

}  // namespace oe
