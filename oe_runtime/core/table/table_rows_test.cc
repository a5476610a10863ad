// Rows by key over every storage, against a map.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/common/thread_pool.h"
#include "oe_runtime/core/storage/test_storage.h"
#include "oe_runtime/core/table/table.h"

namespace oe::table_rows_test {
namespace {

constexpr uint32_t kDim = 3;
constexpr uint64_t kKeys = 2000;
constexpr size_t kState = 2 * kDim;  // Adam

// Weights, then the optimizer's state.
using Row = std::vector<float>;
using Oracle = std::map<Key, Row>;

TableSpec Spec(const std::string& index, const std::string& dtype = "float32") {
  TableSpec spec;
  spec.name = "e";
  spec.dim = kDim;
  spec.dtype = dtype;
  spec.index = index;
  spec.input_dim = index == "array" ? kKeys : 0;
  spec.optimizer.name = "adam";
  return spec;
}

EvictionSpec Cap(double rows) {
  EvictionSpec cap;
  cap.name = "cap";
  cap.policy = "lru";
  cap.params["max_rows"] = rows;
  return cap;
}

std::vector<Key> Range(Key begin, Key end) {
  std::vector<Key> keys;
  for (Key key = begin; key < end; ++key) keys.push_back(key);
  return keys;
}

// All rows, as ReadRows and Keys have them.
Oracle RowsOf(const Table& table) {
  Oracle rows;
  for (uint32_t part = 0; part < Table::kParts; ++part) {
    const std::vector<Key> keys = table.Keys(part);
    std::vector<float> weights(keys.size() * kDim);
    std::vector<float> states(keys.size() * kState);
    std::vector<uint8_t> found(keys.size());
    table.ReadRows(keys.data(), keys.size(), weights.data(), states.data(), found.data());
    for (size_t i = 0; i < keys.size(); ++i) {
      EXPECT_EQ(found[i], 1);
      Row& row = rows[keys[i]];
      row.assign(&weights[i * kDim], &weights[i * kDim] + kDim);
      row.insert(row.end(), &states[i * kState], &states[i * kState] + kState);
    }
  }
  return rows;
}

class TableRowsTest : public testing::TestWithParam<std::tuple<const char*, const char*>> {
 protected:
  std::string type() const { return std::get<0>(GetParam()); }
  StorageSpec storage() const { return TestStorage(type(), directory_.path(), 0); }
  std::unique_ptr<Table> New(const StorageSpec& storage) const {
    return Table::Create(Spec(std::get<1>(GetParam())), storage);
  }

  // Keys that are there and keys that are not; the state of every second call is left as it is.
  void Assign(Table* table, Oracle* oracle) {
    const std::vector<Key> keys = SomeKeys(300);
    std::vector<float> weights;
    std::vector<float> states;
    const bool with_states = random_() % 2 == 0;
    uint64_t created = 0;
    for (const Key key : keys) {
      created += oracle->count(key) == 0 ? 1 : 0;
      Row& row = (*oracle)[key];
      row.resize(kDim + kState);  // of zeros, as Adam's new rows
      for (size_t d = 0; d < row.size(); ++d) {
        if (d < kDim) row[d] = Number();
        if (d >= kDim && with_states) row[d] = std::abs(Number());  // Adam's velocity is never negative
      }
      weights.insert(weights.end(), row.begin(), row.begin() + kDim);
      states.insert(states.end(), row.begin() + kDim, row.end());
    }
    const Table::AssignCounts counts =
        table->Assign(keys.data(), keys.size(), weights.data(), with_states ? states.data() : nullptr);
    EXPECT_EQ(counts.created, created);
    EXPECT_EQ(counts.evicted + counts.no_room, 0U);
  }
  void Erase(Table* table, Oracle* oracle) {
    const std::vector<Key> keys = SomeKeys(200);
    uint64_t erased = 0;
    for (const Key key : keys) erased += oracle->erase(key);
    EXPECT_EQ(table->Erase(keys.data(), keys.size()), erased);
  }
  // What pushes do to rows is other tests' business: the oracle takes the keys' rows from the table.
  void Push(Table* table, Oracle* oracle) {
    const std::vector<Key> keys = SomeKeys(200);
    std::vector<float> gradients(keys.size() * kDim);
    for (float& gradient : gradients) gradient = Number();
    table->Push(keys.data(), keys.size(), gradients.data(), 0.1);
    const Oracle rows = RowsOf(*table);
    for (const Key key : keys) (*oracle)[key] = rows.at(key);
  }
  void Change(Table* table, Oracle* oracle) {
    for (int i = 0; i < 6; ++i) {
      const uint64_t kind = random_() % 4;
      if (kind == 0) {
        Push(table, oracle);
      } else if (kind == 1) {
        Erase(table, oracle);
      } else {
        Assign(table, oracle);
      }
      table->Upkeep();
    }
  }

