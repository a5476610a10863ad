#include "tests/simulation/disk.h"

#include <fcntl.h>
#include <libpmem.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/common/file.h"
#include "tests/simulation/processes.h"
#include "tests/simulation/real.h"
#include "tests/simulation/scheduler.h"

namespace sim {
namespace {

namespace fs = std::filesystem;

constexpr size_t kLine = 64;
constexpr size_t kWord = 8;
constexpr size_t kSector = 512;
constexpr size_t kPage = 4096;

// A line of persistent memory that was flushed and not fenced, as it was then.
struct Flushed {
  uint64_t file;
  size_t offset;
  std::array<char, kLine> bytes;
};

struct DiskFile {
  std::string durable;
  std::vector<std::pair<size_t, size_t>> written;  // begin and end, since the last sync
  bool mapped = false;
  int host = 0;
};

struct Mapping {
  size_t size = 0;
  uint64_t file = 0;
};

using Names = std::map<std::string, uint64_t>;  // and what file each is

struct Ill {
  Trouble trouble;
  uint64_t until;
};

struct Cut {
  bool syncs = false;
  int process = -1;
  uint64_t steps = 0;  // left
};

struct Disks {
  DiskPolicy policy;
  Random random{Seed() ^ 0x6469736b};
  std::map<uint64_t, DiskFile> files;     // by inode
  std::map<uint64_t, Names> directories;  // by inode: names that are durable
  std::map<const char*, Mapping> mappings;
  std::map<int, std::vector<Flushed>> flushed;  // by task
  std::map<int, Ill> ill;                       // by host
  bool had_trouble = false;
  bool lied = false;
  bool lost = false;
  std::set<std::pair<std::string, uint64_t>> removed;  // rows, by table and key
  std::set<std::string> unnamed;                       // tables that have more damaged rows than were named
  std::set<std::string> without_counts;                // tables
  Cut cut;
};

Disks& All() {
  static Disks* disks = nullptr;
  if (disks == nullptr) disks = new Disks;
  return *disks;
}

uint64_t InodeOf(const fs::path& path) {
  struct stat there{};
  return ::stat(path.c_str(), &there) == 0 ? there.st_ino : 0;
}

std::string BytesOf(const fs::path& path) {
  std::string bytes(fs::file_size(path), '\0');
  std::ifstream(path, std::ios::binary).read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

Names NamesIn(const fs::path& directory) {
  Names names;
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.path().filename() == "oe.lock") continue;
    if (entry.is_directory()) continue;
    names[entry.path().filename().string()] = InodeOf(entry.path());
  }
  return names;
}

// A point at which the power may go: before a write, or before a sync.
void Step(bool sync = false) {
  Cut& cut = All().cut;
  YieldAtLock();
  if (cut.process != Current()->process || cut.steps == 0 || (cut.syncs && !sync)) return;
  if (--cut.steps == 0) Block("the end of the power", nullptr, nullptr, Now() + kMillisecond);
}

bool Is(int host, Trouble trouble) {
  const auto found = All().ill.find(host);
  return found != All().ill.end() && found->second.trouble == trouble && Now() < found->second.until;
}

int Host() { return HostOf(Current()->process); }

// By chance, an error of a failing disk.
bool Fails(int host = Host()) {
  if (!Is(host, Trouble::kFailing) || !All().random.OneIn(8)) return false;
  errno = EIO;
  return true;
}

bool IsFull() {
  if (!Is(Host(), Trouble::kFull)) return false;
  errno = ENOSPC;
  return true;
}

// A sync or fence that says that it is done.
bool Lies() {
  if (!Is(Host(), Trouble::kLying)) return false;
  All().lied = true;
  return true;
}

void Take(uint64_t most) {
  if (Is(Host(), Trouble::kSlow)) most = 10 * kSecond;
  if (most > 0) Block("a disk", nullptr, nullptr, Now() + All().random.Below(most));
}

// Makes the bytes of a file durable as they are.
void Persist(DiskFile* file, int descriptor, size_t begin, size_t end, size_t size) {
  file->durable.resize(std::max(size, file->durable.size()));
  end = std::min(end, size);
  if (begin >= end) return;
  RealSyscall(SYS_pread64, descriptor, reinterpret_cast<long>(&file->durable[begin]),
              static_cast<long>(end - begin), static_cast<long>(begin));
}

Mapping* Find(const char* address, const char** begin) {
  auto& mappings = All().mappings;
  auto found = mappings.upper_bound(address);
  if (found == mappings.begin()) return nullptr;
  --found;
  *begin = found->first;
  return address < found->first + found->second.size ? &found->second : nullptr;
}

// Nobody asked for it: a line leaves the cache at any time.
void WriteBack(const char* begin, const Mapping& mapping) {
  Random& random = All().random;
  if (!random.OneIn(4)) return;
  const size_t at = random.Below(mapping.size / kLine) * kLine;
  const size_t size = std::min(mapping.size - at, random.Below(16) * kLine);
  std::memcpy(&All().files[mapping.file].durable[at], begin + at, size);
}

bool Keeps(uint64_t kind) {
  Random& random = All().random;
  if (kind == 0) return false;  // nothing that was not synced
  if (kind == 1) return !random.OneIn(16);
  if (kind == 2) return random.OneIn(16);
  return random.OneIn(2);
}

// What of a file a power cut leaves, whose bytes are `live` if it has a name.
std::string AfterCut(uint64_t inode, std::string live, bool named, uint64_t kind) {
  const DiskFile& file = All().files[inode];
  std::string left = file.durable;
  const size_t grain = All().policy.persistent && file.mapped ? kWord : kSector;
  for (const auto& [task, lines] : All().flushed) {
    for (const Flushed& line : lines) {
      if (line.file != inode) continue;
      for (size_t at = 0; at < kLine; at += kWord) {
        if (Keeps(kind)) std::memcpy(&left[line.offset + at], &line.bytes[at], kWord);
      }
    }
  }
  if (!named) return left;
  if (live.size() != left.size() && Keeps(kind)) left.resize(live.size());
  live.resize(left.size());
  for (size_t at = 0; at < left.size(); at += grain) {
    const size_t size = std::min(grain, left.size() - at);
    if (std::memcmp(&left[at], &live[at], size) != 0 && Keeps(kind)) std::memcpy(&left[at], &live[at], size);
  }
  return left;
}

// What the core says of damaged rows, a table and a key in each line.
void NoteRemovals(const char* text) {
  std::stringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t begin = line.find("table '") + 7;
    const size_t end = line.find('\'', begin);
    if (begin < 7 || end == std::string::npos) continue;
    const std::string table = line.substr(begin, end - begin);
    const auto says = [&](const char* words) { return line.find(words, end) != std::string::npos; };
    const size_t key = line.find("key ", end);
    if (says("begins anew when it is pushed") && key != std::string::npos) {
      All().removed.emplace(table, std::strtoull(&line[key + 4], nullptr, 10));
    } else if (says("more damaged rows were not named") || says("rows are damaged")) {
      All().unnamed.insert(table);
    } else if (says("counting begins at zero")) {
      All().without_counts.insert(table);
    }
  }
}

