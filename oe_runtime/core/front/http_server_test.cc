#include "oe_runtime/core/front/http_server.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <asio/buffer.hpp>
#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/read_until.hpp>
#include <asio/write.hpp>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace oe::http_server_test {
namespace {

using asio::ip::tcp;

HttpOptions Options() {
  HttpOptions options;
  options.host = "127.0.0.1";
  options.connections = 64;
  options.requests = 64;
  options.body_bytes = 1 << 20;
  options.head_seconds = 10;
  options.idle_seconds = 10;
  options.patience_seconds = 10;
  options.threads = 2;
  return options;
}

void RunHere(const std::function<void()>& run) { run(); }

class TestClient {
 public:
  explicit TestClient(uint16_t port) : socket_(io_) {
    socket_.connect({asio::ip::make_address("127.0.0.1"), port});
  }

  // The head of the answer, and its body; nothing where the connection has ended before.
  std::optional<std::pair<std::string, std::string>> Ask(const std::string& sent) {
    asio::error_code error;
    asio::write(socket_, asio::buffer(sent), error);
    const size_t size = asio::read_until(socket_, asio::dynamic_buffer(got_), "\r\n\r\n", error);
    if (error) return std::nullopt;
    const std::string head = got_.substr(0, size);
    got_.erase(0, size);
    const size_t length = std::stoul(head.substr(head.find("Content-Length: ") + 16));
    while (got_.size() < length && !error) {
      std::string more(length - got_.size(), ' ');
      more.resize(socket_.read_some(asio::buffer(more), error));
      got_ += more;
    }
    const std::string body = got_.substr(0, length);
    got_.erase(0, length);
    return std::pair(head, body);
  }

 private:
  asio::io_context io_;
  tcp::socket socket_;
  std::string got_;
};

std::string Post(const std::string& body) {
  return "POST / HTTP/1.1\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

TEST(HttpServerTest, AnswersEachWithItsOwn) {
  HttpServer server(
      Options(), [](const HttpRequest& request) { return HttpReply{200, request.body}; }, RunHere);
  server.Start();
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&server, i] {
      TestClient client(server.port());
      for (int n = 0; n < 50; ++n) {
        const std::string body(static_cast<size_t>(n % 7 == 0 ? 100000 + i : 10 * n + i), 'x');
        const auto answer = client.Ask(Post(body));
        ASSERT_TRUE(answer);
        EXPECT_EQ(answer->second, body);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  server.Stop(5);
}

// Each client begins anew when it is told that its connection ends, until there is no server.
TEST(HttpServerTest, LosesNothingWhenItEnds) {
  for (int round = 0; round < 3; ++round) {
    HttpServer server(Options(), [](const HttpRequest&) { return HttpReply{200, "{}"}; }, RunHere);
    server.Start();
    std::atomic<int> answered{0};
    std::atomic<int> lost{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (;;) {
          std::optional<TestClient> client;
          try {
            client.emplace(server.port());
          } catch (const std::exception&) {
            return;
          }
          for (bool ends = false; !ends;) {
            const auto answer = client->Ask(Post("{}"));
            if (!answer) {
              ++lost;
              return;
            }
            ++answered;
            ends = answer->first.find("Connection: close") != std::string::npos;
          }
        }
      });
    }
    while (answered < 100) std::this_thread::yield();
    server.Stop(10);
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(lost, 0);
  }
}

TEST(HttpServerTest, SaysWhatAnAnswerThatFailsWas) {
  HttpServer server(
      Options(),
      [](const HttpRequest& request) {
        if (request.body[0] == 'x') throw std::bad_alloc();
        return HttpReply{200, "{}"};
      },
      RunHere);
  server.Start();
  for (int i = 0; i < 3; ++i) {  // two of them have no room at a time
    TestClient client(server.port());
    const auto answer = client.Ask(Post(std::string(900 << 10, 'x')));
    ASSERT_TRUE(answer);
    EXPECT_EQ(answer->first.substr(0, 12), "HTTP/1.1 500");
    EXPECT_NE(answer->first.find("Connection: close"), std::string::npos);
  }
  TestClient client(server.port());
  EXPECT_EQ(client.Ask(Post("{}"))->second, "{}");
  server.Stop(5);
}

TEST(HttpServerTest, LargeBodiesDoNotWaitForThoseThatNeedMoreRoom) {
  std::promise<void> small, large;
  std::atomic<int> begun{0};
  HttpServer server(
      Options(),
      [&](const HttpRequest& request) {
        ++begun;
        if (request.body[0] == 's') small.get_future().wait();
        if (request.body[0] == 'l') large.get_future().wait();
        return HttpReply{200, "{}"};
      },
      RunHere);
  server.Start();
  std::vector<std::thread> threads;
  const auto ask = [&](size_t kilobytes, char of) {
    TestClient client(server.port());
    const auto answer = client.Ask(Post(std::string(kilobytes << 10, of)));
    EXPECT_TRUE(answer && answer->first.substr(0, 12) == "HTTP/1.1 200");
  };
  threads.emplace_back(ask, 600, 'l');
  threads.emplace_back(ask, 400, 's');
  while (begun < 2) std::this_thread::yield();
  threads.emplace_back(ask, 900, 'w');
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // it waits, most probably, before the next
  threads.emplace_back(ask, 300, 'x');
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  small.set_value();
  threads[3].join();
  EXPECT_EQ(begun, 3);
  large.set_value();
  for (std::thread& thread : threads)
    if (thread.joinable()) thread.join();
  server.Stop(5);
}

TEST(HttpServerTest, AcceptsAgainWhenThereAreDescriptors) {
  HttpServer server(Options(), [](const HttpRequest&) { return HttpReply{200, "{}"}; }, RunHere);
  server.Start();
  asio::io_context io;
  tcp::socket socket(io, tcp::v4());
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlim_t soft = std::exchange(limit.rlim_cur, 3);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  socket.connect({asio::ip::make_address("127.0.0.1"), server.port()});
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // it finds none
  limit.rlim_cur = soft;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  asio::write(socket, asio::buffer(Post("{}")));
  std::string got;
  EXPECT_GT(asio::read_until(socket, asio::dynamic_buffer(got), "\r\n\r\n"), 0U);
  server.Stop(5);
}

TEST(HttpServerTest, FreesItsAnswerWhenItEnds) {
  const auto held = std::make_shared<int>();
  const auto answer = [held](const HttpRequest&) { return HttpReply{200, "{}"}; };
  const long before = held.use_count();
  HttpServer ended(Options(), answer, RunHere);
  HttpServer unused(Options(), answer, RunHere);
  EXPECT_EQ(held.use_count(), before + 2);
  ended.Start();
  EXPECT_TRUE(TestClient(ended.port()).Ask(Post("{}")));
  ended.Stop(0);
  unused.Stop(0);
  EXPECT_EQ(held.use_count(), before);
}

TEST(HttpServerTest, EndsWithUnansweredAndUnreadRequests) {
  HttpServer server(
      Options(), [](const HttpRequest&) { return HttpReply{200, std::string(1 << 20, 'x')}; }, RunHere);
  server.Start();
  asio::io_context io;
  std::vector<tcp::socket> sockets;
  for (int i = 0; i < 20; ++i) {
    tcp::socket& socket = sockets.emplace_back(io);
    socket.connect({asio::ip::make_address("127.0.0.1"), server.port()});
    const std::string sent = Post("{}").substr(0, static_cast<size_t>(3 * i));
    asio::write(socket, asio::buffer(i % 2 == 0 ? sent : Post("{}") + Post("{}")));
  }
  server.Stop(0);
}

}  // namespace
}  // namespace oe::http_server_test
