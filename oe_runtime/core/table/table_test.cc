#include "oe_runtime/core/table/table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/optimizer/optimizer.h"
#include "oe_runtime/core/storage/test_storage.h"

namespace oe::table_test {
namespace {

constexpr uint32_t kDim = 9;
constexpr uint64_t kInputDim = 5000;

TableSpec Spec(const std::string& index, const std::string& optimizer = "adagrad", uint32_t dim = kDim) {
  TableSpec spec;
  spec.name = "C1";
  spec.dim = dim;
  spec.index = index;
  spec.input_dim = index == "array" ? kInputDim : 0;
  spec.optimizer.name = optimizer;
  spec.initializer = {"uniform", {}, 20};
  return spec;
}

std::vector<float> Pull(const Table& table, const std::vector<Key>& keys) {
  std::vector<float> rows(keys.size() * table.spec().dim);
  table.Pull(keys.data(), keys.size(), rows.data());
  return rows;
}

std::vector<float> Initial(const TableSpec& spec, const std::vector<Key>& keys) {
  std::vector<float> rows(keys.size() * spec.dim);
  const auto initializer = Initializer::Create(spec.initializer, spec.name);
  for (size_t i = 0; i < keys.size(); ++i) initializer->Fill(keys[i], &rows[i * spec.dim], spec.dim);
  return rows;
}

std::vector<float> Gradients(const std::vector<Key>& keys, uint32_t dim, int step) {
  std::vector<float> grads(keys.size() * dim);
  for (size_t i = 0; i < grads.size(); ++i) {
    const uint64_t bits = Mix64(keys[i / dim] * 1000 + i % dim + static_cast<uint64_t>(step) * 77777);
    grads[i] = static_cast<float>(static_cast<double>(bits >> 40) / 8388608.0 - 1);
  }
  return grads;
}

std::vector<Key> Batch(int step, size_t size, bool array) {
  std::mt19937_64 random(static_cast<uint64_t>(step) % 3);  // some batches come again
  std::vector<Key> keys;
  keys.reserve(size);
  for (size_t i = 0; i < size; ++i)
    keys.push_back(array ? random() % kInputDim : random() >> (random() % 50));
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  std::shuffle(keys.begin(), keys.end(), random);
  return keys;
}

// Runs tasks from the last to the first: an order that no code may rely on.
class Backwards final : public Executor {
 public:
  void ParallelFor(size_t count, const std::function<void(size_t)>& task) override {
    while (count > 0) task(--count);
  }
};

class TableTest : public testing::TestWithParam<std::tuple<const char*, const char*>> {
 protected:
  StorageSpec StorageFor(uint64_t capacity = 0) const {
    return TestStorage(std::get<0>(GetParam()), directory_.path(), capacity);
  }
  std::string index() const { return std::get<1>(GetParam()); }
  bool array() const { return index() == "array"; }
  static bool IsLog() { return std::string(std::get<0>(GetParam())) == "dram_ssd"; }

