// Checkpoints over the connections: what a good client gets, and what a bad one does not.
#include "oe_runtime/core/server/scratch.h"

#include <gtest/gtest.h>

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/write.hpp>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "oe_runtime/core/checkpoint/table_file.h"
#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/server/raw_socket.h"
#include "oe_runtime/core/server/test_cluster.h"

namespace oe::scratch_test {
namespace {

namespace fs = std::filesystem;

std::set<std::string> Names(const std::string& directory) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) names.insert(entry.path().filename().string());
  return names;
}

// The servers' copies and the folders they lie in, none of which may outlive a transfer.
std::set<std::string> Left(const TestDirectory& scratch) {
  std::set<std::string> names;
  for (const auto& server : fs::directory_iterator(scratch.path())) {
    if (!server.is_directory()) continue;
    const fs::path transfer = server.path() / "transfer";
    std::error_code gone;  // while this looks
    for (auto it = fs::recursive_directory_iterator(transfer, gone); it != fs::end(it); it.increment(gone)) {
      names.insert(fs::relative(it->path(), transfer, gone).string());
    }
  }
  return names;
}

// The only client's folder.
std::string OnlyFolder(const TestDirectory& scratch) {
  for (const auto& entry : fs::directory_iterator(scratch.file("server-0/transfer"))) return entry.path();
  ADD_FAILURE() << "there is none";
  return "/";
}

void WaitUntilEmpty(const TestDirectory& scratch) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!Left(scratch).empty() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_EQ(Left(scratch), std::set<std::string>());
}

TEST(WireCheckpointTest, FilesAreThoseOfASharedDirectory) {
  const TestDirectory scratch;
  const TestDirectory shared;
  const TestDirectory fetched;
  Cluster cluster(3, "", scratch.path());
  const auto client = Client::Connect(cluster.remote, 2);
  Train(client.get(), 1);
  cluster.remote.wire_checkpoints = false;
  const nlohmann::json wanted = Client::Connect(cluster.remote, 1)->Save(shared.path());
  EXPECT_EQ(client->Save(fetched.path()), wanted);
  EXPECT_EQ(wanted.size(), 6U);
  EXPECT_EQ(Names(fetched.path()), Names(shared.path()));
  for (const std::string& name : Names(shared.path())) {
    EXPECT_EQ(ReadAll(fetched.file(name)), ReadAll(shared.file(name))) << name;
  }
  EXPECT_TRUE(Left(scratch).empty());
}

TEST(SharedCheckpointTest, FilesOfFewRowsMayBeLeftToTheClient) {
  const TestDirectory written;
  const TestDirectory held;
  Cluster cluster(3, "", "");
  const auto client = Client::Connect(cluster.remote, 2);
  Train(client.get(), 1);
  const nlohmann::json wanted = client->Save(written.path());
  Contents contents;
  EXPECT_EQ(client->Save(held.path(), "", &contents), wanted);
  EXPECT_TRUE(Names(held.path()).empty());
  EXPECT_EQ(contents.size(), 3U) << "a pack for each server";
  for (const auto& [name, content] : contents) WriteAll(held.file(name), content);
  for (const nlohmann::json& entry : wanted) {
    const std::string name = entry["file"];
    EXPECT_EQ(OpenTable(held.file(name)).content, ReadAll(written.file(name))) << name;
  }
  Train(client.get(), 2);
  const TestDirectory more;
  for (const nlohmann::json& entry : client->Save(more.path(), held.path(), &contents)) {
    EXPECT_TRUE(entry.contains("base")) << entry;
  }
}

TEST(WireCheckpointTest, IncrementsGoBothWays) {
  const TestDirectory scratch;
  Cluster cluster(2, "", scratch.path());
  for (const bool wire : {true, false}) {
    SCOPED_TRACE(wire ? "wire" : "shared");
    const TestDirectory full;
    const TestDirectory more;
    cluster.remote.wire_checkpoints = wire;
    const auto writer = Client::Connect(cluster.remote, 1);
    Train(writer.get(), 1);
    writer->Save(full.path());
    Train(writer.get(), 2);
    for (const nlohmann::json& entry : writer->Save(more.path(), full.path())) {
      EXPECT_TRUE(entry.contains("base")) << entry;
      EXPECT_EQ(entry["tombstones"], 0);
    }
    const std::vector<float> wanted = Train(writer.get(), 3);
    for (const uint32_t count : {1U, 2U, 3U}) {
      const TestDirectory other;
      Cluster target(count, "", other.path());
      target.remote.wire_checkpoints = wire;
      const auto reader = Client::Connect(target.remote, 2);
      Train(reader.get(), 99);
      EXPECT_NE(MessageOf<CheckpointError>([&] { reader->Restore(more.path()); }).find("is missing"),
                std::string::npos);
      reader->Restore({full.path(), more.path()});
      EXPECT_EQ(Train(reader.get(), 3), wanted) << count;
    }
    EXPECT_NE(MessageOf<CheckpointError>([&] {
                writer->Save(more.path(), full.path() + "/none");
              }).find("/none: cannot be listed"),
              std::string::npos);
  }
}

