#include "oe_runtime/core/storage/log_verify.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <utility>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/file.h"
#include "oe_runtime/core/storage/block_device.h"
#include "oe_runtime/core/storage/directory_lock.h"
#include "oe_runtime/core/storage/row_log.h"
#include "oe_runtime/core/storage/row_log_format.h"

namespace oe {
namespace {

constexpr size_t kMostBlocksNamed = 20;  // of a file
constexpr size_t kMostKeysNamed = 4;     // of a block

class LogVerifier {
 public:
  LogVerifier(std::string path, std::vector<std::string>* problems)
      : path_(std::move(path)), problems_(problems), file_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (!file_.ok()) throw StorageError("cannot read the storage file " + path_, errno);
  }

  void Run() {
    const std::optional<RowLogSuper> super = ReadSuper();
    if (!super) return;
    for (size_t segment = 0; segment < super->extents.size(); ++segment) {
      const uint64_t begin = 2 * super_bytes_ + segment * super->segment_bytes;
      if (super->extents[segment] > 0) VerifySegment(*super, begin, segment);
    }
    if (wrong_ > kMostBlocksNamed) Say("is damaged: " + std::to_string(wrong_) + " blocks in all are wrong");
  }

 private:
  void Say(const std::string& what) { problems_->push_back(path_ + " " + what); }

  // Whether all of it could be read.
  bool Read(uint64_t offset, size_t bytes, std::byte* into) const {
    for (size_t done = 0; done < bytes;) {
      const ssize_t got = ::pread(file_.get(), into + done, bytes - done, static_cast<off_t>(offset + done));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      done += static_cast<size_t>(got);
    }
    return true;
  }

  std::optional<RowLogSuper> ReadSuper() {
    std::optional<RowLogSuper> newest;
    std::optional<uint64_t> wrong;
    for (uint64_t copy = 0; copy < 2; ++copy) {
      const uint64_t offset = copy * super_bytes_;
      BlockBuffer buffer(super_bytes_);
      RowLogSuper super;
      if (!Read(offset, kBlockBytes, buffer.data()) ||
          !Read(offset, RowLogSuperBytes(buffer.data(), super_bytes_), buffer.data()) ||
          !DecodeRowLogSuper(buffer.data(), RowLogSuperBytes(buffer.data(), super_bytes_), &super)) {
        wrong = offset;
      } else if (!newest || super.sequence > newest->sequence) {
        newest = std::move(super);
      }
    }
    if (!newest) {
      Say("is damaged: both copies of its superblock are gone");
    } else if (wrong && newest->sequence > 0) {  // until its first commit a log has one copy only
      Say("is damaged: the copy of its superblock at byte " + std::to_string(*wrong) +
          " is wrong or cannot be read, as after a power cut; a start takes the other one, which may "
          "lack the newest checkpoint");
    }
    return newest;
  }

  void VerifySegment(const RowLogSuper& super, uint64_t begin, size_t segment) {
    const uint32_t extent = super.extents[segment];
    const BlockBuffer buffer(extent * kBlockBytes);
    unread_.assign(extent, false);
    if (!Read(begin, buffer.size(), buffer.data())) {
      for (size_t block = 0; block < extent; ++block) {
        unread_[block] = !Read(begin + block * kBlockBytes, kBlockBytes, buffer.data() + block * kBlockBytes);
      }
    }
    Chunk chunk;
    for (uint32_t place = 0; place < extent; place += chunk.blocks) {
      const std::byte* const header = buffer.data() + place * kBlockBytes;
      const uint32_t header_blocks = unread_[place] ? 0 : ChunkHeaderBlocks(header);
      if (header_blocks == 0 || place + header_blocks > extent || !DecodeChunk(header, &chunk) ||
          chunk.uuid != super.uuid || chunk.place != place || place + chunk.blocks > extent) {
        return Say("is damaged: the header at byte " + std::to_string(begin + place * kBlockBytes) +
                   " is wrong, so that the rows behind it have no keys");
      }
      if (!super.uses.empty() && static_cast<uint16_t>(chunk.use) != super.uses[segment]) {
        return Say("is damaged: the header at byte " + std::to_string(begin + place * kBlockBytes) +
                   " is of another time than the superblock: the drive lost writes, or a part of the file is "
                   "of an older copy");
      }
      VerifyRows(super, chunk, header, begin + place * kBlockBytes, place);
    }
  }

  void VerifyRows(const RowLogSuper& super, const Chunk& chunk, const std::byte* header, uint64_t offset,
                  uint32_t place) {
    const size_t rows = std::max<size_t>(1, kBlockBytes / super.row_bytes);   // of a block
    const size_t blocks = (super.row_bytes + kBlockBytes - 1) / kBlockBytes;  // of a row
    for (size_t block = 0; block < chunk.sums.size(); ++block) {
      const size_t at = (chunk.header_blocks + block) * kBlockBytes;
      const bool unread = unread_[place + chunk.header_blocks + block];
      if (!unread && BlockChecksum(header + at) == chunk.sums[block]) continue;
      if (++wrong_ > kMostBlocksNamed) continue;
      std::string keys;
      const size_t first = block / blocks * rows;
      const size_t end = std::min(first + rows, chunk.rows.size());
      for (size_t row = first; row < std::min(end, first + kMostKeysNamed); ++row) {
        keys += (row == first ? "" : ", ") + std::to_string(chunk.rows[row].key);
      }
      if (end > first + kMostKeysNamed) keys += ", …";
      Say("is damaged: the " + std::string(unread ? "" : "checksum of the ") + "block at byte " +
          std::to_string(offset + at) + (unread ? " cannot be read" : " is wrong") + ", with rows of keys " +
          keys);
    }
  }

  const std::string path_;
  std::vector<std::string>* const problems_;
  const File file_;
  const size_t super_bytes_ = RowLogSpec{}.super_bytes;
  std::vector<bool> unread_;  // blocks of the segment
  size_t wrong_ = 0;
};

}  // namespace

std::vector<std::string> VerifyLogs(const std::string& directory) {
  const DirectoryLock lock(directory);
  std::vector<std::string> paths;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    if (IsRowLogName(entry->path().filename().string())) paths.push_back(entry->path().string());
  }
  if (error) throw StorageError("cannot list the storage directory " + directory, error.value());
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> problems;
  for (const std::string& path : paths) LogVerifier(path, &problems).Run();
  return problems;
}

}  // namespace oe
