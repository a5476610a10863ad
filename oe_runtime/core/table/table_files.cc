#include "oe_runtime/core/table/table_files.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/storage/log_store.h"

namespace oe {
namespace {

constexpr size_t kLoadBytes = size_t{4} << 20;  // of rows of a restore that are added at once
constexpr size_t kRowsAhead = 16;               // of a save that are on their way from memory

constexpr size_t kSavedAtOnce = 1024;  // rows of a save that are looked up together

// How many blocks of a log are read in order in the time of one that is read by itself.
constexpr uint64_t kRandomCost = 8;

constexpr size_t kAddedAtOnce = 1024;  // rows of a restore that are added together

// Room for the rows that a call adds to a log or changes there. Without the lock of the shard.
RowLog::Room RoomFor(const RowMap& map, size_t rows) {
  return map.store().RoomFor(2 * rows, RowLog::Need::kNewRows);
}

// Unpins rows when they are done with; before the lock of the shard is given back.
class Unpin {
 public:
  Unpin(RowMap* map, uint32_t* numbers, size_t n) : map_(map), numbers_(numbers), n_(n) {
    std::fill_n(numbers, n, kNoRow);
  }
  ~Unpin() { map_->store().Unpin(numbers_, n_); }
  Unpin(const Unpin&) = delete;
  Unpin& operator=(const Unpin&) = delete;

 private:
  RowMap* const map_;
  uint32_t* const numbers_;
  const size_t n_;
};

// Moves the entries that are to be kept to the front; how many there are.
template <typename Keep>
size_t KeepOnly(size_t n, Key* keys, uint32_t* numbers, const Keep& keep) {
  size_t kept = 0;
  for (size_t i = 0; i < n; ++i) {
    if (!keep(keys[i], numbers[i])) continue;
    keys[kept] = keys[i];
    numbers[kept++] = numbers[i];
  }
  return kept;
}

size_t KeepChanged(const RowMap& map, size_t n, Key* keys, uint32_t* numbers) {
  return KeepOnly(n, keys, numbers,
                  [&](Key key, uint32_t number) { return map.store().HasChanged(key, number); });
}

// What the walk has not passed.
size_t KeepRest(const RowLogWalk& walk, size_t n, Key* keys, uint32_t* numbers) {
  return KeepOnly(n, keys, numbers, [&](Key /*key*/, uint32_t number) {
    return (number & kCopyBit) != 0 || !walk.HasPassed(number);
  });
}

// Whether to read all of a log rather than so many rows of it.
bool IsMuchOf(const RowLog& log, uint64_t rows) {
  return rows > 0 && rows * log.reads_per_row() * kBlockBytes >= log.used_bytes() / kRandomCost;
}

// Rows that are to be saved, and how many of them are in a log only.
struct Wanted {
  uint64_t rows = 0;
  uint64_t to_read = 0;
};

// Rows of a shard from *position on, 0 at first, as RowMap::Scan; of those that changed only the `listed`
// ones, if they are listed.
using Listed = std::optional<std::vector<Key>>;
size_t Scan(const RowMap& map, const Listed& listed, uint64_t* position, size_t max, Key* keys,
            uint32_t* numbers) {
  if (!listed) return map.Scan(position, max, keys, numbers);
  size_t kept = 0;
  while (kept == 0 && *position < listed->size()) {
    const size_t n = std::min<size_t>(max, listed->size() - *position);
    std::copy_n(listed->begin() + static_cast<ptrdiff_t>(*position), n, keys);
    *position += n;
    map.Numbers(keys, n, numbers);
    kept = KeepOnly(n, keys, numbers, [](Key /*key*/, uint32_t number) { return number != kNoRow; });
  }
  return kept;
}

Wanted CountChanged(const RowMap& map, const Listed& listed) {
  std::array<Key, kSavedAtOnce> keys;          // NOLINT(cppcoreguidelines-pro-type-member-init)
  std::array<uint32_t, kSavedAtOnce> numbers;  // NOLINT(cppcoreguidelines-pro-type-member-init)
  uint64_t position = 0;
  Wanted wanted;
  while (true) {
    const std::shared_lock<FairSharedMutex> lock(map.mutex());
    const size_t found = Scan(map, listed, &position, keys.size(), keys.data(), numbers.data());
    if (found == 0) return wanted;
    const size_t kept = KeepChanged(map, found, keys.data(), numbers.data());
    wanted.rows += kept;
    wanted.to_read += static_cast<uint64_t>(std::count_if(
        numbers.data(), numbers.data() + kept, [](uint32_t number) { return (number & kCopyBit) == 0; }));
  }
}

Wanted CountAll(const RowMap& map) {
  const uint64_t in_frames = map.store().cache_stats().rows;
  return {map.size(), map.size() - std::min(map.size(), in_frames)};
}

// The keys that were erased and have no row now.
void AddTombstones(const RowMap& map, std::vector<Key>* tombstones) {
  std::vector<Key> keys = map.store().changes().erased();
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  const std::shared_lock<FairSharedMutex> lock(map.mutex());
  for (const Key key : keys) {
    if (!map.HasAll(&key, 1)) tombstones->push_back(key);
  }
}

}  // namespace

// Rows on their way to a file, block by block.
class TableFiles::Blocks {
 public:
  Blocks(TableFileWriter* writer, size_t row_bytes, uint64_t rows)
      : writer_(writer),
        row_bytes_(row_bytes),
        most_(std::clamp<size_t>(rows, 1, writer->block_rows())),
        keys_(new Key[most_]),
        rows_(new std::byte[most_ * row_bytes]) {}

