// Tables of every dtype, and of the state's, over every storage.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "oe_runtime/core/checkpoint/compare.h"
#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/common/half.h"
#include "oe_runtime/core/common/half_packing.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/optimizer/optimizer.h"
#include "oe_runtime/core/spec/row_format.h"
#include "oe_runtime/core/storage/test_storage.h"
#include "oe_runtime/core/table/row_ops.h"
#include "oe_runtime/core/table/table.h"

namespace oe::table_dtype_test {
namespace {

constexpr uint32_t kDim = 9;
constexpr size_t kKeys = 600;

// `dtypes`: "bfloat16", or with that of the state, "float16_bfloat16".
TableSpec Spec(const std::string& dtypes, const std::string& optimizer = "adagrad", uint32_t dim = kDim) {
  TableSpec spec;
  spec.name = "C1";
  spec.dim = dim;
  const size_t end = dtypes.find('_');
  spec.dtype = dtypes.substr(0, end);
  if (end != std::string::npos) spec.state_dtype = dtypes.substr(end + 1);
  spec.optimizer.name = optimizer;
  spec.initializer = {"uniform", {{"minval", -1}, {"maxval", 1}}, 20};
  return spec;
}

std::vector<Key> AllKeys() {
  std::vector<Key> keys(kKeys);
  for (size_t i = 0; i < kKeys; ++i) keys[i] = Mix64(i);
  return keys;
}

// Those of a batch: different ones in each.
std::vector<Key> KeysOf(uint64_t step) {
  std::vector<Key> keys;
  for (const Key key : AllKeys()) {
    if (Mix64(key + step) % 3 != 0) keys.push_back(key);
  }
  return keys;
}

template <typename T>
std::vector<T> GradientsOf(const std::vector<Key>& keys, uint32_t dim, uint64_t step) {
  std::vector<T> gradients;
  for (const Key key : keys) {
    for (uint32_t d = 0; d < dim; ++d) {
      gradients.push_back(static_cast<T>(Mix64(key * 100 + d + step * 77777) >> 40) / T(1 << 23) - 1);
    }
  }
  return gradients;
}

template <typename T>
std::vector<T> PullAs(const Table& table, const std::vector<Key>& keys) {
  std::vector<T> rows(keys.size() * table.spec().dim);
  table.Pull(keys.data(), keys.size(), rows.data());
  return rows;
}

bool IsFloat64(const Table& table) { return DtypeOf(table.spec()) == Dtype::kFloat64; }

template <typename T>
std::vector<T> StatesOf(const Table& table, const std::vector<Key>& keys) {
  std::vector<T> rows(keys.size() * table.spec().dim);
  std::vector<T> states(keys.size() * table.state_values());
  std::vector<uint8_t> found(keys.size());
  table.ReadRows(keys.data(), keys.size(), rows.data(), states.data(), found.data());
  return states;
}

template <typename T>
void AddBits(const std::vector<T>& values, std::vector<uint64_t>* bits) {
  for (const T value : values) {
    bits->emplace_back();
    std::memcpy(&bits->back(), &value, sizeof(value));
  }
}

// What a pull brings, and the states, bit by bit.
std::vector<uint64_t> Bits(const Table& table, const std::vector<Key>& keys = AllKeys()) {
  std::vector<uint64_t> bits;
  if (IsFloat64(table)) {
    AddBits(PullAs<double>(table, keys), &bits);
    AddBits(StatesOf<double>(table, keys), &bits);
  } else {
    AddBits(PullAs<float>(table, keys), &bits);
    AddBits(StatesOf<float>(table, keys), &bits);
  }
  return bits;
}

// One push of its batch, of the keys that are this server's.
void Push(Table* table, uint64_t step, Executor* executor = nullptr) {
  std::vector<Key> keys;
  for (const Key key : KeysOf(step)) {
    if (server_of(key, table->shard().servers, false) == table->shard().server) keys.push_back(key);
  }
  (void)Bits(*table, keys);
  table->Upkeep();
  if (IsFloat64(*table)) {
    const auto gradients = GradientsOf<double>(keys, table->spec().dim, step);
    table->Push(keys.data(), keys.size(), gradients.data(), 0.05, executor);
  } else {
    const auto gradients = GradientsOf<float>(keys, table->spec().dim, step);
    table->Push(keys.data(), keys.size(), gradients.data(), 0.05, executor);
  }
}

// Runs tasks from the last to the first.
class Backwards final : public Executor {
 public:
  void ParallelFor(size_t count, const std::function<void(size_t)>& task) override {
    while (count > 0) task(--count);
  }
};

const char* const kDtypes[] = {"float32",          "float64",           "bfloat16",        "float16",
                               "float32_bfloat16", "bfloat16_bfloat16", "float16_bfloat16"};

bool CanHave(const std::string& dtypes, const std::string& optimizer) {
  try {
    (void)Complete(Spec(dtypes, optimizer));
    return true;
  } catch (const SpecError&) {
    return false;
  }
}

class TableDtypeTest : public testing::TestWithParam<std::tuple<const char*, const char*>> {
 protected:
  StorageSpec StorageFor(bool recover = false) const {
    StorageSpec storage = TestStorage(std::get<0>(GetParam()), directory_.path());
    storage.recover = recover;
    return storage;
  }
  static bool IsLog() { return std::string(std::get<0>(GetParam())) == "dram_ssd"; }
  std::string dtype() const { return std::get<1>(GetParam()); }
  std::unique_ptr<Table> New(const TableSpec& spec, ShardInfo shard = {}, bool recover = false) const {
    return Table::Create(spec, StorageFor(recover), shard);
  }