uint64_t Write(const fs::path& path, const std::string& bytes) {
  const oe::File file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file.ok() || ::ftruncate(file.get(), static_cast<off_t>(bytes.size())) != 0)
    FailRun("cannot copy " + path.string() + ": " + std::strerror(errno));
  static const std::string zeros(kPage, '\0');  // holes, as most of a pool is
  for (size_t at = 0; at < bytes.size(); at += kPage) {
    const size_t size = std::min(kPage, bytes.size() - at);
    if (std::memcmp(&bytes[at], zeros.data(), size) == 0) continue;
    if (RealSyscall(SYS_pwrite64, file.get(), reinterpret_cast<long>(&bytes[at]), static_cast<long>(size),
                    static_cast<long>(at)) != static_cast<long>(size))
      FailRun("cannot copy " + path.string() + ": " + std::strerror(errno));
  }
  return InodeOf(path);
}

void CopyAfterCut(const fs::path& from, const fs::path& to, const Names& live, const Names& durable) {
  const uint64_t kind = All().random.Below(4);
  std::set<std::string> all;
  for (const Names& names : {live, durable}) {
    for (const auto& [name, inode] : names) all.insert(name);
  }
  for (const std::string& name : all) {
    const auto in_live = live.find(name);
    const auto in_durable = durable.find(name);
    const bool same =
        in_live != live.end() && in_durable != durable.end() && in_live->second == in_durable->second;
    const bool new_name = same || Keeps(kind);
    const auto chosen = new_name ? in_live : in_durable;
    if (chosen == (new_name ? live.end() : durable.end())) continue;
    const auto named = std::find_if(live.begin(), live.end(),
                                    [&](const auto& item) { return item.second == chosen->second; });
    const bool is_named = named != live.end();
    const std::string bytes = is_named ? BytesOf(from / named->first) : "";
    const std::string left = AfterCut(chosen->second, bytes, is_named, kind);
    All().files[Write(to / name, left)].durable = left;
  }
  AddDisk(to);
}

}  // namespace

