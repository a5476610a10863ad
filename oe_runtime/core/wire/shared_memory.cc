#include "oe_runtime/core/wire/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <new>
#include <utility>

#include "oe_runtime/core/common/pages.h"

namespace oe {
namespace {

constexpr char kName[] = "oe_runtime";
constexpr char kLink[] = "/memfd:oe_runtime (deleted)";  // as /proc shows it
constexpr size_t kStep = size_t{16} << 20;  // by which the file grows, as a server maps it anew each time

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U  // Linux 6.3
#endif

File NewFile() {
  File file(::memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL));
  if (!file.ok()) file = File(::memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING));  // an older kernel
  return file;
}

}  // namespace

std::optional<Nonce> NewNonce() noexcept {
  Nonce nonce{};
  if (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) return std::nullopt;
  return nonce;
}

std::string NonceText(const Nonce& nonce) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : nonce) {
    text += kDigits[byte / 16];
    text += kDigits[byte % 16];
  }
  return text;
}

std::optional<Nonce> ParseNonce(const std::string& text) {
  Nonce nonce{};
  if (text.size() != 2 * nonce.size()) return std::nullopt;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'))) return std::nullopt;
    const int digit = c <= '9' ? c - '0' : c - 'a' + 10;
    nonce[i / 2] = static_cast<uint8_t>(nonce[i / 2] * 16 + digit);
  }
  return nonce;
}

std::shared_ptr<SharedArena> SharedArena::Create() noexcept {
  File file = NewFile();
  if (!file.ok() || ::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) return nullptr;
  void* const data = ::mmap(nullptr, kMost, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (data == MAP_FAILED) return nullptr;
  (void)::madvise(data, kMost, MADV_HUGEPAGE);  // a hint, which few systems take for such memory
  try {
    std::shared_ptr<SharedArena> arena(new SharedArena(std::move(file), static_cast<uint8_t*>(data)));
    const std::lock_guard<std::mutex> lock(arena->mutex_);
    if (!arena->Extend(kNonceBytes)) return nullptr;
    return arena;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

SharedArena::SharedArena(File file, uint8_t* data)
    : file_(std::move(file)), data_(data), process_(::getpid()) {
  free_.reserve(2);
}

SharedArena::~SharedArena() { (void)::munmap(data_, kMost); }

// Gives memory to all before `end`, and some more, now: a page that the system cannot give once it is touched
// would end the process.
bool SharedArena::Extend(size_t end) {
  if (end > kMost) return false;
  if (end <= backed_) return true;
  const size_t to = std::min(RoundUp(end, kStep), kMost);
  if (::fallocate(file_.get(), 0, static_cast<off_t>(backed_), static_cast<off_t>(to - backed_)) != 0) {
    return false;
  }
  backed_ = to;
  if (to <= size_) return true;
  const size_t before = std::max(size_, kNonceBytes);
  size_ = to;
  if (!free_.empty() && free_.back().end == before) {
    free_.back().end = to;
  } else {
    free_.push_back({before, to});
  }
  return true;
}

uint8_t* SharedArena::Take(size_t bytes) {
  if (bytes > kMost) return nullptr;
  bytes = RoundUp(std::max<size_t>(bytes, 1), kPage);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (::getpid() != process_) return nullptr;
  free_.reserve(blocks_ + 3);  // the gaps between that many blocks and around them
  const auto fits = [bytes](const Range& range) { return range.end - range.begin >= bytes; };
  auto range = std::find_if(free_.begin(), free_.end(), fits);
  size_t begin = size_;
  if (range != free_.end()) {
    begin = range->begin;
  } else if (!free_.empty() && free_.back().end == size_) {
    begin = free_.back().begin;
  }
  if (!Extend(begin + bytes)) return nullptr;
  range = std::find_if(free_.begin(), free_.end(), fits);
  range->begin += bytes;
  if (range->begin == range->end) free_.erase(range);
  ++blocks_;
  return data_ + begin;
}

void SharedArena::Give(uint8_t* block, size_t bytes) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  // A process that was forked has the same file, but not its blocks.
  if (::getpid() != process_) return;
  const auto begin = static_cast<size_t>(block - data_);
  const size_t end = begin + RoundUp(std::max<size_t>(bytes, 1), kPage);
  auto next =
      std::find_if(free_.begin(), free_.end(), [&](const Range& range) { return range.begin >= end; });
  const bool joins_next = next != free_.end() && next->begin == end;
  const bool joins_last = next != free_.begin() && (next - 1)->end == begin;
  if (joins_last && joins_next) {
    (next - 1)->end = next->end;
    free_.erase(next);
  } else if (joins_last) {
    (next - 1)->end = end;
  } else if (joins_next) {
    next->begin = begin;
  } else {
    free_.insert(next, {begin, end});  // there is room: see Take
  }
  --blocks_;
  const Range& last = free_.back();
  if (last.end != size_ || backed_ < last.begin + kMostSpare) return;
  const auto spare = static_cast<off_t>(backed_ - last.begin);
  const auto at = static_cast<off_t>(last.begin);
  if (::fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, spare) == 0) {
    backed_ = last.begin;
  }
}

size_t SharedArena::size() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return size_;
}

std::optional<uint64_t> SharedArena::PlaceOf(const void* data) const {
  const std::less<const uint8_t*> before;
  const auto* byte = static_cast<const uint8_t*>(data);
  if (before(byte, data_) || !before(byte, data_ + kMost)) return std::nullopt;
  return static_cast<uint64_t>(byte - data_);
}

ShareRequest SharedArena::Show(size_t connection, const Nonce& nonce) {
  const size_t at = connection * sizeof(Nonce);
  std::memcpy(data_ + at, nonce.data(), sizeof(Nonce));
  return {static_cast<uint32_t>(process_), static_cast<uint32_t>(file_.get()), size(), at};
}

std::unique_ptr<SharedMapping> SharedMapping::Open(const ShareRequest& request, const Nonce& nonce) {
  if (request.size < kNonceBytes || request.size > SharedArena::kMost) return nullptr;
  if (request.nonce_at > kNonceBytes - sizeof(Nonce)) return nullptr;
  const std::string path = "/proc/" + std::to_string(request.process) + "/fd/" + std::to_string(request.file);
  // Nothing but such memory is opened: to open a device can do things.
  std::array<char, sizeof kLink> link{};
  const ssize_t length = ::readlink(path.c_str(), link.data(), link.size());
  if (length != sizeof kLink - 1 || std::memcmp(link.data(), kLink, sizeof kLink - 1) != 0) return nullptr;
  const File file(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file.ok()) return nullptr;
  // Sealed, so that what is looked at now stays so.
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  struct stat status{};
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(file.get(), &status) != 0) return nullptr;
  if (static_cast<uint64_t>(status.st_size) < request.size) return nullptr;
  void* const data =
      ::mmap(nullptr, request.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file.get(), 0);
  if (data == MAP_FAILED) return nullptr;
  (void)::madvise(data, request.size, MADV_HUGEPAGE);
  std::unique_ptr<SharedMapping> mapping(new SharedMapping(static_cast<std::byte*>(data), request.size));
  Nonce found{};
  std::memcpy(found.data(), mapping->data() + request.nonce_at, found.size());
  return found == nonce ? std::move(mapping) : nullptr;
}

SharedMapping::~SharedMapping() { (void)::munmap(data_, size_); }

}  // namespace oe