  TestDirectory directory_;
  TestDirectory files_;
};

// The first field in which tables of different dtypes differ, as messages have it.
std::string Other(const TableSpec& left, const TableSpec& right, const std::string& is,
                  const std::string& where) {
  const bool same = left.dtype == right.dtype;
  const auto dtype = [&](const TableSpec& spec) { return same ? spec.state_dtype : spec.dtype; };
  return std::string(same ? "'state_dtype' " : "'dtype' ") + is + " \"" + dtype(left) + "\" " + where +
         " table 'C1' has \"" + dtype(right) + "\"";
}

// Whether a half is one of the two neighbours of a value.
bool IsRounded(const std::string& dtype, float half, float value) {
  const auto neighbour = [&](uint32_t random) {
    return dtype == "bfloat16" ? Bfloat16::ToFloat(Bfloat16::FromFloat(value, random))
                               : Float16::ToFloat(Float16::FromFloat(value, random));
  };
  return half == neighbour(0) || half == neighbour(~0U);
}

// Weights and states of float32 and float64 are what the optimizer makes of them in that dtype, bit for bit.
// Halves are one of the two neighbours of what it makes of the last ones in float32.
template <typename T>
void ExpectUpdates(Table* table) {
  const TableSpec& spec = table->spec();
  const auto optimizer = Optimizer<T>::Create(spec.optimizer, spec.dim);
  const size_t state_values = table->state_values();
  const auto right = [](const std::string& dtype, T is, T wanted) {
    const bool half = dtype == "bfloat16" || dtype == "float16";
    return half ? IsRounded(dtype, static_cast<float>(is), static_cast<float>(wanted)) : is == wanted;
  };
  for (uint64_t step = 1; step <= 4; ++step) {
    const std::vector<Key> keys = KeysOf(step);
    const std::vector<T> gradients = GradientsOf<T>(keys, spec.dim, step);
    std::vector<T> weights = PullAs<T>(*table, keys);
    std::vector<T> states = StatesOf<T>(*table, keys);
    Push(table, step);
    const std::vector<T> rows = PullAs<T>(*table, keys);
    const std::vector<T> states_now = StatesOf<T>(*table, keys);
    for (size_t i = 0; i < keys.size(); ++i) {
      T* weight = &weights[i * spec.dim];
      T* state = states.data() + i * state_values;
      const T* gradient = &gradients[i * spec.dim];
      optimizer->Apply({&weight, &state, &gradient, 1}, static_cast<T>(0.05), step);
      for (uint32_t d = 0; d < spec.dim; ++d) {
        const T is = rows[i * spec.dim + d];
        ASSERT_TRUE(right(spec.dtype, is, weight[d]))
            << spec.optimizer.name << " step " << step << ": " << is << " of " << weight[d];
      }
      for (size_t d = 0; d < state_values; ++d) {
        const T is = states_now[i * state_values + d];
        ASSERT_TRUE(right(spec.state_dtype, is, state[d]))
            << spec.optimizer.name << " step " << step << ", state: " << is << " of " << state[d];
      }
    }
  }
}

TEST_P(TableDtypeTest, EveryOptimizerUpdatesItsRows) {
  for (const OptimizerInfo& optimizer : Optimizers()) {
    const bool can = CanHave(dtype(), optimizer.name);
    EXPECT_EQ(can, optimizer.name != "adagrad_decay" || dtype().find('_') == std::string::npos);
    if (!can) continue;
    const auto table = New(Spec(dtype(), optimizer.name));
    if (IsFloat64(*table)) {
      ExpectUpdates<double>(table.get());
    } else {
      ExpectUpdates<float>(table.get());
    }
  }
}

// For dims with and without padding, and more than one group of rows in a push.
TEST_P(TableDtypeTest, AMissingRowReadsItsInitialValue) {
  for (const uint32_t dim : {1U, 8U, 65U, 5000U}) {
    for (const char* name : {"uniform", "normal", "truncated_normal"}) {
      TableSpec spec = Spec(dtype(), "adam", dim);
      spec.initializer = {name, {}, 3};
      const auto table = New(spec);
      const std::vector<Key> keys = {0, 1, 77, ~Key{0}, Key{1} << 40};
      const std::vector<uint64_t> before = Bits(*table, keys);
      const std::vector<double> zeros(keys.size() * dim);  // of any dtype
      table->Push(keys.data(), keys.size(), zeros.data(), 0.05);
      ASSERT_EQ(table->rows(), keys.size());
      EXPECT_EQ(Bits(*table, keys), before) << name << " " << dim;
    }
  }
}

// Any storage, number of servers, order of the work and number of saves between gives the same bits.
TEST_P(TableDtypeTest, TheSameBitsEverywhere) {
  TableSpec spec = Spec(dtype(), "adam");
  // 4 bytes behind the state.
  if (!IsLog()) spec.eviction = {{"global_step", {{"steps_to_live", 100}}, ""}};
  const auto one = Table::Create(spec, StorageSpec{});
  std::vector<std::unique_ptr<Table>> three;
  for (uint32_t i = 0; i < 3; ++i) three.push_back(New(spec, {i, 3}));
  Backwards backwards;
  const auto push = [&](uint64_t step) {
    Push(one.get(), step);
    for (const auto& table : three) Push(table.get(), step, &backwards);
  };
  const auto expect_same = [&] {
    for (const auto& table : three) {
      std::vector<Key> keys;
      for (const Key key : AllKeys()) {
        if (server_of(key, 3, false) == table->shard().server) keys.push_back(key);
      }
      ASSERT_EQ(Bits(*table, keys), Bits(*one, keys));
    }
  };
  for (uint64_t step = 1; step <= 3; ++step) push(step);
  expect_same();
  // A full save and an increment of each, restored on two servers, which go on.
  std::vector<TableChain> chains;
  for (uint32_t i = 0; i < 3; ++i) {
    const TableFileInfo full = three[i]->Save(files_.file(std::to_string(i) + ".full"));
    chains.push_back({full.file});
    Push(three[i].get(), 4);
    const TableFileInfo increment = three[i]->Save(files_.file(std::to_string(i) + ".more"), full.checksum);
    EXPECT_TRUE(increment.base);
    EXPECT_EQ(increment.row_bytes, three[i]->row_bytes());
    chains.back().push_back(increment.file);
  }
  Push(one.get(), 4);
  expect_same();
  std::vector<std::unique_ptr<Table>> two;
  for (uint32_t i = 0; i < 2; ++i) {
    two.push_back(New(spec, {i, 2}));
    two.back()->RestoreChains(chains);
    Push(two.back().get(), 5);
  }
  push(5);
  expect_same();
  for (const auto& table : two) {
    std::vector<Key> keys;
    for (const Key key : AllKeys()) {
      if (server_of(key, 2, false) == table->shard().server) keys.push_back(key);
    }
    ASSERT_EQ(Bits(*table, keys), Bits(*one, keys));
    EXPECT_GT(keys.size(), kKeys / 3);
  }
}

TEST_P(TableDtypeTest, FilesOfAnotherDtypeAreRefusedByFileAndField) {
  const auto table = New(Spec(dtype()));
  Push(table.get(), 1);
  const std::string file = files_.file("table.oet");
  table->Save(file);
  for (const std::string other : kDtypes) {
    if (other == dtype()) continue;
    const auto target = Table::Create(Spec(other), StorageSpec{});
    Push(target.get(), 2);
    const std::vector<uint64_t> before = Bits(*target);
    EXPECT_EQ(MessageOf<CheckpointError>([&] { target->Restore({file}); }),
              file + ": " + Other(table->spec(), target->spec(), "was", "when table 'C1' was saved, but") +
                  "; set it back, or convert the checkpoint: restore(..., convert=True), or oeprov reshard "
                  "CHECKPOINT --servers N " +
                  (table->spec().dtype == target->spec().dtype ? "--state-dtype " + target->spec().state_dtype
                                                               : "--dtype " + target->spec().dtype));
    EXPECT_EQ(Bits(*target), before);
  }
}

TEST_P(TableDtypeTest, EveryFlippedByteOfAFileIsFound) {
  const auto table = New(Spec(dtype()));
  const std::vector<Key> keys = {1, 2};
  const std::vector<double> zeros(keys.size() * kDim);
  table->Push(keys.data(), keys.size(), zeros.data(), 0.05);
  const std::string file = files_.file("table.oet");
  table->Save(file);
  const std::string content = ReadAll(file);
  for (size_t at = 0; at < content.size(); at += 3) {
    std::string damaged = content;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << (at % 8)));
    WriteAll(file, damaged);
    ASSERT_EQ(MessageOf<CheckpointError>([&] { (void)VerifyTableFile(file); }).find(file), 0U) << at;
  }
}

