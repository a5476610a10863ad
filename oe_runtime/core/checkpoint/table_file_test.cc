#include "oe_runtime/core/checkpoint/table_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/table/table.h"

namespace oe::table_file_test {
namespace {

constexpr uint32_t kDim = 3;

class TableFileTest : public testing::Test {
 protected:
  TableFileTest() : table_(NewTable("adam")) {
    for (Key key = 0; key < 40; ++key) keys_.push_back(key * 3);
    const std::vector<float> grads(keys_.size() * kDim, 0.5F);
    table_->Push(keys_.data(), keys_.size(), grads.data(), 0.1);
    table_->Save(file_);
    content_ = ReadAll(file_);
  }

  static std::unique_ptr<Table> NewTable(const std::string& optimizer, uint32_t dim = kDim,
                                         ShardInfo shard = {}) {
    TableSpec spec;
    spec.name = "C7";
    spec.dim = dim;
    spec.optimizer.name = optimizer;
    return Table::Create(spec, StorageSpec{}, shard);
  }

  std::vector<float> Rows(const Table& table) const {
    std::vector<float> rows(keys_.size() * kDim);
    table.Pull(keys_.data(), keys_.size(), rows.data());
    return rows;
  }

  // What a restore into a table with other content says; the content must stay.
  std::string Refusal(const std::vector<std::string>& files) const {
    const auto other = NewTable("adam");
    const std::vector<float> grads(keys_.size() * kDim, -2.0F);
    other->Push(keys_.data(), 20, grads.data(), 0.1);
    other->Push(keys_.data(), 20, grads.data(), 0.1);
    const std::vector<float> before = Rows(*other);
    std::string message = MessageOf<CheckpointError>([&] { other->Restore(files); });
    EXPECT_EQ(Rows(*other), before);
    EXPECT_EQ(other->rows(), 20U);
    EXPECT_EQ(other->version(), 2U);
    return message;
  }

  TestDirectory directory_;
  const std::string file_ = directory_.file("C7");
  const std::unique_ptr<Table> table_;
  std::vector<Key> keys_;
  std::string content_;
};

// Not synced, it must not be seen: a power cut would leave a name without content.
TEST_F(TableFileTest, NoPendingFileHasItsNameBeforeAllAreDurable) {
  const std::string good = directory_.file("good");
  const std::string bad = directory_.file("bad");
  {
    PendingFiles files;
    for (const std::string& file : {good, bad}) WriteAll(file + ".tmp", "content");
    files.Add(File(::open((good + ".tmp").c_str(), O_RDONLY | O_CLOEXEC)), good + ".tmp", good);
    files.Add(File(), bad + ".tmp", bad);  // cannot be synced
    EXPECT_EQ(MessageOf<CheckpointError>([&] { files.Publish(); }),
              "cannot sync " + bad + ".tmp: Bad file descriptor");
    EXPECT_FALSE(std::filesystem::exists(good));
  }
  EXPECT_FALSE(std::filesystem::exists(good + ".tmp"));
  EXPECT_FALSE(std::filesystem::exists(bad + ".tmp"));
}

TEST_F(TableFileTest, HeldFilesAreGivenUpTogetherOrWritten) {
  const std::string first = directory_.file("first");
  const std::string second = directory_.file("second");
  PendingFiles files(true, 2 * content_.size());
  table_->Save(first, std::nullopt, &files);
  EXPECT_EQ(files.TakeHeld(), std::vector<std::string>{content_});
  files.Publish();
  EXPECT_FALSE(std::filesystem::exists(first));
  table_->Save(first, std::nullopt, &files);
  table_->Save(second, std::nullopt, &files);  // for which there is no room
  EXPECT_EQ(files.TakeHeld(), std::nullopt);
  files.Publish();
  EXPECT_EQ(ReadAll(first), content_);
  EXPECT_EQ(ReadAll(second), content_);
}

TEST_F(TableFileTest, InfoDescribesTheFile) {
  for (const TableFileInfo& info : {ReadTableFileInfo(file_), VerifyTableFile(file_)}) {
    EXPECT_EQ(info.file, file_);
    EXPECT_EQ(TableFileBytes(info), content_.size());
    EXPECT_EQ(info.rows, 40U);
    EXPECT_EQ(info.version, 1U);
    EXPECT_EQ(info.row_bytes, 3 * kDim * sizeof(float));
    EXPECT_EQ(info.bytes, content_.size());
    EXPECT_FALSE(Difference(info.spec, table_->spec()));
    uint64_t last = 0;
    std::memcpy(&last, &content_[content_.size() - 8], 8);
    EXPECT_EQ(info.checksum, last);
    EXPECT_EQ(XXH3_64bits(content_.data(), content_.size() - 8), last);
  }
  EXPECT_FALSE(std::filesystem::exists(file_ + ".tmp"));
}

TEST_F(TableFileTest, EveryFlippedByteIsFound) {
  const std::string copy = directory_.file("copy");
  for (size_t at = 0; at < content_.size(); ++at) {
    std::string damaged = content_;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << (at % 8)));
    WriteAll(copy, damaged);
    const std::string message = MessageOf<CheckpointError>([&] { (void)VerifyTableFile(copy); });
    ASSERT_EQ(message.find(copy), 0U) << "byte " << at << ": " << message;
    if (at % 50 == 0) {
      ASSERT_EQ(Refusal({copy}).find(copy), 0U) << "byte " << at;
    }
  }
}

