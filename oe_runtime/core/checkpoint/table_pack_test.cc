#include "oe_runtime/core/checkpoint/table_pack.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/server/store.h"

namespace oe::table_pack_test {
namespace {

constexpr uint32_t kDim = 3;

class TablePackTest : public testing::Test {
 protected:
  TablePackTest() {
    for (const std::string table : {"C1", "wide/emb", "C2"}) {
      TableSpec spec;
      spec.name = table;
      spec.dim = kDim;
      tables_.push_back(Table::Create(spec, StorageSpec{}, ShardInfo{}));
      Push(tables_.back().get(), 0, 20 * tables_.size());
      names_.push_back(TableFileName(table, {}));
      tables_.back()->Save(directory_.file(names_.back()));
      contents_.push_back(ReadAll(directory_.file(names_.back())));
    }
  }

  static void Push(Table* table, Key begin, Key end) {
    std::vector<Key> keys;
    for (Key key = begin; key < end; ++key) keys.push_back(key);
    const std::vector<float> gradients(keys.size() * kDim, 0.5F);
    table->Push(keys.data(), keys.size(), gradients.data(), 0.1);
  }
  std::string Pack() const {
    std::vector<std::pair<std::string, std::string_view>> files;
    for (size_t i = 0; i < names_.size(); ++i) files.emplace_back(names_[i], contents_[i]);
    return EncodePack(files);
  }
  // Instead of the files.
  void UsePack(const std::string& pack) const {
    for (const std::string& name : names_) std::filesystem::remove(directory_.file(name));
    WriteAll(pack_, pack);
  }
  std::string Refusal() const {
    return MessageOf<CheckpointError>([&] {
      for (const std::string& name : names_) VerifyTableFile(directory_.file(name));
    });
  }

  TestDirectory directory_;
  const std::string pack_ = directory_.file(PackName({}));
  std::vector<std::unique_ptr<Table>> tables_;
  std::vector<std::string> names_;
  std::vector<std::string> contents_;
};

TEST_F(TablePackTest, FilesAreReadAsThoughTheyLayBesideIt) {
  std::vector<TableFileInfo> before;
  for (const std::string& name : names_) before.push_back(VerifyTableFile(directory_.file(name)));
  const auto sums = TableChecksums(directory_.path(), {"C1", "wide/emb", "C2"});
  UsePack(Pack());
  for (size_t i = 0; i < names_.size(); ++i) {
    const TableFileInfo info = VerifyTableFile(directory_.file(names_[i]));
    EXPECT_EQ(info.file, directory_.file(names_[i]));
    EXPECT_EQ(info.spec.name, before[i].spec.name);
    EXPECT_EQ(info.rows, 20 * (i + 1));
    EXPECT_EQ(info.bytes, before[i].bytes);
    EXPECT_EQ(info.checksum, before[i].checksum);
    EXPECT_EQ(FindTableFiles(directory_.path(), info.spec.name), std::vector<std::string>{info.file});
    tables_[i]->Restore({info.file});
  }
  EXPECT_EQ(TableChecksums(directory_.path(), {"C1", "wide/emb", "C2"}), sums);
  EXPECT_EQ(MessageOf<CheckpointError>([&] { VerifyTableFile(directory_.file("server-0-of-1.C3.oet")); }),
            "cannot read " + directory_.file("server-0-of-1.C3.oet") + ": No such file or directory");
  EXPECT_EQ(MessageOf<CheckpointError>([&] { FindTableFiles(directory_.path(), "C3"); }),
            directory_.path() + ": has no file of table 'C3'");
}

// Also of its large files, which are not held in memory.
TEST_F(TablePackTest, AnIncrementIsAppliedFromIt) {
  std::vector<uint64_t> sums;
  for (size_t i = 0; i < names_.size(); ++i) {
    const uint64_t saved = VerifyTableFile(directory_.file(names_[i])).checksum;
    Push(tables_[i].get(), 10, i == 0 ? 30'000 : 12);
    tables_[i]->Save(directory_.file(names_[i]), saved);
    contents_[i] = ReadAll(directory_.file(names_[i]));
  }
  ASSERT_GT(contents_[0].size(), kSmallTable);
  UsePack(Pack());
  Increment read = ReadIncrement(directory_.path(), {"C1", "wide/emb", "C2"}, {});
  EXPECT_EQ(read.parts.at("C1").held, nullptr);
  EXPECT_NE(read.parts.at("C2").held, nullptr);
  EXPECT_EQ(read.parts.at("C2").info.rows, 2U);
  std::filesystem::remove(pack_);
  EXPECT_EQ(read.parts.at("C2").held->NextBlock(), 0U) << "it was verified";
  read.parts.at("C2").held->Rewind();
  EXPECT_EQ(read.parts.at("C2").held->NextBlock(), 2U);
  EXPECT_EQ(MessageOf<CheckpointError>([&] { ReadIncrement(directory_.path(), {"C1"}, {}); }),
            "cannot read " + directory_.file(names_[0]) + ": No such file or directory");
}

// Nobody who changes a byte, or the size, is believed.
TEST_F(TablePackTest, DamageIsFound) {
  const std::string pack = Pack();
  for (size_t at = 0; at < pack.size(); ++at) {
    std::string damaged = pack;
    damaged[at] = static_cast<char>(damaged[at] ^ 4);
    UsePack(damaged);
    const std::string said = Refusal();
    EXPECT_TRUE(said.find(directory_.path()) != std::string::npos) << at << ": " << said;
  }
  for (const size_t size : {size_t{0}, size_t{15}, size_t{40}, pack.size() - 1}) {
    UsePack(pack.substr(0, size));
    EXPECT_NE(Refusal().find(pack_ + " is damaged: "), std::string::npos) << Refusal();
  }
  UsePack(pack + "x");
  EXPECT_NE(Refusal().find("its index promises"), std::string::npos) << Refusal();
  std::filesystem::remove(pack_);
  std::filesystem::create_directory(pack_);
  EXPECT_NE(Refusal().find("not a regular file"), std::string::npos) << Refusal();
}

TEST_F(TablePackTest, NamesOfAnotherPlaceAreRefused) {
  for (const std::string name : {"../server-0-of-1.C1.oet", "server-1-of-2.C1.oet", "server-0-of-1.oets",
                                 "server-0-of-1.C1.oet", "manifest.json", ""}) {
    UsePack(EncodePack({{names_[0], contents_[0]}, {name, contents_[1]}}));
    EXPECT_EQ(Refusal(),
              pack_ + " is damaged: a file in it is named '" + name + "'; restore from another checkpoint");
  }
  for (const std::string& name :
       {std::string("server-0-of-1.\xff.oet"), std::string("server-0-of-1.a\0b.oet", 21)}) {
    UsePack(EncodePack({{names_[0], contents_[0]}, {name, contents_[1]}}));
    EXPECT_NE(Refusal().find("a file in it has a name that no table's file has"), std::string::npos)
        << Refusal();
  }
}

}  // namespace
}  // namespace oe::table_pack_test
