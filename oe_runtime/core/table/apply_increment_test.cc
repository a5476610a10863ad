// Increments that are applied in place, to a table that is only read.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/common/half.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/storage/test_storage.h"
#include "oe_runtime/core/table/table.h"

namespace oe::apply_increment_test {
namespace {

constexpr uint64_t kKeys = 3000;

class ApplyIncrementTest : public testing::TestWithParam<std::tuple<const char*, const char*>> {
 protected:
  std::unique_ptr<Table> New(const StorageSpec& storage) const {
    TableSpec spec;
    spec.name = "C1";
    spec.dim = 5;
    spec.index = std::get<1>(GetParam());
    spec.input_dim = spec.index == "array" ? kKeys : 0;
    spec.optimizer.name = "adam";
    EvictionSpec eviction;
    eviction.name = "global_step";
    eviction.params["steps_to_live"] = 2;
    spec.eviction = {eviction};
    return Table::Create(spec, storage);
  }
  std::unique_ptr<Table> Copy() const { return New(TestStorage(std::get<0>(GetParam()), rows_.path(), 0)); }

  static void Push(Table* table, Key begin, Key end) {
    std::vector<Key> keys;
    for (Key key = begin; key < end; ++key) keys.push_back(key);
    std::vector<float> gradients(keys.size() * table->spec().dim);
    for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = static_cast<float>(i % 13) - 6.5F;
    table->Push(keys.data(), keys.size(), gradients.data(), 0.1);
  }
  static std::vector<float> Rows(const Table& table) {
    std::vector<Key> keys(kKeys);
    for (Key key = 0; key < kKeys; ++key) keys[key] = key;
    std::vector<float> rows(kKeys * table.spec().dim);
    table.Pull(keys.data(), keys.size(), rows.data());
    return rows;
  }