TEST(WireCheckpointTest, RestoresIntoEveryCount) {
  const TestDirectory scratch;
  const TestDirectory saved;
  Cluster cluster(2, "", scratch.path());
  const auto writer = Client::Connect(cluster.remote, 1);
  Train(writer.get(), 1);
  writer->Save(saved.path());
  const std::vector<float> wanted = Train(writer.get(), 2);
  for (const uint32_t count : {1U, 2U, 3U, 5U}) {
    const TestDirectory other;
    Cluster target(count, "", other.path());
    const auto reader = Client::Connect(target.remote, 2);
    Train(reader.get(), 99);
    reader->Restore(saved.path());
    EXPECT_TRUE(Left(other).empty());
    // Rows, slots and step numbers: or both would not go on alike.
    EXPECT_EQ(Train(reader.get(), 2), wanted) << count;
  }
}

// Files of several chunks, keys of which each server gets another share, and an empty table.
TEST(WireCheckpointTest, ManyChunks) {
  const TestDirectory scratch;
  const TestDirectory saved;
  constexpr size_t kRows = 90'000;
  constexpr size_t kDim = 33;  // 12 MiB
  std::vector<Key> keys(kRows);
  std::vector<float> gradients(kRows * kDim);
  for (size_t i = 0; i < kRows; ++i) keys[i] = i * 7;
  for (size_t i = 0; i < gradients.size(); ++i) gradients[i] = static_cast<float>(i % 1013);
  TableSpec spec = Spec("large", kDim, "sgd");
  spec.index = "array";
  spec.input_dim = kRows * 7;
  const auto create = [&spec](Client* client) {
    const uint32_t id = client->CreateTable(spec);
    client->CreateTable(Spec("empty", 2, "adam"));
    return id;
  };
  const auto rows = [&](Client* client, uint32_t table) {
    std::vector<float> values(kRows * kDim);
    client->PullRows(table, keys.data(), kRows, values.data());
    return values;
  };
  std::vector<float> wanted;
  {
    Cluster cluster(1, "", scratch.path());
    const auto client = Client::Connect(cluster.remote, 2);
    const uint32_t table = create(client.get());
    const auto pulled = client->Pull({{keys.data(), kRows}}, {{table, 0}});
    client->Push(*pulled, {{gradients.data(), kRows, kDim}}, {0.01});
    wanted = rows(client.get(), table);
    EXPECT_EQ(client->Save(saved.path()).size(), 2U);
  }
  const TestDirectory other;
  Cluster cluster(2, "", other.path());
  const auto client = Client::Connect(cluster.remote, 2);
  const uint32_t table = create(client.get());
  client->Restore(saved.path());
  EXPECT_EQ(rows(client.get(), table), wanted);
  EXPECT_EQ(cluster.servers[0]->Stats()["tables"][0]["rows"], kRows / 2);
}

TEST(WireCheckpointTest, ADamagedOrMissingFileRestoresNothing) {
  const TestDirectory scratch;
  const TestDirectory saved;
  Cluster cluster(2, "", scratch.path());
  const auto client = Client::Connect(cluster.remote, 2);
  Train(client.get(), 1);
  client->Save(saved.path());
  Train(client.get(), 2);
  const std::string victim = saved.file("server-1-of-2.narrow.oet");
  const std::string good = ReadAll(victim);
  std::string bad = good;
  bad[bad.size() / 2] = static_cast<char>(bad[bad.size() / 2] ^ 1);
  for (const std::string& content : {bad, good.substr(0, good.size() - 3), std::string()}) {
    WriteAll(victim, content);
    if (content.empty()) fs::remove(victim);
    EXPECT_NE(MessageOf<CheckpointError>([&] { client->Restore(saved.path()); }).find("server-1-of-2.narrow"),
              std::string::npos);
    EXPECT_EQ(cluster.servers[0]->Stats()["tables"][0]["version"], 12);
  }
  WriteAll(victim, good);
  client->Restore(saved.path());
  EXPECT_EQ(cluster.servers[0]->Stats()["tables"][0]["version"], 6);
}