TEST_P(TableDtypeTest, PoolsGoOnWithTheSameBitsAndRefuseAnotherDtype) {
  if (!KeepsCheckpoints(std::get<0>(GetParam()))) GTEST_SKIP() << "no checkpoints in this storage";
  const auto model = Table::Create(Spec(dtype(), "adam"), StorageSpec{});
  for (uint64_t life = 0; life < 3; ++life) {
    const auto table = New(Spec(dtype(), "adam"), {}, true);
    ASSERT_EQ(table->version(), 2 * life);
    ASSERT_EQ(Bits(*table), Bits(*model)) << life;
    for (uint64_t step = 2 * life + 1; step <= 2 * life + 2; ++step) {
      Push(table.get(), step);
      Push(model.get(), step);
    }
    table->Checkpoint(life + 1);
    Push(table.get(), 100);  // lost
    ASSERT_NE(Bits(*table), Bits(*model));
  }
  for (const std::string other : kDtypes) {
    if (other == dtype()) continue;
    const std::string message = MessageOf<StorageError>([&] { (void)New(Spec(other, "adam"), {}, true); });
    EXPECT_NE(message.find("dtype' is "), std::string::npos) << message;
  }
  EXPECT_EQ(Bits(*New(Spec(dtype(), "adam"), {}, true)), Bits(*model));
}

