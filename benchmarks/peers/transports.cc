// A client and a server in a process each over loopback, which exchange messages of the sizes of a batch: the
// bytes of the keys there, those of the rows back, into memory that the client has for them.
//
//   transports KIND REQUEST_BYTES REPLY_BYTES SECONDS
//
// KIND is socket, asio, zeromq or nng. Prints the median and the 99th percentile of a round trip and the
// processor time of both sides for one, in microseconds.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <nng/nng.h>
#include <nng/protocol/reqrep0/rep.h>
#include <nng/protocol/reqrep0/req.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zmq.h>

#include <algorithm>
#include <array>
#include <asio.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace {

using Bytes = std::vector<char>;
constexpr size_t kChunk = size_t{1} << 20;  // as our servers and clients tell Asio

void Require(bool fine, const char* what) {
  if (fine) return;
  std::perror(what);
  std::_Exit(1);
}

struct Sizes {
  size_t request = 0;
  size_t reply = 0;
};

// The address that the server listens at comes through a pipe.
void Tell(int to, uint16_t port) { Require(write(to, &port, sizeof port) == sizeof port, "write"); }

// ---- plain blocking sockets

void SendAll(int socket, const Bytes& bytes) {
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t n = send(socket, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
    if (n <= 0) std::_Exit(0);
    at += static_cast<size_t>(n);
  }
}

void ReceiveAll(int socket, Bytes* bytes) {
  for (size_t at = 0; at < bytes->size();) {
    const ssize_t n = recv(socket, bytes->data() + at, bytes->size() - at, 0);
    if (n <= 0) std::_Exit(0);
    at += static_cast<size_t>(n);
  }
}

sockaddr_in Loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  return address;
}

void NoDelay(int socket) {
  const int one = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

void ServeSocket(Sizes sizes, int to) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = Loopback(0);
  socklen_t length = sizeof address;
  Require(bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0, "bind");
  Require(listen(listener, 1) == 0, "listen");
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length);
  Tell(to, ntohs(address.sin_port));
  const int peer = accept(listener, nullptr, nullptr);
  NoDelay(peer);
  Bytes request(sizes.request);
  const Bytes reply(sizes.reply);
  for (;;) {
    ReceiveAll(peer, &request);
    SendAll(peer, reply);
  }
}