  std::vector<Key> SomeKeys(size_t n) {
    std::vector<Key> keys = Range(0, kKeys);
    std::shuffle(keys.begin(), keys.end(), random_);
    keys.resize(n);
    return keys;
  }
  float Number() { return static_cast<float>(random_() % 2001) / 100.0F - 10.0F; }

  TestDirectory directory_;
  TestDirectory files_;
  std::mt19937_64 random_{7};
};

TEST_P(TableRowsTest, AgreesWithAMap) {
  const auto table = New(storage());
  Oracle oracle;
  for (int round = 0; round < 8; ++round) {
    Change(table.get(), &oracle);
    ASSERT_TRUE(RowsOf(*table) == oracle) << "round " << round;
    ASSERT_EQ(table->rows(), oracle.size());
  }
}

TEST_P(TableRowsTest, IsPartOfSavesAndIncrements) {
  const auto table = New(storage());
  Oracle oracle;
  Change(table.get(), &oracle);
  std::vector<std::string> chain = {files_.file("0")};
  uint64_t last = table->Save(chain[0]).checksum;
  for (int i = 1; i <= 5; ++i) {
    Change(table.get(), &oracle);
    chain.push_back(files_.file(std::to_string(i)));
    const TableFileInfo info = table->Save(chain.back(), last);
    ASSERT_EQ(info.base, last);
    last = info.checksum;
    const auto copy = New(StorageSpec{});
    copy->RestoreChains({chain});
    ASSERT_TRUE(RowsOf(*copy) == oracle) << "increment " << i;
  }
}

TEST_P(TableRowsTest, IsPartOfCheckpoints) {
  if (!KeepsCheckpoints(type())) return;
  StorageSpec recovering = storage();
  recovering.kept_checkpoints = 3;
  auto table = New(recovering);
  recovering.recover = true;
  std::map<uint64_t, Oracle> kept;
  Oracle oracle;
  for (uint64_t id = 1; id <= 4; ++id) {
    Change(table.get(), &oracle);
    table->Checkpoint(id);
    kept[id] = oracle;
  }
  table->WaitDurable();
  Change(table.get(), &oracle);
  table->Recover(4);
  EXPECT_TRUE(RowsOf(*table) == kept[4]);
  oracle = kept[4];
  Change(table.get(), &oracle);
  table.reset();  // what follows the checkpoint is lost
  table = New(recovering);
  EXPECT_TRUE(RowsOf(*table) == kept[4]);
  table->Recover(3);
  EXPECT_TRUE(RowsOf(*table) == kept[3]);
  // An assignment alone is a change that a recovery takes back.
  const Key key = 5;
  const Row row = {1, 2, 3};
  table->Assign(&key, 1, row.data(), nullptr);
  table->Recover(3);
  EXPECT_TRUE(RowsOf(*table) == kept[3]);
}

TEST_P(TableRowsTest, ReadsWhatANewRowWouldHave) {
  const auto table = New(storage());
  const Key key = 17;
  std::vector<float> weights(kDim);
  std::vector<float> states(kState, -1);
  std::vector<float> pulled(kDim);
  uint8_t found = 1;
  table->ReadRows(&key, 1, weights.data(), states.data(), &found);
  EXPECT_EQ(found, 0);
  table->Pull(&key, 1, pulled.data());
  EXPECT_EQ(weights, pulled);
  EXPECT_EQ(states, std::vector<float>(kState, 0.0F));
  EXPECT_EQ(table->rows(), 0U);
}

TEST_P(TableRowsTest, RefusesNumbersThatAreNotFinite) {
  const auto table = New(storage());
  const std::vector<Key> keys = {4, 5};
  std::vector<float> weights = {1, 2, 3, 4, std::numeric_limits<float>::quiet_NaN(), 6};
  EXPECT_EQ(MessageOf<SpecError>([&] { table->Assign(keys.data(), 2, weights.data(), nullptr); }),
            "table 'e': the row of key 5 is not finite; give finite numbers, or set the table's "
            "nonfinite_gradients to pass");
  weights[4] = 5;
  std::vector<float> states(2 * kState, 1.0F);
  states[0] = std::numeric_limits<float>::infinity();
  EXPECT_NE(MessageOf<SpecError>([&] {
              table->Assign(keys.data(), 2, weights.data(), states.data());
            }).find("optimizer's state of key 4"),
            std::string::npos);
  EXPECT_EQ(table->rows(), 0U);
}

// Weights and state as columns of a wider array, by several threads; what lies between them stays.
TEST_P(TableRowsTest, MayBeColumnsOfAWiderArray) {
  constexpr size_t kWidth = 1 + kDim + 2 + kState;
  constexpr size_t kStateAt = 1 + kDim + 2;
  constexpr RowStrides kStrides = {kWidth * sizeof(float), kWidth * sizeof(float)};
  ThreadPool pool(2);
  const auto table = New(storage());
  Oracle oracle;
  Change(table.get(), &oracle);
  const std::vector<Key> keys = SomeKeys(1500);
  std::vector<float> wide(keys.size() * kWidth, -7.0F);
  std::vector<float> wanted = wide;
  for (size_t i = 0; i < keys.size(); ++i) {
    Row& row = oracle[keys[i]];
    row.clear();
    for (size_t d = 0; d < kDim + kState; ++d) row.push_back(Number());
    std::copy_n(&row[0], kDim, &wanted[i * kWidth + 1]);
    std::copy_n(&row[kDim], kState, &wanted[i * kWidth + kStateAt]);
  }
  table->Assign(keys.data(), keys.size(), &wanted[1], &wanted[kStateAt], &pool, kStrides);
  EXPECT_TRUE(RowsOf(*table) == oracle);
  std::vector<uint8_t> found(keys.size());
  table->ReadRows(keys.data(), keys.size(), &wide[1], &wide[kStateAt], found.data(), &pool, kStrides);
  EXPECT_EQ(wide, wanted);
  EXPECT_EQ(std::count(found.begin(), found.end(), 1), static_cast<std::ptrdiff_t>(keys.size()));
  wanted[700 * kWidth + kStateAt + kState - 1] = std::numeric_limits<float>::infinity();
  EXPECT_NE(MessageOf<SpecError>([&] {
              table->Assign(keys.data(), keys.size(), &wanted[1], &wanted[kStateAt], &pool, kStrides);
            }).find("state of key " + std::to_string(keys[700])),
            std::string::npos);
  EXPECT_TRUE(RowsOf(*table) == oracle);
}

// Each row is read as one of the calls wrote it, while others write and pull.
TEST_P(TableRowsTest, AreWholeWhileOthersWrite) {
  const auto table = New(storage());
  const std::vector<Key> keys = Range(0, 500);
  const auto write = [&](float value) {
    const std::vector<float> weights(keys.size() * kDim, value);
    const std::vector<float> states(keys.size() * kState, value);
    table->Assign(keys.data(), keys.size(), weights.data(), states.data());
  };
  write(0);
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (int round = 1; round <= 30; ++round) {
      write(static_cast<float>(round));
      table->Upkeep();
    }
    done = true;
  });
  std::vector<float> weights(keys.size() * kDim);
  std::vector<float> states(keys.size() * kState);
  std::vector<float> pulled(keys.size() * kDim);
  std::vector<uint8_t> found(keys.size());
  for (bool last = false; !last;) {
    last = done;
    table->ReadRows(keys.data(), keys.size(), weights.data(), states.data(), found.data());
    table->Pull(keys.data(), keys.size(), pulled.data());
    for (size_t i = 0; i < keys.size(); ++i) {
      const float value = weights[i * kDim];
      EXPECT_EQ(std::count(&weights[i * kDim], &weights[i * kDim] + kDim, value), kDim);
      EXPECT_EQ(std::count(&states[i * kState], &states[i * kState] + kState, value), kState);
      EXPECT_EQ(std::count(&pulled[i * kDim], &pulled[i * kDim] + kDim, pulled[i * kDim]), kDim);
    }
    if (!last) continue;
    EXPECT_EQ(weights, std::vector<float>(keys.size() * kDim, 30.0F));
  }
  writer.join();
}

