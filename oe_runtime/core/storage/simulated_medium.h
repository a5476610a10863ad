#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/storage/medium.h"

namespace oe {

// For tests only. Persistent memory with a power switch: what a program stores lies in a copy ("cache"), and
// reaches the medium when a fence follows a flush, or at any time before, line by line, by chance. A power
// cut keeps an arbitrary subset of all 8-byte words that were stored and not fenced. One thread.
class SimulatedMedium final : public Medium {
 public:
  struct Crash {};  // no std::exception: the code under test must not catch it

  explicit SimulatedMedium(uint64_t seed) : random_(seed) {}

  // Called at every store, flush and fence that goes through a Flusher, before it.
  std::function<void()> on_step;
  uint64_t capacity = UINT64_MAX;

  // One step: here the power may go, and lines may be written back.
  void Step() {
    if (crashed_) throw Crash{};  // NOLINT(bugprone-std-exception-baseclass)
    if (steps_left_ == 0) {
      crashed_ = true;
      throw Crash{};  // NOLINT(bugprone-std-exception-baseclass)
    }
    --steps_left_;
    if (random_() % 4 == 0) WriteBack();
    if (on_step) on_step();
  }
  // The Step() after `steps` more throws Crash, and nothing is stored any more.
  void CrashAfter(uint64_t steps) { steps_left_ = steps; }
  uint64_t steps_left() const { return steps_left_; }

  // What the next process finds. After a power cut that is the medium; a process that was killed leaves what
  // it had stored to be read, and not yet durable.
  void Restart(bool power_cut) {
    const uint64_t kind = random_() % 4;
    for (auto& [name, file] : files_) {
      if (power_cut) {
        for (const Flushed& line : file.flushed) {
          for (size_t word = 0; word < kLineWords; ++word) {
            if (Keeps(kind)) file.medium[line.offset + word] = line.words[word];
          }
        }
        for (size_t word = 0; word < file.cache.size(); ++word) {
          if (file.cache[word] != file.medium[word] && Keeps(kind)) file.medium[word] = file.cache[word];
        }
        file.cache = file.medium;
      }
      file.flushed.clear();
    }
    crashed_ = false;
    steps_left_ = UINT64_MAX;
  }

  Region Create(const std::string& name, size_t least, size_t wanted, const std::string& owner) override {
    Step();
    const uint64_t left = Room();
    if (least > left) throw StorageFull("the simulated medium is full for '" + owner + "'");
    const size_t bytes = std::min<uint64_t>({wanted, left / 4096 * 4096, std::max(least, largest_)});
    File& file = files_[name];
    Step();
    file.cache.assign(bytes / sizeof(uint64_t), 0);
    file.medium = file.cache;
    Step();
    return Open(name);
  }
  size_t SizeOf(const std::string& name) const override {
    return files_.at(name).cache.size() * sizeof(uint64_t);
  }
  Region Open(const std::string& name) override {
    File& file = files_.at(name);
    Region region{name, name};
    region.data = reinterpret_cast<std::byte*>(file.cache.data());
    region.size = file.cache.size() * sizeof(uint64_t);
    return region;
  }
  void Close(const Region& /*region*/) noexcept override {}
  void Remove(const std::string& name) override {
    if (!crashed_) files_.erase(name);
  }
  uint64_t Room() const noexcept override {
    const uint64_t used = Used();
    return capacity > used ? capacity - used : 0;
  }
  std::vector<std::string> List() const override {
    std::vector<std::string> names;
    names.reserve(files_.size());
    for (const auto& [name, file] : files_) names.push_back(name);
    return names;
  }
  std::string PathOf(const std::string& name) const override { return name; }

  std::unique_ptr<Flusher> NewFlusher() override { return std::make_unique<SimulatedFlusher>(this); }

  // Flips a bit behind the program's back, of the medium and so of what it reads.
  void Flip(const void* address, int bit) {
    const auto* at = static_cast<const std::byte*>(address);
    for (auto& [name, file] : files_) {
      auto* begin = reinterpret_cast<std::byte*>(file.cache.data());
      if (at < begin || at >= begin + file.cache.size() * sizeof(uint64_t)) continue;
      auto* medium = reinterpret_cast<std::byte*>(file.medium.data());
      begin[at - begin] ^= std::byte{1} << bit;
      medium[at - begin] ^= std::byte{1} << bit;
      return;
    }
    throw StorageError("a flip outside of the medium");
  }

