#include "oe_runtime/core/storage/memory_error.h"

#include <signal.h>  // NOLINT(modernize-deprecated-headers): sigaction is not in <csignal>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string_view>

namespace oe {
namespace {

// One that the handler, which may take no lock and free no memory, can walk: entries are used again, never
// freed.
struct Mapping {
  std::atomic<const std::byte*> data{nullptr};  // null: free
  std::atomic<size_t> size{0};
  std::array<char, 512> path{};
  Mapping* next = nullptr;
};

std::mutex changes;  // of those who change known_mappings
std::atomic<Mapping*> known_mappings{nullptr};

// Text for the handler: no memory, no locale.
class Line {
 public:
  Line& operator<<(std::string_view text) {
    const size_t size = std::min(text.size(), text_.size() - size_);
    std::memcpy(text_.data() + size_, text.data(), size);
    size_ += size;
    return *this;
  }
  Line& operator<<(uint64_t number) {
    std::array<char, 20> digits;
    size_t begin = digits.size();
    do {
      digits[--begin] = static_cast<char>('0' + number % 10);
      number /= 10;
    } while (number > 0);
    return *this << std::string_view(digits.data() + begin, digits.size() - begin);
  }
  void Write() const { (void)!::write(STDERR_FILENO, text_.data(), size_); }

 private:
  std::array<char, 1200> text_;
  size_t size_ = 0;
};

void OnBus(int number, siginfo_t* info, void* /*context*/) {
  const auto* address = static_cast<const std::byte*>(info->si_addr);
  Line line;
  const Mapping* found = nullptr;
  for (const Mapping* m = known_mappings.load(std::memory_order_acquire); m != nullptr; m = m->next) {
    const std::byte* data = m->data.load(std::memory_order_acquire);
    if (data != nullptr && address >= data && address < data + m->size.load(std::memory_order_relaxed)) {
      found = m;
    }
  }
  if (found == nullptr) {
    line << "error: memory that the device cannot give back (SIGBUS), in none of the pool files\n";
  } else {
    line << "error: " << found->path.data() << " cannot be read at byte "
         << static_cast<uint64_t>(address - found->data.load(std::memory_order_relaxed))
         << (info->si_code == BUS_ADRERR
                 ? " (SIGBUS): the file was cut short, or its device fails; see the kernel's log"
                 : " (SIGBUS): the memory there is bad; `ndctl list --media-errors` and the kernel's log "
                   "name it")
         << ". Move the pool away, or start fresh (--storage-fresh), and restore from a checkpoint\n";
  }
  line.Write();
  (void)::signal(number, SIG_DFL);  // the load is tried again, and ends the process
}

}  // namespace

void NoteMapping(const std::byte* data, size_t size, const std::string& path) {
  const std::lock_guard<std::mutex> lock(changes);
  Mapping* mapping = known_mappings.load(std::memory_order_relaxed);
  while (mapping != nullptr && mapping->data.load(std::memory_order_relaxed) != nullptr)
    mapping = mapping->next;
  const bool fresh = mapping == nullptr;
  if (fresh) mapping = new Mapping;
  const size_t length = std::min(path.size(), mapping->path.size() - 1);
  std::memcpy(mapping->path.data(), path.data(), length);
  mapping->path[length] = '\0';
  mapping->size.store(size, std::memory_order_relaxed);
  mapping->data.store(data, std::memory_order_release);
  if (fresh) {
    mapping->next = known_mappings.load(std::memory_order_relaxed);
    known_mappings.store(mapping, std::memory_order_release);
  }
}

void ForgetMapping(const std::byte* data) noexcept {
  const std::lock_guard<std::mutex> lock(changes);
  for (Mapping* m = known_mappings.load(std::memory_order_relaxed); m != nullptr; m = m->next) {
    if (m->data.load(std::memory_order_relaxed) == data) m->data.store(nullptr, std::memory_order_release);
  }
}

void ReportMemoryErrors() {
  struct sigaction action{};
  action.sa_sigaction = OnBus;
  action.sa_flags = SA_SIGINFO;
  (void)::sigemptyset(&action.sa_mask);
  (void)::sigaction(SIGBUS, &action, nullptr);
}

}  // namespace oe
