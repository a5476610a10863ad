// Turns of one table with a checkpoint and without, and how they are compared.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <string>
#include <vector>

#include "benchmarks/pmem/workload.h"

namespace oe {

// Milliseconds of this thread or of all.
inline double ProcessorTime(clockid_t of) {
  timespec time{};
  clock_gettime(of, &time);
  return static_cast<double>(time.tv_sec) * 1e3 + static_cast<double>(time.tv_nsec) / 1e6;
}

// Of every ten: what copies rows after a checkpoint, or is flushed beside, takes longer than that; what the
// machine does else hits one or two.
inline double MeanOfMedians(const std::vector<double>& steps) {
  constexpr size_t kTogether = 10;
  double sum = 0;
  size_t count = 0;
  for (size_t at = 0; at + kTogether <= steps.size(); at += kTogether) {
    const auto begin = steps.begin() + static_cast<ptrdiff_t>(at);
    sum += Quantile({begin, begin + kTogether}, 0.5);
    ++count;
  }
  return sum / static_cast<double>(count);
}

// "+0.80 % (+0.50 to +1.10)": how much more the first of each pair are with `both` added to each; the median
// and an interval that has it with a probability of at least 95 %, or all if there are fewer than six pairs.
inline std::string More(const std::vector<double>& with, const std::vector<double>& without, double both) {
  std::vector<double> ratios;
  for (size_t i = 0; i < with.size(); ++i) {
    ratios.push_back(100 * ((both + with[i]) / (both + without[i]) - 1));
  }
  std::sort(ratios.begin(), ratios.end());
  // How many are left out at each end: those below the median are as many as heads of so many coins.
  const size_t n = ratios.size();
  size_t out = 0;
  double chance = std::pow(0.5, n);
  for (double below = chance; 2 * below <= 0.05; below += chance) {
    ++out;
    chance *= static_cast<double>(n - out + 1) / static_cast<double>(out);
  }
  const size_t first = out > 0 ? out - 1 : 0;
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%+.2f %% (%+.2f to %+.2f)", Quantile(ratios, 0.5), ratios[first],
                ratios[n - 1 - first]);
  return text.data();
}

}  // namespace oe
