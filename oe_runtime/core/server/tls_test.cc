// Servers and clients that encrypt, and all that can be between one that does and one that does not.
#include <gtest/gtest.h>
#include <openssl/ssl.h>

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/read.hpp>
#include <asio/ssl.hpp>
#include <asio/write.hpp>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "oe_runtime/core/common/test_directory.h"
#include "oe_runtime/core/server/test_cluster.h"
#include "oe_runtime/core/wire/stream.h"

namespace oe::tls_test {
namespace {

using asio::ip::tcp;

const std::string kToken = "0123456789abcdef";

ServerOptions With(TlsMode mode) {
  ServerOptions options;
  options.tls = mode;
  return options;
}

template <typename Exception>
std::string RefusalOf(const RemoteOptions& remote) {
  return MessageOf<Exception>([&remote] { Client::Connect(remote, 1); });
}

// An alert is on its way before it is counted.
uint64_t Refused(const Cluster& cluster, const std::string& why) {
  return AwaitStat(*cluster.servers[0], "/connections/refused/" + why, 1);
}

TEST(TlsTest, TheSameRows) {
  const auto local = Client::InProcess({}, 1, 2);
  const std::vector<float> wanted = Train(local.get(), 5);
  for (const uint32_t count : {1U, 3U}) {
    Cluster cluster(count, kToken, "", With(TlsMode::kOn));
    EXPECT_EQ(Train(Client::Connect(cluster.remote, 2).get(), 5), wanted);
    EXPECT_TRUE(cluster.servers[0]->Stats()["connections"]["encrypted"].get<bool>());
  }
}

TEST(TlsTest, ManyClientsAtOnce) {
  Cluster cluster(2, kToken, "", With(TlsMode::kOn));
  std::vector<std::thread> workers;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    workers.emplace_back([&cluster, seed] { Train(Client::Connect(cluster.remote, 1).get(), seed); });
  }
  for (std::thread& worker : workers) worker.join();
  EXPECT_EQ(cluster.servers[1]->Stats()["pushes"]["requests"], 4 * 6);
}

TEST(TlsTest, CheckpointsTravelToo) {
  const TestDirectory directory;
  Cluster cluster(2, kToken, directory.path(), With(TlsMode::kOn));
  const auto client = Client::Connect(cluster.remote, 1);
  Train(client.get(), 1);
  std::filesystem::create_directory(directory.path() + "/saved");
  EXPECT_EQ(client->Save(directory.path() + "/saved").size(), 4U);
  const auto wanted = Train(client.get(), 2);
  client->Restore(directory.path() + "/saved");
  EXPECT_EQ(Train(client.get(), 2), wanted);
}

TEST(TlsTest, AnotherTokenIsRefused) {
  Cluster cluster(1, kToken, "", With(TlsMode::kOn));
  cluster.remote.token = "fedcba9876543210";
  EXPECT_NE(RefusalOf<AuthError>(cluster.remote).find("the token is not this server's"), std::string::npos);
  cluster.remote.token = "short";
  EXPECT_NE(RefusalOf<SpecError>(cluster.remote).find("at least 16 bytes"), std::string::npos);
  cluster.remote.token = "";
  EXPECT_NE(RefusalOf<SpecError>(cluster.remote).find("--token-file"), std::string::npos);
  EXPECT_EQ(Refused(cluster, "token"), 1U);
  cluster.remote.token = kToken;
  EXPECT_FALSE(Train(Client::Connect(cluster.remote, 1).get(), 1).empty());
}

TEST(TlsTest, EncryptionOnOneSideOnlyIsRefused) {
  Cluster encrypted(1, kToken, "", With(TlsMode::kOn));
  encrypted.remote.tls = TlsMode::kOff;
  EXPECT_NE(RefusalOf<ProtocolError>(encrypted.remote).find("--tls on"), std::string::npos);
  EXPECT_EQ(Refused(encrypted, "clear"), 1U);
  Cluster clear(1, kToken, "", With(TlsMode::kOff));
  clear.remote.tls = TlsMode::kOn;
  EXPECT_NE(RefusalOf<ProtocolError>(clear.remote).find("does not encrypt; start it with --tls on"),
            std::string::npos);
  EXPECT_EQ(Refused(clear, "encrypted"), 1U);
}

TEST(TlsTest, GarbageIsRefused) {
  ServerOptions options = With(TlsMode::kOn);
  options.limits.hello = std::chrono::milliseconds(300);
  Cluster cluster(1, kToken, "", options);
  const uint16_t port = cluster.servers[0]->port();
  EXPECT_EQ(Talk(port, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), "");
  EXPECT_EQ(Talk(port, ""), "");
  Talk(port, std::string("\x16\x03\x01\x00\x20", 5) + std::string(32, 'x'));
  EXPECT_EQ(Refused(cluster, "foreign"), 1U);
  EXPECT_EQ(Refused(cluster, "handshake"), 1U);
  asio::io_context io;
  tcp::socket half(io);
  half.connect({asio::ip::address_v4::loopback(), port});
  asio::write(half, asio::buffer("\x16\x03\x01", 3));
  std::string rest;
  asio::error_code ignored;
  asio::read(half, asio::dynamic_buffer(rest), ignored);
  EXPECT_EQ(Refused(cluster, "slow"), 1U);
  EXPECT_FALSE(Train(Client::Connect(cluster.remote, 1).get(), 1).empty());
}

// Somebody without the token, who has OpenSSL and no scruples.
TEST(TlsTest, AClientWithoutAKeyGetsNoHandshake) {
  Cluster cluster(1, kToken, "", With(TlsMode::kOn));
  asio::io_context io;
  asio::ssl::context context(asio::ssl::context::tls_client);
  asio::ssl::stream<tcp::socket> stream(io, context);
  stream.next_layer().connect({asio::ip::address_v4::loopback(), cluster.servers[0]->port()});
  EXPECT_THROW(stream.handshake(asio::ssl::stream_base::client), std::exception);
  EXPECT_EQ(Refused(cluster, "handshake"), 1U);
}

// A man in the middle with a certificate of his own must not get a hello.
TEST(TlsTest, AServerWithACertificateInsteadOfTheTokenIsRefused) {
  asio::io_context io;
  tcp::acceptor acceptor(io, {asio::ip::address_v4::loopback(), 0});
  asio::ssl::context context(asio::ssl::context::tls_server);
  {
    EVP_PKEY_CTX* const made = EVP_PKEY_CTX_new_id(EVP_PKEY_EC, nullptr);
    EVP_PKEY* pair = nullptr;
    EVP_PKEY_keygen_init(made);
    EVP_PKEY_CTX_set_ec_paramgen_curve_nid(made, NID_X9_62_prime256v1);
    ASSERT_EQ(EVP_PKEY_keygen(made, &pair), 1);
    X509* const certificate = X509_new();
    X509_gmtime_adj(X509_getm_notBefore(certificate), 0);
    X509_gmtime_adj(X509_getm_notAfter(certificate), 3600);
    X509_set_pubkey(certificate, pair);
    ASSERT_GT(X509_sign(certificate, pair, EVP_sha256()), 0);
    SSL_CTX_use_certificate(context.native_handle(), certificate);
    SSL_CTX_use_PrivateKey(context.native_handle(), pair);
    X509_free(certificate);
    EVP_PKEY_free(pair);
    EVP_PKEY_CTX_free(made);
  }
  bool agreed = true;
  std::thread impostor([&] {
    asio::ssl::stream<tcp::socket> stream(acceptor.accept(), context);
    asio::error_code error;
    stream.handshake(asio::ssl::stream_base::server, error);
    std::array<char, 1> byte{};
    if (!error) stream.read_some(asio::buffer(byte), error);  // in TLS 1.3 the client's refusal comes here
    agreed = !error;
  });
  RemoteOptions remote;
  remote.endpoints = {"127.0.0.1:" + std::to_string(acceptor.local_endpoint().port())};
  remote.token = kToken;
  remote.tls = TlsMode::kOn;
  EXPECT_THROW(Client::Connect(remote, 1), AuthError);
  impostor.join();
  EXPECT_FALSE(agreed);
}

TEST(TlsTest, AutoEncryptsWhatLeavesTheMachine) {
  const auto address = [](const char* text) { return asio::ip::make_address(text); };
  for (const char* text : {"127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"}) {
    EXPECT_FALSE(Encrypts(TlsMode::kAuto, address(text))) << text;
    EXPECT_TRUE(Encrypts(TlsMode::kOn, address(text))) << text;
  }
  for (const char* text : {"0.0.0.0", "::", "192.0.2.1", "fe80::1", "::ffff:192.0.2.1"}) {
    EXPECT_TRUE(Encrypts(TlsMode::kAuto, address(text))) << text;
    EXPECT_FALSE(Encrypts(TlsMode::kOff, address(text))) << text;
  }
  EXPECT_THROW(ParseTlsMode("yes"), SpecError);
}

// Many keys in one connection, in both directions.
TEST(TlsTest, KeysChangeOnTheWay) {
  asio::io_context io;
  tcp::acceptor acceptor(io, {asio::ip::address_v4::loopback(), 0});
  tcp::socket near(io);
  near.connect(acceptor.local_endpoint());
  Stream client(std::move(near), 100'000);
  Stream server(acceptor.accept(), 100'000);
  TlsContext client_context(TlsContext::Role::kClient, kToken);
  TlsContext server_context(TlsContext::Role::kServer, kToken);
  int greeted = 0;
  const auto done = [&greeted](const asio::error_code& error) { greeted += error ? 0 : 1; };
  server.AsyncHandshake(&server_context, TlsContext::Role::kServer, done);
  client.AsyncHandshake(&client_context, TlsContext::Role::kClient, done);
  io.run();
  ASSERT_EQ(greeted, 2);
  std::string sent(50'000, '\0');
  std::string got(sent.size(), '\0');
  for (int i = 0; i < 20; ++i) {
    for (char& c : sent) c = static_cast<char>(c * 5 + i + 1);
    Stream& from = i % 2 == 0 ? client : server;
    Stream& to = i % 2 == 0 ? server : client;
    from.Sending(sent.size());
    io.restart();
    asio::async_write(from, asio::buffer(sent),
                      [](const asio::error_code& error, size_t) { ASSERT_FALSE(error); });
    asio::async_read(to, asio::buffer(got),
                     [](const asio::error_code& error, size_t) { ASSERT_FALSE(error); });
    io.run();
    ASSERT_EQ(got, sent);
  }
}

}  // namespace
}  // namespace oe::tls_test