TEST_P(TableDtypeTest, GradientsThatAreNotFinite) {
  for (const bool skip : {false, true}) {
    TableSpec spec = Spec(dtype(), "sgd");
    spec.nonfinite_gradients = skip ? "skip" : "refuse";
    const auto table = New(spec);
    const std::vector<Key> keys = {4, 5, 6};
    const std::vector<uint64_t> before = Bits(*table, keys);
    const auto push = [&](auto zero) {
      std::vector<decltype(zero)> gradients(keys.size() * kDim, 1);
      gradients[kDim + 3] = std::numeric_limits<decltype(zero)>::infinity();
      if (!skip) table->CheckGradients(keys.data(), keys.size(), gradients.data());
      table->Push(keys.data(), keys.size(), gradients.data(), 0.5);
    };
    const auto push_any = [&] { IsFloat64(*table) ? push(0.0) : push(0.0F); };
    if (!skip) {
      EXPECT_EQ(MessageOf<GradientError>(push_any),
                "table 'C1': the gradient of key 5 is not finite (1 of 3 keys); try a smaller learning rate, "
                "or set the table's nonfinite_gradients to skip or pass");
      continue;
    }
    push_any();
    const std::vector<uint64_t> after = Bits(*table, keys);
    for (size_t i = 0; i < after.size(); ++i) EXPECT_EQ(after[i] == before[i], i / kDim == 1) << i;
    EXPECT_EQ(table->nonfinite_gradients(), 1U);
  }
}

