// Whether connections are encrypted; wire/tls.h does it.
#pragma once

#include <cstdint>
#include <string>

namespace oe {

enum class TlsMode : uint8_t { kAuto, kOn, kOff };

// "auto", "on" or "off"; throws SpecError for anything else.
TlsMode ParseTlsMode(const std::string& text);

}  // namespace oe
