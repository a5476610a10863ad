#include "oe_runtime/core/client/rounds.h"

#include <algorithm>
#include <string>

#include "oe_runtime/core/common/error.h"

namespace oe {
namespace {

size_t KeysOf(const ServerBatch& batch, size_t i) { return batch.blocks[batch.entries[i].block].size; }

uint64_t BytesOf(const ServerBatch& batch, size_t i) {
  const bool counted = !batch.counts.empty() && batch.counts[i] != nullptr;
  return batch.bytes[i] + KeysOf(batch, i) * (sizeof(Key) + (counted ? sizeof(uint32_t) : 0));
}

uint64_t BytesOf(const ServerBatch& batch) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < batch.entries.size(); ++i) bytes += BytesOf(batch, i);
  return bytes;
}

// Adds keys [begin, end) of entry i of one batch to another.
void Add(const ServerBatch& from, size_t i, size_t begin, size_t end, ServerBatch* to) {
  const KeyBlock& block = from.blocks[from.entries[i].block];
  const size_t row = block.size == 0 ? 0 : from.bytes[i] / block.size;
  to->entries.push_back(from.entries[i]);
  to->entries.back().block = static_cast<uint32_t>(to->blocks.size());
  to->blocks.push_back({block.keys + begin, end - begin});
  to->values.push_back(from.values[i] + begin * row);
  to->bytes.push_back((end - begin) * row);
  to->packs.push_back(from.packs.empty() ? Dtype::kFloat32 : from.packs[i]);
  if (from.counts.empty()) return;
  to->counts.push_back(from.counts[i] == nullptr ? nullptr : from.counts[i] + begin);
}

// One server's rounds.
std::vector<ServerBatch> Split(const ServerBatch& batch, uint64_t most) {
  std::vector<ServerBatch> parts(1);
  uint64_t filled = 0;
  for (size_t i = 0; i < batch.entries.size(); ++i) {
    const size_t keys = KeysOf(batch, i);
    const uint64_t of_key = keys == 0 ? 0 : BytesOf(batch, i) / keys;
    for (size_t begin = 0; begin < keys;) {
      if (filled > 0 && filled + of_key > most) {
        parts.emplace_back();
        filled = 0;
      }
      const uint64_t room = std::max<uint64_t>(1, (most - std::min(filled, most)) / of_key);
      const auto end = static_cast<size_t>(std::min<uint64_t>(keys, begin + room));
      Add(batch, i, begin, end, &parts.back());
      filled += (end - begin) * of_key;
      begin = end;
    }
  }
  return parts;
}

}  // namespace

uint64_t LargestBytes(const std::vector<ServerBatch>& batches) {
  uint64_t largest = 0;
  for (const ServerBatch& batch : batches) largest = std::max(largest, BytesOf(batch));
  return largest;
}

Rounds RoundsOfPull(const std::vector<ServerBatch>& batches, uint64_t most) {
  Rounds rounds;
  for (size_t server = 0; server < batches.size(); ++server) {
    std::vector<ServerBatch> parts = Split(batches[server], most);
    if (parts.size() > rounds.size()) rounds.resize(parts.size(), std::vector<ServerBatch>(batches.size()));
    for (size_t i = 0; i < parts.size(); ++i) rounds[i][server] = std::move(parts[i]);
  }
  for (std::vector<ServerBatch>& round : rounds) {
    for (ServerBatch& batch : round) batch.skip = batch.entries.empty();
  }
  return rounds;
}

Rounds RoundsOfPush(const std::vector<ServerBatch>& batches, uint64_t most) {
  Rounds rounds;
  std::vector<uint64_t> filled(batches.size());
  for (size_t i = 0; i < batches.front().entries.size(); ++i) {
    bool fits = !rounds.empty();
    for (size_t server = 0; server < batches.size(); ++server) {
      const uint64_t bytes = BytesOf(batches[server], i);
      if (bytes > most) {
        throw SpecError("a push of " + std::to_string(bytes) + " bytes of one table to one server; at most " +
                        std::to_string(most) + " are allowed: use smaller batches, or more servers");
      }
      fits = fits && filled[server] + bytes <= most;
    }
    if (!fits) {
      rounds.emplace_back(batches.size());
      std::fill(filled.begin(), filled.end(), 0);
    }
    for (size_t server = 0; server < batches.size(); ++server) {
      Add(batches[server], i, 0, KeysOf(batches[server], i), &rounds.back()[server]);
      rounds.back()[server].skip = batches[server].skip;
      filled[server] += BytesOf(batches[server], i);
    }
  }
  return rounds;
}

}  // namespace oe
