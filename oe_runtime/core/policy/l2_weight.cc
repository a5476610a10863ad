// l2_weight {threshold}: rows of which half the sum of the squared weights is below it go, as in DeepRec.
#include "oe_runtime/core/common/half.h"
#include "oe_runtime/core/policy/eviction_registry.h"

namespace oe {
namespace {

class L2Weight final : public SweepRule {
 public:
  static constexpr const char* kField = "threshold";
  static constexpr RowFacts::Needs kNeeds = {};
  static void Check(const CheckedParams& params) { params.Positive(kField); }

  L2Weight(const EvictionSpec& spec, const RowShape& rows)
      : threshold_(rows.dtype == Dtype::kFloat64 ? spec.params.at(kField)
                                                 : static_cast<float>(spec.params.at(kField))),
        dtype_(rows.dtype),
        dim_(rows.dim) {}

  bool Evicts(const std::byte* row, uint32_t /*step*/, TtlClock::Reading /*time*/) const noexcept override {
    return 0.5 * SquaresOf(row) < threshold_;
  }

 private:
  double SquaresOf(const std::byte* row) const noexcept {
    // In the arithmetic of the table.
    const auto sum = [this](auto zero, const auto& weight) {
      for (uint32_t d = 0; d < dim_; ++d) zero += weight(d) * weight(d);
      return static_cast<double>(zero);
    };
    const auto* halves = reinterpret_cast<const uint16_t*>(row);
    switch (dtype_) {
      case Dtype::kFloat64:
        return sum(0.0, [row](uint32_t d) { return reinterpret_cast<const double*>(row)[d]; });
      case Dtype::kBfloat16:
        return sum(0.0F, [halves](uint32_t d) { return Bfloat16::ToFloat(halves[d]); });
      case Dtype::kFloat16:
        return sum(0.0F, [halves](uint32_t d) { return Float16::ToFloat(halves[d]); });
      case Dtype::kFloat32:
        break;
    }
    return sum(0.0F, [row](uint32_t d) { return reinterpret_cast<const float*>(row)[d]; });
  }

  const double threshold_;  // in the arithmetic of the table
  const Dtype dtype_;
  const uint32_t dim_;
};

const RegisterSweep<L2Weight> kL2Weight("l2_weight");

}  // namespace
}  // namespace oe
