#include "oe_runtime/core/initializer/initializer.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ULL;

class Constant final : public Initializer {
 public:
  explicit Constant(double value) : value_(value) {}

  void Fill(Key /*key*/, float* weights, uint32_t dim) const noexcept override {
    std::fill_n(weights, dim, static_cast<float>(value_));
  }
  void Fill(Key /*key*/, double* weights, uint32_t dim) const noexcept override {
    std::fill_n(weights, dim, value_);
  }

 private:
  const double value_;
};

// Initializers whose element is a function of 32 random bits.
template <typename FromBits>
class Random final : public Initializer {
 public:
  Random(uint64_t seed, const std::string& table, FromBits from_bits)
      : stream_(Mix64(Mix64(seed + kGolden) ^ XXH3_64bits(table.data(), table.size()))),
        from_bits_(from_bits) {}

  void Fill(Key key, float* weights, uint32_t dim) const noexcept override { FillAs(key, weights, dim); }
  void Fill(Key key, double* weights, uint32_t dim) const noexcept override { FillAs(key, weights, dim); }

 private:
  template <typename T>
  void FillAs(Key key, T* weights, uint32_t dim) const noexcept {
    uint64_t state = Mix64(stream_ + kGolden * (key + 1));
    for (uint32_t d = 0; d < dim; d += 2) {
      state += kGolden;
      const uint64_t word = Mix64(state);
      from_bits_(static_cast<uint32_t>(word), &weights[d]);
      if (d + 1 < dim) from_bits_(static_cast<uint32_t>(word >> 32), &weights[d + 1]);
    }
  }

  const uint64_t stream_;
  const FromBits from_bits_;
};

struct UniformFromBits {
  double low;
  double range;
  // 24 bits are all that a float in [0, 1) holds.
  void operator()(uint32_t bits, float* weight) const noexcept {
    *weight =
        static_cast<float>(low) + static_cast<float>(range) * (static_cast<float>(bits >> 8) * 0x1p-24F);
  }
  void operator()(uint32_t bits, double* weight) const noexcept {
    *weight = low + range * (static_cast<double>(bits) * 0x1p-32);
  }
};

// Natural logarithm of a positive normal number: x = 2^e·m, log m = 2·atanh((m - 1)/(m + 1)). Its error is
// below 1e-13, and unlike libm's it has the same bits on every machine.
double PortableLog(double x) noexcept {
  uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof(bits));
  auto exponent = static_cast<int>((bits >> 52) & 0x7FF) - 1023;
  bits = (bits & 0x000FFFFFFFFFFFFFULL) | 0x3FF0000000000000ULL;
  double m = 0;
  std::memcpy(&m, &bits, sizeof(m));
  if (m > 1.4142135623730951) {
    m *= 0.5;
    ++exponent;
  }
  const double s = (m - 1) / (m + 1);
  const double square = s * s;
  double sum = 0;
  for (int k = 17; k >= 1; k -= 2) sum = sum * square + 1.0 / k;
  return 2 * s * sum + exponent * 0.6931471805599453;
}

// Inverse error function by the polynomials of M. Giles, "Approximating the erfinv function" (2012); relative
// error about 1e-7, a float's worth.
double InverseErf(double x) noexcept {
  static constexpr double kCentral[] = {2.81022636e-08,  3.43273939e-07, -3.5233877e-06,
                                        -4.39150654e-06, 0.00021858087,  -0.00125372503,
                                        -0.00417768164,  0.246640727,    1.50140941};
  static constexpr double kTail[] = {-0.000200214257, 0.000100950558, 0.00134934322,
                                     -0.00367342844,  0.00573950773,  -0.0076224613,
                                     0.00943887047,   1.00167406,     2.83297682};
  const double w = -PortableLog((1 - x) * (1 + x));
  const bool central = w < 5;
  const double u = central ? w - 2.5 : std::sqrt(w) - 3;
  double sum = 0;
  for (const double c : central ? kCentral : kTail) sum = sum * u + c;
  return sum * x;
}

// A standard normal variable below which lies the fraction (1 + x) / 2.
double NormalQuantile(double x) noexcept { return 1.4142135623730951 * InverseErf(x); }

// In (-1, 1), never at an end.
double Symmetric(uint32_t bits) noexcept { return (static_cast<double>(bits) + 0.5) * 0x1p-31 - 1; }

struct NormalFromBits {
  double mean;
  double deviation;
  template <typename T>
  void operator()(uint32_t bits, T* weight) const noexcept {
    *weight = static_cast<T>(mean + deviation * NormalQuantile(Symmetric(bits)));
  }
};

// By the inverse of the distribution function, so that an element takes its own bits and no others (drawing
// again until a value lies within the bounds takes a number of them that is not known).
struct TruncatedNormalFromBits {
  double mean;
  double deviation;
  template <typename T>
  void operator()(uint32_t bits, T* weight) const noexcept {
    constexpr double kWithinTwo = 0.9544997361036416;  // erf(2 / sqrt(2)): the share of what is left
    const double z = NormalQuantile(kWithinTwo * Symmetric(bits));
    *weight = static_cast<T>(mean + deviation * std::clamp(z, -2.0, 2.0));
  }
};

}  // namespace

InitializerSpec Initializer::Complete(const InitializerSpec& spec) {
  const std::string what = "initializer '" + spec.name + "'";
  if (spec.name == "zeros") return {spec.name, CompleteParams(what, spec.params, {}), spec.seed};
  if (spec.name == "constant") {
    return {spec.name, CompleteParams(what, spec.params, {{"value", 0.0}}), spec.seed};
  }
  if (spec.name == "uniform") {
    Params params = CompleteParams(what, spec.params, {{"minval", -0.05}, {"maxval", 0.05}});
    if (params["minval"] > params["maxval"]) {
      throw SpecError(what + ": 'minval' (" + NumberText(params["minval"]) + ") is above 'maxval' (" +
                      NumberText(params["maxval"]) + ")");
    }
    if (!std::isfinite(static_cast<float>(params["maxval"] - params["minval"]))) {
      throw SpecError(what + ": 'minval' and 'maxval' are further apart than float32 holds");
    }
    return {spec.name, params, spec.seed};
  }
  if (spec.name == "normal" || spec.name == "truncated_normal") {
    Params params = CompleteParams(what, spec.params, {{"mean", 0.0}, {"stddev", 0.05}});
    CheckParam(what, params, "stddev", 0, HUGE_VAL);
    return {spec.name, params, spec.seed};
  }
  throw SpecError("initializer '" + spec.name +
                  "' is not one of constant, normal, truncated_normal, uniform, zeros");
}

std::unique_ptr<Initializer> Initializer::Create(const InitializerSpec& spec, const std::string& table) {
  const InitializerSpec complete = Complete(spec);
  const Params& params = complete.params;
  if (spec.name == "uniform") {
    const double low = params.at("minval");
    const double range = params.at("maxval") - low;
    return std::make_unique<Random<UniformFromBits>>(spec.seed, table, UniformFromBits{low, range});
  }
  if (spec.name == "normal") {
    const NormalFromBits from_bits{params.at("mean"), params.at("stddev")};
    return std::make_unique<Random<NormalFromBits>>(spec.seed, table, from_bits);
  }
  if (spec.name == "truncated_normal") {
    const TruncatedNormalFromBits from_bits{params.at("mean"), params.at("stddev")};
    return std::make_unique<Random<TruncatedNormalFromBits>>(spec.seed, table, from_bits);
  }
  return std::make_unique<Constant>(spec.name == "zeros" ? 0.0 : params.at("value"));
}

}  // namespace oe