  TestDirectory directory_;
};

TEST_P(TableTest, PullDoesNotInsert) {
  const TableSpec spec = Spec(index());
  const auto table = Table::Create(spec, StorageFor());
  const std::vector<Key> keys = {7, 0, 4999, 7};
  EXPECT_EQ(Pull(*table, keys), Initial(table->spec(), keys));
  EXPECT_EQ(table->rows(), 0U);
  EXPECT_EQ(table->version(), 0U);
  EXPECT_EQ(table->bytes(), IsLog() ? uint64_t{512} << 10 : 0U);  // of a log, the superblocks
}

// As ids come where a client only reads: many of few keys, with and without rows, of more than one piece.
TEST_P(TableTest, RepeatedKeysGetTheRowsOfSingleOnes) {
  const auto table = Table::Create(Spec(index()), StorageFor());
  const std::vector<Key> pushed = Batch(1, 2000, array());
  table->Push(pushed.data(), pushed.size(), Gradients(pushed, kDim, 1).data(), 0.1);
  std::mt19937_64 random(3);
  std::vector<Key> keys(20'000);
  for (Key& key : keys) key = random() % 8 == 0 ? random() % kInputDim : pushed[random() % 100];
  const CacheStats before = table->cache();
  const std::vector<float> rows = Pull(*table, keys);
  const CacheStats after = table->cache();
  size_t present = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto row = rows.begin() + static_cast<std::ptrdiff_t>(i * kDim);
    ASSERT_EQ(std::vector<float>(row, row + kDim), Pull(*table, {keys[i]})) << keys[i];
    present += std::find(pushed.begin(), pushed.end(), keys[i]) == pushed.end() ? 0 : 1;
  }
  const bool cached = std::string(std::get<0>(GetParam())) == "dram_pmem";
  if (!IsLog()) {  // which looks up repeated keys once
    EXPECT_EQ(after.hits + after.misses - before.hits - before.misses, cached ? present : 0);
  }
  EXPECT_EQ(table->rows(), pushed.size());
}

TEST_P(TableTest, TheFirstOfRepeatedKeysThatIsOutOfRangeIsNamed) {
  if (!array()) GTEST_SKIP() << "every key is one of a hash table";
  const auto table = Table::Create(Spec(index()), StorageFor());
  std::vector<Key> keys(10'000, 3);
  for (size_t i = 700; i < keys.size(); i += 100) keys[i] = kInputDim + 10'000 - i;
  try {
    Pull(*table, keys);
    FAIL();
  } catch (const KeyRangeError& error) {
    EXPECT_NE(std::string(error.what()).find("key " + std::to_string(keys[700])), std::string::npos)
        << error.what();
  }
}

TEST_P(TableTest, PushUpdatesTheRowsOfItsKeys) {
  const auto table = Table::Create(Spec(index(), "sgd"), StorageFor());
  const std::vector<Key> keys = {7, 0, 4999};
  const std::vector<float> grads = Gradients(keys, kDim, 1);
  std::vector<float> expected = Initial(table->spec(), keys);
  table->Push(keys.data(), keys.size(), grads.data(), 0.5);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] -= grads[i] * 0.5F;
  EXPECT_EQ(Pull(*table, keys), expected);
  EXPECT_EQ(Pull(*table, {1}), Initial(table->spec(), {1}));
  EXPECT_EQ(table->rows(), 3U);
  EXPECT_EQ(table->version(), 1U);
  EXPECT_GT(table->bytes(), 0U);
  EXPECT_GT(table->index_bytes(), 0U);
  table->Push(nullptr, 0, nullptr, 0.5);
  EXPECT_EQ(table->version(), 2U);
}

TEST_P(TableTest, MatchesAModelOverManyBatches) {
  using Dims = std::vector<uint32_t>;
  for (const std::string name : {"adagrad", "adam", "adagrad_decay", "nadam", "sgd", "ftrl"}) {
    for (const uint32_t dim : name.substr(0, 3) == "ada" ? Dims{1, 8, 9, 16, 64, 65, 128} : Dims{9}) {
      const auto table = Table::Create(Spec(index(), name, dim), StorageFor());
      const auto optimizer = Optimizer<float>::Create(table->spec().optimizer, dim);
      std::map<Key, std::vector<float>> model;
      for (int step = 1; step <= 5; ++step) {
        const std::vector<Key> keys = Batch(step, 700, array());
        const std::vector<float> grads = Gradients(keys, dim, step);
        for (int pull = 0; pull < 3; ++pull) (void)Pull(*table, keys);
        table->Push(keys.data(), keys.size(), grads.data(), 0.1);
        for (size_t i = 0; i < keys.size(); ++i) {
          std::vector<float>& row = model[keys[i]];
          if (row.empty()) {
            row = Initial(table->spec(), {keys[i]});
            row.resize(dim + optimizer->state_values());
            optimizer->InitState(row.data() + dim);
          }
          float* weights = row.data();
          float* state = weights + dim;
          const float* gradient = &grads[i * dim];
          optimizer->Apply({&weights, &state, &gradient, 1}, 0.1F, static_cast<uint64_t>(step));
        }
      }
      ASSERT_EQ(table->rows(), model.size());
      for (const auto& [key, row] : model) {
        ASSERT_EQ(Pull(*table, {key}), std::vector<float>(row.begin(), row.begin() + dim))
            << name << " key " << key;
      }
    }
  }
}

TEST_P(TableTest, ExtremeAndStridedKeys) {
  if (array()) GTEST_SKIP() << "array keys lie in [0, input_dim)";
  const auto table = Table::Create(Spec("hash", "sgd"), StorageFor());
  std::vector<Key> keys = {0, ~Key{0}, Key{1} << 63, (Key{1} << 63) - 1};
  for (Key i = 1; i < 3000; ++i) keys.push_back(i << 40);
  for (Key i = 1; i < 3000; ++i) keys.push_back(i << 12);
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  const std::vector<float> grads = Gradients(keys, kDim, 1);
  std::vector<float> expected = Initial(table->spec(), keys);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] -= grads[i];
  table->Push(keys.data(), keys.size(), grads.data(), 1.0);
  EXPECT_EQ(table->rows(), keys.size());
  EXPECT_EQ(Pull(*table, keys), expected);
}

TEST_P(TableTest, KeysOutsideAnArrayAreRefusedBeforeAnythingChanges) {
  if (!array()) GTEST_SKIP() << "every key of a hash table is legal";
  const auto table = Table::Create(Spec("array"), StorageFor());
  const std::vector<Key> keys = {3, kInputDim, 4};
  const std::vector<float> grads(keys.size() * kDim, 1.0F);
  std::vector<float> out(keys.size() * kDim);
  const std::string expected = "table 'C1': key 5000 is not below its input_dim 5000";
  EXPECT_EQ(MessageOf<KeyRangeError>([&] { table->Push(keys.data(), 3, grads.data(), 1); }), expected);
  EXPECT_EQ(MessageOf<KeyRangeError>([&] { table->Pull(keys.data(), 3, out.data()); }), expected);
  const Key negative = static_cast<Key>(-1);
  EXPECT_EQ(MessageOf<KeyRangeError>([&] { table->Pull(&negative, 1, out.data()); }),
            "table 'C1': key 18446744073709551615 (-1 as int64) is not below its input_dim 5000");
  EXPECT_EQ(table->rows(), 0U);
  EXPECT_EQ(table->version(), 0U);
}

TEST_P(TableTest, AnIndexBeyondMemoryIsRefused) {
#if defined(OE_SANITIZE_ADDRESS) || defined(OE_SANITIZE_THREAD)
  GTEST_SKIP() << "the sanitizer's allocator ends the process instead";
#else
  if (!array()) GTEST_SKIP() << "hash tables grow with their keys";
  TableSpec spec = Spec("array");
  spec.input_dim = uint64_t{1} << 62;
  EXPECT_EQ(MessageOf<StorageError>([&] { (void)Table::Create(spec, StorageFor()); }),
            "table 'C1': no memory for the index of 'input_dim' 4611686018427387904; use more servers or a "
            "hash table");
#endif
}

TEST_P(TableTest, LearningRatesAreChecked) {
  const auto table = Table::Create(Spec(index()), StorageFor());
  const Key key = 1;
  const std::vector<float> grads(kDim, 1.0F);
  for (const double rate : {-1.0, std::numeric_limits<double>::quiet_NaN(), 1e300}) {
    EXPECT_THROW(table->Push(&key, 1, grads.data(), rate), SpecError) << rate;
  }
  EXPECT_EQ(table->rows(), 0U);
}

TEST_P(TableTest, GradientsThatAreNotFinite) {
  const std::vector<Key> keys = {7, 0, 4999, 12};
  const float infinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> grads = Gradients(keys, kDim, 1);
  for (float& g : grads) g *= std::numeric_limits<float>::max() / 2;  // large is not infinite
  for (const float bad : {nan, -nan, infinity, -infinity}) {
    for (const char* policy : {"refuse", "skip", "pass"}) {
      TableSpec spec = Spec(index(), "sgd");
      spec.nonfinite_gradients = policy;
      const auto table = Table::Create(spec, StorageFor());
      table->CheckGradients(keys.data(), keys.size(), grads.data());
      std::vector<float> bad_grads = grads;
      bad_grads[kDim] = bad;          // the first of key 0
      bad_grads[3 * kDim - 1] = bad;  // the last of key 4999
      const std::string refusal = MessageOf<GradientError>(
          [&] { table->CheckGradients(keys.data(), keys.size(), bad_grads.data()); });
      std::vector<float> expected = Initial(table->spec(), keys);
      if (policy == std::string("refuse")) {
        EXPECT_EQ(refusal,
                  "table 'C1': the gradient of key 0 is not finite (2 of 4 keys); try a smaller "
                  "learning rate, or set the table's nonfinite_gradients to skip or pass");
        EXPECT_EQ(table->version(), 0U);
      } else {
        EXPECT_EQ(refusal, "no exception");
        Backwards executor;
        table->Push(keys.data(), keys.size(), bad_grads.data(), 0x1p-126, &executor);
        EXPECT_EQ(table->version(), 1U);
        const bool skip = policy == std::string("skip");
        EXPECT_EQ(table->rows(), skip ? 2U : 4U);
        for (size_t i = 0; i < keys.size(); ++i) {
          if (skip && (i == 1 || i == 2)) continue;
          for (size_t d = 0; d < kDim; ++d) expected[i * kDim + d] -= bad_grads[i * kDim + d] * 0x1p-126F;
        }
      }
      const std::vector<float> rows = Pull(*table, keys);
      for (size_t i = 0; i < rows.size(); ++i) {
        if (std::isnan(expected[i])) {
          EXPECT_TRUE(std::isnan(rows[i])) << policy << " " << i;
        } else {
          EXPECT_EQ(rows[i], expected[i]) << policy << " " << i;
        }
      }
      EXPECT_EQ(table->nonfinite_gradients(), policy == std::string("pass") ? 0U : 2U);
    }
  }
}

TEST_P(TableTest, OneInfinityAmongManyGradientsIsFound) {
  std::vector<Key> keys(kInputDim);
  for (Key key = 0; key < kInputDim; ++key) keys[key] = key;
  std::vector<float> grads(keys.size() * 64, 1.0F);
  Backwards executor;
  const auto wide = Table::Create(Spec(index(), "sgd", 64), StorageFor());
  wide->CheckGradients(keys.data(), keys.size(), grads.data(), &executor);
  for (const size_t at : {size_t{0}, size_t{65535}, size_t{65536}, grads.size() - 1}) {
    grads[at] = std::numeric_limits<float>::infinity();
    EXPECT_THROW(wide->CheckGradients(keys.data(), keys.size(), grads.data(), &executor), GradientError)
        << at;
    grads[at] = 1;
  }
}

// What a rule takes from the number of the push must be the same after a restore: Adam's powers, Nadam's
// product, AdagradDecay's period.
TEST_P(TableTest, ARestoredTableGoesOnAsIfNothingHadHappened) {
  for (const auto& [name, defaults, counts_pushes] : Optimizers()) {
    TableSpec spec = Spec(index(), name);
    if (name == "adagrad_decay") spec.optimizer.params["accumulator_decay_step"] = 3;
    if (name == "nadam") spec.optimizer.params = {{"torch", 1}, {"momentum_decay", 0.004}};
    if (name == "sgd") spec.optimizer.params = {{"coupled_weight_decay", 0.1}, {"learning_rate_decay", 0.5}};
    const auto push = [&](Table* table, int step) {
      const std::vector<Key> keys = Batch(step, 50, array());
      const std::vector<float> grads = Gradients(keys, kDim, step);
      (void)Pull(*table, keys);
      table->Upkeep();
      table->Push(keys.data(), keys.size(), grads.data(), 0.1);
    };
    const auto table = Table::Create(spec, StorageFor());
    for (int step = 1; step <= 7; ++step) push(table.get(), step);
    const std::string file = directory_.file(name + ".oet");
    table->Save(file);
    spec.nonfinite_gradients = "pass";  // the policy may be another
    const auto restored = Table::Create(spec, StorageFor());
    restored->Restore({file});
    for (int step = 8; step <= 12; ++step) {
      push(table.get(), step);
      push(restored.get(), step);
    }
    for (uint32_t part = 0; part < Table::kParts; ++part) {
      const std::vector<Key> keys = table->Keys(part);
      EXPECT_EQ(Pull(*table, keys), Pull(*restored, keys)) << name;
    }
  }
}

TEST_P(TableTest, ShardsExecutorsAndTiersGiveTheSameBits) {
  for (const char* optimizer : {"adagrad", "adam"}) {
    const TableSpec spec = Spec(index(), optimizer);
    const auto one = Table::Create(spec, StorageSpec{});
    std::vector<std::unique_ptr<Table>> three;
    three.reserve(3);
    for (uint32_t i = 0; i < 3; ++i) three.push_back(Table::Create(spec, StorageFor(), {i, 3}));
    Backwards backwards;
    for (int step = 1; step <= 6; ++step) {
      const std::vector<Key> keys = Batch(step, 2000, array());
      const std::vector<float> grads = Gradients(keys, kDim, step);
      one->Push(keys.data(), keys.size(), grads.data(), 0.05);
      std::vector<float> parts(keys.size() * kDim);
      const std::vector<float> whole = Pull(*one, keys);
      for (uint32_t server = 0; server < 3; ++server) {
        std::vector<Key> mine;
        std::vector<float> my_grads;
        std::vector<size_t> places;
        for (size_t i = 0; i < keys.size(); ++i) {
          if (server_of(keys[i], 3, array()) != server) continue;
          mine.push_back(keys[i]);
          places.push_back(i);
          my_grads.insert(my_grads.end(), &grads[i * kDim], &grads[i * kDim] + kDim);
        }
        EXPECT_GT(mine.size(), keys.size() / 4);
        three[server]->Push(mine.data(), mine.size(), my_grads.data(), 0.05, &backwards);
        std::vector<float> rows(mine.size() * kDim);
        three[server]->Pull(mine.data(), mine.size(), rows.data(), &backwards);
        for (size_t i = 0; i < mine.size(); ++i) std::copy_n(&rows[i * kDim], kDim, &parts[places[i] * kDim]);
      }
      ASSERT_EQ(parts, whole) << optimizer << " step " << step;
    }
    EXPECT_EQ(three[0]->rows() + three[1]->rows() + three[2]->rows(), one->rows());
  }
}

TEST_P(TableTest, KeysOfAnotherServerAreRefused) {
  const auto table = Table::Create(Spec(index()), StorageFor(), {1, 3});
  Key key = 0;
  while (server_of(key, 3, array()) != 2) ++key;
  std::vector<float> row(kDim);
  EXPECT_EQ(MessageOf<SpecError>([&] { table->Pull(&key, 1, row.data()); }),
            "table 'C1': key " + std::to_string(key) + " belongs to server 2 of 3, but was sent to server 1");
  EXPECT_THROW((void)Table::Create(Spec(index()), StorageFor(), {3, 3}), SpecError);
}

TEST_P(TableTest, AFullStorageLeavesEveryRowWhole) {
  constexpr uint64_t kOfLog = uint64_t{2} << 20;  // superblocks and some segments
  const auto table =
      Table::Create(Spec(index(), "sgd", 64), StorageFor(IsLog() ? kOfLog : uint64_t{768} << 10));
  std::vector<Key> keys(array() ? kInputDim : 20000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  const std::vector<Key> few(keys.begin(), keys.begin() + 500);
  const std::vector<float> few_grads = Gradients(few, 64, 1);
  table->Push(few.data(), few.size(), few_grads.data(), 1.0);
  const std::vector<float> before = Pull(*table, keys);

  const std::vector<float> grads = Gradients(keys, 64, 2);
  const std::string message =
      MessageOf<StorageError>([&] { table->Push(keys.data(), keys.size(), grads.data(), 1.0); });
  EXPECT_NE(message.find("is full: table 'C1' needs"), std::string::npos) << message;
  // Nothing of the push is to be seen; rows it made have the value that a pull read before.
  EXPECT_EQ(Pull(*table, keys), before);
  EXPECT_EQ(table->version(), 1U);
  EXPECT_GE(table->rows(), few.size());
  EXPECT_LT(table->rows(), keys.size());
  // The table goes on with what it has.
  std::vector<float> expected = Pull(*table, few);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] -= few_grads[i];
  table->Push(few.data(), few.size(), few_grads.data(), 1.0);
  EXPECT_EQ(Pull(*table, few), expected);
  // And every row there is can be saved and read back.
  const TestDirectory saved;
  const uint64_t rows = table->Save(saved.file("t")).rows;
  EXPECT_EQ(rows, table->rows());
  const auto copy = Table::Create(table->spec(), StorageSpec{});
  copy->Restore({saved.file("t")});
  EXPECT_EQ(Pull(*copy, keys), Pull(*table, keys));
}

TEST_P(TableTest, SaveAndRestoreAcrossServerCounts) {
  for (const char* optimizer : {"adagrad", "adam", "sgd", "ftrl"}) {
    const TestDirectory saved;
    const TableSpec spec = Spec(index(), optimizer);
    const auto original = Table::Create(spec, StorageFor());
    for (int step = 1; step <= 4; ++step) {
      const std::vector<Key> keys = Batch(step, 3000, array());
      original->Push(keys.data(), keys.size(), Gradients(keys, kDim, step).data(), 0.05);
    }
    const std::string one = saved.file("one");
    EXPECT_EQ(original->Save(one).rows, original->rows());

    // 1 → 3 servers, each file read by each; then 3 → 2; then 2 → 1.
    std::vector<std::string> files = {one};
    for (const uint32_t servers : {3U, 2U, 1U}) {
      std::vector<std::unique_ptr<Table>> tables;
      std::vector<std::string> next;
      uint64_t rows = 0;
      for (uint32_t i = 0; i < servers; ++i) {
        tables.push_back(Table::Create(spec, StorageFor(), {i, servers}));
        tables.back()->Restore(files);
        EXPECT_EQ(tables.back()->version(), 4U);
        rows += tables.back()->rows();
        next.push_back(saved.file(std::to_string(servers) + "-" + std::to_string(i)));
        tables.back()->Save(next.back());
      }
      EXPECT_EQ(rows, original->rows());
      files = next;
    }
    const auto back = Table::Create(spec, StorageFor());
    back->Restore(files);
    // Slots and step too: one more push must give the same bits.
    for (int step = 5; step <= 6; ++step) {
      const std::vector<Key> keys = Batch(step, 3000, array());
      const std::vector<float> grads = Gradients(keys, kDim, step);
      original->Push(keys.data(), keys.size(), grads.data(), 0.05);
      back->Push(keys.data(), keys.size(), grads.data(), 0.05);
      ASSERT_EQ(Pull(*back, keys), Pull(*original, keys)) << optimizer;
    }
    EXPECT_EQ(back->version(), original->version());
  }
}

TEST_P(TableTest, RestoreReplacesEverything) {
  const TestDirectory saved;
  const auto table = Table::Create(Spec(index()), StorageFor());
  const std::vector<Key> keys = {1, 2, 3};
  const std::vector<float> grads(keys.size() * kDim, 1.0F);
  table->Push(keys.data(), 2, grads.data(), 0.1);
  const std::vector<float> then = Pull(*table, keys);
  table->Save(saved.file("t"));
  table->Push(keys.data(), 3, grads.data(), 0.1);
  EXPECT_NE(Pull(*table, keys), then);
  table->Restore({saved.file("t")});
  EXPECT_EQ(Pull(*table, keys), then);
  EXPECT_EQ(table->rows(), 2U);
  EXPECT_EQ(table->version(), 1U);
}

TEST_P(TableTest, AnEmptyTableIsSavedToo) {
  const TestDirectory saved;
  const auto table = Table::Create(Spec(index()), StorageFor());
  EXPECT_EQ(table->Save(saved.file("t")).rows, 0U);
  table->Restore({saved.file("t")});
  EXPECT_EQ(table->rows(), 0U);
}

INSTANTIATE_TEST_SUITE_P(Kinds, TableTest,
                         testing::Combine(testing::ValuesIn(kStorageTypes), testing::Values("hash", "array")),
                         [](const auto& kind) {
                           return std::string(std::get<0>(kind.param)) + "_" + std::get<1>(kind.param);
                         });

}  // namespace
}  // namespace oe::table_test
