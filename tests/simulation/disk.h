// The servers' disks: which of their bytes a power cut leaves.
#pragma once

#include <cstdint>
#include <filesystem>

namespace sim {

struct DiskPolicy {
  bool persistent = false;  // pools lie in persistent memory; else in the page cache
  uint64_t sync = 0;        // most nanoseconds of a sync
  uint64_t fence = 0;       // most nanoseconds of a fence of persistent memory
};

void SetDiskPolicy(const DiskPolicy& policy);

// Copies the directory of a server that has ended, for the next one. After a power cut the copy has what was
// synced, and of everything else an arbitrary subset: words of persistent memory, sectors of other files,
// names whose directory was not synced.
void CopyDisk(const std::filesystem::path& from, const std::filesystem::path& to, bool power_cut);
// The directory is on such a disk from now on.
void AddDisk(const std::filesystem::path& directory);

// Returns when the process is about to write to its disk for the `steps`-th time from now, or at `until`.
void AwaitWrites(int process, uint64_t steps, uint64_t until);

}  // namespace sim
