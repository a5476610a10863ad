#include "oe_runtime/core/spec/spec.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "oe_runtime/core/common/error.h"
#include "tests/fuzz/targets.h"

namespace oe {

void FuzzSpec(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  std::optional<TableSpec> spec;
  try {
    spec = TableSpecFromJsonText(text);
  } catch (const SpecError&) {  // NOLINT(bugprone-empty-catch): a refusal is what it asks for
  }
  // What is written is read as the same.
  if (spec) Require(!Difference(*spec, TableSpecFromJsonText(ToJsonText(*spec))));
  const nlohmann::json parsed = nlohmann::json::parse(text, nullptr, false);
  if (parsed.is_discarded()) return;
  try {
    (void)parsed.get<StorageSpec>();
  } catch (const SpecError&) {  // NOLINT(bugprone-empty-catch): a refusal is what it asks for
  }
}

std::vector<std::pair<std::string, std::string>> SpecSeeds() {
  std::vector<std::pair<std::string, std::string>> seeds;
  for (const char* optimizer : {"sgd", "adagrad", "adam", "ftrl"}) {
    TableSpec spec;
    spec.name = "t";
    spec.dim = 9;
    spec.optimizer.name = optimizer;
    spec.initializer.name = "uniform";
    seeds.emplace_back(optimizer, ToJsonText(Complete(spec)));
  }
  seeds.emplace_back("array",
                     R"({"name":"t","dim":1,"index":"array","input_dim":5,"optimizer":{"name":"sgd"},)"
                     R"("initializer":{"name":"normal","stddev":0.1,"seed":18446744073709551615}})");
  seeds.emplace_back(
      "policies",
      R"({"name":"t","dim":1,"admission":{"name":"cbf","filter_freq":3,"max_element_size":9,)"
      R"("false_positive_probability":0.1},"eviction":[{"name":"cap","max_rows":9,"policy":"lfu"},)"
      R"({"name":"ttl","seconds":9},{"name":"l2_weight","threshold":0.1,"every_steps":2}]})");
  seeds.emplace_back("storage", R"({"type":"pmem_libpmem","path":"/mnt/pmem0","capacity_bytes":1073741824})");
  return seeds;
}

}  // namespace oe
