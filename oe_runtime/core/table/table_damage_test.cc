// Rows that are no longer what was written to them: found by their checksums wherever they would be copied,
// named, counted, and never given a new checksum.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/storage/pool_format.h"
#include "oe_runtime/core/storage/pool_verify.h"
#include "oe_runtime/core/storage/slot_store.h"
#include "oe_runtime/core/storage/test_storage.h"
#include "oe_runtime/core/table/table.h"

namespace oe::table_damage_test {
namespace {

constexpr uint32_t kDim = 9;
constexpr Key kKeys = 2000;
constexpr Key kDamaged = 1234;

std::vector<Key> AllKeys() {
  std::vector<Key> keys(kKeys);
  for (Key key = 0; key < kKeys; ++key) keys[key] = key;
  return keys;
}

TableSpec Spec() {
  TableSpec spec;
  spec.name = "t";
  spec.dim = kDim;
  spec.optimizer.name = "sgd";
  return spec;
}

void Push(Table* table, const std::vector<Key>& keys) {
  std::vector<float> grads(keys.size() * kDim);
  for (size_t i = 0; i < grads.size(); ++i) grads[i] = static_cast<float>(i % 31) / 31.0F - 0.4F;
  table->Push(keys.data(), keys.size(), grads.data(), 0.5);
}

std::vector<float> Row(const Table& table, Key key) {
  std::vector<float> row(kDim);
  table.Pull(&key, 1, row.data());
  return row;
}

std::vector<float> Rows(const Table& table) {
  const std::vector<Key> keys = AllKeys();
  std::vector<float> rows(keys.size() * kDim);
  table.Pull(keys.data(), keys.size(), rows.data());
  return rows;
}

// Through all rows once.
void Scrub(Table* table) {
  Table::ScrubPosition position;
  uint64_t bytes = 0;
  while (table->Scrub(&position, &bytes)) {
  }
}

// Where `content` lies in the files of a directory, exactly once.
struct Place {
  std::string file;
  size_t at = 0;
};
Place Find(const std::string& directory, const void* content, size_t size) {
  const std::string wanted(static_cast<const char*>(content), size);
  std::vector<Place> places;
  for (const auto& entry : std::filesystem::directory_iterator(directory)) {
    if (entry.path().extension() != ".pool") continue;
    const std::string all = ReadAll(entry.path().string());
    for (size_t at = all.find(wanted); at != std::string::npos; at = all.find(wanted, at + 1)) {
      places.push_back({entry.path().string(), at});
    }
  }
  if (places.size() != 1) ADD_FAILURE() << "found " << places.size() << " times";
  return places.empty() ? Place{} : places.front();
}

// Files are mapped shared, so that this is also what an open table sees.
void Write(const std::string& file, size_t at, const void* data, size_t size) {
  std::fstream out(file, std::ios::in | std::ios::out | std::ios::binary);
  out.seekp(static_cast<std::streamoff>(at));
  out.write(static_cast<const char*>(data), static_cast<std::streamsize>(size));
  ASSERT_TRUE(out.good());
}
void Flip(const Place& place, size_t bit) {
  char byte = ReadAll(place.file)[place.at + bit / 8];
  byte = static_cast<char>(byte ^ 1 << bit % 8);
  Write(place.file, place.at + bit / 8, &byte, 1);
}

class TableDamageTest : public testing::TestWithParam<const char*> {
 protected:
  std::unique_ptr<Table> Open(bool recover = true) const {
    StorageSpec spec = TestStorage(GetParam(), directory_.path());
    spec.recover = recover;
    spec.fresh = !recover;
    return Table::Create(Spec(), spec);
  }
  // A pool with one checkpoint of all keys; the table as it is there.
  void MakePool() {
    const auto table = Open(false);
    Push(table.get(), AllKeys());
    table->Checkpoint(1);
    table->WaitDurable();
    written_ = Rows(*table);
  }
  std::vector<float> Written(Key key) const {
    return {written_.begin() + static_cast<ptrdiff_t>(key * kDim),
            written_.begin() + static_cast<ptrdiff_t>((key + 1) * kDim)};
  }
  Place RowPlace(Key key) const {
    const std::vector<float> row = Written(key);
    return Find(directory_.path(), row.data(), kDim * sizeof(float));
  }
  // Of the slot that has the row: its key, then its state.
  Place MetaPlace(Key key) const {
    const Place row = RowPlace(key);
    SegmentHeader header{};
    const std::string all = ReadAll(row.file);
    std::memcpy(&header, all.data(), sizeof header);
    for (uint64_t slot = 0; slot < header.blocks * header.block_rows; ++slot) {
      SlotMeta meta{};
      const size_t at = kPoolPage + slot * sizeof meta;
      std::memcpy(&meta, &all[at], sizeof meta);
      if (meta.key == key && meta.state != 0 && !IsTombstone(meta.state)) return {row.file, at};
    }
    ADD_FAILURE() << "no slot of key " << key;
    return {};
  }
  // As a table without that row.
  std::vector<float> Fresh(Key key) const { return Row(*Table::Create(Spec(), StorageSpec{}), key); }
  std::vector<float> FreshAndPushed(Key key) const {
    const auto table = Table::Create(Spec(), StorageSpec{});
    Push(table.get(), {key});
    return Row(*table, key);
  }
  void ExpectNothingIsLaundered() const {
    for (const std::string& problem : VerifyPools(directory_.path())) ADD_FAILURE() << problem;
  }

