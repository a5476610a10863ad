// The servers' disks: which of their bytes a power cut leaves.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace sim {

struct DiskPolicy {
  bool persistent = false;  // pools lie in persistent memory; else in the page cache
  uint64_t sync = 0;        // most nanoseconds of a sync
  uint64_t fence = 0;       // most nanoseconds of a fence of persistent memory
};

void SetDiskPolicy(const DiskPolicy& policy);

enum class Trouble {
  kFull,     // no file grows
  kFailing,  // one in eight reads, writes and syncs fails
  kLying,    // syncs say that they are done, and do nothing
  kSlow,     // syncs take up to ten seconds
};
// Of the disk of a host, and of the job's files as that host writes them, until then.
void TroubleDisk(int host, Trouble trouble, uint64_t until);
void HealDisks();
bool HasTrouble(int host);
// Whether any disk had been in trouble.
bool DisksHadTrouble();
// Whether a power cut came after a sync that was a lie: nothing that was synced need be there.
bool DisksLost();
// What servers have said of their rows, since the run began or ForgetRemovals(). Their statistics say so too,
// beside figures of this machine, which are not the same in each run of a seed.
// Whether one has removed the damaged row of a key, or, of more damaged rows than it names, perhaps this one.
bool RowWasRemoved(const std::string& table, uint64_t key);
// Whether one has lost what the table's admission filter had counted.
bool CountsWereLost(const std::string& table);
void ForgetRemovals();
// The error of a write to a file that is on no simulated disk; 0: none.
int WriteError();

// Renames the directory of a server that was killed, for the next one.
void ReleaseDisk(const std::filesystem::path& from, const std::filesystem::path& to);
// Copies the directory of a server whose host lost power, for the next one: what was synced, and of
// everything else an arbitrary subset: words of persistent memory, sectors of other files, names whose
// directory was not synced.
void CopyDiskAfterCut(const std::filesystem::path& from, const std::filesystem::path& to);
// The directory is on such a disk from now on.
void AddDisk(const std::filesystem::path& directory);

// Returns when the process is about to write to its disk, or only to sync, for the `steps`-th time from now,
// or at `until`.
void AwaitWrites(int process, bool syncs, uint64_t steps, uint64_t until);

}  // namespace sim
