#include "oe_runtime/core/checkpoint/filter_file.h"

#include <xxhash.h>

#include <cstring>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"
#include "tests/fuzz/targets.h"

namespace oe {
namespace {

constexpr uint32_t kParts = 16;
constexpr uint64_t kVersion = 7;

TableSpec Spec() {
  TableSpec spec;
  spec.name = "t";
  spec.dim = 1;
  spec.initializer.name = "zeros";
  spec.admission = {"counter", {{"filter_freq", 3}}};
  return Complete(spec);
}

uint32_t PartOf(Key key) { return static_cast<uint32_t>(Mix64(key) >> 60); }

void Load(const std::string& table_file) {
  try {
    const auto filter = AdmissionFilter::Create(Spec().admission, kParts, {});
    Require(LoadFilters({table_file}, Spec(), kVersion, filter.get(), PartOf));
    Require(LoadFilters({table_file}, Spec(), kVersion));
  } catch (const CheckpointError&) {
    return;
  }
}

}  // namespace

void FuzzFilterFile(const uint8_t* data, size_t size) {
  static const TestDirectory directory;  // lives as long as the process
  const std::string file = directory.file("table.oet");
  std::string content(reinterpret_cast<const char*>(data), size);
  WriteAll(FilterFileName(file), content);
  Load(file);
  if (content.size() < sizeof(uint64_t)) return;
  const size_t end = content.size() - sizeof(uint64_t);
  const uint64_t checksum = XXH3_64bits(content.data(), end);
  std::memcpy(content.data() + end, &checksum, sizeof checksum);
  WriteAll(FilterFileName(file), content);
  Load(file);
}

std::vector<std::pair<std::string, std::string>> FilterFileSeeds() {
  std::vector<std::pair<std::string, std::string>> seeds;
  for (const uint64_t keys : {uint64_t{0}, uint64_t{3}}) {
    const auto filter = AdmissionFilter::Create(Spec().admission, kParts, {});
    for (Key key = 1; key <= keys; ++key) (void)filter->Count(PartOf(key), key, 1);
    std::string content;
    EncodeFilter(*filter, Spec(), {0, 2}, kVersion, [&content](const void* from, size_t bytes) {
      content.append(static_cast<const char*>(from), bytes);
    });
    seeds.emplace_back(keys == 0 ? "empty" : "counter", content);
  }
  return seeds;
}

}  // namespace oe
