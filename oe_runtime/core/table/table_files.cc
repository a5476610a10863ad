#include "oe_runtime/core/table/table_files.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

constexpr size_t kLoadBytes = size_t{4} << 20;  // of rows of a restore that are added at once
constexpr size_t kRowsAhead = 16;               // of a save that are on their way from memory

constexpr size_t kAddedAtOnce = 1024;  // rows of a restore that are added together

// Room for the rows that a call adds to a log or changes there. Without the lock of the shard.
RowLog::Room RoomFor(const RowMap& map, size_t rows) {
  if (map.log() == nullptr) return {};
  return map.log()->log()->Reserve(2 * rows, RowLog::Need::kNewRows);
}

// Unpins rows when they are done with; before the lock of the shard is given back.
class Unpin {
 public:
  Unpin(RowMap* map, uint32_t* numbers, size_t n) : map_(map), numbers_(numbers), n_(n) {
    std::fill_n(numbers, n, kNoRow);
  }
  ~Unpin() { map_->Unpin(numbers_, n_); }
  Unpin(const Unpin&) = delete;
  Unpin& operator=(const Unpin&) = delete;

 private:
  RowMap* const map_;
  uint32_t* const numbers_;
  const size_t n_;
};

// Moves the entries of rows that changed to the front; how many there are.
size_t KeepChanged(const RowMap& map, size_t n, Key* keys, uint32_t* numbers) {
  size_t kept = 0;
  for (size_t i = 0; i < n; ++i) {
    if (!map.HasChanged(keys[i], numbers[i])) continue;
    keys[kept] = keys[i];
    numbers[kept++] = numbers[i];
  }
  return kept;
}

uint64_t CountChanged(const RowMap& map) {
  std::array<Key, 1024> keys{};
  std::array<uint32_t, 1024> numbers{};
  uint64_t position = 0;
  uint64_t count = 0;
  while (true) {
    const std::shared_lock<FairSharedMutex> lock(map.mutex());
    const size_t found = map.Scan(&position, keys.size(), keys.data(), numbers.data());
    if (found == 0) return count;
    count += KeepChanged(map, found, keys.data(), numbers.data());
  }
}

// The keys that were erased and have no row now.
void AddTombstones(const RowMap& map, std::vector<Key>* tombstones) {
  std::vector<Key> keys = map.changes().erased();
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  const std::shared_lock<FairSharedMutex> lock(map.mutex());
  for (const Key key : keys) {
    if (!map.HasAll(&key, 1)) tombstones->push_back(key);
  }
}

}  // namespace

TableFileInfo TableFiles::Save(const RowMaps& maps, const std::string& file, uint64_t version,
                               std::optional<uint64_t> since, Damaged* damaged) const {
  TableFileInfo info;
  info.file = file;
  info.spec = spec_;
  info.shard = shard_;
  info.version = version;
  info.row_bytes = row_bytes_;
  std::vector<Key> tombstones;
  for (const auto& map : maps) {
    if (since) {
      info.rows += CountChanged(*map);
      AddTombstones(*map, &tombstones);
    } else {
      info.rows += map->size();
    }
  }
  info.base = since;
  info.tombstones = tombstones.size();

  TableFileWriter writer(info);
  writer.WriteTombstones(tombstones.data(), tombstones.size());
  const size_t block = writer.block_rows();
  const std::unique_ptr<Key[]> keys(new Key[block]);
  const std::unique_ptr<uint32_t[]> numbers(new uint32_t[block]);
  const std::unique_ptr<std::byte[]> rows(new std::byte[block * row_bytes_]);
  const std::unique_ptr<const std::byte*[]> contents(new const std::byte*[block]);
  size_t filled = 0;
  for (const auto& map : maps) {
    uint64_t position = 0;
    while (true) {
      const std::shared_lock<FairSharedMutex> lock(map->mutex());  // a log's thread may move rows
      size_t found = map->Scan(&position, block - filled, &keys[filled], numbers.get());
      if (found == 0) break;
      if (since) found = KeepChanged(*map, found, &keys[filled], numbers.get());
      LogReads reads;
      map->Rows(&keys[filled], numbers.get(), found, contents.get(), &reads);
      reads.Run();
      const auto prefetch = [&](size_t i) {
        if (map->log() == nullptr) map->Prefetch(numbers[i]);
      };
      for (size_t i = 0; i < std::min(found, kRowsAhead); ++i) prefetch(i);
      for (size_t i = 0; i < found; ++i) {
        if (i + kRowsAhead < found) prefetch(i + kRowsAhead);
        const Key key = keys[filled + i];
        std::byte* row = &rows[(filled + i) * row_bytes_];
        if (contents[i] != nullptr) std::memcpy(row, contents[i], row_bytes_);
        if (contents[i] != nullptr && map->Intact(key, numbers[i])) continue;
        // The file's checksum would say that it is right. As when it is pushed, the key begins anew.
        new_row_(key, row);
        damaged->emplace_back(map.get(), key);
      }
      filled += found;
      if (filled == block) {
        writer.WriteBlock(keys.get(), rows.get(), filled);
        filled = 0;
      }
    }
  }
  if (filled > 0) writer.WriteBlock(keys.get(), rows.get(), filled);
  return writer.Finish();
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

void TableFiles::AddLoad(const Load& load, RowMap* map, uint32_t shard) const {
  const std::vector<Key>& keys = load.keys[shard];
  const std::vector<size_t>& places = load.places[shard];
  const std::unique_ptr<uint32_t[]> numbers(new uint32_t[keys.size()]);
  size_t added = 0;  // rows are made in the order of the keys, if none is there already
  const auto fill = [&](Key key, std::byte* row) {
    if (added == keys.size() || keys[added] != key) return;
    std::memcpy(row, load.rows.data() + places[added++], kept_bytes_);
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
  while (const size_t n = reader->NextBlock()) {
    for (size_t i = 0; i < n; ++i) {
      const Key key = reader->keys()[i];
      RowMap& map = map_of(key);
      const RowLog::Room room = RoomFor(map, 1);
      const std::unique_lock<FairSharedMutex> lock(map.mutex());
      uint32_t number = kNoRow;
      const Unpin unpin(&map, &number, 1);
      map.FindOrAdd(&key, 1, &number, [](Key, std::byte*) {});
      const auto copies = map.LockCopies();
      std::memcpy(map.row(number), reader->rows() + i * row_bytes_, kept_bytes_);
    }
  }
  for (const auto& map : maps) map->changes().Start();
}

}  // namespace oe
