// Tables in logs on a drive: equal to tables in DRAM to the bit, with a cache of a small part of their rows.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "oe_runtime/core/checkpoint/filter_file.h"
#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/common/test_heap.h"
#include "oe_runtime/core/storage/log_pool.h"
#include "oe_runtime/core/storage/log_verify.h"
#include "oe_runtime/core/table/table.h"

namespace oe::table_ssd_test {
namespace {

constexpr Key kKeys = 8000;

TableSpec Spec(uint32_t dim, const std::string& optimizer = "adam") {
  TableSpec spec;
  spec.name = "t";
  spec.dim = dim;
  spec.optimizer.name = optimizer;
  spec.initializer = {"uniform", {}, 20};
  return spec;
}

class TableSsdTest : public testing::TestWithParam<uint32_t> {
 protected:
  StorageSpec Storage(bool recover = false, uint64_t cache = uint64_t{100} << 10) const {
    StorageSpec spec{"dram_ssd", directory_.path()};
    spec.recover = recover;
    spec.cache_bytes = cache;
    return spec;
  }

  static std::vector<Key> Batch(std::mt19937_64* random, size_t size) {
    std::vector<Key> keys(size);
    for (Key& key : keys) key = (*random)() % ((*random)() % 4 == 0 ? kKeys : kKeys / 20);
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    return keys;
  }

  static void Push(Table* table, const std::vector<Key>& keys) {
    std::vector<float> grads(keys.size() * table->spec().dim);
    for (size_t i = 0; i < grads.size(); ++i) {
      grads[i] = static_cast<float>((keys[i / table->spec().dim] + i + table->version()) % 17) - 8;
    }
    table->Push(keys.data(), keys.size(), grads.data(), 0.01);
  }

  // Weights and state of all keys.
  static std::vector<float> RowsOf(const Table& table) {
    std::vector<Key> keys(kKeys);
    for (Key key = 0; key < kKeys; ++key) keys[key] = key;
    std::vector<float> weights(kKeys * table.spec().dim);
    std::vector<float> states(kKeys * table.state_values());
    std::vector<uint8_t> found(kKeys);
    table.ReadRows(keys.data(), kKeys, weights.data(), states.data(), found.data());
    weights.insert(weights.end(), states.begin(), states.end());
    weights.insert(weights.end(), found.begin(), found.end());
    return weights;
  }

  // One step of both: the pulls must be equal.
  static void Step(Table* left, Table* right, const std::vector<Key>& keys) {
    std::vector<float> of_left(keys.size() * left->spec().dim);
    std::vector<float> of_right(of_left.size());
    left->Pull(keys.data(), keys.size(), of_left.data());
    right->Pull(keys.data(), keys.size(), of_right.data());
    ASSERT_EQ(of_left, of_right);
    Push(left, keys);
    Push(right, keys);
  }

  // The file of the only table.
  std::string Log() const {
    for (const auto& entry : std::filesystem::directory_iterator(directory_.path())) {
      if (entry.path().extension() == ".log") return entry.path().string();
    }
    return "";
  }

  // Flips a bit in each of the first blocks of rows, at most `most`, but in none of a header. How many.
  size_t DamageRows(size_t most = SIZE_MAX) const {
    const std::string bytes = ReadAll(Log());
    std::fstream file(Log(), std::ios::in | std::ios::out | std::ios::binary);
    size_t blocks = 0;
    for (size_t at = 2 * RowLogSpec{}.super_bytes; at < bytes.size() && blocks < most; at += kBlockBytes) {
      const auto* block = reinterpret_cast<const std::byte*>(bytes.data() + at);
      if (const uint32_t header = ChunkHeaderBlocks(block); header > 0) {
        at += (header - 1) * kBlockBytes;
      } else if (std::any_of(&bytes[at], &bytes[at] + kBlockBytes, [](char c) { return c != 0; })) {
        (void)file.seekp(static_cast<std::streamoff>(at + 17)).put(static_cast<char>(bytes[at + 17] ^ 8));
        ++blocks;
      }
    }
    return blocks;
  }