  // Where the row of the key is to be written before the next call.
  std::byte* Add(Key key) {
    if (filled_ == most_) Finish();
    keys_[filled_] = key;
    ++added_;
    return &rows_[filled_++ * row_bytes_];
  }
  // After the last one.
  void Finish() {
    if (filled_ > 0) writer_->WriteBlock(keys_.get(), rows_.get(), filled_);
    filled_ = 0;
  }
  uint64_t added() const { return added_; }

 private:
  TableFileWriter* const writer_;
  const size_t row_bytes_;
  const size_t most_;
  const std::unique_ptr<Key[]> keys_;
  const std::unique_ptr<std::byte[]> rows_;
  size_t filled_ = 0;
  uint64_t added_ = 0;
};

TableFileInfo TableFiles::Save(const RowMaps& maps, const std::string& file, PendingFiles* files,
                               uint64_t version, std::optional<uint64_t> since, Damaged* damaged) const {
  TableFileInfo info;
  info.file = file;
  info.spec = spec_;
  info.shard = shard_;
  info.version = version;
  info.row_bytes = row_bytes_;
  std::vector<Key> tombstones;
  uint64_t to_read = 0;
  std::array<Listed, kShards> listed;  // of what changed
  for (size_t i = 0; i < maps.size(); ++i) {
    const auto& map = maps[i];
    if (since) listed[i] = map->store().changes().Listed();
    const Wanted wanted = since ? CountChanged(*map, listed[i]) : CountAll(*map);
    info.rows += wanted.rows;
    to_read += wanted.to_read;
    if (since) AddTombstones(*map, &tombstones);
  }
  info.base = since;
  info.tombstones = tombstones.size();

  TableFileWriter writer(info, files);
  writer.WriteTombstones(tombstones.data(), tombstones.size());
  Blocks blocks(&writer, row_bytes_, info.rows);
  std::optional<RowLogWalk> walk;
  if (const RowLog* const log = maps.front()->store().log(); log != nullptr && IsMuchOf(*log, to_read)) {
    walk.emplace(log);
    SaveInOrder(maps, since.has_value(), &*walk, &blocks);
  }
  for (size_t i = 0; i < maps.size(); ++i) {
    const auto& map = maps[i];
    SaveRest(*map, since.has_value(), listed[i], walk ? &*walk : nullptr, &blocks, [&](Key key) {
      damaged->emplace_back(map.get(), key);
      map->store().RequireFewDamaged(damaged->size());
    });
  }
  blocks.Finish();
  if (blocks.added() != info.rows) {
    throw CheckpointError(file + " was not written: table '" + spec_.name + "' has " +
                          std::to_string(info.rows) + " rows to save, but " + std::to_string(blocks.added()) +
                          " were found; save it again");
  }
  return writer.Finish();
}

// Rows of logs that are not in frames, as they come.
void TableFiles::SaveInOrder(const RowMaps& maps, bool changed, RowLogWalk* walk, Blocks* blocks) const {
  struct OfShard {
    std::vector<Key> keys;
    std::vector<uint32_t> rows;  // of the chunk
    std::vector<uint32_t> numbers;
  };
  std::array<OfShard, kShards> shards;
  std::vector<uint8_t> wanted;
  while (walk->Next()) {
    SegmentChunks& chunks = walk->chunks();
    for (OfShard& shard : shards) {
      shard.keys.clear();
      shard.rows.clear();
    }
    for (const uint32_t row : walk->live()) {
      const Key key = chunks.chunk().rows[row].key;
      const uint32_t shard = shard_of_(key);
      if (shard == kShards) continue;
      shards[shard].keys.push_back(key);
      shards[shard].rows.push_back(row);
    }
    wanted.assign(chunks.chunk().rows.size(), 0);
    for (uint32_t i = 0; i < kShards; ++i) {
      OfShard& shard = shards[i];
      shard.numbers.resize(shard.keys.size());
      maps[i]->Numbers(shard.keys.data(), shard.keys.size(), shard.numbers.data());
      for (size_t at = 0; at < shard.keys.size(); ++at) {
        if (shard.numbers[at] != chunks.slot(shard.rows[at]))
          continue;  // it has a frame, or is a former version
        wanted[shard.rows[at]] =
            !changed || maps[i]->store().HasChanged(shard.keys[at], shard.numbers[at]) ? 1 : 0;
      }
    }
    for (const uint32_t row : walk->live()) {
      if (wanted[row] == 0) continue;
      const std::byte* const content = chunks.row(row);
      if (content != nullptr) {
        std::memcpy(blocks->Add(chunks.chunk().rows[row].key), content, row_bytes_);
      } else {
        walk->LeaveOut(chunks.slot(row));
      }
    }
  }
}

// All rows, but for those that the walk has passed.
void TableFiles::SaveRest(const RowMap& map, bool changed, const std::optional<std::vector<Key>>& listed,
                          const RowLogWalk* walk, Blocks* blocks,
                          const std::function<void(Key)>& damaged) const {
  std::array<Key, kSavedAtOnce> keys;                   // NOLINT(cppcoreguidelines-pro-type-member-init)
  std::array<uint32_t, kSavedAtOnce> numbers;           // NOLINT(cppcoreguidelines-pro-type-member-init)
  std::array<const std::byte*, kSavedAtOnce> contents;  // NOLINT(cppcoreguidelines-pro-type-member-init)
  uint64_t position = 0;
  size_t found = 0;
  for (bool more = true; more; found = 0) {
    const std::shared_lock<FairSharedMutex> lock(map.mutex());
    while (found < keys.size()) {  // of many that have been written few may be left
      size_t n = Scan(map, listed, &position, keys.size() - found, &keys[found], &numbers[found]);
      more = n > 0;
      if (!more) break;
      if (changed) n = KeepChanged(map, n, &keys[found], &numbers[found]);
      if (walk != nullptr) n = KeepRest(*walk, n, &keys[found], &numbers[found]);
      found += n;
    }
    LogReads reads;
    map.store().Rows(keys.data(), numbers.data(), found, contents.data(), &reads);
    reads.Run();
    for (size_t i = 0; i < std::min(found, kRowsAhead); ++i) map.store().Prefetch(numbers[i]);
    for (size_t i = 0; i < found; ++i) {
      if (i + kRowsAhead < found) map.store().Prefetch(numbers[i + kRowsAhead]);
      std::byte* const row = blocks->Add(keys[i]);
      if (contents[i] != nullptr) std::memcpy(row, contents[i], row_bytes_);
      if (contents[i] != nullptr && map.store().Intact(keys[i], numbers[i])) continue;
      // The file's checksum would say that it is right. As when it is pushed, the key begins anew.
      new_row_(keys[i], row);
      damaged(keys[i]);
    }
  }
}

// Rows of a chain, ordered by internal shard.
struct TableFiles::Load {
  std::array<std::vector<Key>, kShards> keys;
  std::array<std::vector<size_t>, kShards> places;  // of the keys' rows
  std::vector<std::byte> rows;
  std::string file;  // what errors name
};

// Fills *load with the next rows; false when there are no more, and then every checksum was right.
bool TableFiles::ReadLoad(TableChainReader* reader, Load* load) const {
  for (uint32_t shard = 0; shard < kShards; ++shard) {
    load->keys[shard].clear();
    load->places[shard].clear();
  }
  load->rows.clear();
  while (load->rows.size() < kLoadBytes) {
    const size_t filled = load->rows.size();
    const size_t n = reader->NextBlock();
    if (n == 0) return filled > 0;
    load->rows.insert(load->rows.end(), reader->rows(), reader->rows() + n * row_bytes_);
    for (size_t i = 0; i < n; ++i) {
      const Key key = reader->keys()[i];
      const uint32_t shard = shard_of_(key);
      if (shard < kShards) {
        load->keys[shard].push_back(key);
        load->places[shard].push_back(filled + i * row_bytes_);
      } else if (spec_.index == "array" && key >= spec_.input_dim) {
        throw CheckpointError(load->file + ": key " + std::to_string(key) + " is not below input_dim " +
                              std::to_string(spec_.input_dim) + "; the file is damaged");
      }
    }
  }
  return true;
}

// What the maps keep of a row of a file: its first bytes, or its weights reduced to `scratch`.
const std::byte* TableFiles::Kept(Key key, const std::byte* row, std::byte* scratch) const {
  if (reduced_ == nullptr) return row;
  reduced_->Reduce(key, row, scratch);
  return scratch;
}

void TableFiles::AddLoad(const Load& load, RowMap* map, uint32_t shard) const {
  const std::vector<Key>& keys = load.keys[shard];
  const std::vector<size_t>& places = load.places[shard];
  const std::unique_ptr<uint32_t[]> numbers(new uint32_t[keys.size()]);
  std::vector<std::byte> scratch(reduced_ != nullptr ? keys.size() * kept_bytes_ : 0);
  std::vector<const std::byte*> kept(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    std::byte* const to = scratch.empty() ? nullptr : &scratch[i * kept_bytes_];
    kept[i] = Kept(keys[i], load.rows.data() + places[i], to);
  }
  size_t added = 0;  // rows are made in the order of the keys, if none is there already
  const auto fill = [&](Key key, std::byte* row) {
    if (added == keys.size() || keys[added] != key) return;
    std::memcpy(row, kept[added++], kept_bytes_);
  };
  for (size_t begin = 0; begin < keys.size(); begin += kAddedAtOnce) {
    const size_t size = std::min(kAddedAtOnce, keys.size() - begin);
    const RowLog::Room room = RoomFor(*map, size);
    const std::unique_lock<FairSharedMutex> lock(map->mutex());
    const Unpin unpin(map, numbers.get(), size);
    map->FindOrAdd(&keys[begin], size, numbers.get(), fill);
  }
  if (added == keys.size()) return;
  throw CheckpointError(load.file + ": key " + std::to_string(keys[added]) +
                        " has a row already; the files overlap");
}

// While the rows that were read are added, shard by shard, the next are read.
void TableFiles::LoadChain(const TableChain& chain, const RowMaps& maps, Executor* executor) const {
  TableChainReader reader(chain);
  std::array<Load, 2> loads;
  for (Load& load : loads) load.file = chain.back();
  std::array<std::exception_ptr, kShards + 1> errors;
  bool more = ReadLoad(&reader, loads.data());
  for (size_t turn = 0; more; turn ^= 1) {
    const auto work = [&](size_t i) {
      try {
        if (i == 0) {  // the longest
          more = ReadLoad(&reader, &loads[turn ^ 1]);
        } else {
          AddLoad(loads[turn], maps[i - 1].get(), static_cast<uint32_t>(i - 1));
        }
      } catch (...) {
        errors[i] = std::current_exception();
      }
    };
    if (executor != nullptr) {
      executor->ParallelFor(errors.size(), work);
    } else {
      for (size_t i = 0; i < errors.size(); ++i) work(i);
    }
    for (const std::exception_ptr& error : errors) {
      if (error) std::rethrow_exception(error);
    }
  }
}

void TableFiles::Apply(TableFileReader* reader, const RowMaps& maps) const {
  const auto map_of = [&](Key key) -> RowMap& {
    const uint32_t shard = shard_of_(key);
    if (shard < kShards) return *maps[shard];
    throw CheckpointError(reader->info().file + ": key " + std::to_string(key) +
                          " is not of this server's part of table '" + spec_.name + "'; the file is damaged");
  };
  while (const size_t n = reader->NextTombstones()) {
    for (size_t i = 0; i < n; ++i) {
      RowMap& map = map_of(reader->keys()[i]);
      const RowLog::Room room = RoomFor(map, 1);
      const std::unique_lock<FairSharedMutex> lock(map.mutex());
      map.Erase(reader->keys()[i]);
    }
  }
  std::vector<std::byte> scratch(kept_bytes_);
  while (const size_t n = reader->NextBlock()) {
    for (size_t i = 0; i < n; ++i) {
      const Key key = reader->keys()[i];
      RowMap& map = map_of(key);
      const std::byte* const kept = Kept(key, reader->rows() + i * row_bytes_, scratch.data());
      const RowLog::Room room = RoomFor(map, 1);
      const std::unique_lock<FairSharedMutex> lock(map.mutex());
      uint32_t number = kNoRow;
      const Unpin unpin(&map, &number, 1);
      map.FindOrAdd(&key, 1, &number, [](Key, std::byte*) {});
      const auto copies = map.store().LockCopies();
      std::memcpy(map.row(number), kept, kept_bytes_);
    }
  }
  for (const auto& map : maps) map->store().changes().Start();
}

}  // namespace oe
