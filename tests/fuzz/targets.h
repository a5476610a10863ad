// Parsers of what comes from outside, each as a function that takes any bytes and must neither crash nor read
// beyond them. libFuzzer drives them (`make fuzz`), and fuzz_test.cc replays the corpus.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/wire/buffer.h"

namespace oe {

struct FuzzTarget {
  const char* name;  // of its folder in fuzz/corpus too
  void (*run)(const uint8_t* data, size_t size);
  // Good input, made by our own encoders: name of the file, content.
  std::vector<std::pair<std::string, std::string>> (*seeds)();
};

// A frame and the body that belongs to its operation.
void FuzzFrame(const uint8_t* data, size_t size);
std::vector<std::pair<std::string, std::string>> FrameSeeds();

// A request to a server with a table: a byte for the operation, then the body.
void FuzzRequest(const uint8_t* data, size_t size);
std::vector<std::pair<std::string, std::string>> RequestSeeds();

// A table file. Its two checksums are made right first, or nothing but them would be tried.
void FuzzTableFile(const uint8_t* data, size_t size);
std::vector<std::pair<std::string, std::string>> TableFileSeeds();

// What an admission filter had counted, in a file; its checksum is made right first, too.
void FuzzFilterFile(const uint8_t* data, size_t size);
std::vector<std::pair<std::string, std::string>> FilterFileSeeds();

// The superblock and a segment of a pool; the checksums of their headers are made right first, too.
void FuzzPool(const uint8_t* data, size_t size);
std::vector<std::pair<std::string, std::string>> PoolSeeds();

// Specifications of tables and storage in JSON.
void FuzzSpec(const uint8_t* data, size_t size);
std::vector<std::pair<std::string, std::string>> SpecSeeds();

// A byte for the layout, then lines of training data.
void FuzzCriteo(const uint8_t* data, size_t size);
std::vector<std::pair<std::string, std::string>> CriteoSeeds();

inline std::vector<FuzzTarget> FuzzTargets() {
  return {{"frame", FuzzFrame, FrameSeeds},
          {"request", FuzzRequest, RequestSeeds},
          {"table_file", FuzzTableFile, TableFileSeeds},
          {"filter_file", FuzzFilterFile, FilterFileSeeds},
          {"pool", FuzzPool, PoolSeeds},
          {"spec", FuzzSpec, SpecSeeds},
          {"criteo", FuzzCriteo, CriteoSeeds}};
}

// As a server has it: aligned, and for the sanitizers with a fence at its end.
inline Buffer CopyOf(const uint8_t* data, size_t size) {
  Buffer copy(size);
  if (size != 0) std::memcpy(copy.data(), data, size);
  return copy;
}

// A result that the sanitizers would miss: ends the process.
inline void Require(bool holds) {
  if (!holds) __builtin_trap();
}

}  // namespace oe
