#include "oe_runtime/core/spec/spec.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"

namespace oe::spec_test {
namespace {

std::string Refusal(const std::string& text) {
  return MessageOf<SpecError>([&] { (void)TableSpecFromJsonText(text); });
}

TEST(SpecTest, JsonRoundTrip) {
  const TableSpec spec = TableSpecFromJsonText(R"({"name": "C1", "dim": 9, "index": "array", "input_dim": 5,
      "optimizer": {"name": "sgd", "momentum": 0.5, "nesterov": true},
      "initializer": {"name": "normal", "stddev": 0.1, "seed": 18446744073709551615},
      "nonfinite_gradients": "skip"})");
  EXPECT_EQ(spec.optimizer.params.at("nesterov"), 1);
  EXPECT_EQ(spec.initializer.params.at("mean"), 0);
  EXPECT_EQ(spec.initializer.seed, ~uint64_t{0});
  const TableSpec again = TableSpecFromJsonText(ToJsonText(spec));
  EXPECT_FALSE(Difference(spec, again));
  EXPECT_EQ(ToJsonText(again), ToJsonText(spec));
}

TEST(SpecTest, RefusesByField) {
  EXPECT_EQ(Refusal(R"({"dim": 9})"), "the field 'name' is missing");
  EXPECT_EQ(
      Refusal(R"({"name": "t", "dim": 9, "rows": 3})"),
      "unknown field 'rows'; the fields are name, dim, dtype, state_dtype, exchange_dtype, index, input_dim, "
      "optimizer, initializer, "
      "nonfinite_gradients, admission, eviction");
  EXPECT_EQ(Refusal(R"({"name": "t", "dim": 1.5})"),
            "the field 'dim' must be a whole number between 0 and 65536, not 1.5");
  EXPECT_EQ(Refusal(R"({"name": "t", "dim": 9, "initializer": {"name": "zeros", "seed": -1}})"),
            "the field 'initializer.seed' must be a whole number between 0 and 18446744073709551615, not -1");
  EXPECT_EQ(Refusal(R"({"name": "t", "dim": 9, "optimizer": {"name": "adam", "beta_1": "x"}})"),
            "the field 'optimizer.beta_1' must be a number, not \"x\"");
  EXPECT_EQ(Refusal(R"({"name": "t", "dim": 0})"), "table 't': 'dim' must be between 1 and 65536, not 0");
  EXPECT_EQ(Refusal(R"({"name": "t", "dim": 9, "index": "tree"})"),
            "table 't': 'index' must be hash or array, not 'tree'");
  EXPECT_EQ(Refusal(R"({"name": "t", "dim": 9, "index": "array"})"),
            "table 't': an array table needs 'input_dim', the number of its keys");
  EXPECT_EQ(Refusal(R"({"name": "t", "dim": 9, "input_dim": 4})"),
            "table 't': a hash table takes any key, so 'input_dim' must be 0, not 4");
  EXPECT_EQ(Refusal(R"({"name": "t", "dim": 9, "dtype": "float8"})"),
            "table 't': 'dtype' must be float32, float64, bfloat16 or float16, not 'float8'");
  EXPECT_EQ(Refusal(R"({"name": "t", "dim": 9, "optimizer": {"name": "sgd", "amsgrad": true}})"),
            "table 't': optimizer 'sgd' does not support 'amsgrad'; it supports coupled_weight_decay, "
            "dampening, learning_rate_decay, maximize, momentum, nesterov, torch, weight_decay");
  EXPECT_EQ(Refusal(R"({"name": "t", "dim": 9, "nonfinite_gradients": "clip"})"),
            "table 't': 'nonfinite_gradients' must be refuse, skip or pass, not 'clip'");
  EXPECT_NE(Refusal("{").find("not JSON"), std::string::npos);
  EXPECT_EQ(Refusal("[1]"), "the spec must be a JSON object, not [1]");
}

TEST(SpecTest, Policies) {
  const auto with = [](const std::string& fields) { return R"({"name": "t", "dim": 9, )" + fields + "}"; };
  const TableSpec spec = TableSpecFromJsonText(with(
      R"("admission": {"name": "cbf", "filter_freq": 3, "max_element_size": 1e9,
         "false_positive_probability": 0.01, "default_value": 0.5},
         "eviction": [{"name": "ttl", "seconds": 60}, {"name": "cap", "max_rows": 100, "policy": "lfu"},
         {"name": "global_step", "steps_to_live": 7, "every_steps": 2}, {"name": "l2_weight", "threshold": 0.1}])"));
  EXPECT_EQ(spec.eviction[0].policy, "lfu");
  EXPECT_EQ(spec.eviction[1].params.at("every_steps"), 2);
  EXPECT_EQ(spec.eviction[3].params.at("every_steps"), 0);
  EXPECT_FALSE(Difference(spec, TableSpecFromJsonText(ToJsonText(spec))));
  TableSpec none = spec;
  none.admission = {};
  none.eviction.clear();
  EXPECT_EQ(ToJsonText(none).find("admission"), std::string::npos);
  EXPECT_EQ(ToJsonText(none).find("eviction"), std::string::npos);
  const auto difference = [&](const TableSpec& left, const TableSpec& right) {
    const SpecDifference found = Difference(left, right).value_or(SpecDifference{});
    return found.field + ": " + found.left + " / " + found.right;
  };
  EXPECT_EQ(difference(none, spec), "admission.name: null / \"cbf\"");
  TableSpec other = spec;
  other.eviction.pop_back();
  EXPECT_EQ(difference(other, spec), "eviction.3.name: null / \"ttl\"");
  other = spec;
  other.eviction[0].params["max_rows"] = 99;
  EXPECT_EQ(difference(spec, other), "eviction.0.max_rows: 100.0 / 99.0");

  const auto refusal = [&](const std::string& fields) { return Refusal(with(fields)); };
  EXPECT_EQ(refusal(R"("admission": {"name": "bloom"})"),
            "table 't': 'admission.name' must be cbf or counter, not 'bloom'");
  EXPECT_EQ(refusal(R"("admission": {"filter_freq": 3})"), "the field 'admission.name' is missing");
  EXPECT_EQ(refusal(R"("admission": {"name": "counter"})"),
            "table 't': 'admission' counter needs 'filter_freq'");
  EXPECT_EQ(refusal(R"("admission": {"name": "counter", "filter_freq": 2.5})"),
            "table 't': 'admission' counter: 'filter_freq' must be a whole number, not 2.5");
  EXPECT_EQ(refusal(R"("admission": {"name": "cbf", "filter_freq": 256, "max_element_size": 9,
                    "false_positive_probability": 0.1})"),
            "table 't': 'admission' cbf: 'filter_freq' must be between 1 and 255, not 256");
  EXPECT_EQ(
      refusal(R"("index": "array", "input_dim": 9, "admission": {"name": "cbf", "filter_freq": 2,
                    "max_element_size": 9, "false_positive_probability": 0.1})"),
      "table 't': 'admission' cbf is for hash tables; an array table has no more counters than keys: use "
      "counter");
  EXPECT_EQ(refusal(R"("eviction": {"name": "ttl"})"),
            "the field 'eviction' must be a list, not {\"name\":\"ttl\"}");
  EXPECT_EQ(refusal(R"("eviction": [{"name": "ttl", "seconds": "9"}])"),
            "the field 'eviction[0].seconds' must be a number, not \"9\"");
  EXPECT_EQ(refusal(R"("eviction": [{"name": "old"}])"),
            "table 't': 'eviction.name' must be cap, global_step, l2_weight or ttl, not 'old'");
  EXPECT_EQ(refusal(R"("eviction": [{"name": "global_step", "steps_to_live": 0}])"),
            "table 't': 'eviction' global_step: 'steps_to_live' must be between 1 and 2147483647, not 0");
  EXPECT_EQ(refusal(R"("eviction": [{"name": "l2_weight", "threshold": 0}])"),
            "table 't': 'eviction' l2_weight: 'threshold' must be above 0, not 0");
  EXPECT_EQ(refusal(R"("eviction": [{"name": "cap", "max_rows": 9, "max_bytes": 9}])"),
            "table 't': 'eviction' cap needs either 'max_rows' or 'max_bytes'");
  EXPECT_EQ(refusal(R"("eviction": [{"name": "cap", "max_rows": 9, "policy": "fifo"}])"),
            "table 't': 'eviction' cap: 'policy' must be lru or lfu, not 'fifo'");
  EXPECT_EQ(refusal(R"("eviction": [{"name": "cap", "max_rows": 9}, {"name": "cap", "max_rows": 8}])"),
            "table 't': 'eviction' has cap twice");
}