std::function<void()> ClientOfSocket(Sizes sizes, uint16_t port) {
  const int peer = socket(AF_INET, SOCK_STREAM, 0);
  const sockaddr_in address = Loopback(port);
  Require(connect(peer, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0, "connect");
  NoDelay(peer);
  auto request = std::make_shared<Bytes>(sizes.request);
  auto rows = std::make_shared<Bytes>(sizes.reply);
  return [=] {
    SendAll(peer, *request);
    ReceiveAll(peer, rows.get());
  };
}

// ---- Asio, as oe_runtime/core/server/connection.cc and client/exchange.cc use it

auto InChunks() {
  return [](const asio::error_code& error, size_t) { return error ? size_t{0} : kChunk; };
}

struct AsioPeer {
  explicit AsioPeer(asio::io_context* io) : socket(*io) {}
  // Reads into *in, then writes out, again and again.
  void Serve(Bytes* in, const Bytes& out) {
    asio::async_read(socket, asio::buffer(*in), InChunks(),
                     [this, in, &out](const asio::error_code& error, size_t) {
                       if (error) std::_Exit(0);
                       asio::async_write(socket, asio::buffer(out), InChunks(),
                                         [this, in, &out](const asio::error_code& failed, size_t) {
                                           if (failed) std::_Exit(0);
                                           Serve(in, out);
                                         });
                     });
  }
  asio::ip::tcp::socket socket;
};

void ServeAsio(Sizes sizes, int to) {
  asio::io_context io;
  asio::ip::tcp::acceptor acceptor(io, {asio::ip::address_v4::loopback(), 0});
  Tell(to, acceptor.local_endpoint().port());
  AsioPeer peer(&io);
  acceptor.accept(peer.socket);
  peer.socket.set_option(asio::ip::tcp::no_delay(true));
  Bytes request(sizes.request);
  const Bytes reply(sizes.reply);
  peer.Serve(&request, reply);
  io.run();
}

std::function<void()> ClientOfAsio(Sizes sizes, uint16_t port) {
  auto io = std::make_shared<asio::io_context>();
  auto peer = std::make_shared<AsioPeer>(io.get());
  peer->socket.connect({asio::ip::address_v4::loopback(), port});
  peer->socket.set_option(asio::ip::tcp::no_delay(true));
  auto request = std::make_shared<Bytes>(sizes.request);
  auto rows = std::make_shared<Bytes>(sizes.reply);
  return [=] {
    asio::async_write(peer->socket, asio::buffer(*request), InChunks(),
                      [](const asio::error_code&, size_t) {});
    asio::async_read(peer->socket, asio::buffer(*rows), InChunks(), [](const asio::error_code&, size_t) {});
    io->restart();
    io->run();
  };
}

// ---- ZeroMQ: messages that are sent are not copied, those that come are the library's

void NothingToFree(void*, void*) {}

void SendZero(void* socket, const Bytes& bytes) {
  zmq_msg_t message;
  zmq_msg_init_data(&message, const_cast<char*>(bytes.data()), bytes.size(), NothingToFree, nullptr);
  Require(zmq_msg_send(&message, socket, 0) >= 0, "zmq_msg_send");
}

void ServeZero(Sizes sizes, int to) {
  void* const socket = zmq_socket(zmq_ctx_new(), ZMQ_REP);
  Require(zmq_bind(socket, "tcp://127.0.0.1:*") == 0, "zmq_bind");
  std::array<char, 64> name{};
  size_t length = name.size();
  zmq_getsockopt(socket, ZMQ_LAST_ENDPOINT, name.data(), &length);
  Tell(to, static_cast<uint16_t>(std::atoi(std::strrchr(name.data(), ':') + 1)));
  const Bytes reply(sizes.reply);
  for (;;) {
    zmq_msg_t request;
    zmq_msg_init(&request);
    Require(zmq_msg_recv(&request, socket, 0) >= 0, "zmq_msg_recv");
    zmq_msg_close(&request);
    SendZero(socket, reply);
  }
}

std::function<void()> ClientOfZero(Sizes sizes, uint16_t port) {
  void* const socket = zmq_socket(zmq_ctx_new(), ZMQ_REQ);
  Require(zmq_connect(socket, ("tcp://127.0.0.1:" + std::to_string(port)).c_str()) == 0, "zmq_connect");
  auto request = std::make_shared<Bytes>(sizes.request);
  auto rows = std::make_shared<Bytes>(sizes.reply);
  return [=] {
    SendZero(socket, *request);
    Require(zmq_recv(socket, rows->data(), rows->size(), 0) >= 0, "zmq_recv");
  };
}

// ---- nng: messages are the library's on both sides

nng_msg* MessageOf(const Bytes& bytes) {
  nng_msg* message = nullptr;
  Require(nng_msg_alloc(&message, bytes.size()) == 0, "nng_msg_alloc");
  std::memcpy(nng_msg_body(message), bytes.data(), bytes.size());
  return message;
}

void ServeNng(Sizes sizes, int to) {
  nng_socket socket{};
  nng_listener listener{};
  Require(nng_rep0_open(&socket) == 0, "nng_rep0_open");
  nng_socket_set_size(socket, NNG_OPT_RECVMAXSZ, 0);
  Require(nng_listen(socket, "tcp://127.0.0.1:0", &listener, 0) == 0, "nng_listen");
  nng_sockaddr address{};
  nng_listener_get_addr(listener, NNG_OPT_LOCADDR, &address);
  Tell(to, ntohs(address.s_in.sa_port));
  const Bytes reply(sizes.reply);
  for (;;) {
    nng_msg* request = nullptr;
    Require(nng_recvmsg(socket, &request, 0) == 0, "nng_recvmsg");
    nng_msg_free(request);
    Require(nng_sendmsg(socket, MessageOf(reply), 0) == 0, "nng_sendmsg");
  }
}

std::function<void()> ClientOfNng(Sizes sizes, uint16_t port) {
  nng_socket socket{};
  Require(nng_req0_open(&socket) == 0, "nng_req0_open");
  nng_socket_set_size(socket, NNG_OPT_RECVMAXSZ, 0);
  Require(nng_dial(socket, ("tcp://127.0.0.1:" + std::to_string(port)).c_str(), nullptr, 0) == 0, "nng_dial");
  auto request = std::make_shared<Bytes>(sizes.request);
  auto rows = std::make_shared<Bytes>(sizes.reply);
  return [=] {
    Require(nng_sendmsg(socket, MessageOf(*request), 0) == 0, "nng_sendmsg");
    nng_msg* reply = nullptr;
    Require(nng_recvmsg(socket, &reply, 0) == 0, "nng_recvmsg");
    std::memcpy(rows->data(), nng_msg_body(reply), rows->size());
    nng_msg_free(reply);
  };
}

// ----

struct Kind {
  const char* name;
  void (*serve)(Sizes, int);
  std::function<void()> (*client)(Sizes, uint16_t);
};
constexpr Kind kKinds[] = {{"socket", ServeSocket, ClientOfSocket},
                           {"asio", ServeAsio, ClientOfAsio},
                           {"zeromq", ServeZero, ClientOfZero},
                           {"nng", ServeNng, ClientOfNng}};

double SecondsOf(int who) {
  rusage used{};
  getrusage(who, &used);
  const auto seconds = [](timeval time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

void Measure(const Kind& kind, Sizes sizes, double seconds) {
  using Clock = std::chrono::steady_clock;
  std::array<int, 2> ends{};
  Require(pipe(ends.data()) == 0, "pipe");
  const pid_t server = fork();
  if (server == 0) {
    kind.serve(sizes, ends[1]);
    std::_Exit(0);
  }
  uint16_t port = 0;
  Require(read(ends[0], &port, sizeof port) == sizeof port, "read");
  const auto trip = kind.client(sizes, port);
  for (int i = 0; i < 20; ++i) trip();
  std::vector<double> times;
  const double before = SecondsOf(RUSAGE_SELF);
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (auto now = Clock::now(); now < end;) {
    trip();
    const auto then = Clock::now();
    times.push_back(std::chrono::duration<double, std::micro>(then - now).count());
    now = then;
  }
  const double client = SecondsOf(RUSAGE_SELF) - before;
  kill(server, SIGKILL);
  waitpid(server, nullptr, 0);
  const auto trips = static_cast<double>(times.size());
  // The server's first 20 round trips are in its time too.
  const double cpu = client / trips + SecondsOf(RUSAGE_CHILDREN) / (trips + 20);
  std::sort(times.begin(), times.end());
  std::printf("%.1f %.1f %.1f\n", times[times.size() / 2], times[times.size() * 99 / 100], cpu * 1e6);
}

}  // namespace

int main(int argc, char** argv) {
  for (const Kind& kind : kKinds) {
    if (argc != 5 || std::string(argv[1]) != kind.name) continue;
    Measure(kind, {std::stoul(argv[2]), std::stoul(argv[3])}, std::stod(argv[4]));
    return 0;
  }
  std::fprintf(stderr, "usage: transports socket|asio|zeromq|nng REQUEST_BYTES REPLY_BYTES SECONDS\n");
  return 2;
}