INSTANTIATE_TEST_SUITE_P(Kinds, TableRowsTest,
                         testing::Combine(testing::ValuesIn(kStorageTypes), testing::Values("hash", "array")),
                         [](const auto& kind) {
                           return std::string(std::get<0>(kind.param)) + "_" + std::get<1>(kind.param);
                         });

// What a row of halves reads is what was assigned, to the nearest half; assigned again it is the same.
TEST(TableRows, HalvesAreRoundedToTheNearest) {
  for (const auto& [dtype, nearest] : std::vector<std::pair<std::string, float>>{
           {"bfloat16", 1.0078125F}, {"float16", 1.0058594F}, {"float32", 1.006F}}) {
    const auto table = Table::Create(Spec("hash", dtype), StorageSpec{});
    const Key key = 1;
    const Row row = {1.006F, -2.0F, 0.0F};
    Row pulled(kDim);
    table->Assign(&key, 1, row.data(), nullptr);
    table->Pull(&key, 1, pulled.data());
    EXPECT_EQ(pulled, (Row{nearest, -2.0F, 0.0F})) << dtype;
    const Row first = pulled;
    table->Assign(&key, 1, pulled.data(), nullptr);
    table->Pull(&key, 1, pulled.data());
    EXPECT_EQ(pulled, first) << dtype;
  }
}