TEST(SpecTest, DifferenceNamesTheField) {
  TableSpec left;
  left.name = "t";
  left.dim = 9;
  left = Complete(left);
  TableSpec right = left;
  right.optimizer = Complete(OptimizerSpec{"adam", {}});
  const auto text = [&] {
    const SpecDifference difference = Difference(left, right).value_or(SpecDifference{});
    return difference.field + ": " + difference.left + " / " + difference.right;
  };
  EXPECT_EQ(text(), "optimizer.name: \"adagrad\" / \"adam\"");
  right = left;
  right.initializer.params["minval"] = -1;
  EXPECT_EQ(text(), "initializer.minval: -0.05 / -1.0");
  right = left;
  EXPECT_EQ(text(), ":  / ");
}

TEST(SpecTest, Storage) {
  auto spec = nlohmann::json::parse(R"({"type": "pmem_libpmem", "path": "/x", "capacity_bytes": 7})");
  const auto complete = nlohmann::json(spec.get<StorageSpec>());
  spec["recover"] = false;
  spec["kept_checkpoints"] = 2;
  spec["cache_bytes"] = 0;
  spec["weights_only"] = false;
  spec["fresh"] = false;
  EXPECT_EQ(complete, spec);
  spec["recover"] = true;
  spec["kept_checkpoints"] = 5;
  spec["cache_bytes"] = 4096;
  spec["weights_only"] = true;
  spec["row_precision"] = "int8";
  spec["fresh"] = true;
  EXPECT_EQ(nlohmann::json(spec.get<StorageSpec>()), spec);
  spec["recover"] = 1;
  EXPECT_EQ(MessageOf<SpecError>([&] { (void)spec.get<StorageSpec>(); }),
            "the field 'storage.recover' must be true or false, not 1");
  EXPECT_THROW((void)nlohmann::json::parse(R"({"type": "dram", "size": 7})").get<StorageSpec>(), SpecError);
}

}  // namespace
}  // namespace oe::spec_test
