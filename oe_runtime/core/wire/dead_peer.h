// A peer whose host has vanished (power cut, cable) sends no farewell: without a limit of our own, TCP would
// wait for it for minutes to hours.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>

namespace oe {

// From now on the connection breaks once the peer's host has not answered anything for about `silence`:
// neither data that waits for it nor the probes of an idle connection. A busy or stopped process is no
// silence, its kernel answers the probes; only when it leaves a full window unread for so long is it taken
// for dead.
inline void NoticeDeadPeer(int socket, std::chrono::seconds silence) {
  const int seconds = std::max(1, static_cast<int>(silence.count()));
  const auto set = [socket](int level, int option, int value) {
    (void)::setsockopt(socket, level, option, &value, sizeof value);
  };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, seconds / 3));
  set(IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, seconds / 6));
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, seconds * 1000);  // overrules the number of probes
}

}  // namespace oe