  TestDirectory directory_;
  std::vector<float> written_;
};

TEST_P(TableDamageTest, APushDoesNotCopyADamagedRow) {
  MakePool();
  const Place damaged = RowPlace(kDamaged);
  Flip(damaged, 30);
  {
    const auto table = Open();
    testing::internal::CaptureStderr();
    Push(table.get(), {kDamaged});
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_NE(
        log.find("error: table 't': the row of key 1234 is damaged: its checksum does not fit, at byte " +
                 std::to_string(damaged.at) + " of " + damaged.file + "; it was removed"),
        std::string::npos)
        << log;
    EXPECT_EQ(table->damage_counts().quarantined, 1U);
    EXPECT_EQ(Row(*table, kDamaged), FreshAndPushed(kDamaged));
    EXPECT_EQ(Row(*table, 7), Written(7));
    EXPECT_EQ(table->rows(), kKeys);
    // Until no kept checkpoint needs the slot.
    for (uint64_t id = 2; id < 5; ++id) {
      Push(table.get(), {kDamaged});
      table->Checkpoint(id);
    }
    table->WaitDurable();
    EXPECT_EQ(table->damage_counts().quarantined, 1U);
  }
  ExpectNothingIsLaundered();
  EXPECT_EQ(Open()->rows(), kKeys);
}

// A drive that lies about a sync loses rows and keeps what says that they are there, and a recovery reads
// only that.
TEST_P(TableDamageTest, ARecoveredRowIsCheckedBeforeItIsRead) {
  MakePool();
  constexpr Key kOther = 77;
  Flip(RowPlace(kDamaged), 30);
  Flip(RowPlace(kOther), 3);
  const auto table = Open();
  testing::internal::CaptureStderr();
  EXPECT_EQ(Row(*table, kDamaged), Fresh(kDamaged));
  std::vector<float> row(kDim);
  uint8_t found = 1;
  table->ReadRows(&kOther, 1, row.data(), nullptr, &found, nullptr, {});
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_EQ(found, 0);
  EXPECT_NE(log.find("the row of key 1234 is damaged"), std::string::npos) << log;
  EXPECT_NE(log.find("the row of key 77 is damaged"), std::string::npos) << log;
  EXPECT_EQ(table->damage_counts().quarantined, 2U);
  EXPECT_EQ(Row(*table, 7), Written(7));
  // Nor is one given out that has to stay.
  constexpr Key kThird = 99;
  Flip(RowPlace(kThird), 30);
  {
    const std::unique_lock<FairSharedMutex> checkpoint(*table->push_lock());
    const char* const says =
        "table 't': 1 rows are damaged, the first of them of key 99, and cannot be removed beside a "
        "checkpoint, a save or an eviction; read them again";
    EXPECT_EQ(MessageOf<StorageError>([&] { (void)Row(*table, kThird); }), says);
    EXPECT_EQ(MessageOf<StorageError>(
                  [&] { table->ReadRows(&kThird, 1, row.data(), nullptr, &found, nullptr, {}); }),
              says);
  }
  EXPECT_EQ(Row(*table, kThird), Fresh(kThird));
  EXPECT_EQ(table->damage_counts().quarantined, 3U);
  // A pass of the background check ends that.
  Scrub(table.get());
  Flip(RowPlace(7), 30);
  EXPECT_NE(Row(*table, 7), Written(7));
  EXPECT_EQ(table->damage_counts().quarantined, 3U);
}

TEST_P(TableDamageTest, RecoveredRowsBeyondTheLimitAreNotRead) {
  MakePool();
  const std::string file = RowPlace(kDamaged).file;
  const std::string all = ReadAll(file);
  SegmentHeader header{};
  std::memcpy(&header, all.data(), sizeof header);
  const std::string nothing(all.size() - header.rows_offset, '\xff');
  Write(file, header.rows_offset, nothing.data(), nothing.size());
  const auto table = Open();
  testing::internal::CaptureStderr();
  const std::string message = MessageOf<StorageError>([&] { (void)Rows(*table); });
  (void)testing::internal::GetCapturedStderr();
  EXPECT_NE(message.find("table 't': too many rows are damaged: 1024 of about"), std::string::npos)
      << message;
}

TEST_P(TableDamageTest, RepeatedKeysInAPushToADamagedRow) {
  MakePool();
  Flip(RowPlace(kDamaged), 30);
  const auto table = Open();
  Push(table.get(), {5, kDamaged, 9, kDamaged, kDamaged});
  EXPECT_EQ(table->damage_counts().quarantined, 1U);
  EXPECT_EQ(table->rows(), kKeys);
}

TEST_P(TableDamageTest, AScrubFindsDamageInUnusedRows) {
  MakePool();
  Flip(RowPlace(kDamaged), 3);
  const auto table = Open();
  Scrub(table.get());
  const Table::DamageCounts counts = table->damage_counts();
  EXPECT_EQ(counts.quarantined, 1U);
  EXPECT_EQ(counts.scrubbed_rows, kKeys);
  EXPECT_EQ(counts.scrubs, 1U);
  EXPECT_EQ(Row(*table, kDamaged), Fresh(kDamaged));
  EXPECT_EQ(table->rows(), kKeys - 1);
  Scrub(table.get());
  EXPECT_EQ(table->damage_counts().quarantined, 1U);
  // It stays away.
  table->Checkpoint(2);
  table->WaitDurable();
  table->Recover(2);
  EXPECT_EQ(table->rows(), kKeys - 1);
}

TEST_P(TableDamageTest, AScrubLeavesGoodRowsAlone) {
  MakePool();
  const auto table = Open();
  Scrub(table.get());
  Push(table.get(), {1, 2, 3, kKeys + 5});  // rows of the open epoch have no checksum
  Scrub(table.get());
  table->Checkpoint(2);  // nor those of one that is not durable yet
  Scrub(table.get());
  table->WaitDurable();
  Scrub(table.get());
  EXPECT_EQ(table->damage_counts().quarantined, 0U);
  EXPECT_EQ(table->damage_counts().repaired, 0U);
  EXPECT_EQ(table->rows(), kKeys + 1);
}

TEST_P(TableDamageTest, AFlippedBitOfMetadataIsCorrected) {
  for (const size_t bit : {size_t{2}, size_t{62}, size_t{64 + 5}, size_t{64 + 40}}) {
    MakePool();
    const auto table = Open();
    Flip(MetaPlace(kDamaged), bit);
    Scrub(table.get());
    EXPECT_EQ(table->damage_counts().repaired, 1U) << bit;
    EXPECT_EQ(table->damage_counts().quarantined, 0U) << bit;
    EXPECT_EQ(Rows(*table), written_);
    Push(table.get(), {1});
    table->Checkpoint(2);
    table->WaitDurable();
    table->Recover(2);
    EXPECT_EQ(table->rows(), kKeys);
    EXPECT_EQ(Row(*table, kDamaged), Written(kDamaged));
  }
}

// What recovery would refuse is not acknowledged.
TEST_P(TableDamageTest, NoCheckpointOfMetadataThatIsLost) {
  MakePool();
  const auto table = Open();
  const uint64_t state = 0;
  const Place meta = MetaPlace(kDamaged);
  Write(meta.file, meta.at + sizeof(Key), &state, sizeof state);
  Push(table.get(), {kDamaged});
  EXPECT_EQ(table->damage_counts().quarantined, 1U);
  EXPECT_EQ(Row(*table, kDamaged), FreshAndPushed(kDamaged));
  table->Checkpoint(2);
  const std::string message = MessageOf<StorageError>([&] { table->WaitDurable(); });
  EXPECT_NE(message.find("the metadata of the rows beside " + directory_.path()), std::string::npos)
      << message;
  EXPECT_NE(message.find("save the tables to files"), std::string::npos) << message;
}

TEST_P(TableDamageTest, ASaveWritesNoDamagedRow) {
  MakePool();
  Flip(RowPlace(kDamaged), 17);
  const auto table = Open();
  const std::string file = directory_.file("saved");
  EXPECT_EQ(table->Save(file).rows, kKeys);
  EXPECT_EQ(table->damage_counts().quarantined, 1U);
  EXPECT_EQ(Row(*table, kDamaged), Fresh(kDamaged));
  const auto restored = Table::Create(Spec(), StorageSpec{});
  restored->Restore({file});
  EXPECT_EQ(Rows(*restored), Rows(*table));
  // The next increment goes on from there.
  const TableFileInfo increment = table->Save(directory_.file("next"), VerifyTableFile(file).checksum);
  EXPECT_TRUE(increment.base);
  EXPECT_EQ(increment.tombstones, 1U);
}

TEST_P(TableDamageTest, NoDamagedRowEntersTheCache) {
  if (std::string(GetParam()) != "dram_pmem") GTEST_SKIP() << "has no cache";
  MakePool();
  const auto table = Open();
  // While it is not cached: it does not come in.
  Flip(RowPlace(kDamaged), 30);
  (void)Row(*table, kDamaged);
  table->Upkeep();
  EXPECT_EQ(table->damage_counts().quarantined, 1U);
  EXPECT_EQ(Row(*table, kDamaged), Fresh(kDamaged));
  // While it is: the copy is right, and is written to another slot.
  (void)Row(*table, 7);
  table->Upkeep();
  EXPECT_EQ(table->cache().rows, 1U);
  Flip(RowPlace(7), 30);
  Scrub(table.get());
  EXPECT_EQ(table->damage_counts().repaired, 1U);
  EXPECT_EQ(Row(*table, 7), Written(7));
  table->Checkpoint(2);
  table->WaitDurable();
  table->Recover(2);
  Scrub(table.get());
  EXPECT_EQ(Row(*table, 7), Written(7));
  EXPECT_EQ(table->damage_counts().quarantined, 1U);
}

// The counts of an admission filter are rows of a pool as well.
TEST_P(TableDamageTest, ACountThatIsDamagedBeginsAnew) {
  TableSpec spec = Spec();
  spec.admission.name = "counter";
  spec.admission.params = {{"filter_freq", 3}};
  StorageSpec storage = TestStorage(GetParam(), directory_.path());
  storage.recover = true;
  {
    const auto table = Table::Create(spec, storage);
    Push(table.get(), {kDamaged});
    Push(table.get(), {kDamaged});
    table->Checkpoint(1);
    table->WaitDurable();
  }
  const uint32_t count = 2;
  const auto table = Table::Create(spec, storage);
  // The only row of the pool that has one.
  for (const auto& entry : std::filesystem::directory_iterator(directory_.path())) {
    const std::string all = ReadAll(entry.path().string());
    SegmentHeader header{};
    if (all.size() < sizeof header) continue;  // the lock
    std::memcpy(&header, all.data(), sizeof header);
    if (header.magic != kSegmentMagic || header.row_bytes != sizeof count) continue;
    const size_t at = all.find('\2', header.rows_offset);
    ASSERT_NE(at, std::string::npos);
    Flip({entry.path().string(), at}, 0);
  }
  Push(table.get(), {kDamaged});  // would be the third
  EXPECT_EQ(table->damage_counts().quarantined, 1U);
  EXPECT_EQ(table->rows(), 0U);
  Push(table.get(), {kDamaged});
  Push(table.get(), {kDamaged});
  EXPECT_EQ(table->rows(), 1U);
}

// As a flipped bit of when the row was pushed would have it; other rows from the future get the present time.
TEST_P(TableDamageTest, ASweepDoesNotCopyADamagedRow) {
  TableSpec spec = Spec();
  spec.eviction = {{"ttl", {{"seconds", 1000}}, ""}};
  StorageSpec storage = TestStorage(GetParam(), directory_.path());
  storage.recover = true;
  {
    const auto table = Table::Create(spec, storage);
    Push(table.get(), AllKeys());
    table->Checkpoint(1);
    table->WaitDurable();
    written_ = Rows(*table);
  }
  const auto table = Table::Create(spec, storage);
  Place seconds = RowPlace(kDamaged);
  seconds.at += kDim * sizeof(float);
  Flip(seconds, 31);
  EXPECT_EQ(table->Evict(), 1U);
  EXPECT_EQ(table->damage_counts().quarantined, 1U);
  EXPECT_EQ(table->rows(), kKeys - 1);
  EXPECT_EQ(Row(*table, 7), Written(7));
}

// Where new rows are refused, and slots are kept for updates.
TEST_P(TableDamageTest, AFullPoolIsScrubbedToo) {
  StorageSpec storage = TestStorage(GetParam(), directory_.path(), uint64_t{8} << 20);
  const auto table = Table::Create(Spec(), storage);
  Push(table.get(), AllKeys());
  std::vector<Key> more(1000);
  EXPECT_THROW(
      {
        for (Key first = kKeys;; first += more.size()) {
          for (size_t i = 0; i < more.size(); ++i) more[i] = first + i;
          Push(table.get(), more);
        }
      },
      StorageFull);
  table->Checkpoint(1);
  table->WaitDurable();
  written_ = Rows(*table);
  const uint64_t rows = table->rows();
  const uint64_t refused = table->room()->refused;
  // In different shards, each of which has few slots left.
  Flip(MetaPlace(kDamaged), 2);
  Flip(RowPlace(7), 3);
  Scrub(table.get());
  EXPECT_EQ(table->damage_counts().repaired, 1U);
  EXPECT_EQ(table->damage_counts().quarantined, 1U);
  EXPECT_EQ(table->rows(), rows - 1);
  EXPECT_EQ(table->room()->refused, refused) << "no new row was asked for";
  EXPECT_EQ(Row(*table, kDamaged), Written(kDamaged));
}

TEST_P(TableDamageTest, ACheckpointInFilesThatAreGoneIsNone) {
  for (const char* which : {"super", "000000"}) {
    TestDirectory directory;
    StorageSpec storage = TestStorage(GetParam(), directory.path());
    const auto table = Table::Create(Spec(), storage);
    Push(table.get(), AllKeys());
    table->Checkpoint(1);
    table->WaitDurable();
    std::string gone;
    for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
      if (entry.path().string().find(which) != std::string::npos) gone = entry.path().string();
    }
    ASSERT_TRUE(std::filesystem::remove(gone));
    Push(table.get(), {1});
    table->Checkpoint(2);
    const std::string message = MessageOf<StorageError>([&] { table->WaitDurable(); });
    EXPECT_NE(message.find("the pool file " + gone + " is gone"), std::string::npos) << message;
    ASSERT_EQ(table->Checkpoints().size(), 1U);
    EXPECT_EQ(table->Checkpoints().front().id, 1U);
    // What a user still can do.
    EXPECT_EQ(table->Save(directory.file("saved")).rows, kKeys);
  }
}

INSTANTIATE_TEST_SUITE_P(Pools, TableDamageTest, testing::Values("pmem_libpmem", "dram_pmem"),
                         [](const auto& kind) { return std::string(kind.param); });

}  // namespace
}  // namespace oe::table_damage_test
