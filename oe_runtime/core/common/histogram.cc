#include "oe_runtime/core/common/histogram.h"

#include <nlohmann/json.hpp>
#include <utility>

namespace oe {

nlohmann::json TimesOf(const Histogram& histogram) {
  nlohmann::json bounds = nlohmann::json::array();
  nlohmann::json counts = nlohmann::json::array();
  for (size_t i = 0; i < Histogram::kBuckets; ++i) {
    if (i < Histogram::kBounds) bounds.push_back(static_cast<double>(Histogram::Bound(i)) / 1e9);
    counts.push_back(histogram.bucket(i));
  }
  return {
      {"bounds", std::move(bounds)}, {"counts", std::move(counts)}, {"sum_seconds", histogram.sum_seconds()}};
}

}  // namespace oe
