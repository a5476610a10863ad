#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

namespace oe {

// Counts and logs damaged rows of a table in its pools. Thread-safe.
class Damage {
 public:
  enum class Kind {
    kQuarantined,  // the row is gone: its key has none until it is pushed again
    kRepaired,     // nothing is lost: its metadata was corrected, or it was written anew from its cached copy
    kReplaced,     // a copy from before was taken in its place
  };

  // `table`: what messages call it. `shards`: among which its keys are spread evenly. `check`: what its user
  // should check. `found`: how damage shows.
  explicit Damage(std::string table, uint32_t shards = 1,
                  std::string check = "the memory (`ndctl list --media-errors`)",
                  std::string found = "its checksum does not fit")
      : table_(std::move(table)), shards_(shards), check_(std::move(check)), found_(std::move(found)) {}

  // Before `more` rows are given up, of which a shard has `rows` with them: throws StorageError if the table
  // has lost too many for that. Training would go on with a model that is no longer the one it was.
  void RequireFew(uint64_t more, uint64_t rows) const;
  // The rows are those of a checkpoint again; what was lost before does not count.
  void Recovered() noexcept { recovered_.store(quarantined(), std::memory_order_relaxed); }

  // Counts it, and writes a line to the standard error. Lines beyond kMostLines per minute are only counted,
  // which the first line after that minute says. `where`: the file and the place in it.
  void Report(Kind kind, const std::string& what, const std::string& where) noexcept;
  // The line alone, of an error about damaged rows that nobody is there to get.
  void Say(const std::string& what) noexcept;

  uint64_t quarantined() const noexcept { return quarantined_.load(std::memory_order_relaxed); }
  uint64_t repaired() const noexcept { return repaired_.load(std::memory_order_relaxed); }
  uint64_t replaced() const noexcept { return replaced_.load(std::memory_order_relaxed); }

  static constexpr uint64_t kMostLines = 20;
  // Rows that a table may lose: a hundredth, or what one block of a drive has of the shortest rows.
  static constexpr uint64_t kMostLostOf = 100;
  static constexpr uint64_t kLeastLost = 1024;

 private:
  bool AdmitLine(uint64_t* left_out);

  const std::string table_;
  const uint32_t shards_;
  const std::string check_;
  const std::string found_;
  std::atomic<uint64_t> quarantined_{0};
  std::atomic<uint64_t> repaired_{0};
  std::atomic<uint64_t> replaced_{0};
  std::atomic<uint64_t> recovered_{0};  // of quarantined_
  std::mutex mutex_;                    // of what follows
  std::chrono::steady_clock::time_point minute_;
  uint64_t lines_ = 0;
  uint64_t left_out_ = 0;
};

}  // namespace oe
