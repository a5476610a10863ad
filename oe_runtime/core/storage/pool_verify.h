#pragma once

#include <string>
#include <vector>

namespace oe {

// What is wrong with the pools (pool.h) in a directory, a line each that names the file: headers, the list of
// checkpoints, missing segments, and, what recovery does not read, every row of a kept checkpoint against its
// checksum. Changes nothing; takes 25 bytes of memory per row, and as long as reading all of it. Throws
// StorageError for a directory that a server uses, or that cannot be read.
std::vector<std::string> VerifyPools(const std::string& directory);

}  // namespace oe
