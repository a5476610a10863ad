#pragma once

#include <cstddef>
#include <string>

namespace oe {

// A load from persistent memory that the device cannot give back ("media error", "poison"), or from a mapped
// file that somebody has cut short, ends the process by SIGBUS: nothing can be returned to the load. Where
// ReportMemoryErrors was called, a line on stderr names the file and the byte first.
//
// Source: Linux, Documentation/driver-api/nvdimm/nvdimm.rst and sigaction(2), BUS_MCEERR_AR.

// From now on [data, data + size) is `path`; until ForgetMapping(data). Thread-safe.
void NoteMapping(const std::byte* data, size_t size, const std::string& path);
void ForgetMapping(const std::byte* data) noexcept;

// Handles SIGBUS of this process, for good; the process still ends by it. For servers: whom another process
// belongs to decides on its signals himself.
void ReportMemoryErrors();

}  // namespace oe
