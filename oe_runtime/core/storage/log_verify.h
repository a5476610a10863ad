#pragma once

#include <string>
#include <vector>

namespace oe {

// What is wrong with the logs (row_log.h) in a directory, a line each that names the file: superblocks,
// headers of chunks and, what recovery does not read, every block of rows against its checksum. Changes
// nothing; takes as long as reading all of it. Throws StorageError for a directory that a server uses, or
// that cannot be read.
std::vector<std::string> VerifyLogs(const std::string& directory);

}  // namespace oe
