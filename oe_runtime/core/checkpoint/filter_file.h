#pragma once

#include <memory>
#include <string>
#include <vector>

#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/policy/admission.h"
#include "oe_runtime/core/spec/spec.h"

namespace oe {

// The counts of an admission filter, beside the table file that was saved with it. Little-endian, no padding:
//
//   "OEFILTR\n"           8 bytes
//   format version        u32 (1)
//   header size           u32
//   header                JSON: {"table": its name, "admission": its spec, "server", "servers", "version",
//                         "bytes"}
//   counts                `bytes` bytes (AdmissionFilter::Write)
//   checksum              u64, XXH3-64 of all bytes before it
std::string FilterFileName(const std::string& table_file);  // "….oet" → "….oet.filter"

struct FilterFileInfo {
  uint64_t bytes = 0;     // of the file
  uint64_t checksum = 0;  // its last 8 bytes
};

// Reads everything and compares the checksum. Throws CheckpointError naming the file.
FilterFileInfo VerifyFilterFile(const std::string& file);

// The whole file as bytes.
void EncodeFilter(const AdmissionFilter& filter, const TableSpec& spec, ShardInfo shard, uint64_t version,
                  const AdmissionFilter::Sink& sink);

// Writes the file of the server `shard` at `version` pushes and adds it to `files`. Throws CheckpointError
// naming it; then nothing is left of it.
void SaveFilter(const AdmissionFilter& filter, const TableSpec& spec, ShardInfo shard, uint64_t version,
                const std::string& file, PendingFiles* files);

// Adds to `filter` the counts of the files beside `table_files`, which are files of one saved table at
// `version` pushes; without a filter, only checks them. False if no such file exists. Throws
// CheckpointError naming the file and the field for one that is missing, damaged or of another table or
// checkpoint; then `filter` is unusable.
bool LoadFilters(const std::vector<std::string>& table_files, const TableSpec& spec, uint64_t version,
                 AdmissionFilter* filter = nullptr, const AdmissionFilter::PartOf& part_of = {});

// The counts, in the files beside `table_files`, of the keys of the server `shard`; nullptr if no such file
// exists. Throws as LoadFilters.
std::unique_ptr<AdmissionFilter> FilterOf(const std::vector<std::string>& table_files, const TableSpec& spec,
                                          uint64_t version, ShardInfo shard);

}  // namespace oe