  // Segments are at most about this large.
  void set_largest(size_t bytes) { largest_ = bytes; }

 private:
  static constexpr size_t kLineBytes = 64;
  static constexpr size_t kLineWords = kLineBytes / sizeof(uint64_t);

  // A line that was flushed and not fenced, as it was then.
  struct Flushed {
    uint64_t flusher;
    size_t offset;  // of its first word
    std::array<uint64_t, kLineWords> words;
  };
  struct File {
    std::vector<uint64_t> cache;
    std::vector<uint64_t> medium;
    std::vector<Flushed> flushed;  // in the order of the flushes, which a seed repeats
  };

  class SimulatedFlusher final : public Flusher {
   public:
    explicit SimulatedFlusher(SimulatedMedium* medium) : medium_(medium), number_(++medium->flushers_) {}
    void Store(uint64_t* word, uint64_t value) override {
      medium_->Step();
      *word = value;
    }
    void Flush(const void* data, size_t size) override {
      medium_->Step();
      medium_->FlushLines(number_, static_cast<const std::byte*>(data), size);
    }
    void Fence() override {
      medium_->Step();
      medium_->FenceAll(number_);
    }

   private:
    SimulatedMedium* const medium_;
    const uint64_t number_;
  };

  uint64_t Used() const noexcept {
    uint64_t used = 0;
    for (const auto& [name, file] : files_) used += file.cache.size() * sizeof(uint64_t);
    return used;
  }

  bool Keeps(uint64_t kind) {
    if (kind == 0) return false;  // nothing that was not fenced
    if (kind == 1) return random_() % 16 != 0;
    if (kind == 2) return random_() % 16 == 0;
    return random_() % 2 == 0;
  }

  void FlushLines(uint64_t flusher, const std::byte* data, size_t size) {
    for (auto& [name, file] : files_) {
      const auto* begin = reinterpret_cast<const std::byte*>(file.cache.data());
      if (data < begin || data >= begin + file.cache.size() * sizeof(uint64_t)) continue;
      const auto first = static_cast<size_t>(data - begin) / kLineBytes;
      const auto last = (static_cast<size_t>(data - begin) + size - 1) / kLineBytes;
      for (size_t line = first; line <= last; ++line) {
        Flushed& flushed = file.flushed.emplace_back();
        flushed.flusher = flusher;
        flushed.offset = line * kLineWords;
        std::memcpy(flushed.words.data(), &file.cache[line * kLineWords], kLineBytes);
      }
      return;
    }
    throw StorageError("a flush outside of the medium");
  }

  void FenceAll(uint64_t flusher) {
    for (auto& entry : files_) {
      File& file = entry.second;
      const auto is_fenced = [&](const Flushed& line) {
        if (line.flusher != flusher) return false;
        std::memcpy(&file.medium[line.offset], line.words.data(), kLineBytes);
        return true;
      };
      file.flushed.erase(std::remove_if(file.flushed.begin(), file.flushed.end(), is_fenced),
                         file.flushed.end());
    }
  }

  // Writes a few words back that nobody asked for.
  void WriteBack() {
    if (files_.empty()) return;
    auto file = files_.begin();
    std::advance(file, random_() % files_.size());
    const size_t lines = file->second.cache.size() / kLineWords;
    if (lines == 0) return;
    const size_t first = random_() % lines;
    const size_t last = std::min(lines, first + random_() % 16);
    for (size_t word = first * kLineWords; word < last * kLineWords; ++word) {
      file->second.medium[word] = file->second.cache[word];
    }
  }

  std::mt19937_64 random_;
  std::map<std::string, File> files_;
  uint64_t flushers_ = 0;  // so far
  uint64_t steps_left_ = UINT64_MAX;
  bool crashed_ = false;
  size_t largest_ = size_t{64} << 10;
};

}  // namespace oe
