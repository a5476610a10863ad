#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "oe_runtime/core/common/file.h"

namespace oe {

// Where bytes of a block device lie: in one file, or striped over several.
class StripedFiles {
 public:
  struct Piece {
    size_t file;
    uint64_t offset;
    uint64_t bytes;  // that follow there without a gap
  };

  StripedFiles(std::vector<File> files, uint64_t stripe_bytes)
      : files_(std::move(files)), stripe_bytes_(stripe_bytes) {}

  Piece Locate(uint64_t offset) const {
    if (files_.size() == 1) return {0, offset, UINT64_MAX - offset};
    const uint64_t stripe = offset / stripe_bytes_;
    const uint64_t within = offset % stripe_bytes_;
    return {stripe % files_.size(), stripe / files_.size() * stripe_bytes_ + within, stripe_bytes_ - within};
  }

  size_t count() const { return files_.size(); }
  int descriptor(size_t file) const { return files_[file].get(); }

 private:
  std::vector<File> files_;
  uint64_t stripe_bytes_;
};

}  // namespace oe