TEST(WireCheckpointTest, ATableThatTheClientDoesNotKnowIsNamed) {
  const TestDirectory scratch;
  const TestDirectory saved;
  Cluster cluster(1, "", scratch.path());
  const auto client = Client::Connect(cluster.remote, 1);
  Train(client.get(), 1);
  client->Save(saved.path());
  const auto other = Client::Connect(cluster.remote, 1);
  other->CreateTable(Spec("wide", 9, "adam"));
  EXPECT_NE(MessageOf<CheckpointError>([&] { other->Restore(saved.path()); }).find("table 'narrow'"),
            std::string::npos);
}

TEST(WireCheckpointTest, AServerWithoutADirectoryIsNamedAtOnce) {
  Cluster cluster(2);
  cluster.remote.wire_checkpoints = true;
  const std::string message = MessageOf<CheckpointError>([&] { Client::Connect(cluster.remote, 1); });
  EXPECT_NE(message.find(cluster.remote.endpoints[0]), std::string::npos) << message;
  EXPECT_NE(message.find("--checkpoint-dir"), std::string::npos) << message;
}

TEST(WireCheckpointTest, ADirectoryThatCannotBeUsed) {
  const TestDirectory scratch;
  Cluster cluster(1, "", scratch.path());
  EXPECT_NE(MessageOf<CheckpointError>([&] { Cluster again(1, "", scratch.path()); }).find("another server"),
            std::string::npos);
  EXPECT_NE(MessageOf<CheckpointError>([] { Cluster none(1, "", "/proc/absent"); }).find("/proc/absent"),
            std::string::npos);
  // A link in the place of our own folder leads nowhere.
  const TestDirectory target;
  WriteAll(target.file("precious"), "kept");
  fs::create_directories(scratch.file("other/server-0"));
  fs::create_directory_symlink(target.path(), scratch.file("other/server-0/transfer"));
  EXPECT_NE(
      MessageOf<CheckpointError>([&] { Cluster linked(1, "", scratch.file("other")); }).find("transfer"),
      std::string::npos);
  EXPECT_EQ(ReadAll(target.file("precious")), "kept");
}

TEST(WireCheckpointTest, LeftoversOfAKilledServerGoAtStart) {
  const TestDirectory scratch;
  fs::create_directories(scratch.file("server-0/transfer"));
  WriteAll(scratch.file("server-0/transfer/server-0-of-1.wide.oet"), "old");
  fs::create_directories(scratch.file("server-0/transfer/client-3"));
  WriteAll(scratch.file("server-0/transfer/client-3/server-0-of-1.wide.oet"), "old");
  WriteAll(scratch.file("server-0/not-ours"), "kept");
  const Cluster cluster(1, "", scratch.path());
  EXPECT_TRUE(Left(scratch).empty());
  EXPECT_EQ(ReadAll(scratch.file("server-0/not-ours")), "kept");
}

// ---- Bad clients, in raw frames

class HostileTest : public testing::Test {
 protected:
  HostileTest() : cluster_(1, "", scratch_.path()) {
    cluster_.remote.wire_checkpoints = false;
    client_ = Client::Connect(cluster_.remote, 1);
    Train(client_.get(), 1);
  }

  // What the server says to a client that says all this and leaves.
  std::string Say(const std::string& frames) const {
    return Talk(cluster_.servers[0]->port(),
                Frame(Op::kHello, EncodeHello({kProtocolVersion, "", ""})) + frames);
  }
  static std::string Read(const std::string& name, uint64_t offset, uint32_t size) {
    return Frame(Op::kReadFile, EncodeFileChunk({name, offset, size}));
  }
  static std::string Write(const std::string& name, uint64_t offset, const std::string& data) {
    return Frame(Op::kWriteFile, EncodeFileChunk({name, offset, static_cast<uint32_t>(data.size())}) + data);
  }
  static std::string Receive(uint64_t bytes, const std::string& second = kNarrow) {
    return Frame(
        Op::kReceive,
        nlohmann::json{{"files", {{{"file", kWide}, {"bytes", bytes}}, {{"file", second}, {"bytes", bytes}}}}}
            .dump());
  }
  void ExpectRefusal(const std::string& frames, const std::string& words) const {
    const std::string reply = Say(frames);
    EXPECT_NE(reply.find(words), std::string::npos) << words << " is not in: " << reply;
    WaitUntilEmpty(scratch_);
  }