  TestDirectory directory_;
};

TEST_P(TableSsdTest, ReadsAheadWhatIsNotInDramAndWhatIsStillWanted) {
  const auto dram = Table::Create(Spec(GetParam()), StorageSpec{});
  const uint64_t cache = kKeys / 4 * (3 * GetParam() * sizeof(float) + 24);
  const auto ssd = Table::Create(Spec(GetParam()), Storage(false, std::max(cache, uint64_t{100} << 10)));
  std::mt19937_64 random(GetParam());
  for (int step = 0; step < 40; ++step) Step(ssd.get(), dram.get(), Batch(&random, 1000));
  ASSERT_FALSE(HasFatalFailure());
  ssd->Checkpoint(1);
  ssd->WaitDurable();  // or rows would come from memory that is still to be written
  const auto reads = [&] { return ssd->drive()->device.reads; };
  for (uint64_t last = 0;
       last != reads();) {  // the cleaner reads, too, and has more to do after a checkpoint
    last = reads();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }

  std::vector<Key> keys;
  for (Key key = 0; key < kKeys; key += 97) keys.push_back(key);
  const CacheStats before = ssd->cache();
  const uint64_t reads_before = reads();
  ssd->ReadAhead(keys.data(), keys.size(), [] { return false; });
  EXPECT_EQ(reads(), reads_before);
  ssd->ReadAhead(keys.data(), keys.size(), [] { return true; });
  const uint64_t read = reads() - reads_before;
  EXPECT_GT(read, keys.size() / 4);  // of blocks: a wide row has some
  EXPECT_EQ(ssd->cache().misses, before.misses);
  EXPECT_EQ(ssd->cache().hits, before.hits);

  std::vector<float> of_ssd(keys.size() * GetParam());
  std::vector<float> of_dram(of_ssd.size());
  ssd->Pull(keys.data(), keys.size(), of_ssd.data());
  dram->Pull(keys.data(), keys.size(), of_dram.data());
  EXPECT_EQ(of_ssd, of_dram);
  EXPECT_EQ(reads(), reads_before + read);
  // Each row counts once, and one that was read ahead as missing.
  std::vector<uint8_t> found(keys.size());
  std::vector<float> weights(of_dram.size());
  dram->ReadRows(keys.data(), keys.size(), weights.data(), nullptr, found.data());
  const auto rows = static_cast<uint64_t>(std::count(found.begin(), found.end(), 1));
  const CacheStats after = ssd->cache();
  EXPECT_GT(after.misses, before.misses);
  EXPECT_EQ(after.misses - before.misses + after.hits - before.hits, rows);

  // Nothing of a request for which the cache is too small.
  std::vector<Key> all(kKeys);
  for (Key key = 0; key < kKeys; ++key) all[key] = key;
  const uint64_t reads_until_now = reads();
  ssd->ReadAhead(all.data(), all.size(), [] { return true; });
  EXPECT_EQ(reads(), reads_until_now);
  EXPECT_EQ(RowsOf(*ssd), RowsOf(*dram));
}

TEST_P(TableSsdTest, EqualsATableInDramThroughCheckpointsAndRestarts) {
  const auto dram = Table::Create(Spec(GetParam()), StorageSpec{});
  auto ssd = Table::Create(Spec(GetParam()), Storage());
  std::mt19937_64 random(GetParam());
  uint64_t id = 0;
  for (int life = 0; life < 3; ++life) {
    for (int step = 0; step < 30; ++step) {
      Step(ssd.get(), dram.get(), Batch(&random, 1000));
      if (step % 7 == 6) {
        std::vector<Key> erased = Batch(&random, 50);
        EXPECT_EQ(ssd->Erase(erased.data(), erased.size()), dram->Erase(erased.data(), erased.size()));
      }
      if (step % 5 == 4) ssd->Checkpoint(++id);
      if (HasFatalFailure()) return;
    }
    EXPECT_EQ(RowsOf(*ssd), RowsOf(*dram));
    ssd->WaitDurable();
    EXPECT_EQ(ssd->Checkpoints().size(), 2U);
    EXPECT_GT(ssd->cache().misses, 100U);
    EXPECT_GT(ssd->cache().evictions, 100U);
    const uint64_t rows = ssd->rows();
    ssd.reset();
    ssd = Table::Create(Spec(GetParam()), Storage(true));
    EXPECT_EQ(ssd->rows(), rows);
    EXPECT_EQ(ssd->version(), dram->version());
    EXPECT_EQ(RowsOf(*ssd), RowsOf(*dram));
  }
}

TEST_P(TableSsdTest, GoesBackToAnyKeptCheckpoint) {
  auto ssd = Table::Create(Spec(GetParam()), Storage());
  std::mt19937_64 random(7);
  std::vector<std::vector<float>> then;
  for (uint64_t id = 1; id <= 4; ++id) {
    for (int step = 0; step < 5; ++step) Push(ssd.get(), Batch(&random, 800));
    then.push_back(RowsOf(*ssd));
    ssd->Checkpoint(id);
  }
  Push(ssd.get(), Batch(&random, 800));
  ssd->Recover(4);
  EXPECT_EQ(RowsOf(*ssd), then[3]);
  Push(ssd.get(), Batch(&random, 800));
  ssd->Recover(3);
  EXPECT_EQ(RowsOf(*ssd), then[2]);
  Push(ssd.get(), Batch(&random, 800));
  ssd->Checkpoint(9);
  ssd->WaitDurable();
  const std::vector<float> last = RowsOf(*ssd);
  ssd.reset();
  ssd = Table::Create(Spec(GetParam()), Storage(true));
  EXPECT_EQ(RowsOf(*ssd), last);
}

INSTANTIATE_TEST_SUITE_P(Dims, TableSsdTest, testing::Values(2, 16, 400));

class TableSsdFileTest : public TableSsdTest {};

// Of all ids 86 % are of 100 rows and 10 % of 1 % of the rows. What is left comes about once, and must not
// push out the others, for which the cache of 2 % has room.
TEST_F(TableSsdFileTest, RowsThatComeOftenStayInTheCache) {
  constexpr Key kRows = 200000;
  constexpr uint64_t kRowBytes = 512;
  constexpr uint64_t kFrameBytes = 24;
  TableSpec spec = Spec(64, "adagrad");
  const auto ssd = Table::Create(spec, Storage(false, kRows / 50 * (kRowBytes + kFrameBytes)));
  std::vector<Key> keys(kRows / 8);
  for (Key first = 0; first < kRows; first += keys.size()) {
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = first + i;
    Push(ssd.get(), keys);
  }
  std::mt19937_64 random(1);
  std::vector<float> rows;
  uint64_t seldom = 0;
  CacheStats before;
  for (int batch = 0; batch < 60; ++batch) {
    if (batch == 30) {  // the cache is full of what it needs
      before = ssd->cache();
      seldom = 0;
    }
    keys.clear();
    for (int i = 0; i < 10000; ++i) {
      const uint64_t kind = random() % 1000;
      seldom += kind < 957 ? 0 : 1;
      keys.push_back(random() % (kind < 857 ? 100 : kind < 957 ? kRows / 100 : kRows));
    }
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    rows.resize(keys.size() * spec.dim);
    ssd->Pull(keys.data(), keys.size(), rows.data());
    ssd->Upkeep();
    Push(ssd.get(), keys);
  }
  const uint64_t misses = ssd->cache().misses - before.misses;
  EXPECT_GT(misses, seldom * 9 / 10);
  EXPECT_LT(misses, seldom * 115 / 100);
}

// A shard of a narrow table needs little, so it must not take much: all rows of all tables fit.
TEST_F(TableSsdFileTest, ManyNarrowTablesShareASmallCache) {
  constexpr int kTables = 20;
  constexpr Key kRows = 1600;
  constexpr uint64_t kCache = uint64_t{4} << 20;
  std::vector<std::unique_ptr<Table>> tables;
  std::vector<Key> keys(kRows);
  for (Key key = 0; key < kRows; ++key) keys[key] = key;
  for (int i = 0; i < kTables; ++i) {
    TableSpec spec = Spec(1, "adagrad");
    spec.name += std::to_string(i);
    tables.push_back(Table::Create(spec, Storage(false, kCache)));
    Push(tables.back().get(), keys);
    ASSERT_GT(kCache, uint64_t{kTables} * kRows * (tables.back()->row_bytes() + 24) * 2);
  }
  std::vector<float> rows(kRows);
  for (int round = 0; round < 3; ++round) {
    uint64_t misses = 0;
    for (const auto& table : tables) {
      const uint64_t before = table->cache().misses;
      table->Pull(keys.data(), kRows, rows.data());
      table->Upkeep();
      misses += table->cache().misses - before;
    }
    if (round > 0) {
      EXPECT_EQ(misses, 0U);
    }
  }
}

TEST_F(TableSsdFileTest, ARowWithAFlippedBitIsQuarantined) {
  auto ssd = Table::Create(Spec(64, "sgd"), Storage(false, 100 << 10));
  std::vector<Key> keys(5000);
  for (Key key = 0; key < keys.size(); ++key) keys[key] = key;
  Push(ssd.get(), keys);
  ssd->Checkpoint(1);
  ssd->WaitDurable();
  ssd.reset();
  // A bit in a block of rows: some blocks behind the header of a chunk.
  std::string bytes = ReadAll(Log());
  size_t header = size_t{512} << 10;
  while (bytes.compare(header + 1, 6, "OECHNK") != 0) header += 4096;
  bytes[header + size_t{20} * 4096 + 17] ^= 8;
  WriteAll(Log(), bytes);
  ssd = Table::Create(Spec(64, "sgd"), Storage(true, 100 << 10));
  EXPECT_EQ(ssd->rows(), keys.size());
  std::vector<float> weights(keys.size() * 64);
  ssd->Pull(keys.data(), keys.size(), weights.data());
  const uint64_t lost = ssd->damage_counts().quarantined;
  EXPECT_GT(lost, 0U);
  EXPECT_LE(lost, 16U);
  EXPECT_EQ(ssd->rows(), keys.size() - lost);
  Push(ssd.get(), keys);
  EXPECT_EQ(ssd->rows(), keys.size());
  ssd->Checkpoint(2);
  ssd->WaitDurable();
}

// All of a drive that is gone cannot be read: no row is damaged, and there is nothing to be trained on.
TEST_F(TableSsdFileTest, ADriveThatIsGoneTakesNoRowWithIt) {
  auto ssd = Table::Create(Spec(64, "sgd"), Storage(false, 100 << 10));
  std::vector<Key> keys(5000);
  for (Key key = 0; key < keys.size(); ++key) keys[key] = key;
  Push(ssd.get(), keys);
  ssd->Checkpoint(1);
  ssd->WaitDurable();
  ssd.reset();
  ssd = Table::Create(Spec(64, "sgd"), Storage(true, 100 << 10));
  const std::vector<float> before = RowsOf(*ssd);
  // Nothing can be read at the descriptor of the log.
  int log = 3;
  while (!std::filesystem::equivalent("/proc/self/fd/" + std::to_string(log), Log())) ++log;
  const int saved = ::dup(log);
  const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(::dup2(nothing, log), log);

  std::vector<float> weights(keys.size() * 64);
  const auto expect_gone = [](const std::function<void()>& work) {
    try {
      work();
      ADD_FAILURE() << "the drive is gone";
    } catch (const StorageError& error) {
      const std::string said = error.what();
      EXPECT_NE(said.find(".log cannot be read, not even its superblock: "), std::string::npos) << said;
    }
  };
  expect_gone([&] { ssd->Pull(keys.data(), keys.size(), weights.data()); });
  EXPECT_THROW(Push(ssd.get(), keys), StorageError);  // it may want room, too
  expect_gone([&] { (void)ssd->Save(directory_.file("saved")); });
  EXPECT_FALSE(std::filesystem::exists(directory_.file("saved")));
  EXPECT_EQ(ssd->damage_counts().quarantined, 0U);
  EXPECT_EQ(ssd->rows(), keys.size());

  ASSERT_EQ(::dup2(saved, log), log);
  ::close(saved);
  ::close(nothing);
  EXPECT_EQ(RowsOf(*ssd), before);
  Push(ssd.get(), keys);
  ssd->Checkpoint(2);
  ssd->WaitDurable();
}

// A backing file or a namespace that was truncated: the superblocks are there, and most rows are not.
TEST_F(TableSsdFileTest, ADriveThatLostAPartOfItselfTakesNoRowWithIt) {
  auto ssd = Table::Create(Spec(64, "sgd"), Storage(false, 100 << 10));
  std::vector<Key> keys(5000);
  for (Key key = 0; key < keys.size(); ++key) keys[key] = key;
  Push(ssd.get(), keys);
  ssd->Checkpoint(1);
  ssd->WaitDurable();
  ssd.reset();
  ssd = Table::Create(Spec(64, "sgd"), Storage(true, 100 << 10));
  const std::vector<float> before = RowsOf(*ssd);
  int log = 3;
  while (!std::filesystem::equivalent("/proc/self/fd/" + std::to_string(log), Log())) ++log;
  const int saved = ::dup(log);
  const std::string truncated = directory_.file("truncated");
  const std::string whole = ReadAll(Log());
  const auto header_at = [&](size_t at) {
    return ChunkHeaderBlocks(reinterpret_cast<const std::byte*>(whole.data() + at));
  };
  size_t first = 2 * RowLogSpec{}.super_bytes;
  while (header_at(first) == 0) first += kBlockBytes;
  WriteAll(truncated, whole.substr(0, first + (header_at(first) + 1) * kBlockBytes));
  const int part = ::open(truncated.c_str(), O_RDONLY | O_CLOEXEC);
  ASSERT_EQ(::dup2(part, log), log);

  std::vector<float> weights(keys.size() * 64);
  const auto expect_refused = [&](const std::function<void()>& work) {
    const std::string said = MessageOf<StorageError>(work);
    EXPECT_NE(said.find(" cannot be read from " + Log() + ": No data available; no row was given up"),
              std::string::npos)
        << said;
  };
  std::vector<uint8_t> found(keys.size());
  expect_refused([&] { ssd->Pull(keys.data(), keys.size(), weights.data()); });
  expect_refused([&] { ssd->ReadRows(keys.data(), keys.size(), weights.data(), nullptr, found.data()); });
  expect_refused([&] { (void)ssd->Save(directory_.file("saved")); });
  EXPECT_FALSE(std::filesystem::exists(directory_.file("saved")));
  testing::internal::CaptureStderr();
  Table::ScrubPosition position;
  for (uint64_t bytes = 0; ssd->Scrub(&position, &bytes);) {
  }
  const std::string of_scrub = testing::internal::GetCapturedStderr();
  EXPECT_EQ(of_scrub.find("error: table 't': the header at byte "), 0U) << of_scrub;
  EXPECT_NE(of_scrub.find("\nerror: table 't': the row of key "), std::string::npos) << of_scrub;
  EXPECT_NE(of_scrub.find(" cannot be read from " + Log()), std::string::npos) << of_scrub;
  EXPECT_EQ(std::count(of_scrub.begin(), of_scrub.end(), '\n'), Damage::kMostLines);
  EXPECT_THROW(Push(ssd.get(), keys), StorageError);  // it may write first, which fails too
  EXPECT_EQ(ssd->damage_counts().quarantined, 0U);
  EXPECT_EQ(ssd->rows(), keys.size());

  ASSERT_EQ(::dup2(saved, log), log);
  ::close(saved);
  ::close(part);
  EXPECT_EQ(RowsOf(*ssd), before);
  EXPECT_EQ(ssd->Save(directory_.file("saved")).rows, keys.size());
}

TEST_F(TableSsdFileTest, ASaveWritesNewRowsForThoseThatAreDamaged) {
  auto ssd = Table::Create(Spec(64, "sgd"), Storage());
  std::vector<Key> keys(5000);
  for (Key key = 0; key < keys.size(); ++key) keys[key] = key;
  Push(ssd.get(), keys);
  ssd->Checkpoint(1);
  ssd->WaitDurable();
  ssd->Upkeep();  // a large push had more frames than the cache has
  const size_t damaged = DamageRows(40) * kBlockBytes / ssd->row_bytes();
  EXPECT_EQ(ssd->Save(directory_.file("saved")).rows, keys.size());
  const uint64_t lost = ssd->damage_counts().quarantined;
  EXPECT_GT(lost, 50U);
  EXPECT_LE(lost, damaged);
  EXPECT_EQ(ssd->rows(), keys.size() - lost);
  const auto copy = Table::Create(Spec(64, "sgd"), StorageSpec{});
  copy->Restore({directory_.file("saved")});
  EXPECT_EQ(RowsOf(*copy).size(), RowsOf(*ssd).size());
  std::vector<float> left(keys.size() * 64);
  std::vector<float> right(left.size());
  copy->Pull(keys.data(), keys.size(), left.data());
  ssd->Pull(keys.data(), keys.size(), right.data());
  EXPECT_EQ(left, right);

  // Too many: no file, which would look whole.
  (void)DamageRows();
  const std::string said = MessageOf<StorageError>([&] { (void)ssd->Save(directory_.file("more")); });
  EXPECT_EQ(said.find("table 't': too many rows are damaged"), 0U) << said;
  EXPECT_FALSE(std::filesystem::exists(directory_.file("more")));
  std::vector<uint8_t> found(keys.size());
  const std::string exported = MessageOf<StorageError>(
      [&] { ssd->ReadRows(keys.data(), keys.size(), left.data(), nullptr, found.data()); });
  EXPECT_EQ(exported.find("table 't': too many rows are damaged"), 0U) << exported;
  EXPECT_EQ(ssd->rows(), keys.size() - lost);
}

// A drive that refuses a write ends the checkpoints: a file is the way out then, whatever cannot be read.
TEST_F(TableSsdFileTest, ASaveAfterAFailedWriteGoesOnPastRowsThatAreDamaged) {
  TableSpec spec = Spec(64, "sgd");
  spec.admission = {"counter", {{"filter_freq", 1}}};
  auto ssd = Table::Create(spec, Storage());
  std::vector<Key> keys(5000);
  for (Key key = 0; key < keys.size(); ++key) keys[key] = key;
  Push(ssd.get(), keys);
  for (uint64_t id = 1; id <= 12; ++id) {  // until the log does not grow any more
    ssd->Checkpoint(id);
    ssd->WaitDurable();
    Push(ssd.get(), {1, 2, 3});
  }
  // A limit on file sizes stands in for the drive's error.
  struct rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  struct rlimit limit = before;
  limit.rlim_cur = 64 << 10;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  ssd->Checkpoint(13);
  const std::string failure = MessageOf<StorageError>([&] { ssd->WaitDurable(); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  (void)std::signal(SIGXFSZ, handler);
  EXPECT_NE(failure.find("cannot write"), std::string::npos) << failure;
  EXPECT_THROW(ssd->Checkpoint(14), StorageError);
  (void)DamageRows(40);
  const std::string file = directory_.file("saved");
  ASSERT_NO_THROW(EXPECT_EQ(ssd->Save(file).rows, keys.size()));
  EXPECT_EQ(ssd->rows(), keys.size()) << "the log cannot note what is quarantined";
  EXPECT_TRUE(std::filesystem::exists(FilterFileName(file)));
  const auto copy = Table::Create(spec, StorageSpec{});
  copy->Restore({file});
  EXPECT_EQ(copy->rows(), keys.size());
}

TEST_F(TableSsdFileTest, VerifyNamesACopyOfTheSuperblockThatIsWrong) {
  auto ssd = Table::Create(Spec(64, "sgd"), Storage());
  for (const uint64_t id : {1, 2}) {
    Push(ssd.get(), {1, 2, 3});
    ssd->Checkpoint(id);
    ssd->WaitDurable();
  }
  ssd.reset();
  EXPECT_EQ(VerifyLogs(directory_.path()), std::vector<std::string>());
  const std::string content = ReadAll(Log());
  for (const size_t at : {size_t{0}, RowLogSpec{}.super_bytes}) {
    std::string damaged = content;
    damaged.replace(at, kBlockBytes, kBlockBytes, '\0');  // as where a drive lost it
    WriteAll(Log(), damaged);
    const std::vector<std::string> problems = VerifyLogs(directory_.path());
    ASSERT_EQ(problems.size(), 1U);
    EXPECT_EQ(problems[0].find(Log() + " is damaged: the copy of its superblock at byte " +
                               std::to_string(at) + " is wrong or cannot be read"),
              0U)
        << problems[0];
  }
}

TEST_F(TableSsdFileTest, AScrubRepairsRowsInFramesAndQuarantinesTheRest) {
  auto ssd = Table::Create(Spec(64, "sgd"), Storage());
  std::vector<Key> keys(5000);
  for (Key key = 0; key < keys.size(); ++key) keys[key] = key;
  Push(ssd.get(), keys);
  ssd->Checkpoint(1);
  ssd->WaitDurable();
  ssd->Upkeep();  // a large push had more frames than the cache has
  const auto scrub = [&] {
    Table::ScrubPosition position;
    uint64_t bytes = 0;
    uint64_t all = 0;
    while (ssd->Scrub(&position, &bytes)) {
      EXPECT_GT(bytes, 0U);
      all += bytes;
    }
    return all;
  };
  EXPECT_GT(scrub(), keys.size() * 256);
  EXPECT_EQ(ssd->damage_counts().scrubbed_rows, keys.size());
  EXPECT_EQ(ssd->damage_counts().scrubs, 1U);
  EXPECT_EQ(ssd->damage_counts().quarantined, 0U);
  const size_t damaged = DamageRows(40) * kBlockBytes / ssd->row_bytes();
  (void)scrub();
  EXPECT_EQ(ssd->damage_counts().scrubs, 2U);
  const uint64_t frames = ssd->damage_counts().repaired;
  const uint64_t lost = ssd->damage_counts().quarantined;
  EXPECT_GT(lost, 50U);
  EXPECT_EQ(frames + lost, damaged);
  EXPECT_EQ(ssd->rows(), keys.size() - lost);
  const std::vector<float> before = RowsOf(*ssd);
  ssd->Checkpoint(2);
  ssd->WaitDurable();
  (void)scrub();
  EXPECT_EQ(ssd->damage_counts().repaired, frames) << "they are found once";
  ssd.reset();
  ssd = Table::Create(Spec(64, "sgd"), Storage(true));
  EXPECT_EQ(RowsOf(*ssd), before);
}

TEST_F(TableSsdFileTest, TheRoomSaysHowManyRowsFit) {
  StorageSpec storage = Storage();
  storage.capacity_bytes = uint64_t{16} << 20;
  const auto ssd = Table::Create(Spec(64, "sgd"), storage);
  const uint64_t first = ssd->room()->headroom;
  std::vector<Key> keys(500);
  Key next = 0;
  for (bool refused = false; !refused;) {
    for (Key& key : keys) key = next++;
    const PoolRoom room = ssd->room().value();
    try {
      Push(ssd.get(), keys);
      // Who writes rows back has some room for a moment.
      EXPECT_LE(ssd->room()->headroom, room.headroom + LogStore::kAtOnce + keys.size());
    } catch (const StorageFull&) {
      refused = true;
    }
    ASSERT_LT(next, 100000U);
  }
  EXPECT_NEAR(static_cast<double>(ssd->rows()), static_cast<double>(first), 0.1 * static_cast<double>(first));
  EXPECT_LT(ssd->room()->headroom, 2 * keys.size());
  EXPECT_EQ(ssd->room()->refused, 1U);
  EXPECT_GT(ssd->room()->slots, ssd->rows());
  keys = {0, 1, 2};
  Push(ssd.get(), keys);
  EXPECT_EQ(ssd->room()->refused, 1U) << "no new row was asked for";
}

// What malloc gives is in a statistic, and old versions and erased rows take little of it.
TEST_F(TableSsdFileTest, TheIndexBytesCountVersionsThatCheckpointsNeed) {
  constexpr Key kRows = 200'000;
  const auto ssd = Table::Create(Spec(4, "sgd"), Storage());
  std::vector<Key> keys(20'000);
  const auto for_all = [&](const std::function<void()>& work) {
    for (Key begin = 0; begin < kRows; begin += keys.size()) {
      for (size_t i = 0; i < keys.size(); ++i) keys[i] = begin + i;
      work();
    }
    ssd->Upkeep();
  };
  uint64_t id = 0;
  // By how much what malloc gives and index_bytes() differ, per row.
  const auto uncounted = [&] {
    ssd->Checkpoint(++id);
    ssd->WaitDurable();
    return (static_cast<double>(HeapBytes()) - static_cast<double>(ssd->index_bytes())) / kRows;
  };
  for_all([&] { Push(ssd.get(), keys); });
  for_all([&] { Push(ssd.get(), keys); });
  const double before = uncounted();
  const uint64_t bytes = ssd->index_bytes();
  for (int turn = 0; turn < 2; ++turn) {
    for_all([&] { Push(ssd.get(), keys); });
    EXPECT_GE(ssd->drive()->log.retired, (1 + turn) * kRows);
    const double after = uncounted();
    std::printf("%d: %.2f bytes per row that nothing counts, %.2f before\n", turn, after, before);
    EXPECT_LT(after, before + 2) << turn;
  }
  EXPECT_LT(static_cast<double>(ssd->index_bytes() - bytes), 3.0 * kRows);
  for_all([&] { (void)ssd->Erase(keys.data(), keys.size()); });
  EXPECT_GT(ssd->drive()->log.tombstones, kRows / 2);
  EXPECT_LT(uncounted(), before + 2);
}

// A superblock names so many segments only, so those of a large drive are larger.
TEST_F(TableSsdFileTest, OneTableMayFillALargeDrive) {
  constexpr uint64_t kGiB = uint64_t{1} << 30;
  const auto segment_bytes = [&] {
    RowLogSpec spec;
    spec.row_bytes = 1;
    return RowLog::Peek(OpenBlockDevice(Log()).get(), spec)->segment_bytes;
  };
  StorageSpec storage = Storage();
  storage.capacity_bytes = 150 * kGiB;
  {
    const auto ssd = Table::Create(Spec(64, "adagrad"), storage);
    EXPECT_EQ(segment_bytes(), RowLogSpec{}.segment_bytes);
  }
  storage.capacity_bytes = 1000 * kGiB;
  {
    const auto ssd = Table::Create(Spec(64, "adagrad"), storage);
    EXPECT_GE(segment_bytes() * RowLogSpec{}.MostSegments(), 1000 * kGiB);
    Push(ssd.get(), {1, 2, 3});
    ssd->Checkpoint(1);
  }
  const uint64_t large = segment_bytes();
  storage.recover = true;
  storage.capacity_bytes = 150 * kGiB;
  {
    const auto ssd = Table::Create(Spec(64, "adagrad"), storage);
    EXPECT_EQ(ssd->rows(), 3U);
    EXPECT_EQ(segment_bytes(), large);
  }
  storage.recover = false;
  storage.fresh = true;
  storage.capacity_bytes = 100000 * kGiB;  // wide rows, of which a segment would have too many blocks
  const auto ssd = Table::Create(Spec(4096, "adagrad"), storage);
  Push(ssd.get(), {1, 2, 3});
  EXPECT_EQ(ssd->rows(), 3U);
}

TEST_F(TableSsdFileTest, AFullStorageRefusesNewRowsAndGoesOn) {
  StorageSpec storage = Storage();
  storage.capacity_bytes = uint64_t{16} << 20;
  const auto ssd = Table::Create(Spec(64, "sgd"), storage);
  std::vector<Key> keys(1000);
  std::string what;
  Key next = 0;
  while (what.empty()) {
    for (Key& key : keys) key = next++;
    try {
      Push(ssd.get(), keys);
    } catch (const StorageFull& error) {
      what = error.what();
    }
    ASSERT_LT(next, 100000U);
  }
  EXPECT_NE(what.find("is full: table 't' needs"), std::string::npos) << what;
  EXPECT_NE(what.find("Table 't' takes no new rows"), std::string::npos) << what;
  EXPECT_GT(ssd->rows(), 20000U);
  for (uint64_t turn = 0; turn < 3; ++turn) {
    for (Key begin = 0; begin < 2000; begin += keys.size()) {
      for (size_t i = 0; i < keys.size(); ++i) keys[i] = begin + i;
      Push(ssd.get(), keys);
    }
    ssd->Checkpoint(turn + 1);
    ssd->WaitDurable();
  }
}

// With a cap, a push takes room for what it may evict, and pushes run one by one.
TEST_F(TableSsdFileTest, APushThatWaitsForAnotherTakesNoRoom) {
  struct Meanwhile final : Executor {
    std::function<void()> once;
    void ParallelFor(size_t count, const std::function<void(size_t)>& task) override {
      if (const auto now = std::exchange(once, {})) now();
      for (size_t i = 0; i < count; ++i) task(i);
    }
  };
  TableSpec spec = Spec(64, "sgd");
  spec.eviction = {{"cap", {{"max_rows", 1e6}}, "lru"}};
  StorageSpec storage = Storage();
  storage.capacity_bytes = uint64_t{16} << 20;
  const auto ssd = Table::Create(spec, storage);
  // With six appends per row, most of the room: there is none for two pushes at once.
  std::vector<Key> keys(ssd->room()->headroom / 7);
  for (Key key = 0; key < keys.size(); ++key) keys[key] = key;
  const std::vector<float> grads(keys.size() * 64, 1.0F);
  std::future<void> other;
  Meanwhile meanwhile;
  meanwhile.once = [&] {
    other = std::async(std::launch::async, [&] { Push(ssd.get(), keys); });
    (void)other.wait_for(std::chrono::milliseconds(200));  // it cannot end before this one
  };
  ssd->Push(keys.data(), keys.size(), grads.data(), 0.01, &meanwhile);
  EXPECT_NO_THROW(other.get());
  EXPECT_EQ(ssd->version(), 2U);
}

TEST_F(TableSsdFileTest, FilesWithAllRowsAndIncrementsGoFromOneToAnother) {
  const auto trained = Table::Create(Spec(16), Storage());
  const TestDirectory elsewhere;
  StorageSpec other = Storage();
  other.path = elsewhere.path();
  const auto copy = Table::Create(Spec(16), other);
  std::mt19937_64 random(5);
  for (int step = 0; step < 10; ++step) Push(trained.get(), Batch(&random, 800));
  TableFileInfo info = trained->Save(directory_.file("all"));
  copy->Restore({directory_.file("all")});
  EXPECT_EQ(RowsOf(*copy), RowsOf(*trained));
  for (int turn = 0; turn < 3; ++turn) {
    Push(trained.get(), Batch(&random, 300));
    const std::vector<Key> erased = Batch(&random, 40);
    (void)trained->Erase(erased.data(), erased.size());
    const std::string file = directory_.file("more-" + std::to_string(turn));
    info = trained->Save(file, info.checksum);
    ASSERT_TRUE(info.base.has_value());
    EXPECT_LT(info.rows, 600U);
    copy->ApplyIncrement(file);
    EXPECT_EQ(RowsOf(*copy), RowsOf(*trained));
  }
  EXPECT_EQ(copy->version(), trained->version());
}

TEST_P(TableSsdTest, ASaveReadsTheLogInOrder) {
  const auto ssd = Table::Create(Spec(GetParam()), Storage());
  std::mt19937_64 random(5);
  std::vector<Key> keys(kKeys);
  for (Key key = 0; key < kKeys; ++key) keys[key] = key;
  Push(ssd.get(), keys);
  for (int step = 0; step < 20; ++step) Push(ssd.get(), Batch(&random, 1000));
  // The least that `save` reads: the cleaner, which reads too, has nothing to do some time.
  const auto least = [&](uint64_t most, const auto& save, const auto& of) {
    uint64_t found = UINT64_MAX;
    for (int i = 0; i < 100 && found > most; ++i) {
      const uint64_t before = of(ssd->drive()->device);
      save();
      found = std::min(found, of(ssd->drive()->device) - before);
    }
    return found;
  };
  for (int step = 0; step < 2; ++step) {  // without a checkpoint, rows in frames are nowhere else
    // One for each segment; rows of chunks that are not on the drive yet are copied.
    const uint64_t segments = ssd->drive()->log.segments;
    const auto save = [&] { EXPECT_EQ(ssd->Save(directory_.file("saved")).rows, kKeys); };
    EXPECT_LE(least(segments, save, [](const auto& device) { return device.reads; }), segments);
    const auto copy = Table::Create(Spec(GetParam()), StorageSpec{});
    copy->Restore({directory_.file("saved")});
    EXPECT_EQ(RowsOf(*copy), RowsOf(*ssd));
    ssd->Checkpoint(static_cast<uint64_t>(step) + 1);
    ssd->WaitDurable();
  }
  // Of few rows that changed, each is read by itself.
  uint64_t checksum = ssd->Save(directory_.file("all")).checksum;
  const std::vector<Key> few(keys.begin(), keys.begin() + 10);
  const auto save = [&] {
    Push(ssd.get(), few);
    const TableFileInfo info = ssd->Save(directory_.file("few"), checksum);
    EXPECT_EQ(info.rows, few.size());
    checksum = info.checksum;
  };
  const uint64_t most = few.size() * (ssd->row_bytes() / kBlockBytes + 1) * kBlockBytes;
  EXPECT_LE(least(most, save, [](const auto& device) { return device.read_bytes; }), most);
}

TEST_F(TableSsdFileTest, ThreadsPullPushEraseAndSaveMeanwhile) {
  const auto ssd = Table::Create(Spec(16), Storage(false, 300 << 10));
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (uint64_t seed = 0; seed < 3; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937_64 random(seed);
      std::vector<float> out;
      while (!stop) {
        const std::vector<Key> keys = Batch(&random, 500);
        out.resize(keys.size() * 16);
        ssd->Pull(keys.data(), keys.size(), out.data());
        Push(ssd.get(), keys);
        ssd->Upkeep();
        if (random() % 8 == 0) (void)ssd->Erase(keys.data(), 20);
      }
    });
  }
  for (uint64_t id = 1; id <= 6; ++id) {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    ssd->Checkpoint(id);
    if (id % 2 == 0) (void)ssd->Save(directory_.file("save"));
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  ssd->WaitDurable();
  const auto copy = Table::Create(Spec(16), StorageSpec{});
  (void)ssd->Save(directory_.file("last"));
  copy->Restore({directory_.file("last")});
  EXPECT_EQ(RowsOf(*copy), RowsOf(*ssd));
}

}  // namespace
}  // namespace oe::table_ssd_test
