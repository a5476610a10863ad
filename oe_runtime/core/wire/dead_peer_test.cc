#include "oe_runtime/core/wire/dead_peer.h"

#include <gtest/gtest.h>

#include <asio/io_context.hpp>
#include <asio/ip/tcp.hpp>
#include <asio/write.hpp>
#include <string>
#include <thread>

namespace oe::dead_peer_test {
namespace {

using asio::ip::tcp;
using std::chrono::seconds;
using std::chrono::steady_clock;

// A connection whose other end does not read, as that of a process that is stopped.
struct Pair {
  Pair() {
    tcp::acceptor acceptor(io, {asio::ip::address_v4::loopback(), 0});
    here.connect(acceptor.local_endpoint());
    acceptor.accept(there);
    here.non_blocking(true);
  }
  // Sends until nothing more is taken for a while.
  size_t Fill() {
    const std::string piece(size_t{1} << 16, 'x');
    size_t sent = 0;
    for (int full = 0; full < 20;) {
      asio::error_code error;
      const size_t now = here.write_some(asio::buffer(piece), error);
      sent += now;
      full = now == 0 ? full + 1 : 0;
      if (now == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return sent;
  }
  asio::error_code Error() {
    asio::error_code error;
    const std::string one = "x";
    here.write_some(asio::buffer(one), error);
    return error == asio::error::would_block ? asio::error_code() : error;
  }
  asio::io_context io;
  tcp::socket here{io};
  tcp::socket there{io};
};

TEST(DeadPeerTest, AProcessThatDoesNotReadIsNotAHostThatHasVanished) {
  Pair pair;
  ProbeIdlePeer(pair.here.native_handle(), seconds(1));
  (void)pair.Fill();
  HostWatch watch;
  for (const auto begin = steady_clock::now(); steady_clock::now() - begin < seconds(4);) {
    ASSERT_FALSE(watch.Silent(pair.here.native_handle(), seconds(1)));
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  EXPECT_EQ(pair.Error(), asio::error_code());
}

TEST(DeadPeerTest, AServerDoesNotWaitForAClientThatDoesNotRead) {
  Pair pair;
  EndSilentPeer(pair.here.native_handle(), seconds(1));
  (void)pair.Fill();
  for (int i = 0; i < 600 && !pair.Error(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(pair.Error(), asio::error::broken_pipe) << "after its timeout has been told";
}

TEST(DeadPeerTest, NothingIsKnownOfASocketThatIsClosed) {
  HostWatch watch;
  EXPECT_FALSE(watch.Silent(-1, seconds(0)));
}

}  // namespace
}  // namespace oe::dead_peer_test
