#include "oe_runtime/core/storage/damage.h"

#include <cstdio>
#include <exception>

namespace oe {

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
  (kind == Kind::kQuarantined ? quarantined_ : repaired_).fetch_add(1, std::memory_order_relaxed);
  try {
    uint64_t left_out = 0;
    if (!AdmitLine(&left_out)) return;
    std::string lines;
    if (left_out > 0) {
      lines = "error: " + table_ + ": " + std::to_string(left_out) +
              " more damaged rows were not named; the statistics count all\n";
    }
    lines += "error: " + table_ + ": " + what + " is damaged: " + found_ + ", " + where;
    lines += kind == Kind::kQuarantined
                 ? "; it was removed, and begins anew when it is pushed. Check " + check_ +
                       ", and go back to an earlier checkpoint if too many are lost\n"
                 : "; it was repaired, and nothing is lost. Check " + check_ + "\n";
    (void)std::fputs(lines.c_str(), stderr);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): it is counted
  }
}

}  // namespace oe