TEST_P(TableDtypeTest, TheL2NormIsThatOfTheWeights) {
  if (IsLog()) GTEST_SKIP() << "it has no eviction";
  TableSpec spec = Spec(dtype(), "sgd");
  spec.initializer = {"constant", {{"value", 2}}, 0};
  spec.eviction = {{"l2_weight", {{"threshold", 0.5 * kDim * 4}}, ""}};
  const auto table = New(spec);
  const std::vector<Key> keys = {4, 5, 6};
  const auto push = [&](auto zero) {
    std::vector<decltype(zero)> gradients(keys.size() * kDim);
    gradients[kDim] = 1;  // key 5 gets smaller
    table->Push(keys.data(), keys.size(), gradients.data(), 0.5);
  };
  IsFloat64(*table) ? push(0.0) : push(0.0F);
  EXPECT_EQ(table->Evict(), 1U);
  EXPECT_EQ(table->rows(), 2U);
}

// The threshold is as exact as the weights: this one is no float32.
TEST(L2WeightTest, TheL2ThresholdHasThePrecisionOfTheTable) {
  for (const char* dtype : {"float64", "float32"}) {
    TableSpec spec = Spec(dtype, "sgd", 1);
    spec.initializer = {"constant", {{"value", 2}}, 0};
    spec.eviction = {{"l2_weight", {{"threshold", 2 + 1e-9}}, ""}};
    const auto table = Table::Create(spec, StorageSpec{});
    const Key key = 4;
    const double zero = 0;  // of either type
    table->Push(&key, 1, &zero, 0.5);
    EXPECT_EQ(table->Evict(), spec.dtype == "float64" ? 1U : 0U) << dtype;
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, TableDtypeTest,
                         testing::Combine(testing::ValuesIn(kStorageTypes), testing::ValuesIn(kDtypes)),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param)) + "_" + std::get<1>(test.param);
                         });

TEST(RowFormatTest, BytesOfARow) {
  const auto bytes = [](const std::string& dtype, const char* optimizer, uint32_t dim, bool facts) {
    TableSpec spec = Spec(dtype, optimizer, dim);
    if (facts) spec.eviction = {{"ttl", {{"seconds", 9}}, ""}};
    return Table::Create(spec, StorageSpec{})->row_bytes();
  };
  EXPECT_EQ(bytes("float32", "adagrad", 9, false), 9U * 4 + 9 * 4);
  EXPECT_EQ(bytes("float32", "adam", 9, true), 9U * 4 + 18 * 4 + 4);
  EXPECT_EQ(bytes("float64", "adagrad", 9, false), 9U * 8 + 9 * 8);
  EXPECT_EQ(bytes("float64", "adagrad", 9, true), 9U * 8 + 9 * 8 + 4 + 4);
  for (const char* half : {"bfloat16", "float16"}) {
    EXPECT_EQ(bytes(half, "adagrad", 64, false), 64U * 2 + 64 * 4);
    EXPECT_EQ(bytes(half, "adagrad", 9, true), 9U * 2 + 2 + 9 * 4 + 4);
    EXPECT_EQ(bytes(half, "sgd", 1, false), 4U);
    const std::string both = std::string(half) + "_bfloat16";
    EXPECT_EQ(bytes(both, "adagrad", 64, false), 64U * 2 + 64 * 2);
    EXPECT_EQ(bytes(both, "adagrad", 9, true), 9U * 2 + 9 * 2 + 4);
    EXPECT_EQ(bytes(both, "rowwise_adagrad", 16, false), 16U * 2 + 2 + 2);
    EXPECT_EQ(bytes(both, "sgd", 1, false), 4U);
  }
  EXPECT_EQ(bytes("float32_bfloat16", "adam", 9, false), 9U * 4 + 18 * 2);
}