  TestDirectory files_;
  TestDirectory rows_;
};

TEST_P(ApplyIncrementTest, FollowsTheTableThatIsTrained) {
  const auto trained = New(StorageSpec{});
  const auto copy = Copy();
  Push(trained.get(), 0, 1000);
  uint64_t last = trained->Save(files_.file("0")).checksum;
  copy->Restore({files_.file("0")});
  for (uint64_t i = 1; i <= 4; ++i) {
    const std::string file = files_.file(std::to_string(i));
    Push(trained.get(), 400 * i, 400 * i + 900);  // the rows below go when they were not pushed for long
    const TableFileInfo info = trained->Save(file, last);
    ASSERT_EQ(info.base, last);
    last = info.checksum;
    copy->CheckIncrement(info);
    copy->ApplyIncrement(file);
    copy->Upkeep();
    EXPECT_EQ(copy->rows(), trained->rows());
    EXPECT_EQ(copy->version(), trained->version());
    EXPECT_EQ(Rows(*copy), Rows(*trained));
  }
  EXPECT_LT(trained->rows(), 2500U) << "no row was evicted";
  // The optimizer's state came along.
  Push(trained.get(), 1000, 2000);
  Push(copy.get(), 1000, 2000);
  EXPECT_EQ(Rows(*copy), Rows(*trained));
}

// The list of what changed knows the keys that rows' numbers go to.
TEST_P(ApplyIncrementTest, NumbersOfErasedRowsGoToOtherKeys) {
  const auto trained = New(StorageSpec{});
  const auto copy = Copy();
  Push(trained.get(), 0, 600);
  uint64_t last = trained->Save(files_.file("0")).checksum;
  copy->Restore({files_.file("0")});
  for (uint64_t i = 1; i <= 3; ++i) {
    const std::string file = files_.file(std::to_string(i));
    Push(trained.get(), 0, 300);
    std::vector<Key> keys;
    for (Key key = 0; key < 250; ++key) keys.push_back(key);
    EXPECT_GT(trained->Erase(keys.data(), keys.size()), 0U);
    Push(trained.get(), 700 + 300 * i, 950 + 300 * i);
    Push(trained.get(), 100, 110);
    const TableFileInfo info = trained->Save(file, last);
    ASSERT_EQ(info.base, last);
    last = info.checksum;
    copy->ApplyIncrement(file);
    EXPECT_EQ(copy->rows(), trained->rows());
    EXPECT_EQ(Rows(*copy), Rows(*trained));
  }
  EXPECT_EQ(trained->Save(files_.file("more"), last).rows, 0U);
}

// Rows of 5 weights instead of 16 numbers; the rows that are read are the same.
TEST_P(ApplyIncrementTest, WeightsAloneAreEnoughToRead) {
  const auto trained = New(StorageSpec{});
  StorageSpec storage = TestStorage(std::get<0>(GetParam()), rows_.path(), 0);
  storage.weights_only = true;
  const auto copy = New(storage);
  Push(trained.get(), 0, 1500);
  uint64_t last = trained->Save(files_.file("0")).checksum;
  copy->Restore({files_.file("0")});
  EXPECT_EQ(Rows(*copy), Rows(*trained));
  for (uint64_t i = 1; i <= 3; ++i) {
    const std::string file = files_.file(std::to_string(i));
    Push(trained.get(), 500 * i, 500 * i + 900);
    last = trained->Save(file, last).checksum;
    copy->ApplyIncrement(file);
    copy->Upkeep();
    EXPECT_EQ(copy->rows(), trained->rows());
    EXPECT_EQ(Rows(*copy), Rows(*trained));
  }
  EXPECT_EQ(copy->row_bytes(), trained->row_bytes());
  const auto refused = [](const auto& work) {
    return MessageOf<SpecError>(work).find("table 'C1' has the weights of its rows only") == 0;
  };
  EXPECT_TRUE(refused([&] { Push(copy.get(), 0, 10); }));
  EXPECT_TRUE(refused([&] { copy->Save(files_.file("copy")); }));
  EXPECT_TRUE(refused([&] { copy->Evict(); }));
  EXPECT_TRUE(refused([&] { copy->Checkpoint(1); }));
  EXPECT_EQ(Rows(*copy), Rows(*trained));
}

// As an export of int8 rows: only keys of an array all have a row there.
TEST_P(ApplyIncrementTest, RowsOfFewerBitsFollowTheTableThatIsTrained) {
  const auto expected = [](const Table& trained, const std::vector<float>& rows, bool is_int8) {
    const uint32_t dim = trained.spec().dim;
    std::vector<Key> keys;
    for (uint32_t part = 0; part < Table::kParts; ++part) {
      for (const Key key : trained.Keys(part)) keys.push_back(key);
    }
    if (trained.spec().index == "array") {
      keys.resize(kKeys);
      for (Key key = 0; key < kKeys; ++key) keys[key] = key;
    }
    std::vector<float> reduced = rows;
    for (const Key key : keys) {
      float* const row = &reduced[key * dim];
      float most = 0;
      for (uint32_t d = 0; d < dim; ++d) most = std::max(most, std::fabs(row[d]));
      const float scale = most / 127.0F;
      for (uint32_t d = 0; d < dim; ++d) {
        row[d] =
            is_int8 ? std::nearbyint(row[d] / scale) * scale : Bfloat16::ToFloat(Bfloat16::Nearest(row[d]));
      }
    }
    return reduced;
  };
  for (const std::string precision : {"int8", "bfloat16"}) {
    const auto trained = New(StorageSpec{});
    const TestDirectory directory;
    StorageSpec storage = TestStorage(std::get<0>(GetParam()), directory.path(), 0);
    storage.weights_only = true;
    storage.row_precision = precision;
    const auto copy = New(storage);
    const auto right = [&] { return expected(*trained, Rows(*trained), precision == "int8"); };
    Push(trained.get(), 0, 1500);
    const std::string full = files_.file(precision);
    uint64_t last = trained->Save(full).checksum;
    copy->Restore({full});
    EXPECT_EQ(Rows(*copy), right());
    EXPECT_NE(Rows(*copy), Rows(*trained));
    for (uint64_t i = 1; i <= 3; ++i) {
      const std::string file = full + std::to_string(i);
      Push(trained.get(), 500 * i, 500 * i + 900);
      last = trained->Save(file, last).checksum;
      copy->ApplyIncrement(file);
      copy->Upkeep();
      EXPECT_EQ(copy->rows(), trained->rows());
      EXPECT_EQ(Rows(*copy), right());
    }
    EXPECT_EQ(MessageOf<SpecError>([&] {
                Push(copy.get(), 0, 10);
              }).find("table 'C1' has the weights of its rows only"),
              0U);
  }
}

TEST_P(ApplyIncrementTest, RefusesAnIncrementOfAnotherBase) {
  const auto trained = New(StorageSpec{});
  const auto copy = Copy();
  Push(trained.get(), 0, 100);
  const auto full = trained->Save(files_.file("full"));
  Push(trained.get(), 50, 150);
  const auto first = trained->Save(files_.file("first"), full.checksum);
  Push(trained.get(), 70, 170);
  const auto second = trained->Save(files_.file("second"), first.checksum);
  const auto refusal = [&](const std::string& file) {
    return MessageOf<CheckpointError>([&] { copy->ApplyIncrement(file); });
  };
  EXPECT_EQ(refusal(first.file), first.file +
                                     ": table 'C1' has other rows than were saved or restored last; restore "
                                     "it first");
  copy->Restore({full.file});
  const auto before = Rows(*copy);
  EXPECT_EQ(refusal(second.file), second.file + " is an increment on the file with the checksum " +
                                      HexText(first.checksum) + ", but the table has the rows of that with " +
                                      HexText(full.checksum));
  EXPECT_EQ(refusal(full.file), full.file + " is no increment, but the table has the rows of that with " +
                                    HexText(full.checksum));
  EXPECT_EQ(Rows(*copy), before);
  copy->ApplyIncrement(first.file);
  EXPECT_NE(refusal(first.file), "") << "it was applied twice";
  Push(copy.get(), 0, 10);
  EXPECT_NE(refusal(second.file).find("has other rows"), std::string::npos);
  copy->RestoreChains({{full.file, first.file}});
  copy->ApplyIncrement(second.file);
  EXPECT_EQ(Rows(*copy), Rows(*trained));
}

TEST_P(ApplyIncrementTest, AfterADamagedFileOnlyARestoreGoesOn) {
  const auto trained = New(StorageSpec{});
  const auto copy = Copy();
  Push(trained.get(), 0, 100);
  const auto full = trained->Save(files_.file("full"));
  Push(trained.get(), 50, 150);
  const auto more = trained->Save(files_.file("more"), full.checksum);
  copy->Restore({full.file});
  const std::string bytes = ReadAll(more.file);
  std::string damaged = bytes;
  damaged[damaged.size() - 40] ^= 1;
  WriteAll(more.file, damaged);
  EXPECT_THROW(copy->ApplyIncrement(more.file), CheckpointError);
  WriteAll(more.file, bytes);
  EXPECT_THROW(copy->ApplyIncrement(more.file), CheckpointError);
  copy->RestoreChains({{full.file, more.file}});
  EXPECT_EQ(Rows(*copy), Rows(*trained));
}

INSTANTIATE_TEST_SUITE_P(Kinds, ApplyIncrementTest,
                         testing::Combine(testing::Values("dram", "pmem_libpmem", "dram_pmem"),
                                          testing::Values("hash", "array")),
                         [](const auto& kind) {
                           return std::string(std::get<0>(kind.param)) + "_" + std::get<1>(kind.param);
                         });

}  // namespace
}  // namespace oe::apply_increment_test
