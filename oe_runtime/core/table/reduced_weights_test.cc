#include "oe_runtime/core/table/reduced_weights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/storage/storage.h"
#include "oe_runtime/core/table/row_ops.h"

namespace oe::reduced_weights_test {
namespace {

TableSpec SpecOf(const std::string& dtype, uint32_t dim) {
  TableSpec spec;
  spec.name = "C1";
  spec.dim = dim;
  spec.dtype = dtype;
  spec.optimizer.name = "sgd";
  return Complete(spec);
}

// A row of these weights as files have it, reduced, and read again.
std::vector<double> Reduced(const std::string& precision, const TableSpec& spec,
                            const std::vector<double>& weights) {
  const auto ops = RowOps::Create(spec);
  const auto reduced = ReducedWeights::Create(precision, spec);
  std::vector<std::byte> row(ops->format().facts_at);
  std::vector<std::byte> kept(reduced->bytes());
  const std::vector<float> floats(weights.begin(), weights.end());
  const bool is_float64 = spec.dtype == "float64";
  ops->Write(is_float64 ? static_cast<const void*>(weights.data()) : floats.data(), row.data());
  reduced->Reduce(static_cast<Key>(-7), row.data(), kept.data());
  std::vector<double> read(spec.dim);
  std::vector<float> read_floats(spec.dim);
  reduced->Read(kept.data(), is_float64 ? static_cast<void*>(read.data()) : read_floats.data());
  return is_float64 ? read : std::vector<double>(read_floats.begin(), read_floats.end());
}

TEST(ReducedWeightsTest, TakeAQuarterAndAHalfOfTheBytes) {
  EXPECT_EQ(ReducedWeights::Create("", SpecOf("float32", 16)), nullptr);
  EXPECT_EQ(ReducedWeights::Create("int8", SpecOf("float32", 16))->bytes(), 20U);
  EXPECT_EQ(ReducedWeights::Create("int8", SpecOf("float32", 9))->bytes(), 16U);
  EXPECT_EQ(ReducedWeights::Create("int8", SpecOf("float64", 64))->bytes(), 68U);
  EXPECT_EQ(ReducedWeights::Create("bfloat16", SpecOf("float32", 64))->bytes(), 128U);
  EXPECT_EQ(ReducedWeights::Create("bfloat16", SpecOf("float64", 9))->bytes(), 20U);
}

TEST(ReducedWeightsTest, HoldWhatTheyCanOfEveryDtype) {
  const std::vector<double> weights = {-1.0, 0.5, 0.25, 0.0, 0.0078125};
  const double step = static_cast<double>(1.0F / 127.0F);
  for (const std::string dtype : {"float32", "float64", "bfloat16", "float16"}) {
    const TableSpec spec = SpecOf(dtype, 5);
    const std::vector<double> read = Reduced("int8", spec, weights);
    const std::vector<int> steps = {-127, 64, 32, 0, 1};  // 63.5 is halfway, and goes to the even one
    for (size_t d = 0; d < 5; ++d) {
      EXPECT_EQ(read[d], static_cast<double>(static_cast<float>(steps[d]) * static_cast<float>(step)));
    }
    EXPECT_EQ(Reduced("bfloat16", spec, weights), weights) << "bfloat16 has them all";
    EXPECT_EQ(Reduced("int8", spec, {0, 0, 0, 0, 0}), (std::vector<double>{0, 0, 0, 0, 0}));
  }
  const double tiny = static_cast<double>(std::numeric_limits<float>::denorm_min());
  const std::vector<double> read = Reduced("int8", SpecOf("float32", 2), {180 * tiny, -180 * tiny});
  EXPECT_EQ(read, (std::vector<double>{127 * tiny, -127 * tiny})) << "the scale is too small";
}

TEST(ReducedWeightsTest, RefuseByNameWhatTheyCannotHold) {
  const double infinity = std::numeric_limits<double>::infinity();
  const auto refusal = [](const std::string& precision, const TableSpec& spec, double weight) {
    return MessageOf<CheckpointError>([&] { Reduced(precision, spec, {0.0, weight}); });
  };
  const std::string says = "table 'C1': the row of key -7 has NaN or a number that rows of int8 cannot hold";
  const TableSpec float32 = SpecOf("float32", 2);
  EXPECT_EQ(refusal("int8", float32, std::nan("")), says);
  EXPECT_EQ(refusal("int8", float32, -infinity), says);
  EXPECT_EQ(refusal("int8", SpecOf("float64", 2), 1e39), says);
  EXPECT_EQ(refusal("int8", float32, 3.4e38), "no exception");
  EXPECT_NE(refusal("bfloat16", float32, 3.4e38), "no exception");
  EXPECT_EQ(refusal("bfloat16", float32, 3.38e38), "no exception");
  EXPECT_EQ(MessageOf<SpecError>([&] { ReducedWeights::Create("int4", float32); }),
            "storage: 'row_precision' must be int8, bfloat16 or empty, not 'int4'");
}

TEST(ReducedWeightsTest, AreForTablesThatAreOnlyRead) {
  StorageSpec storage;
  storage.row_precision = "int8";
  EXPECT_EQ(MessageOf<SpecError>([&] { Storage::Open(storage); }),
            "storage: rows that are trained cannot be kept as int8; 'row_precision' is for 'weights_only'");
}

}  // namespace
}  // namespace oe::reduced_weights_test