// 1,000 updates of a tenth of a thousandth, where the halves next to 1 are 1/256 and 1/2048 apart: to
// nearest, all would be lost. The variance of a weight is at most 1,000 times the step times the distance.
TEST(PackedRowsTest, SmallUpdatesAreNotLost) {
  for (const auto& [dtype, distance] :
       {std::pair<const char*, double>{"bfloat16", 0x1p-8}, {"float16", 0x1p-11}}) {
    TableSpec spec = Spec(dtype, "sgd");
    spec.initializer = {"constant", {{"value", 1}}, 0};
    const auto table = Table::Create(spec, StorageSpec{});
    const std::vector<Key> keys = AllKeys();
    const std::vector<float> gradients(keys.size() * kDim, 1.0F);
    constexpr int kSteps = 1000;
    constexpr double kStep = 1e-4;
    for (int step = 0; step < kSteps; ++step) {
      table->Push(keys.data(), keys.size(), gradients.data(), kStep);
    }
    const std::vector<float> rows = PullAs<float>(*table, keys);
    double sum = 0;
    for (const float weight : rows) sum += static_cast<double>(weight);
    const auto n = static_cast<double>(rows.size());
    const double deviation = std::sqrt(kSteps * kStep * distance / n);
    EXPECT_NEAR(sum / n, 1 - kSteps * kStep, 4 * deviation) << dtype;
    // And they are rounded independently of each other: most rows differ.
    std::vector<std::vector<float>> different;
    for (size_t i = 0; i < keys.size(); ++i) {
      different.emplace_back(rows.begin() + static_cast<std::ptrdiff_t>(i * kDim),
                             rows.begin() + static_cast<std::ptrdiff_t>((i + 1) * kDim));
    }
    std::sort(different.begin(), different.end());
    different.erase(std::unique(different.begin(), different.end()), different.end());
    EXPECT_GT(different.size(), keys.size() * 9 / 10);
  }
}

// So are sums in the state: halves next to 1 are 1/128 apart, and a push adds half of that, so that each
// number goes up or stays with a chance of a half. Two numbers of a row, whose random bits may be halves of
// one number, agree as often as not; so do those of the next push.
TEST(PackedRowsTest, SumsAreRoundedUpOrDownIndependently) {
  constexpr uint32_t kNumbers = 37;  // two blocks of 16 and a part
  TableSpec spec = Spec("bfloat16_bfloat16", "adagrad", kNumbers);
  spec.optimizer.params = {{"initial_accumulator_value", 1}};
  const auto table = Table::Create(spec, StorageSpec{});
  const std::vector<Key> keys = AllKeys();
  const std::vector<float> gradients(keys.size() * kNumbers, 0x1p-4F);
  std::vector<bool> up;  // by push, key and number
  std::vector<float> last(gradients.size(), 1);
  for (int step = 0; step < 2; ++step) {
    table->Push(keys.data(), keys.size(), gradients.data(), 0.001);
    const std::vector<float> states = StatesOf<float>(*table, keys);
    for (size_t i = 0; i < states.size(); ++i) {
      ASSERT_TRUE(states[i] == last[i] || states[i] == last[i] + 0x1p-7F);
      up.push_back(states[i] != last[i]);
    }
    last = states;
  }
  const auto expect_half = [](size_t found, size_t of) {
    EXPECT_NEAR(static_cast<double>(found), static_cast<double>(of) / 2,
                2.5 * std::sqrt(static_cast<double>(of)));
  };
  expect_half(static_cast<size_t>(std::count(up.begin(), up.end(), true)), up.size());
  for (size_t apart = 1; apart < kNumbers; ++apart) {
    size_t agree = 0;
    for (size_t i = 0; i + apart < last.size(); ++i) agree += up[i] == up[i + apart] ? 1 : 0;
    expect_half(agree, last.size() - apart);
  }
  size_t agree = 0;
  for (size_t i = 0; i < last.size(); ++i) agree += up[i] == up[last.size() + i] ? 1 : 0;
  expect_half(agree, last.size());
}

// Tables of halves of earlier versions go on with the same results.
TEST(PackedRowsTest, TheBitsOfRowsAreThoseOfTheFirstVersion) {
  const auto digest = [](const char* dtype) {
    uint64_t sum = 0;
    for (const uint32_t dim : {1U, 7U, 9U, 16U, 65U}) {
      const auto table = Table::Create(Spec(dtype, "adagrad", dim), StorageSpec{});
      for (uint64_t step = 1; step <= 5; ++step) Push(table.get(), step);
      for (const float weight : PullAs<float>(*table, AllKeys())) sum = Mix64(sum + BitsOf(weight));
    }
    return sum;
  };
  EXPECT_EQ(digest("bfloat16"), 11978245342939838912U);
  EXPECT_EQ(digest("float16"), 10417799207020092605U);
}