void SetDiskPolicy(const DiskPolicy& policy) { All().policy = policy; }

void TroubleDisk(int host, Trouble trouble, uint64_t until) {
  All().ill[host] = {trouble, until};
  All().had_trouble = true;
}

void HealDisks() { All().ill.clear(); }

bool HasTrouble(int host) {
  const auto found = All().ill.find(host);
  return found != All().ill.end() && Now() < found->second.until;
}

bool DisksHadTrouble() { return All().had_trouble; }

bool DisksLost() { return All().lost; }

bool RowWasRemoved(const std::string& table, uint64_t key) {
  return All().removed.count({table, key}) + All().unnamed.count(table) > 0;
}

bool CountsWereLost(const std::string& table) { return All().without_counts.count(table) > 0; }

void ForgetRemovals() {
  All().removed.clear();
  All().unnamed.clear();
  All().without_counts.clear();
}

int WriteError() { return IsFull() || Fails() ? errno : 0; }

void AddDisk(const fs::path& directory) { All().directories[InodeOf(directory)] = NamesIn(directory); }

// The threads of the process before are frozen with its files open and its lock held. What it has flushed and
// not fenced is durable by the time of a later power cut.
void ReleaseDisk(const fs::path& from, const fs::path& to) {
  fs::rename(from, to);
  std::set<uint64_t> inodes;
  for (const auto& entry : fs::recursive_directory_iterator(to)) {
    inodes.insert(InodeOf(entry.path()));
    if (entry.path().filename() == "oe.lock") (void)::unlink(entry.path().c_str());
  }
  for (auto& [task, lines] : All().flushed) {
    for (const Flushed& line : lines) {
      if (inodes.count(line.file) > 0)
        std::memcpy(&All().files[line.file].durable[line.offset], line.bytes.data(), kLine);
    }
    lines.erase(std::remove_if(lines.begin(), lines.end(),
                               [&](const Flushed& line) { return inodes.count(line.file) > 0; }),
                lines.end());
  }
}

void CopyDiskAfterCut(const fs::path& from, const fs::path& to) {
  All().lost = All().lost || All().lied;
  fs::create_directory(to);
  for (const auto& entry : fs::directory_iterator(from)) {
    if (entry.is_directory()) CopyDiskAfterCut(entry.path(), to / entry.path().filename());
  }
  const Names live = NamesIn(from);
  const Names& durable = All().directories[InodeOf(from)];
  CopyAfterCut(from, to, live, durable);
  for (const Names& names : {live, durable}) {
    for (const auto& [name, inode] : names) All().files.erase(inode);
  }
}