TEST(TableRows, AreAssignedWithoutAdmission) {
  TableSpec spec = Spec("hash");
  spec.admission.name = "counter";
  spec.admission.params["filter_freq"] = 3;
  const auto table = Table::Create(spec, StorageSpec{});
  const Key key = 9;
  const Row row = {1, 2, 3};
  const std::vector<float> gradient(kDim, 0.0F);
  table->Push(&key, 1, gradient.data(), 0.1);
  EXPECT_EQ(table->rows(), 0U);
  table->Assign(&key, 1, row.data(), nullptr);
  Row pulled(kDim);
  table->Pull(&key, 1, pulled.data());
  EXPECT_EQ(pulled, row);
  // Once it is erased, admission begins anew.
  EXPECT_EQ(table->Erase(&key, 1), 1U);
  table->Push(&key, 1, gradient.data(), 0.1);
  table->Push(&key, 1, gradient.data(), 0.1);
  EXPECT_EQ(table->rows(), 0U);
  table->Push(&key, 1, gradient.data(), 0.1);
  EXPECT_EQ(table->rows(), 1U);
}

TEST(TableRows, OfACapEvictOthersAndSayWhatFindsNoRoom) {
  TableSpec spec = Spec("array");  // keys fall evenly into the shares of the cap
  spec.eviction = {Cap(160)};
  const auto table = Table::Create(spec, StorageSpec{});
  const auto assign = [&](Key begin, Key end) {
    const std::vector<Key> keys = Range(begin, end);
    const std::vector<float> weights(keys.size() * kDim, static_cast<float>(begin));
    return table->Assign(keys.data(), keys.size(), weights.data(), nullptr);
  };
  EXPECT_EQ(assign(0, 160).created, 160U);
  const Table::AssignCounts counts = assign(160, 208);
  EXPECT_EQ(counts.created, 48U);
  EXPECT_EQ(counts.evicted, 48U);
  EXPECT_EQ(counts.no_room, 0U);
  EXPECT_EQ(table->rows(), 160U);
  EXPECT_EQ(table->policy_counts().evicted.at("cap"), 48U);
  // Rows of one call do not evict each other.
  const Table::AssignCounts many = assign(1000, 1176);
  EXPECT_EQ(many.created, 160U);
  EXPECT_EQ(many.no_room, 16U);
  EXPECT_EQ(table->rows(), 160U);
  // A push finds room again.
  const std::vector<Key> keys = Range(0, 16);
  const std::vector<float> gradients(keys.size() * kDim, 1.0F);
  table->Push(keys.data(), keys.size(), gradients.data(), 0.1);
  EXPECT_EQ(table->policy_counts().no_room, 16U);
  uint64_t there = 0;
  for (uint32_t part = 0; part < Table::kParts; ++part) {
    for (const Key key : table->Keys(part)) there += key < 16 ? 1 : 0;
  }
  EXPECT_EQ(there, 16U);
}