TEST_F(TableFileTest, EveryTruncationIsFound) {
  const std::string copy = directory_.file("copy");
  for (size_t size = 0; size < content_.size(); size += size < 600 ? 1 : 13) {
    WriteAll(copy, content_.substr(0, size));
    const std::string message = MessageOf<CheckpointError>([&] { (void)VerifyTableFile(copy); });
    ASSERT_EQ(message.find(copy), 0U) << "size " << size << ": " << message;
  }
  WriteAll(copy, content_ + "x");
  EXPECT_NE(Refusal({copy}).find("is damaged: its header promises 40 rows"), std::string::npos);
}

TEST_F(TableFileTest, NamesTheFieldThatDiffers) {
  NewTable("adagrad")->Save(directory_.file("adagrad"));
  EXPECT_EQ(Refusal({directory_.file("adagrad")}),
            directory_.file("adagrad") +
                ": 'optimizer.name' was \"adagrad\" when table 'C7' was saved, but table 'C7' "
                "has \"adam\"");
  NewTable("adam", 5)->Save(directory_.file("wide"));
  EXPECT_EQ(Refusal({directory_.file("wide")}),
            directory_.file("wide") + ": 'dim' was 5 when table 'C7' was saved, but table 'C7' has 3");
}

TEST_F(TableFileTest, RefusesMissingFilesOfACheckpoint) {
  const auto first = NewTable("adam", kDim, {0, 2});
  const auto second = NewTable("adam", kDim, {1, 2});
  const std::string zero = directory_.file("0");
  const std::string one = directory_.file("1");
  first->Save(zero);
  second->Save(one);
  EXPECT_EQ(Refusal({}), "table 'C7': there is no file to restore it from");
  EXPECT_EQ(Refusal({zero}), "table 'C7': the file of server 1 of 2 is missing (beside " + zero + ")");
  EXPECT_EQ(Refusal({zero, one, zero}), zero + ": 'server' is 0, of which there is a file already");
  EXPECT_EQ(Refusal({zero, file_}),
            file_ + ": 'servers' is 1, but " + zero + " has 2; they are of different checkpoints");
  second->Push(nullptr, 0, nullptr, 0.1);
  second->Save(one);
  EXPECT_EQ(Refusal({zero, one}),
            one + ": 'version' is 1, but " + zero + " has 0; they are of different checkpoints");
  EXPECT_EQ(Refusal({directory_.file("none")}),
            "cannot read " + directory_.file("none") + ": No such file or directory");
}

TEST_F(TableFileTest, OtherFilesAreNotTableFiles) {
  const std::string copy = directory_.file("copy");
  WriteAll(copy, std::string(1000, 'x'));
  EXPECT_EQ(Refusal({copy}), copy + " is not a table file: its first 8 bytes are not OETABLE");
  std::string newer = content_;
  newer[8] = 3;
  WriteAll(copy, newer);
  EXPECT_EQ(Refusal({copy}), copy + " has the table file format 3; this version reads 1 and 2");
  EXPECT_EQ(Refusal({directory_.path()}).find("cannot read " + directory_.path()), 0U);
}

TEST_F(TableFileTest, AFailedSaveLeavesTheOldFile) {
  struct rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  struct rlimit limit = before;
  limit.rlim_cur = 1000;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  const std::string message = MessageOf<CheckpointError>([&] { table_->Save(file_); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  (void)std::signal(SIGXFSZ, handler);
  EXPECT_EQ(message, "cannot write " + file_ + ".tmp: File too large");
  EXPECT_EQ(ReadAll(file_), content_);
  EXPECT_FALSE(std::filesystem::exists(file_ + ".tmp"));
  EXPECT_EQ(MessageOf<CheckpointError>([&] { table_->Save(directory_.file("no/such")); }),
            "cannot write " + directory_.file("no/such") + ".tmp: No such file or directory");
}

TEST_F(TableFileTest, ManyBlocks) {
  const auto big = NewTable("sgd", 200);  // 808 bytes a row: blocks of 1297 rows
  std::vector<Key> keys(5000);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i << 33;
  const std::vector<float> grads(keys.size() * 200, 1.0F);
  big->Push(keys.data(), keys.size(), grads.data(), 0.5);
  EXPECT_EQ(big->Save(directory_.file("big")).rows, 5000U);
  const auto copy = NewTable("sgd", 200);
  copy->Restore({directory_.file("big")});
  std::vector<float> expected(keys.size() * 200);
  std::vector<float> rows(keys.size() * 200);
  big->Pull(keys.data(), keys.size(), expected.data());
  copy->Pull(keys.data(), keys.size(), rows.data());
  EXPECT_EQ(rows, expected);
}

}  // namespace
}  // namespace oe::table_file_test
