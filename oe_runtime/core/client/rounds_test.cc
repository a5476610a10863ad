#include "oe_runtime/core/client/rounds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

#include "oe_runtime/core/common/error.h"

namespace oe::rounds_test {
namespace {

constexpr size_t kRow = 16;  // bytes of a value

// Batches of servers with so many keys in each of their entries, of which some share a block; where each
// value lies says which it is.
struct Made {
  explicit Made(const std::vector<std::vector<size_t>>& keys) {
    values.resize(1000 * kRow);
    for (size_t i = 0; i < all_keys.size(); ++i) all_keys[i] = i;
    size_t at = 0;
    for (const std::vector<size_t>& of_server : keys) {
      ServerBatch& batch = batches.emplace_back();
      for (const size_t n : of_server) {
        batch.entries.push_back(
            {static_cast<uint32_t>(batch.entries.size()), static_cast<uint32_t>(batch.blocks.size()), 0.5});
        batch.blocks.push_back({&all_keys[at], n});
        batch.values.push_back(&values[at * kRow]);
        batch.bytes.push_back(n * kRow);
        batch.counts.push_back(batch.entries.size() % 2 == 0 ? nullptr : &counts[at]);
        at += n;
      }
    }
  }
  std::vector<std::byte> values;
  std::array<Key, 1000> all_keys{};
  std::array<uint32_t, 1000> counts{};
  std::vector<ServerBatch> batches;
};

// What goes to one server in all rounds: table, key and the place of its value, in order.
std::vector<std::array<uint64_t, 3>> All(const Rounds& rounds, size_t server, const Made& made) {
  std::vector<std::array<uint64_t, 3>> all;
  for (const auto& round : rounds) {
    const ServerBatch& batch = round[server];
    for (size_t i = 0; i < batch.entries.size(); ++i) {
      const KeyBlock& block = batch.blocks[batch.entries[i].block];
      EXPECT_EQ(batch.bytes[i], block.size * kRow);
      for (size_t k = 0; k < block.size; ++k) {
        const auto place = static_cast<uint64_t>(batch.values[i] - made.values.data()) + k * kRow;
        all.push_back({batch.entries[i].table, block.keys[k], place});
        if (batch.counts[i] != nullptr) {
          EXPECT_EQ(batch.counts[i] + k, made.counts.data() + block.keys[k]);
        }
      }
    }
  }
  return all;
}

TEST(RoundsTest, APullOfMoreThanOneMessageHoldsIsSplitBetweenRows) {
  const Made made({{10, 0, 300, 1}, {2, 2, 2, 2}, {0, 0, 0, 0}});
  const std::vector<std::vector<ServerBatch>> whole = {made.batches};
  for (const uint64_t most : {1, 28, 29, 500, 1000, 100000}) {
    const Rounds rounds = RoundsOfPull(made.batches, most);
    for (size_t server = 0; server < made.batches.size(); ++server) {
      EXPECT_EQ(All(rounds, server, made), All(whole, server, made)) << most;
    }
    for (const auto& round : rounds) {
      EXPECT_LE(LargestBytes(round), std::max<uint64_t>(most, kRow + 12));
      for (const ServerBatch& batch : round) EXPECT_EQ(batch.skip, batch.entries.empty());
    }
  }
  EXPECT_EQ(RoundsOfPull(made.batches, 100000).size(), 1U);
  EXPECT_EQ(RoundsOfPull(made.batches, 28).size(), 311U);
}

TEST(RoundsTest, APushIsSplitBetweenTablesOfAllServersAtOnce) {
  Made made({{10, 10, 10, 10}, {0, 30, 2, 2}});
  made.batches[0].skip = true;
  const std::vector<std::vector<ServerBatch>> whole = {made.batches};
  const Rounds rounds = RoundsOfPush(made.batches, 750);
  ASSERT_EQ(rounds.size(), 2U);
  EXPECT_EQ(rounds[0][0].entries.size(), 2U);
  for (const auto& round : rounds) {
    EXPECT_EQ(round[0].entries.size(), round[1].entries.size()) << "a server would miss a push";
    EXPECT_TRUE(round[0].skip);
    EXPECT_FALSE(round[1].skip);
    EXPECT_LE(LargestBytes(round), 750U);
  }
  for (size_t server = 0; server < 2; ++server) {
    EXPECT_EQ(All(rounds, server, made), All(whole, server, made));
  }
  EXPECT_EQ(RoundsOfPush(made.batches, 100000).size(), 1U);
  EXPECT_THROW(RoundsOfPush(made.batches, 700), SpecError) << "the push of a table is not to be split";
}

}  // namespace
}  // namespace oe::rounds_test
