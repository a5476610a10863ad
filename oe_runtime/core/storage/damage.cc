#include "oe_runtime/core/storage/damage.h"

#include <algorithm>
#include <cstdio>
#include <exception>

#include "oe_runtime/core/common/error.h"

namespace oe {

void Damage::RequireFew(uint64_t more, uint64_t rows) const {
  const uint64_t lost = quarantined() - recovered_.load(std::memory_order_relaxed);
  const uint64_t all = rows * shards_;
  if (lost + more <= std::max(kLeastLost, all / kMostLostOf)) return;
  throw StorageError(table_ + ": too many rows are damaged: " + std::to_string(lost) + " of about " +
                     std::to_string(all) + " were removed, and of " + std::to_string(more) + " more " +
                     found_ + "; none of these was given up. Check " + check_ +
                     ", then go back to an earlier checkpoint, or restore the table from files");
}

// Whether a line may be written now. `left_out`: how many were not, before this one.
bool Damage::AdmitLine(uint64_t* left_out) {
  const auto now = std::chrono::steady_clock::now();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (lines_ == 0 || now - minute_ >= std::chrono::minutes(1)) {
    minute_ = now;
    lines_ = 0;
    *left_out = std::exchange(left_out_, 0);
  }
  if (lines_ == kMostLines) {
    ++left_out_;
    return false;
  }
  ++lines_;
  return true;
}

void Damage::Report(Kind kind, const std::string& what, const std::string& where) noexcept {
  std::atomic<uint64_t>& count = kind == Kind::kQuarantined ? quarantined_
                                 : kind == Kind::kRepaired  ? repaired_
                                                            : replaced_;
  count.fetch_add(1, std::memory_order_relaxed);
  try {
    std::string line = table_ + ": " + what + " is damaged: " + found_ + ", " + where;
    switch (kind) {
      case Kind::kQuarantined:
        line += "; it was removed, and begins anew when it is pushed. Check " + check_ +
                ", and go back to an earlier checkpoint if too many are lost";
        break;
      case Kind::kRepaired:
        line += "; it was repaired, and nothing is lost. Check " + check_;
        break;
      case Kind::kReplaced:
        line +=
            "; the copy before it was taken, as after a power cut. Without a power cut, the newest "
            "checkpoint may be lost: check " +
            check_;
        break;
    }
    Say(line);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): it is counted
  }
}

void Damage::Say(const std::string& what) noexcept {
  try {
    uint64_t left_out = 0;
    if (!AdmitLine(&left_out)) return;
    std::string lines;
    if (left_out > 0) {
      lines = "error: " + table_ + ": " + std::to_string(left_out) +
              " more damaged rows were not named; the statistics count all\n";
    }
    lines += "error: " + what + "\n";
    (void)std::fputs(lines.c_str(), stderr);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): nothing more can be said
  }
}

}  // namespace oe