  static constexpr const char* kWide = "server-0-of-1.wide.oet";
  static constexpr const char* kNarrow = "server-0-of-1.narrow.oet";
  const std::string save_ = Frame(Op::kSave, "{}");
  const TestDirectory scratch_;
  Cluster cluster_;
  std::unique_ptr<Client> client_;
};

TEST_F(HostileTest, OnlySavedFilesAreRead) {
  WriteAll(scratch_.file("secret"), "top secret");
  WriteAll(scratch_.file("server-0/secret"), "top secret");
  for (const std::string& name :
       {std::string("../secret"), std::string("../../secret"), scratch_.file("secret"),
        std::string("/etc/passwd"), std::string("."), std::string(".."), std::string(),
        std::string("./") + kWide, std::string(kWide) + "/", std::string(kWide) + std::string(1, '\0'),
        std::string(60000, 'a'), "transfer/" + std::string(kWide)}) {
    const std::string reply = Say(save_ + Read(name, 0, 5));
    EXPECT_NE(reply.find("not part of this transfer"), std::string::npos) << name;
    EXPECT_EQ(reply.find("top s"), std::string::npos);
  }
  // The same with a good name works, so it was the names.
  EXPECT_NE(Say(save_ + Read(kWide, 0, 8)).find("OETABLE\n"), std::string::npos);
}

TEST_F(HostileTest, ReadsStayWithinTheFile) {
  constexpr uint64_t kMost = ~uint64_t{0};
  ExpectRefusal(save_ + Read(kWide, 1 << 20, 8), "beyond the end");
  ExpectRefusal(save_ + Read(kWide, kMost, 8), "beyond the end");
  ExpectRefusal(save_ + Read(kWide, kMost - 7, 8), "beyond the end");
  ExpectRefusal(save_ + Read(kWide, 0, kMaxChunk), "beyond the end");
  ExpectRefusal(save_ + Read(kWide, 0, kMaxChunk + 1), "size 4194305 is not between");
  ExpectRefusal(save_ + Read(kWide, 0, 0), "size 0 is not between");
}

TEST_F(HostileTest, ChunksInTheWrongOrderAreRefused) {
  ExpectRefusal(Read(kWide, 0, 8), "no save of this client");
  ExpectRefusal(Write(kWide, 0, "x"), "no restore of this client");
  ExpectRefusal(Frame(Op::kRestore, "{}"), "no restore of this client");
  ExpectRefusal(Receive(100) + Read(kWide, 0, 8), "no save of this client");
  ExpectRefusal(save_ + Write(kWide, 0, "x"), "no restore of this client");
  ExpectRefusal(save_ + Frame(Op::kDrop, "") + Read(kWide, 0, 8), "no save of this client");
  ExpectRefusal(Receive(4) + Write(kWide, 2, "xy"), "at offset 2 where 0 was expected");
  ExpectRefusal(Receive(4) + Write(kWide, 0, "xy") + Write(kWide, 0, "xy"), "offset 0 where 2 was expected");
  ExpectRefusal(Receive(4) + Write(kWide, 0, "xyzxy"), "beyond the announced 4 bytes");
  ExpectRefusal(Receive(4) + Write(kWide, 0, "xyzx") + Write(kWide, 4, "y"), "beyond the announced");
  ExpectRefusal(Receive(4) + Write("../evil", 0, "xy"), "not part of this transfer");
  ExpectRefusal(Receive(4) + Write(kWide, 0, "xyzx") + Frame(Op::kRestore, "{}"), "has 0 of 4 bytes");
}

TEST_F(HostileTest, ImpossibleAnnouncementsAreRefused) {
  ExpectRefusal(Receive(4, "../evil"), "table 'narrow'");
  ExpectRefusal(Receive(4, kWide), "twice");
  ExpectRefusal(Receive(~uint64_t{0} / 2), "too large");
  ExpectRefusal(Receive(uint64_t{1} << 60), "make room there");
  ExpectRefusal(Frame(Op::kReceive, "{}"), "lists no files");
  ExpectRefusal(Frame(Op::kReceive, "[1"), "not a JSON object");
  ExpectRefusal(Frame(Op::kReceive, R"({"files": [{"file": 1, "bytes": 1}]})"), "no name or size");
  ExpectRefusal(Frame(Op::kReceive, R"({"files": [{"file": "a", "bytes": -1}]})"), "no name or size");
}