void AwaitWrites(int process, bool syncs, uint64_t steps, uint64_t until) {
  All().cut = {syncs, process, steps};
  Block("a write to a disk", nullptr, [] { return All().cut.steps == 0; }, until);
  All().cut = {};
}

}  // namespace sim

using sim::All;
using sim::Current;

extern "C" {

// oe::Damage says so what it removes.
int fputs(const char* text, FILE* file) {
  if (Current() != nullptr) sim::NoteRemovals(text);
  return SIM_REAL(fputs)(text, file);
}

ssize_t pwrite(int descriptor, const void* bytes, size_t size, off_t offset) {
  if (Current() != nullptr) {
    sim::Step();
    struct stat before{};
    const bool grows =
        ::fstat(descriptor, &before) == 0 && offset + static_cast<off_t>(size) > before.st_size;
    if (sim::Fails() || (grows && sim::IsFull())) return -1;
  }
  const long put = sim::RealSyscall(SYS_pwrite64, descriptor, reinterpret_cast<long>(bytes),
                                    static_cast<long>(size), offset);
  struct stat there{};
  if (Current() == nullptr || put <= 0 || ::fstat(descriptor, &there) != 0) return put;
  sim::DiskFile& file = All().files[there.st_ino];
  file.host = sim::Host();
  file.written.emplace_back(offset, offset + put);
  return put;
}

// Threads of any process read logs.
ssize_t pread(int descriptor, void* bytes, size_t size, off_t offset) {
  struct stat there{};
  if (Current() != nullptr && All().had_trouble && ::fstat(descriptor, &there) == 0) {
    const auto found = All().files.find(there.st_ino);
    if (found != All().files.end() && sim::Fails(found->second.host)) return -1;
  }
  return sim::RealSyscall(SYS_pread64, descriptor, reinterpret_cast<long>(bytes), static_cast<long>(size),
                          offset);
}

int fallocate(int descriptor, int mode, off_t offset, off_t size) {
  if (Current() != nullptr && mode == 0 && (sim::IsFull() || sim::Fails())) return -1;
  const auto result = static_cast<int>(sim::RealSyscall(SYS_fallocate, descriptor, mode, offset, size));
  struct stat there{};
  if (Current() == nullptr || result != 0 || ::fstat(descriptor, &there) != 0) return result;
  const auto found = All().files.find(there.st_ino);
  if (found != All().files.end()) found->second.written.emplace_back(offset, offset + size);
  return result;
}

int fdatasync(int descriptor) {
  if (Current() == nullptr) return static_cast<int>(sim::RealSyscall(SYS_fdatasync, descriptor));
  sim::Step(true);
  struct stat there{};
  (void)::fstat(descriptor, &there);
  const auto found = All().files.find(there.st_ino);
  if (sim::Fails()) {
    // The pages count as clean from then on, so no later sync writes them (Rebello et al., ATC 2020).
    if (found != All().files.end()) found->second.written.clear();
    errno = EIO;
    return -1;
  }
  // What is written while the sync takes its time need not be in it.
  if (found != All().files.end() && !sim::Lies()) {
    sim::DiskFile& file = found->second;
    const auto size = static_cast<size_t>(there.st_size);
    file.durable.resize(size);
    for (const auto& [begin, end] : std::exchange(file.written, {}))
      sim::Persist(&file, descriptor, begin, end, size);
  }
  sim::Take(All().policy.sync);
  return 0;
}

int fsync(int descriptor) {
  if (Current() == nullptr) return static_cast<int>(sim::RealSyscall(SYS_fsync, descriptor));
  struct stat there{};
  (void)::fstat(descriptor, &there);
  if (!S_ISDIR(there.st_mode)) return fdatasync(descriptor);
  sim::Step(true);
  if (sim::Fails()) return -1;
  if (sim::Lies()) return 0;
  std::array<char, 64> path{};
  std::snprintf(path.data(), path.size(), "/proc/self/fd/%d", descriptor);
  const std::filesystem::path real = std::filesystem::read_symlink(path.data());
  if (real.string().find("/servers/") == std::string::npos) return 0;  // of the job
  sim::Names& names = All().directories[there.st_ino] = sim::NamesIn(real);
  for (const auto& [name, inode] : names) {
    sim::DiskFile& file = All().files[inode];
    file.durable.resize(std::max<size_t>(file.durable.size(), std::filesystem::file_size(real / name)));
  }
  sim::Take(All().policy.sync);
  return 0;
}

// As libpmem does for the flags that the core gives.
void* pmem_map_file(const char* path, size_t size, int flags, mode_t mode, size_t* mapped, int* is_pmem) {
  const bool create = (flags & PMEM_FILE_CREATE) != 0;
  if (create && sim::IsFull()) return nullptr;
  const oe::File file(::open(path, O_RDWR | O_CLOEXEC | (create ? O_CREAT | O_EXCL : 0), mode));
  if (!file.ok()) return nullptr;
  if (create && ::fallocate(file.get(), 0, 0, static_cast<off_t>(size)) != 0) {
    const int error = errno;
    (void)::unlink(path);
    errno = error;
    return nullptr;
  }
  struct stat there{};
  if (::fstat(file.get(), &there) != 0) return nullptr;
  *mapped = static_cast<size_t>(there.st_size);
  void* const data = ::mmap(nullptr, *mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (data == MAP_FAILED) return nullptr;
  *is_pmem = All().policy.persistent ? 1 : 0;
  All().mappings[static_cast<char*>(data)] = {*mapped, there.st_ino};
  sim::DiskFile& known = All().files[there.st_ino];
  known.mapped = true;
  known.host = sim::Host();
  known.durable.resize(std::max(known.durable.size(), *mapped));
  return data;
}

int pmem_unmap(void* data, size_t size) {
  All().mappings.erase(static_cast<char*>(data));
  return ::munmap(data, size);
}

void pmem_flush(const void* data, size_t size) {
  sim::Step();
  const char* begin = nullptr;
  const auto* const mapping = sim::Find(static_cast<const char*>(data), &begin);
  if (mapping == nullptr) return;
  const auto offset = static_cast<size_t>(static_cast<const char*>(data) - begin);
  for (size_t at = offset / sim::kLine * sim::kLine; at < offset + size; at += sim::kLine) {
    sim::Flushed& line = All().flushed[Current()->id].emplace_back();
    line.file = mapping->file;
    line.offset = at;
    std::memcpy(line.bytes.data(), begin + at, sim::kLine);
  }
  sim::WriteBack(begin, *mapping);
}

void pmem_drain() {
  sim::Step(true);
  for (const sim::Flushed& line : std::exchange(All().flushed[Current()->id], {}))
    if (!sim::Lies())
      std::memcpy(&All().files[line.file].durable[line.offset], line.bytes.data(), sim::kLine);
  sim::Take(All().policy.fence);
}

int pmem_msync(const void* data, size_t size) {
  sim::Step(true);
  if (sim::Fails()) return -1;
  if (sim::Lies()) return 0;
  const char* begin = nullptr;
  const auto* const mapping = sim::Find(static_cast<const char*>(data), &begin);
  if (mapping == nullptr) return 0;
  const auto offset = static_cast<size_t>(static_cast<const char*>(data) - begin);
  const size_t first = offset / sim::kPage * sim::kPage;
  const size_t last = std::min(mapping->size, (offset + size + sim::kPage - 1) / sim::kPage * sim::kPage);
  std::memcpy(&All().files[mapping->file].durable[first], begin + first, last - first);
  sim::WriteBack(begin, *mapping);
  sim::Take(All().policy.sync);
  return 0;
}

}  // extern "C"