// An increment may bring more than the cap: they go a few for each new row, which is what a call takes room
// for.
TEST(TableRows, EvictAtMostTwoForEachNewOne) {
  const TestDirectory directory;
  TableSpec spec = Spec("array");
  spec.eviction = {Cap(1e6)};
  const auto assign = [&](Table* table, Key begin, Key end) {
    const std::vector<Key> keys = Range(begin, end);
    const std::vector<float> weights(keys.size() * kDim, 1.0F);
    return table->Assign(keys.data(), keys.size(), weights.data(), nullptr);
  };
  const auto source = Table::Create(spec, StorageSpec{});
  assign(source.get(), 0, 160);
  const std::string full = directory.file("full");
  const std::string changed = directory.file("changed");
  const uint64_t checksum = source->Save(full).checksum;
  assign(source.get(), 160, 800);
  ASSERT_TRUE(source->Save(changed, checksum).base);
  spec.eviction = {Cap(160)};
  for (const char* type : kStorageTypes) {
    const auto table = Table::Create(spec, TestStorage(type, directory.path()));
    table->Restore({full});
    table->ApplyIncrement(changed);
    ASSERT_EQ(table->rows(), 800U) << type;
    const Table::AssignCounts counts = assign(table.get(), 1000, 1016);
    EXPECT_EQ(counts.evicted, 32U) << type;
    EXPECT_EQ(counts.no_room, 16U) << type;
    EXPECT_EQ(table->rows(), 768U) << type;
  }
}

TEST(TableRows, CountAsPushedNow) {
  TableSpec spec = Spec("hash");
  EvictionSpec old;
  old.name = "global_step";
  old.params["steps_to_live"] = 2;
  spec.eviction = {old};
  const auto table = Table::Create(spec, StorageSpec{});
  const std::vector<float> row(kDim, 1.0F);
  const Key pushed = 1;
  const Key assigned = 2;
  table->Push(&pushed, 1, row.data(), 0.1);
  for (int i = 0; i < 2; ++i) table->Push(nullptr, 0, nullptr, 0.1);
  table->Assign(&assigned, 1, row.data(), nullptr);
  table->Push(nullptr, 0, nullptr, 0.1);
  EXPECT_EQ(table->Evict(), 1U);
  uint8_t found = 0;
  std::vector<float> weights(kDim);
  table->ReadRows(&assigned, 1, weights.data(), nullptr, &found);
  EXPECT_EQ(found, 1);
  for (int i = 0; i < 2; ++i) table->Push(nullptr, 0, nullptr, 0.1);
  EXPECT_EQ(table->Evict(), 1U);
}

}  // namespace
}  // namespace oe::table_rows_test