TEST_F(HostileTest, TruncatedChunksAreRefused) {
  const std::string whole = EncodeFileChunk({kWide, 0, 4}) + "four";
  for (const size_t size : {size_t{0}, size_t{9}, size_t{13}, size_t{20}}) {
    EXPECT_NE(Say(Receive(4) + Frame(Op::kWriteFile, whole.substr(0, size))).find("file chunk:"),
              std::string::npos);
  }
  ExpectRefusal(Receive(4) + Frame(Op::kWriteFile, whole.substr(0, whole.size() - 1)), "4 bytes came with 3");
  ExpectRefusal(Receive(4) + Frame(Op::kWriteFile, whole + "x"), "4 bytes came with 5");
  Say(Receive(4) + Frame(Op::kWriteFile, whole.substr(0, whole.size() - 2), whole.size()));  // and leaves
  WaitUntilEmpty(scratch_);
}

TEST_F(HostileTest, AFileThatIsNoTableChangesNothing) {
  const uint64_t version = cluster_.servers[0]->Stats()["tables"][0]["version"];
  ExpectRefusal(
      Receive(4) + Write(kWide, 0, "junk") + Write(kNarrow, 0, "junk") + Frame(Op::kRestore, "{}") + save_,
      "is damaged");
  EXPECT_EQ(cluster_.servers[0]->Stats()["tables"][0]["version"], version);
}

TEST_F(HostileTest, LinksThatSomebodyPlantedAreNotFollowed) {
  WriteAll(scratch_.file("secret"), "top secret");
  // A file that comes: planted between the announcement and the first chunk.
  asio::io_context io;
  asio::ip::tcp::socket socket(io);
  socket.connect({asio::ip::address_v4::loopback(), cluster_.servers[0]->port()});
  const auto ask = [&socket](const std::string& frame) {
    asio::write(socket, asio::buffer(frame));
    return ReadReply(&socket);
  };
  ask(Frame(Op::kHello, EncodeHello({kProtocolVersion, "", ""})));
  ask(Receive(4));
  std::string transfer = OnlyFolder(scratch_);
  fs::create_symlink(scratch_.file("secret"), transfer + "/" + kWide);
  EXPECT_NE(ask(Write(kWide, 0, "evil")).find("File exists"), std::string::npos);
  EXPECT_EQ(ReadAll(scratch_.file("secret")), "top secret");
  EXPECT_TRUE(Left(scratch_).empty());
  // A file that was saved: exchanged for a link.
  ask(save_);
  transfer = OnlyFolder(scratch_);
  fs::remove(transfer + "/" + kWide);
  fs::create_symlink(scratch_.file("secret"), transfer + "/" + kWide);
  EXPECT_NE(ask(Read(kWide, 0, 8)).find("symbolic links"), std::string::npos);
  // A file that shrank.
  fs::resize_file(transfer + "/" + kNarrow, 10);
  EXPECT_NE(ask(Read(kNarrow, 0, 100)).find("it was cut"), std::string::npos);
}

// The first saves, or announces a restore, and stalls; what another one saves, restores and drops is its own.
TEST_F(HostileTest, NoClientTouchesAnothersTransfer) {
  cluster_.remote.wire_checkpoints = true;
  for (const bool saves : {true, false}) {
    const TestDirectory saved;
    const auto other = Client::Connect(cluster_.remote, 1);
    Train(other.get(), 1);
    asio::io_context io;
    asio::ip::tcp::socket socket(io);
    socket.connect({asio::ip::address_v4::loopback(), cluster_.servers[0]->port()});
    const auto ask = [&socket](const std::string& frame) {
      asio::write(socket, asio::buffer(frame));
      return ReadReply(&socket);
    };
    ask(Frame(Op::kHello, EncodeHello({kProtocolVersion, "", ""})));
    ask(saves ? save_ : Receive(4));
    if (!saves) {
      EXPECT_EQ(ask(Write(kWide, 0, "ab")), "");
    }
    const std::set<std::string> mine = Left(scratch_);
    EXPECT_EQ(mine.size(), saves ? 3U : 2U);

    EXPECT_EQ(other->Save(saved.path()).size(), 2U);
    EXPECT_EQ(Left(scratch_), mine);
    other->Restore(saved.path());
    EXPECT_EQ(Left(scratch_), mine);
    if (saves) {
      EXPECT_EQ(ask(Read(kWide, 0, 8)), "OETABLE\n");
    } else {
      EXPECT_EQ(ask(Write(kWide, 2, "cd")), "");
    }
    socket.close();
    WaitUntilEmpty(scratch_);
  }
}

}  // namespace
}  // namespace oe::scratch_test
