#include <cstring>

#include "oe_runtime/core/checkpoint/table_chain.h"
#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/spec/row_format.h"
#include "tests/fuzz/targets.h"

namespace oe {
namespace {

constexpr size_t kFixed = 16;  // magic, format, size of the header
constexpr size_t kChecksum = sizeof(uint64_t);

void MakeChecksumsRight(std::string* file) {
  uint32_t header = 0;
  if (file->size() < kFixed + 2 * kChecksum) return;
  std::memcpy(&header, file->data() + 12, sizeof header);
  if (header > file->size() - kFixed - 2 * kChecksum) return;
  for (const size_t end : {kFixed + header, file->size() - kChecksum}) {
    const uint64_t checksum = XXH3_64bits(file->data(), end);
    std::memcpy(file->data() + end, &checksum, kChecksum);
  }
}

void Read(const std::string& file) {
  try {
    TableFileReader reader(file);
    uint64_t tombstones = 0;
    while (const size_t n = reader.NextTombstones()) tombstones += n;
    Require(tombstones == reader.info().tombstones);
    uint64_t rows = 0;
    while (const size_t n = reader.NextBlock()) {
      rows += n;
      // All of a block is there.
      volatile std::byte last = reader.rows()[n * reader.info().row_bytes - 1];
      volatile Key key = reader.keys()[n - 1];
      (void)last;
      (void)key;
    }
    Require(rows == reader.info().rows);
    // The newer file hides all that the older one has.
    TableChainReader chain({file, file});
    uint64_t left = 0;
    while (const size_t n = chain.NextBlock()) left += n;
    Require(left == rows);
  } catch (const CheckpointError&) {
    return;
  }
}

TableSpec SpecOf(const std::string& name, uint32_t dim, const std::string& optimizer,
                 const std::string& dtype) {
  TableSpec spec;
  spec.name = name;
  spec.dim = dim;
  spec.dtype = dtype;
  spec.optimizer.name = optimizer;
  spec.initializer.name = "uniform";
  return Complete(spec);
}

}  // namespace

void FuzzTableFile(const uint8_t* data, size_t size) {
  static const TestDirectory directory;  // lives as long as the process
  const std::string file = directory.file("table.oet");
  std::string content(reinterpret_cast<const char*>(data), size);
  WriteAll(file, content);
  Read(file);
  MakeChecksumsRight(&content);
  WriteAll(file, content);
  Read(file);
}

std::vector<std::pair<std::string, std::string>> TableFileSeeds() {
  std::vector<std::pair<std::string, std::string>> seeds;
  using Seed = std::tuple<const char*, uint32_t, const char*, uint64_t, uint64_t, const char*>;
  for (const auto& [name, dim, optimizer, rows, tombstones, dtype] :
       {Seed{"adagrad", 2, "adagrad", 3, 0, "float32"},
        {"adam", 1, "adam", 1, 0, "float32"},
        {"empty", 4, "sgd", 0, 0, "float32"},
        {"increment", 2, "sgd", 1, 2, "float32"},
        {"double", 2, "adagrad", 2, 0, "float64"},
        {"half", 3, "adagrad", 2, 0, "bfloat16"}}) {
    TableFileInfo info;
    info.spec = SpecOf(name, dim, optimizer, dtype);
    info.shard = {0, 2};
    info.version = 7;
    info.rows = rows;
    if (tombstones > 0) info.base = 0x0123456789abcdef;
    info.tombstones = tombstones;
    info.row_bytes = FormatOf(info.spec).facts_at;
    std::string content;
    TableFileEncoder encoder(info, [&content](const void* from, size_t bytes) {
      content.append(static_cast<const char*>(from), bytes);
    });
    const std::vector<Key> keys = {5, 6, 7};
    const std::vector<float> values(rows * info.row_bytes / sizeof(float), 0.5F);
    encoder.WriteTombstones(keys.data() + rows, tombstones);
    if (rows > 0) encoder.WriteBlock(keys.data(), reinterpret_cast<const std::byte*>(values.data()), rows);
    (void)encoder.Finish();
    seeds.emplace_back(name, content);
  }
  return seeds;
}

}  // namespace oe