// The bytes of rows after some updates, the last of which may overflow a few weights.
std::vector<std::byte> BytesAfterUpdates(const TableSpec& spec, bool wide, bool overflow) {
  constexpr size_t kRows = 40;
  const auto ops = RowOps::Create(Complete(spec), wide);
  const size_t row_bytes = (ops->format().facts_at + 7) / 8 * 8;
  std::vector<std::byte> bytes(kRows * row_bytes);
  std::vector<Key> keys = AllKeys();
  keys.resize(kRows);
  std::vector<std::byte*> rows;
  for (size_t i = 0; i < kRows; ++i) {
    rows.push_back(&bytes[i * row_bytes]);
    ops->Init(keys[i], rows[i]);
  }
  for (uint64_t step = 1; step <= 3; ++step) {
    auto gradients = GradientsOf<float>(keys, spec.dim, step);
    for (size_t i = 0; overflow && step == 3 && i < gradients.size(); i += 97) {
      gradients[i] = i % 2 == 0 ? 3e38F : std::numeric_limits<float>::infinity();
    }
    std::vector<const void*> of_rows;
    for (size_t i = 0; i < kRows; ++i) of_rows.push_back(&gradients[i * spec.dim]);
    ops->Update(rows.data(), keys.data(), of_rows.data(), kRows, 0.05, step);
  }
  return bytes;
}

TEST(PackedRowsTest, Avx512GivesTheSameBits) {
  if (!HasAvx512()) GTEST_SKIP() << "this processor has no AVX-512";
  for (const char* dtypes : {"bfloat16", "bfloat16_bfloat16", "float32_bfloat16"}) {
    for (const char* optimizer : {"adagrad", "adam"}) {
      for (const uint32_t dim : {1U, 7U, 8U, 9U, 15U, 16U, 17U, 24U, 33U, 64U, 1500U}) {
        const TableSpec spec = Spec(dtypes, optimizer, dim);
        EXPECT_EQ(BytesAfterUpdates(spec, true, true), BytesAfterUpdates(spec, false, true))
            << dtypes << " " << optimizer << " " << dim;
      }
    }
  }
}

// As they were before rows were updated one by one, with every option of optimizers.
TEST(PackedRowsTest, RowsOfEveryOptimizerAndOptionKeepTheirBits) {
  uint64_t sum = 0;
  for (const OptimizerInfo& info : Optimizers()) {
    for (const Params& options : {Params{}, Params{{"weight_decay", 0.1}, {"learning_rate_decay", 0.1}},
                                  Params{{"coupled_weight_decay", 0.1}, {"maximize", 1}}}) {
      for (const char* dtypes : {"float32", "bfloat16", "float16", "bfloat16_bfloat16", "float16_bfloat16"}) {
        if (!CanHave(dtypes, info.name)) continue;
        TableSpec spec = Spec(dtypes, info.name, 17);
        spec.optimizer.params = options;
        for (const std::byte part : BytesAfterUpdates(spec, false, false)) {
          sum = Mix64(sum + static_cast<uint64_t>(part));
        }
      }
    }
  }
  EXPECT_EQ(sum, 15042272760167635091U);
}

// A table of halves stays near one of float32 that is trained alike.
TEST(PackedRowsTest, ComparesWithFloat32) {
  const TestDirectory directory;
  const auto save = [&](const std::string& dtype, uint64_t steps) {
    const auto table = Table::Create(Spec(dtype), StorageSpec{});
    for (uint64_t step = 1; step <= steps; ++step) Push(table.get(), step);
    return table->Save(directory.file(dtype + std::to_string(steps))).file;
  };
  const std::string single = save("float32", 5);
  for (const auto& [dtype, most] : {std::pair<const char*, double>{"bfloat16", 0.05}, {"float16", 0.01}}) {
    const TableDifference found = CompareTables({{single}}, {{save(dtype, 5)}}, size_t{1} << 20);
    EXPECT_EQ(found.only_before + found.only_after, 0U);
    EXPECT_EQ(found.changed, found.before);
    EXPECT_GT(found.weights, 0.0);
    EXPECT_LT(found.weights, most) << dtype;
    EXPECT_EQ(found.state, 0.0);  // Adagrad's sums know nothing of the weights
  }
  const TableDifference wide = CompareTables({{single}}, {{save("float64", 5)}}, size_t{1} << 20);
  EXPECT_GT(wide.weights, 0.0);
  EXPECT_LT(wide.weights, 1e-5);
  const TableDifference same = CompareTables({{save("float16", 4)}}, {{save("float16", 5)}}, size_t{1} << 20);
  EXPECT_EQ(same.changed + same.only_after, KeysOf(5).size());
}

}  // namespace
}  // namespace oe::table_dtype_test
