// What a client makes of the reply to a save, when the server means it ill.
#include <gtest/gtest.h>
#include <xxhash.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/checkpoint/table_pack.h"
#include "oe_runtime/core/client/transfer.h"
#include "oe_runtime/core/common/error.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/server/store.h"

namespace oe::saved_reply_test {
namespace {

using nlohmann::json;

const ShardInfo kShard{1, 3};
const std::string kPack = "server-1-of-3.oets";

// Ends with its checksum, as a table file does.
std::string FileOf(const std::string& rows) {
  const uint64_t checksum = XXH3_64bits(rows.data(), rows.size());
  return rows + std::string(reinterpret_cast<const char*>(&checksum), sizeof checksum);
}

json EntryOf(const std::string& table, const std::string& rows) {
  return {{"file", TableFileName(table, kShard)},
          {"table", table},
          {"server", kShard.server},
          {"servers", kShard.servers},
          {"bytes", FileOf(rows).size()},
          {"checksum", HexText(XXH3_64bits(rows.data(), rows.size()))}};
}

struct SavedReply {
  json list = {EntryOf("wide/emb", "some rows\n"), EntryOf("narrow", "others")};
  std::string files = FileOf("some rows\n") + FileOf("others");

  std::string text() const { return list.dump() + "\n" + files; }
};

json Read(const std::string& reply, Contents* contents) {
  const Bytes bytes{reinterpret_cast<const uint8_t*>(reply.data()), reply.size()};
  return ReadSaved("host:1", bytes, kShard, contents);
}

// Why it is refused; "" if it is not. Nothing is kept of what is refused.
std::string Refusal(const std::string& reply) {
  Contents contents;
  try {
    (void)Read(reply, &contents);
    return "";
  } catch (const ProtocolError& error) {
    EXPECT_TRUE(contents.empty());
    return error.what();
  } catch (const CheckpointError& error) {
    EXPECT_TRUE(contents.empty());
    return error.what();
  }
}

TEST(SavedReplyTest, FilesBecomeAPack) {
  const SavedReply reply;
  Contents contents;
  EXPECT_EQ(Read(reply.text(), &contents), reply.list);
  const TestDirectory directory;
  WriteAll(directory.path() + "/" + kPack, contents.at(kPack));
  const std::vector<PackedFile> packed = ReadPack(directory.path() + "/" + kPack);
  ASSERT_EQ(packed.size(), 2U);
  EXPECT_EQ(packed[0].name, "server-1-of-3.wide%2Femb.oet");
  EXPECT_EQ(packed[1].bytes, FileOf("others").size());

  contents.clear();  // the server has written them itself
  EXPECT_EQ(Read(reply.list.dump(), &contents), reply.list);
  EXPECT_TRUE(contents.empty());
}

struct Hostile {
  std::string name;
  std::function<void(SavedReply*)> change;
  std::string refusal;
};

Hostile Entry(const std::string& name, const json& change, const std::string& refusal) {
  return {name, [change](SavedReply* reply) { reply->list[0].update(change); }, refusal};
}

Hostile List(const std::string& name, const std::string& text, const std::string& refusal) {
  return {name, [text](SavedReply* reply) { reply->list = json::parse(text); }, refusal};
}

std::vector<Hostile> AllHostile() {
  const std::string name = "a saved file has a name that is not its table's, or no content";
  const std::string senseless = "the list of saved files makes no sense";
  const std::string missing = "the content of a saved file is missing";
  const std::string checksum = "its checksum is another";
  const std::string nests = "the reply nests more than 16 JSON arrays and objects";
  return {
      Entry("AbsolutePath", {{"file", "/etc/passwd"}}, name),
      Entry("ParentDirectory", {{"file", "../server-1-of-3.wide%2Femb.oet"}}, name),
      Entry("Dots", {{"file", ".."}, {"table", ".."}}, name),
      Entry("SlashOfTheTable", {{"file", "server-1-of-3.wide/emb.oet"}}, name),
      Entry("Nul", {{"file", std::string("server-1-of-3.wide%2Femb.oet\0x", 30)}}, name),
      Entry("AnotherTable", {{"file", "server-1-of-3.narrow.oet"}}, name),
      Entry("AnotherServersFile", {{"file", "server-0-of-3.wide%2Femb.oet"}}, name),
      Entry("AnotherServer", {{"server", 0}}, "the list of saved files is another server's"),
      Entry("NoName", {{"file", nullptr}}, senseless),
      Entry("NumberForATable", {{"table", 7}}, senseless),
      {"TwiceTheSame", [](SavedReply* reply) { reply->list[1] = reply->list[0]; }, "a table twice"},
      {"NoTable", [](SavedReply* reply) { reply->list[0].erase("table"); }, senseless},
      Entry("BeyondTheFrame", {{"bytes", 1'000'000}}, missing),
      Entry("AlmostAllBytes", {{"bytes", ~uint64_t{0}}}, missing),
      Entry("NegativeBytes", {{"bytes", -1}}, name),
      Entry("HalfAByte", {{"bytes", 18.5}}, name),
      Entry("TextForBytes", {{"bytes", "18"}}, name),
      Entry("NoBytes", {{"bytes", 0}}, name),
      Entry("FewerThanAChecksum", {{"bytes", 7}}, missing),
      Entry("OneByteLess", {{"bytes", 17}}, checksum),
      Entry("OneByteMore", {{"bytes", 19}}, checksum),
      Entry("AnotherChecksum", {{"checksum", "0123456789abcdef"}}, checksum),
      Entry("NumberForAChecksum", {{"checksum", 5}}, senseless),
      {"AnotherContent", [](SavedReply* reply) { reply->files[2] ^= 1; }, checksum},
      {"AnotherChecksumInTheFile", [](SavedReply* reply) { reply->files[12] ^= 1; }, checksum},
      {"More", [](SavedReply* reply) { reply->files += "x"; }, "more came than the saved files"},
      {"FewerEntries", [](SavedReply* reply) { reply->list.erase(size_t{1}); },
       "more came than the saved files"},
      {"AFilter",
       [](SavedReply* reply) {
         json filter = {{"file", "server-1-of-3.wide%2Femb.oet.filter"}, {"bytes", 14}};
         filter["checksum"] = reply->list[1]["checksum"];
         reply->list[0]["filter"] = filter;
       },
       missing},
      List("Null", "null", "the list of saved files is no list"),
      List("Object", R"({"a": {"file": "x"}})", "the list of saved files is no list"),
      List("Numbers", "[1, 2]", senseless),
      List("Lists", "[[], []]", senseless),
      List("Empty", "[]", "more came than the saved files"),
      Entry("Nested", {{"spec", json::parse(std::string(20, '[') + std::string(20, ']'))}}, nests),
  };
}

class HostileSavedReplyTest : public testing::TestWithParam<Hostile> {};

TEST_P(HostileSavedReplyTest, IsRefusedByName) {
  SavedReply reply;
  GetParam().change(&reply);
  const std::string refusal = Refusal(reply.text());
  EXPECT_NE(refusal.find(GetParam().refusal), std::string::npos) << refusal;
}

INSTANTIATE_TEST_SUITE_P(All, HostileSavedReplyTest, testing::ValuesIn(AllHostile()),
                         [](const auto& one) { return one.param.name; });

TEST(SavedReplyTest, NestedBeyondTheStack) {
  EXPECT_EQ(Refusal(std::string(1'000'000, '[') + std::string(1'000'000, ']')),
            "server host:1: the reply nests more than 16 JSON arrays and objects");
}

TEST(SavedReplyTest, CutAtEveryByte) {
  const std::string text = SavedReply().text();
  const size_t list = text.find('\n');
  for (size_t size = 0; size < text.size(); ++size) {
    const std::string refusal = Refusal(text.substr(0, size));
    EXPECT_EQ(refusal.empty(), size == list) << size << ": " << refusal;
  }
}

// What of the list nobody uses may be anything.
TEST(SavedReplyTest, EveryByteChanged) {
  const std::string text = SavedReply().text();
  Contents wanted;
  (void)Read(text, &wanted);
  for (size_t at = 0; at < text.size(); ++at) {
    for (const char change : {'\x01', '\x80', '\xff'}) {
      std::string other = text;
      other[at] = static_cast<char>(other[at] ^ change);
      Contents contents;
      try {
        (void)Read(other, &contents);
        EXPECT_TRUE(contents.empty() || contents == wanted) << at;
      } catch (const ProtocolError&) {    // NOLINT(bugprone-empty-catch)
      } catch (const CheckpointError&) {  // NOLINT(bugprone-empty-catch)
      }
    }
  }
}

TEST(SavedReplyTest, FilesThatNobodyAskedFor) {
  EXPECT_THROW(Read(SavedReply().text(), nullptr), ProtocolError);
  EXPECT_THROW(Read("[]\n", nullptr), ProtocolError);
}

}  // namespace
}  // namespace oe::saved_reply_test
